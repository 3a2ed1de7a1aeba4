"""The controller's handle on all learner ranks.

Consumes batches; produces step outputs, weight updates and checkpoints. Waits for all ranks in every
call; when one raises or dies, the others are killed, which unblocks them.
"""

import asyncio
import contextlib
import logging
import shutil
import uuid
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylearner.config.schema import LearnerSection, WeightsSection
from raylearner.config.section import number
from raylearner.errors import (
    CheckpointError,
    LearnerDied,
    LearnerError,
    RaylearnerError,
    WeightTransferError,
)
from raylearner.learner.batch.layout import LearnerBatch, StepOutput
from raylearner.learner.learner_actor import LearnerActor, Recording
from raylearner.observability.spans import Span
from raylearner.types import PolicyVersion, WeightUpdate
from raylearner.weights.group import WeightGroup

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""After one rank failed: time for the others to fail too, so that the first cause can be told."""


class LearnerGroup:
    """Owns all ranks; promises that a call returns what all ranks did, or raises and none is left.

    Raises `LearnerDied` when a process is gone (`restart` and `restore` mend that), what the rank
    raised otherwise.
    """

    actor: Any = LearnerActor
    """The Ray class of a rank; benchmarks put bare senders of weights here."""

    def __init__(
        self,
        config: LearnerSection,
        *,
        weights: WeightsSection,
        model_path: str,
        temperature: float,
        num_steps: int,
        seed: int,
        reward_weights: Mapping[str, float],
        dump_folder: Path,
        run_name: str,
        engine_dtype: str,
        ranks_per_engine: int = 1,
        recording: Recording | None = None,
        ray_options: Sequence[Mapping[str, Any]] | None = None,
        rank_of: Callable[[str], int] | None = None,
        should_free_memory: bool = False,
    ) -> None:
        """`ranks_per_engine` is its tensor-parallel size; `ray_options` are further actor options,
        one mapping a rank (placement, environment). `rank_of` names the rank whose GPU an engine
        shares; with `should_free_memory` a push leaves nothing cached there."""
        self._rank_of = rank_of or (lambda actor_id: 0)
        self._should_free_memory = should_free_memory
        self._config = config
        self._weights = weights
        self._arguments = {
            "model_path": model_path,
            "temperature": temperature,
            "num_steps": num_steps,
            "seed": seed,
            "reward_weights": reward_weights,
            "dump_folder": dump_folder,
            "recording": recording or Recording(),
        }
        self._ranks_per_engine = ranks_per_engine
        self._group: WeightGroup | None = None
        self._sending: asyncio.Future[list[Any]] | None = None
        self._is_stepping = False
        self._address = ""
        self._seed = seed
        self._run_name = run_name
        self._engine_dtype = engine_dtype
        self._ray_options = ray_options or [{}] * config.num_ranks
        self._folder = str(Path(weights.folder) / f"raylearner-{run_name}-{uuid.uuid4().hex[:12]}")
        self._ranks: list[Any] = []
        self._policy_version: PolicyVersion = 0

    @property
    def policy_version(self) -> PolicyVersion:
        """The version that every rank holds."""
        return self._policy_version

    @property
    def is_stepping(self) -> bool:
        """Whether ranks are in a step, behind which every other call waits."""
        return self._is_stepping

    async def start(self) -> None:
        """Start every rank, wherever Ray places it, and let them meet at rank 0's node."""
        # The suffix tells a restarted rank from the one just killed, whose name lives on a while.
        suffix = uuid.uuid4().hex[:6]
        self._ranks = [
            self.actor.options(
                **{
                    "name": f"{self._run_name}/learner-{rank}-{suffix}",
                    "num_cpus": self._config.cpus_per_rank,
                    "num_gpus": number(self._config.gpus_per_rank),
                    **options,
                }
            ).remote(rank)
            for rank, options in enumerate(self._ray_options)
        ]
        ((address, port),) = await self._gather([self._ranks[0].meeting_point.remote()])
        self._address, self._group = address, None
        weights = {
            "config": self._weights,
            "folder": self._folder,
            "dtype": self._engine_dtype,
            "seed": self._seed,
            "should_free_memory": self._should_free_memory,
        }
        versions = await self._all(
            "start", self._config, weights, len(self._ranks), address, port, **self._arguments
        )
        self._policy_version = versions[0]
        for rank, pid in enumerate(await self._all("pid")):
            log.info("learner-%d runs as process %d", rank, pid)

    async def step(self, batches: Sequence[LearnerBatch]) -> StepOutput:
        """One batch a context group of neighbouring ranks, in order."""
        by_rank = [batch for batch in batches for _ in range(self._config.context_parallel_size)]
        calls = [rank.step.remote(batch) for rank, batch in zip(self._living, by_rank, strict=True)]
        self._is_stepping = True
        try:
            outputs = await self._gather(calls)
        finally:
            self._is_stepping = False
        self._policy_version = outputs[0].policy_version
        return replace(
            outputs[0],
            advantages={key: value for o in outputs for key, value in o.advantages.items()},
            logprobs={key: values for o in outputs for key, values in o.logprobs.items()},
        )

    async def drain_spans(self) -> list[Span]:
        """What every rank recorded since the last call; nothing of one that died."""
        calls = [_resolve(rank.drain.remote()) for rank in self._ranks]
        drained = await asyncio.gather(*calls, return_exceptions=True)
        return [span for spans in drained if isinstance(spans, list) for span in spans]

    async def write(
        self, policy_version: PolicyVersion, members: Sequence[str] = ()
    ) -> WeightUpdate:
        """The weights as they are now, `policy_version` or later, with the probe that verifies them.

        With `nccl` the ranks begin to send as soon as this returns: the members must receive, and
        `send` waits for the end.
        """
        is_broadcast = self._weights.transport == "nccl"
        group = await self._meet(members) if is_broadcast else None
        # Asked for at once: no step may come between what is announced and what is sent.
        writing = [
            rank.write.remote(tuple(m for m in members if self._rank_of(m) == index), group)
            for index, rank in enumerate(self._living)
        ]
        if is_broadcast:
            sending = [rank.send.remote(group) for rank in self._ranks]
            self._sending = asyncio.ensure_future(self._gather(sending))
        update = _merged(await self._gather(writing))
        assert update.policy_version >= policy_version, (update.policy_version, policy_version)
        return update

    async def send(self, update: WeightUpdate) -> dict[str, float]:
        """Wait for the end of a broadcast: its timings, or `WeightTransferError`."""
        sending, self._sending = self._sending, None
        if sending is None:
            return {}
        outcomes = await sending
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, str):
                self._group = None
                raise WeightTransferError(f"learner rank {rank}: {outcome}")
        return outcomes[0]

    async def abandon(self, update: WeightUpdate) -> None:
        """End a broadcast that lost a member; the next one meets anew."""
        self._group = None
        if self._weights.transport == "nccl" and self._ranks:
            with contextlib.suppress(RayActorError):
                await _resolve(self._ranks[0].abandon.remote(update.payload["group"]))

    async def discard(self, update: WeightUpdate) -> None:
        if update.transport == "ipc":
            if self._ranks:
                await self._all("release")
        elif not update.is_collective:
            # Imports torch, which the controller's start-up has no other use for.
            from raylearner.weights.transports.shared_files import discard_weights

            await asyncio.to_thread(discard_weights, update.payload)

    async def _meet(self, members: Sequence[str]) -> WeightGroup:
        """The group of the last push while its members stay the same, else a fresh one."""
        if self._group is None or self._group.members != tuple(members):
            (port,) = await self._gather([self._living[0].free_port.remote()])
            self._group = WeightGroup.of(
                members, address=self._address, port=port, ranks_per_member=self._ranks_per_engine
            )
        return self._group

    async def save(self, folder: Path, *, should_defer: bool = False) -> None:
        """With `should_defer` the state is copied, and on disk once `finish_save` returns."""
        await self._all("save", str(folder), should_defer)

    async def finish_save(self) -> None:
        """Beside training. Raises `CheckpointError` where ranks could not write, and kills none."""
        calls = [_resolve(rank.finish_save.remote()) for rank in self._living]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures: list[str] = []
        raised: BaseException | None = None
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, RayActorError):
                raise LearnerDied(f"learner rank {rank} died: {outcome}") from outcome
            if isinstance(outcome, BaseException):
                raised, cause = outcome, _unwrapped(outcome)
                failures.append(f"learner rank {rank}: {type(cause).__name__}: {cause}")
            elif outcome is not None:
                failures.append(outcome)
        if failures:
            raise CheckpointError("; ".join(failures)) from raised

    async def restore(self, folder: Path) -> None:
        versions = await self._all("restore", str(folder))
        self._policy_version = versions[0]

    async def restart(self) -> None:
        """New processes with the initial policy; `restore` comes next."""
        self._kill()
        await self.start()

    async def close(self) -> None:
        """End every rank and remove what was published. Safe to call twice."""
        self._kill()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def _living(self) -> list[Any]:
        """The ranks. Raises `LearnerDied` where another call found one of them dead, and so ended all."""
        if not self._ranks:
            raise LearnerDied("the learner has no running ranks: start or restart it first")
        return self._ranks

    def _kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    async def _all(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        return await self._gather(
            [getattr(rank, method).remote(*arguments, **keywords) for rank in self._living]
        )

    async def _gather(self, calls: Sequence[Any]) -> list[Any]:
        """All results; on the first failure every rank is killed, and the likeliest cause raised."""
        waiting = [asyncio.ensure_future(_resolve(call)) for call in calls]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            if all(w.done() and w.exception() is None for w in waiting):
                return [w.result() for w in waiting]
            await asyncio.wait(waiting, timeout=GRACE_S)
        finally:
            for w in waiting:
                w.cancel()
        errors = [
            (rank, error)
            for rank, w in enumerate(waiting)
            if w.done() and not w.cancelled() and (error := w.exception()) is not None
        ]
        self._kill()
        raise _cause(errors)


def _merged(updates: Sequence[WeightUpdate | None]) -> WeightUpdate:
    """Rank 0's update, with the handles that other ranks give the engines on their own GPUs."""
    first = updates[0]
    assert first is not None, "rank 0 writes every update"
    others = [update.payload["handles"] for update in updates[1:] if update is not None]
    if not others:
        return first
    handles = dict(ChainMap(first.payload["handles"], *others))
    return replace(first, payload={**first.payload, "handles": handles})


async def _resolve(call: Any) -> Any:
    return await call


def _cause(errors: Sequence[tuple[int, BaseException]]) -> BaseException:
    """A death before an error of ours, and that before the broken connections they leave behind."""
    for rank, error in errors:
        if isinstance(error, RayActorError):
            return _chained(LearnerDied(f"learner rank {rank} died: {error}"), error)
    for _, error in errors:
        cause = _unwrapped(error)
        if isinstance(cause, RaylearnerError):
            return cause
    rank, error = errors[0]
    return _chained(LearnerError(f"learner rank {rank} failed: {error}"), error)


def _unwrapped(error: BaseException) -> BaseException:
    """What a rank raised, without the traceback that Ray makes part of the message."""
    return error.cause if isinstance(error, RayTaskError) else error


def _chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error
