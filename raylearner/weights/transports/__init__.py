"""Transports of weights from learner to engines. Imports neither torch nor vLLM.

A transport is a module of this package with a `Sender` and a `Receiver` (see `transport`), and its entry in
`TRANSPORTS`.
"""

import importlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from raylearner.weights.transports.transport import Receiver, Sender, Weights


@dataclass(frozen=True, slots=True)
class TransportKind:
    """One transport; its module is imported on first use."""

    module: str
    is_collective: bool = False
    """Whether an update is made for the members of one push, who must all receive it."""
    is_broadcast: bool = False
    """Whether all learner ranks send while the members receive, as one process group."""
    shares_memory: bool = False
    """Whether engines read the weights from the learner's own GPU memory."""

    def make_sender(self, weights: "Weights", **options: Any) -> "Sender":
        """Return a learner rank's side; `options` are those of `Sender`."""
        return self._import().Sender(weights, **options)

    def make_receiver(self, actor_id: str) -> "Receiver":
        """Return an engine's side."""
        return self._import().Receiver(actor_id=actor_id)

    def _import(self) -> Any:
        return importlib.import_module(f"{__name__}.{self.module}")


TRANSPORTS = {
    "shared_files": TransportKind("shared_files"),
    "adapter": TransportKind("adapter"),
    "nccl": TransportKind("nccl", is_collective=True, is_broadcast=True),
    "ipc": TransportKind("ipc", is_collective=True, shares_memory=True),
}
"""Transports by the value of `weights.transport` once `auto` is resolved."""


def transport_of(name: str) -> TransportKind:
    """Return the transport; `auto`, where nothing resolved it, means shared files."""
    return TRANSPORTS["shared_files" if name == "auto" else name]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """A process group for pushes: rank 0 sends, each engine holds `ranks_per_member` ranks, in order.

    Process groups cannot change: with other members another one is formed, under another key.
    """

    key: str
    address: str
    port: int
    members: tuple[str, ...]
    ranks_per_member: int

    @classmethod
    def of(
        cls, members: Sequence[str], *, address: str, port: int, ranks_per_member: int
    ) -> "WeightGroup":
        return cls(
            key=uuid4().hex,
            address=address,
            port=port,
            members=tuple(members),
            ranks_per_member=ranks_per_member,
        )

    @property
    def world_size(self) -> int:
        return 1 + len(self.members) * self.ranks_per_member


def discard_files(payload: Mapping[str, Any]) -> None:
    """Remove the file or directory of a push that no engine reads any more."""
    path = Path(payload["path"])
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
