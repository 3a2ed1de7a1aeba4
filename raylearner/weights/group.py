"""Who meets in one push of weights: the learner's first rank and every engine's workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

PACKED_BYTES = 512 * 1024**2
"""Size of one broadcast: while one is on its way the next is gathered."""


def backend(transport: str) -> str:
    """What a transport's engine is called among vLLM's weight-transfer backends."""
    return f"verified_{transport}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """A communicator to be: rank 0 sends, engines hold `ranks_per_member` ranks each, in order.

    A member that is lost or joins makes another group with another key, since a communicator
    cannot change.
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

    def receiver_arguments(self, member: str) -> dict[str, Any]:
        """What vLLM's `nccl` engine of a member is initialised with."""
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": 1 + self.members.index(member) * self.ranks_per_member,
            "world_size": self.world_size,
            "packed": True,
            "packed_buffer_size_bytes": PACKED_BYTES,
        }
