"""The learner's side of a broadcast to engines on other GPUs, through vLLM's own transfer engine.

Consumes the ranks' shards, layer by layer; waits for every engine of the group, which the publisher
tells to receive at the same time. Unblocked by their arrival, or by `abandon`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from raylearner.errors import LearnerError, WeightTransferError
from raylearner.weights.group import PACKED_BYTES, WeightGroup

GatherWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class LayerSource(WeightSource):
    """The learner's weights as vLLM iterates them: every rank to the end, whatever happens to one."""

    def __init__(
        self,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        gather: GatherWeights,
        dtype: torch.dtype,
    ) -> None:
        self._meta = [ParamMeta(name, dtype, shape) for name, shape in shapes]
        self._gather = gather
        self._rest: Iterator[tuple[str, Tensor]] = iter(())
        self._key: str | None = None
        self._abandoned: str | None = None
        self.failure: Exception | None = None
        """What a gather itself raised: then this rank is out of step with the others."""

    @property
    def is_abandoned(self) -> bool:
        return self._key is not None and self._key == self._abandoned

    def restart(self, key: str) -> None:
        """For a push to the group of that key, which may be abandoned before it begins."""
        self._rest = self._gather()
        self._key = key

    def abandon(self, key: str) -> None:
        self._abandoned = key

    def metadata(self) -> list[ParamMeta]:
        return self._meta

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (item := self._next()) is not None:
            if self.is_abandoned:
                raise WeightTransferError("the push was abandoned")
            yield item

    def drain(self) -> None:
        """Join the gathers that are left: the other ranks are in them."""
        while self._next() is not None:
            pass

    def _next(self) -> tuple[str, Tensor] | None:
        try:
            return next(self._rest, None)
        except Exception as error:
            self.failure = error
            raise


class _EnginesAreToldElsewhere:
    """The publisher drives the engines, so that vLLM's trainer side has nobody to call."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


class NcclSender:
    """One rank's part in pushes. Keeps the communicator while its group stays the same."""

    def __init__(self, source: LayerSource, *, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._key: str | None = None
        self._transfer: Any = None

    def send(self, group: WeightGroup, *, deadline_s: float) -> dict[str, float]:
        """Send to all members; every rank calls it.

        Raises `WeightTransferError` when it broke off, `LearnerError` where weights could not even be
        gathered: the ranks are out of step then.
        """
        self._source.restart(group.key)
        started = time.monotonic()
        timer = threading.Timer(deadline_s, self.abandon, [group.key])
        timer.daemon = True
        timer.start()
        try:
            torch.cuda.synchronize()
            if self._source.is_abandoned:
                raise WeightTransferError("the push was abandoned")
            if group.key != self._key:
                self._connect(group, deadline_s)
            connected = time.monotonic()
            self._transfer.send_weights()
            if self._source.is_abandoned:
                raise WeightTransferError("the push was abandoned")
        except Exception as error:
            self._join_others(error)
            self.close()
            raise WeightTransferError(f"weights could not be sent: {error}") from error
        finally:
            timer.cancel()
        return {
            "weights/connect_s": connected - started,
            "weights/send_s": time.monotonic() - connected,
        }

    def _join_others(self, cause: Exception) -> None:
        if self._source.failure is None:
            with contextlib.suppress(Exception):
                self._source.drain()
        failure = self._source.failure
        if failure is not None:
            raise LearnerError(f"weights could not be gathered for a push: {failure}") from cause

    def abandon(self, key: str) -> None:
        """End a push that cannot end by itself, or has not begun. May be called from any thread."""
        self._source.abandon(key)
        if self._key != key:
            return
        communicator = getattr(self._transfer, "model_update_group", None)
        if communicator is not None:
            communicator.destroy()

    def close(self) -> None:
        transfer, self._transfer, self._key = self._transfer, None, None
        if transfer is not None:
            transfer.shutdown()

    def _connect(self, group: WeightGroup, deadline_s: float) -> None:
        """Meet the engines; gives up at the deadline, where vLLM would wait for minutes."""
        self.close()
        init = NCCLTrainerInitInfo(
            master_address=group.address,
            master_port=group.port,
            world_size=group.world_size,
            packed=True,
            packed_buffer_size_bytes=PACKED_BYTES,
            rank=self._rank,
        )
        outcome: list[Any] = []

        def meet() -> None:
            try:
                outcome.append(
                    WeightTransferTrainerFactory.trainer_init(
                        init, client=_EnginesAreToldElsewhere(), source=self._source
                    )
                )
            except Exception as error:
                outcome.append(error)

        meeting = threading.Thread(target=meet, name="weight-group", daemon=True)
        meeting.start()
        until = time.monotonic() + deadline_s
        while meeting.is_alive() and not self._source.is_abandoned and time.monotonic() < until:
            meeting.join(0.02)
        if not outcome:
            raise WeightTransferError(
                f"of {', '.join(group.members)} not all joined within {deadline_s:g} s"
            )
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        self._transfer, self._key = outcome[0], group.key
