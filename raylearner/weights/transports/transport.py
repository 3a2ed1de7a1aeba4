"""The interface of a transport: a side in every learner rank and a side in every vLLM engine."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from raylearner.errors import WeightTransferError
from raylearner.types import PolicyVersion
from raylearner.weights.checksums import Checksum
from raylearner.weights.transports import WeightGroup
from raylearner.weights.update import WeightUpdate
from raylearner.weights.verification import check_shapes, check_tensor_names, verify_weights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

STAGING_MARGIN_BYTES = 1024**3
"""Memory of a GPU that a push leaves free beside the tensors that arrive."""
FIRST_POLL_S, LAST_POLL_S, POLL_SHARE = 0.005, 0.1, 0.1
"""Intervals between questions whether a task beside the engine's steps has ended, for which every rank
interrupts its steps: a share of the time since its start, between two limits."""


class Weights(Protocol):
    """A learner's weights in the engines' precision, by the names of the model's checkpoint.

    Tensors are gathered from all ranks: every rank must iterate to the end.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...

    def shapes(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Return names and full shapes of `tensors`, in its order."""
        ...

    def checksums(self) -> Mapping[str, Checksum]:
        """Return the checksums of `tensors`. Every rank must call it."""
        ...

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]: ...

    def adapter_config(self) -> Mapping[str, Any]: ...


class Sender:
    """One learner rank's side. All ranks make the same calls in the same order."""

    def __init__(self, weights: Weights, *, rank: int, folder: Path, deadline_s: float) -> None:
        """`folder` is where files are written; a `send` fails after `deadline_s`."""
        self._weights = weights
        self._rank = rank
        self._folder = folder
        self._deadline_s = deadline_s

    def write(
        self, policy_version: PolicyVersion, members: Sequence[str], group: WeightGroup | None
    ) -> dict[str, Any] | None:
        """Return this rank's part of the payload, rank 0 with the `checksums`; None for no part.

        `members` are the engines on this rank's GPU, `group` is that of a broadcast.
        """
        raise NotImplementedError

    def send(self, group: WeightGroup) -> dict[str, float]:
        """Broadcast what `write` announced; return timings as metrics.

        Raises `WeightTransferError` for a push that was broken off, and `LearnerError` when weights could
        not be gathered, which leaves the ranks out of step.
        """
        return {}

    def abandon(self, group: WeightGroup) -> None:
        """End a `send` that blocks or has not begun yet; called from another thread."""

    def release(self) -> None:
        """Free GPU memory that was kept for the last push."""


class Receiver:
    """One engine's side; the caller pauses the engine around `replace`.

    The methods here load weights through one of vLLM's weight-transfer engines.
    """

    name: ClassVar[str]
    takes_memory: ClassVar[bool] = False
    """Whether tensors on their way into an engine take memory of its GPU."""
    initial_arguments: ClassVar[Mapping[str, Any] | None] = {}
    """Arguments of vLLM's transfer engine at startup; None where `connect` initializes it."""

    def __init__(self, *, actor_id: str) -> None:
        """`actor_id` identifies this engine in pushes made for particular members."""
        self._actor_id = actor_id
        self.adapter: LoRARequest | None = None
        """The adapter that every request must name, once one has arrived."""
        self._is_staged = False

    @staticmethod
    def vllm_engine() -> type[Any]:
        """Return vLLM's transfer engine for this transport, which runs in its workers."""
        raise NotImplementedError

    @property
    def backend(self) -> str:
        """Name of the transfer engine among vLLM's backends, under which `vllm_worker` registers it."""
        return f"verified_{self.name}"

    async def initialize(self, llm: "AsyncLLM") -> None:
        """Prepare the transport and mark tokens with the initial policy version, 0."""
        if self.initial_arguments is not None:
            await self._initialize_transfer(llm, self.initial_arguments)
        await llm.update_weight_version("0")

    async def prepare(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        """Check the update and connect to the learner, which may take long and needs no pause.

        Raises `WeightTransferError` for another transport or other tensors.
        """
        if update.transport != self.name:
            raise WeightTransferError(
                f"weights arrived via {update.transport!r}; this engine expects {self.name!r}"
            )
        await asyncio.to_thread(check_shapes, update, llm.model_config.model)
        await asyncio.to_thread(check_tensor_names, update)
        await self._connect(llm, update)

    async def stage(self, llm: "AsyncLLM", update: WeightUpdate) -> bool:
        """Let the tensors arrive while the engine generates; `replace` then only copies them.

        False where they do not fit beside the weights: they will then arrive in the pause.
        """
        needed = self._staging_bytes(update.payload)
        limits = [
            free for free in await llm.collective_rpc("free_weight_bytes") if free is not None
        ]
        free = min(limits, default=needed + STAGING_MARGIN_BYTES) - STAGING_MARGIN_BYTES
        if not needed or needed <= free:
            arguments = self._update_arguments(update.payload)
            self._is_staged = all(await run_task(llm, "stage", arguments))
        if not self._is_staged:
            _warn_of_memory(round(needed / 2**30, 1))
        return self._is_staged

    async def replace(
        self, llm: "AsyncLLM", update: WeightUpdate, *, has_slept: bool = False
    ) -> None:
        """Replace the weights, and the version that tokens are marked with from here on.

        The engine must be paused. `has_slept` means that its weights were freed.
        """
        if self._is_staged:
            applying = llm.collective_rpc("apply_weights")
        else:
            arguments = self._update_arguments(update.payload)
            applying = llm.collective_rpc("receive_weights", args=(arguments, has_slept))
        self._is_staged = False
        await asyncio.gather(applying, llm.update_weight_version(str(update.policy_version)))

    async def verify(self, llm: "AsyncLLM", update: WeightUpdate) -> int:
        """Return the number of tensors that every rank holds exactly as they were sent.

        The engine may generate meanwhile. Raises `WeightTransferError` naming the tensors that differ.
        """
        return verify_weights(
            update.payload["checksums"],
            await run_task(llm, "report"),
            policy_version=update.policy_version,
        )

    async def _connect(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        pass

    async def _initialize_transfer(self, llm: "AsyncLLM", arguments: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(arguments)))

    def _update_arguments(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the payload as vLLM's transfer engine takes it."""
        return {key: value for key, value in payload.items() if key != "checksums"}

    def _staging_bytes(self, payload: Mapping[str, Any]) -> int:
        """Return the memory that the tensors take beside the weights, on each rank's GPU."""
        return 0


async def run_task(llm: "AsyncLLM", name: str, *arguments: Any) -> list[Any]:
    """Run a task of a push in a thread of every worker, beside the engine's steps; return the results."""
    await llm.collective_rpc("begin_weight_task", args=(name, *arguments))
    waited_s = 0.0
    while True:
        pause_s = min(max(FIRST_POLL_S, POLL_SHARE * waited_s), LAST_POLL_S)
        await asyncio.sleep(pause_s)
        waited_s += pause_s
        outcomes = await llm.collective_rpc("poll_weight_task")
        if all(has_ended for has_ended, _ in outcomes):
            return [result for _, result in outcomes]


@cache
def _warn_of_memory(needed_gib: float) -> None:
    log.warning(
        "weights arrive while generation is paused, which prolongs every push: the GPU has no %.1f GiB"
        " for them beside the model and its caches; lower actors.engine.memory_fraction",
        needed_gib,
    )
