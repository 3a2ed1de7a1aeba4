"""What is still to be written of a checkpoint: at once, or later from copies in host memory.

Waits for: the other ranks, which must begin and finish the same checkpoints in the same order.
Unblocked by: their writes, or `AGREEMENT_TIMEOUT_S`.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

AGREEMENT_TIMEOUT_S = 600
"""How much longer than the fastest rank any other may take to write its shards; the checkpoint fails
otherwise. No watchdog looks at what is written beside training."""


class Writer:
    """Owns the host's copies and the group over which ranks agree on files, apart from training's.

    Copies are kept from one checkpoint to the next: pinned memory is slow to come by.
    """

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
        self._stager = DefaultStager(options)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREEMENT_TIMEOUT_S))

    def begin(self, *, should_defer: bool) -> "Writes":
        """The previous one's writes must be finished: its copies are overwritten."""
        return Writes(self, should_defer=should_defer)

    def copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """In host memory, of the same placement; `tensors` may change as soon as this returns."""
        return self._stager.stage(tensors)  # pyright: ignore[reportReturnType]


class Writes:
    """Those of one checkpoint by one rank, in order: deferred to `finish`, or made as they come."""

    def __init__(self, writer: Writer, *, should_defer: bool) -> None:
        self.group = writer.group
        self._writer = writer
        self._should_defer = should_defer
        self._pending: list[Callable[[], object]] = []

    def add(self, write: Callable[[], object]) -> None:
        """`write` must hold nothing that training changes: see `kept` and `on_host`.

        What ranks write together comes before what each writes alone: a rank whose disk is full
        would otherwise keep the others waiting for it.
        """
        if self._should_defer:
            self._pending.append(write)
        else:
            write()

    def kept(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same, or copies where they are written later."""
        return self._writer.copies(tensors) if self._should_defer else tensors

    def on_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors in host memory, that share nothing with the masters if written later."""
        return {
            name: tensor.to("cpu", copy=self._should_defer).contiguous()
            for name, tensor in tensors.items()
        }

    def finish(self) -> None:
        """Write what was deferred; from any thread, one at a time."""
        while self._pending:
            self._pending.pop(0)()
