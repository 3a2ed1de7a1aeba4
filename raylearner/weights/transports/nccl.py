"""Weights by broadcast to engines on other GPUs, through vLLM's own transfer engine.

The sender consumes the ranks' shards layer by layer and waits for every engine of the group, which receive
at the same time, while they generate where memory permits; their arrival unblocks it, or `abandon`.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLWeightTransferEngine,
)

from raylearner.errors import LearnerError, WeightTransferError
from raylearner.types import PolicyVersion
from raylearner.weights.transports import WeightGroup, transport
from raylearner.weights.update import WeightUpdate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

GatherWeights = Callable[[], Iterator[tuple[str, Tensor]]]

PACKED_BYTES = 512 * 1024**2
"""Size of one broadcast; the next one is gathered while it travels."""


class Sender(transport.Sender):
    """Keeps the communicator as long as its group stays the same."""

    def __init__(self, weights: transport.Weights, **options: Any) -> None:
        super().__init__(weights, **options)
        self._source = LayerSource(weights.shapes(), weights.tensors, weights.dtype)
        self._key: str | None = None
        self._transfer: Any = None

    def write(
        self, policy_version: PolicyVersion, members: Sequence[str], group: WeightGroup | None
    ) -> dict[str, Any] | None:
        # Before anything is sent: engines compare as soon as they have loaded the weights.
        checksums = self._weights.checksums()
        if self._rank != 0:
            return None
        shapes = self._weights.shapes()
        return {
            "group": group,
            "names": [name for name, _ in shapes],
            "dtype_names": [str(self._weights.dtype).removeprefix("torch.")] * len(shapes),
            "shapes": [list(shape) for _, shape in shapes],
            "checksums": checksums,
        }

    def send(self, group: WeightGroup) -> dict[str, float]:
        self._source.restart(group.key)
        started = time.monotonic()
        timer = threading.Timer(self._deadline_s, self.abandon, [group])
        timer.daemon = True
        timer.start()
        try:
            torch.cuda.synchronize()
            self._check_abandoned()
            if group.key != self._key:
                self._connect(group)
            connected = time.monotonic()
            self._transfer.send_weights()
            self._check_abandoned()
        except Exception as error:
            self._join_others(error)
            self._close()
            raise WeightTransferError(f"weights could not be sent: {error}") from error
        finally:
            timer.cancel()
        return {
            "weights/connect_s": connected - started,
            "weights/send_s": time.monotonic() - connected,
        }

    def abandon(self, group: WeightGroup) -> None:
        self._source.abandon(group.key)
        if self._key != group.key:
            return
        communicator = getattr(self._transfer, "model_update_group", None)
        if communicator is not None:
            communicator.destroy()

    def _check_abandoned(self) -> None:
        if self._source.is_abandoned:
            raise WeightTransferError("the push was abandoned")

    def _join_others(self, cause: Exception) -> None:
        if self._source.failure is None:
            with contextlib.suppress(Exception):
                self._source.drain()
        failure = self._source.failure
        if failure is not None:
            raise LearnerError(f"weights could not be gathered for a push: {failure}") from cause

    def _close(self) -> None:
        transfer, self._transfer, self._key = self._transfer, None, None
        if transfer is not None:
            transfer.shutdown()

    def _connect(self, group: WeightGroup) -> None:
        """Form the process group; fails at the deadline, whereas vLLM would wait for minutes."""
        self._close()
        init = NCCLTrainerInitInfo(
            master_address=group.address,
            master_port=group.port,
            world_size=group.world_size,
            packed=True,
            packed_buffer_size_bytes=PACKED_BYTES,
            rank=self._rank,
        )
        outcome: list[Any] = []

        def connect() -> None:
            try:
                outcome.append(
                    WeightTransferTrainerFactory.trainer_init(
                        init, client=_NoClient(), source=self._source
                    )
                )
            except Exception as error:
                outcome.append(error)

        connecting = threading.Thread(target=connect, name="weight-group", daemon=True)
        connecting.start()
        until = time.monotonic() + self._deadline_s
        while connecting.is_alive() and not self._source.is_abandoned and time.monotonic() < until:
            connecting.join(0.02)
        if not outcome:
            raise WeightTransferError(
                f"not all of {', '.join(group.members)} joined within {self._deadline_s:g} s"
            )
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        self._transfer, self._key = outcome[0], group.key


class Receiver(transport.Receiver):
    """Joins the group at its first push, and keeps it while the members stay the same."""

    name = "nccl"
    takes_memory = True
    initial_arguments = None
    _key: str | None = None

    @staticmethod
    def vllm_engine() -> type[Any]:
        return NCCLWeightTransferEngine

    async def _connect(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        group: WeightGroup = update.payload["group"]
        if group.key == self._key:
            return
        if self._key is not None:
            await llm.shutdown_weight_transfer_engine()
        self._key = None
        offset = 1 + group.members.index(self._actor_id) * group.ranks_per_member
        arguments = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": offset,
            "world_size": group.world_size,
            "packed": True,
            "packed_buffer_size_bytes": PACKED_BYTES,
        }
        await self._initialize_transfer(llm, arguments)
        self._key = group.key

    def _update_arguments(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super()._update_arguments(payload)
        del arguments["group"]
        return arguments

    def _staging_bytes(self, payload: Mapping[str, Any]) -> int:
        tensors = zip(payload["shapes"], payload["dtype_names"], strict=True)
        return sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in tensors)


class LayerSource(WeightSource):
    """The learner's weights as vLLM iterates them: every rank to the end, even after one fails."""

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
        """The error of a gather, after which this rank is out of step with the others."""

    @property
    def is_abandoned(self) -> bool:
        return self._key is not None and self._key == self._abandoned

    def restart(self, key: str) -> None:
        """Begin a push to the group of that key, which may have been abandoned already."""
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
        """Take part in the remaining gathers, in which the other ranks are waiting."""
        while self._next() is not None:
            pass

    def _next(self) -> tuple[str, Tensor] | None:
        try:
            return next(self._rest, None)
        except Exception as error:
            self.failure = error
            raise


class _NoClient:
    """Client of vLLM's trainer side that does nothing: the publisher drives the engines."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass
