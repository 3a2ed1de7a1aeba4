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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylearner.config.section import number
from raylearner.errors import (
    CheckpointError,
    LearnerDied,
    LearnerError,
    RaylearnerError,
    WeightTransferError,
    summary,
)
from raylearner.learner.batch.pack import LearnerBatch
from raylearner.learner.learner_actor import LearnerActor
from raylearner.learner.spec import LearnerSpec, StepOutput
from raylearner.observability.spans import Span
from raylearner.types import PolicyVersion
from raylearner.weights.transports import WeightGroup, discard_files, transport_of
from raylearner.weights.update import WeightUpdate

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 20.0
"""Maximum wait of a step's report for the spans of a rank."""
PHASE_TIMEOUT_S = 1.0
"""Maximum wait for a rank to report what it is doing while it starts."""
GRACE_S = 3.0
"""Time for other ranks to fail too after the first, so that the likeliest cause can be reported."""


class LearnerGroup:
    """Owns all ranks; a call returns the results of all ranks, or raises and ends all.

    Raises `LearnerDied` when a process is gone (`restart` and `restore` recover from that), and the
    rank's own error otherwise.
    """

    actor: Any = LearnerActor
    """Ray class of a rank; benchmarks replace it with one that only sends weights."""

    def __init__(
        self,
        spec: LearnerSpec,
        *,
        ray_options: Sequence[Mapping[str, Any]] | None = None,
        rank_of: Callable[[str], int] = lambda actor_id: 0,
    ) -> None:
        """`ray_options` are further actor options (placement, environment), one mapping a rank;
        `rank_of` returns the rank whose GPU an engine shares."""
        self._spec = spec
        self._ray_options = ray_options or [{}] * spec.learner.num_ranks
        self._rank_of = rank_of
        self._transport = transport_of(spec.weights.transport)
        self._group: WeightGroup | None = None
        self._sending: asyncio.Future[list[Any]] | None = None
        self._is_stepping = self._is_starting = False
        self._ranks: list[Any] = []
        self._policy_version: PolicyVersion = 0
        self._shares_prefixes = False
        self._cause: BaseException | None = None  # of the end of all ranks

    @property
    def policy_version(self) -> PolicyVersion:
        """Version that every rank holds."""
        return self._policy_version

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may be packed with shared prefixes."""
        return self._shares_prefixes

    @property
    def is_stepping(self) -> bool:
        """Whether ranks are in a step; every other call waits for its end."""
        return self._is_stepping

    @property
    def actors(self) -> dict[str, Any]:
        """Return the running ranks by name."""
        return {f"learner-{rank}": actor for rank, actor in enumerate(self._ranks)}

    async def start(self, *, model: Awaitable[None] | None = None) -> None:
        """Start every rank, wherever Ray places it, and connect them at rank 0's node.

        Ranks import their libraries first, and load the model once `model` is done.
        """
        config = self._spec.learner
        # A killed rank's name stays taken for a while: the suffix lets a new rank start at once.
        suffix = uuid.uuid4().hex[:6]
        self._ranks = [
            self.actor.options(
                **{
                    "name": f"{self._spec.run.name}/learner-{rank}-{suffix}",
                    "num_cpus": config.cpus_per_rank,
                    "num_gpus": number(config.gpus_per_rank),
                    **options,
                }
            ).remote(self._spec, rank)
            for rank, options in enumerate(self._ray_options)
        ]
        self._group, self._policy_version = None, 0
        self._is_starting = True
        await self._call_all("load_libraries")
        if model is not None:
            await model
        # Only now, since another process may take the port, which is free until ranks start.
        (address,) = await self._gather([self._living[0].rendezvous_address.remote()])
        for rank, pid in enumerate(await self._call_all("start", len(self._ranks), address)):
            log.info("learner-%d runs as process %d", rank, pid)
        self._shares_prefixes = all(await self._call_all("shares_prefixes"))
        self._is_starting = False

    async def phases(self) -> list[str]:
        """Return what each rank is doing while ranks start; empty afterwards."""
        if not self._is_starting:
            return []
        calls = [asyncio.wait_for(_resolve(r.phase.remote()), PHASE_TIMEOUT_S) for r in self._ranks]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return [phase if isinstance(phase, str) else "starting the process" for phase in found]

    async def step(self, batches: Sequence[LearnerBatch]) -> StepOutput:
        """Step with one batch for each context group of neighbouring ranks, in order."""
        by_rank = [
            batch for batch in batches for _ in range(self._spec.learner.context_parallel_size)
        ]
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
        """Return the spans recorded since the last call, of every rank that answers in time."""
        calls = [
            asyncio.wait_for(_resolve(rank.drain.remote()), DRAIN_TIMEOUT_S) for rank in self._ranks
        ]
        drained = await asyncio.gather(*calls, return_exceptions=True)
        return [span for spans in drained if isinstance(spans, list) for span in spans]

    async def write(
        self, policy_version: PolicyVersion, members: Sequence[str] = ()
    ) -> WeightUpdate:
        """Return an update with the current weights, which are `policy_version` or later.

        With a broadcast the ranks begin to send as soon as this returns: the members must receive, and
        `send` waits for the end.
        """
        group = await self._form_group(members) if self._transport.is_broadcast else None
        # Queued at once: no step may run between announcing the weights and sending them.
        writing = [
            rank.write.remote(tuple(m for m in members if self._rank_of(m) == index), group)
            for index, rank in enumerate(self._living)
        ]
        if group is not None:
            sending = [rank.send.remote(group) for rank in self._ranks]
            self._sending = asyncio.ensure_future(self._gather(sending))
        update = _merge(await self._gather(writing))
        assert update.policy_version >= policy_version, (update.policy_version, policy_version)
        return update

    async def send(self, update: WeightUpdate) -> dict[str, float]:
        """Wait for the end of a broadcast and return its timings. Raises `WeightTransferError`."""
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
        """End a broadcast that lost a member; the next one re-forms the process group."""
        self._group = None
        if self._transport.is_broadcast and self._ranks:
            with contextlib.suppress(RayActorError):
                await _resolve(self._ranks[0].abandon.remote(update.payload["group"]))

    async def discard(self, update: WeightUpdate) -> None:
        """Free the memory or files of an update that no engine needs any more."""
        if not update.is_collective:
            await asyncio.to_thread(discard_files, update.payload)
        elif not self._transport.is_broadcast and self._ranks:
            await self._call_all("release")

    async def _form_group(self, members: Sequence[str]) -> WeightGroup:
        """Return the group of the last push if its members are the same, else a new one."""
        if self._group is None or self._group.members != tuple(members):
            ((address, port),) = await self._gather([self._living[0].rendezvous_address.remote()])
            self._group = WeightGroup.of(
                members,
                address=address,
                port=port,
                ranks_per_member=self._spec.ranks_per_engine,
            )
        return self._group

    async def save(self, folder: Path, *, should_defer: bool = False) -> None:
        """Write a checkpoint; with `should_defer` copy the state, which `finish_save` writes.

        Raises `CheckpointError`, without killing ranks.
        """
        outcomes = await self._call_all("save", folder, should_defer)
        if failures := [outcome for outcome in outcomes if outcome is not None]:
            raise CheckpointError("; ".join(failures))

    async def finish_save(self) -> None:
        """Write the copied state in the background. Raises `CheckpointError`, without killing
        ranks.
        """
        calls = [_resolve(rank.finish_save.remote()) for rank in self._living]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures: list[str] = []
        raised: BaseException | None = None
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, RayActorError):
                raise LearnerDied(f"learner rank {rank} died: {outcome}") from outcome
            if isinstance(outcome, BaseException):
                raised, cause = outcome, _unwrap(outcome)
                failures.append(f"learner rank {rank}: {type(cause).__name__}: {cause}")
            elif outcome is not None:
                failures.append(outcome)
        if failures:
            raise CheckpointError("; ".join(failures)) from raised

    async def restore(self, folder: Path) -> None:
        versions = await self._call_all("restore", folder)
        self._policy_version = versions[0]

    async def restart(self) -> None:
        """Start new processes with the initial policy, for `restore` to follow."""
        self._kill()
        await self.start()

    async def close(self) -> None:
        """End every rank and remove published files. Safe to call twice."""
        self._kill()
        await asyncio.to_thread(shutil.rmtree, self._spec.weights_folder, ignore_errors=True)

    def check(self) -> None:
        """Raise `LearnerDied` after a call in the background found a rank dead and ended all."""
        if not self._ranks:
            cause = "start or restart it first" if self._cause is None else summary(self._cause)
            raise LearnerDied(f"the learner has no running ranks: {cause}")

    @property
    def _living(self) -> list[Any]:
        """Return the ranks. Raises `LearnerDied` after another call found one dead and ended all."""
        self.check()
        return self._ranks

    def _kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    async def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return await self._gather(
            [getattr(rank, method).remote(*arguments) for rank in self._living]
        )

    async def _gather(self, calls: Sequence[Any]) -> list[Any]:
        """Return all results; on the first failure kill every rank and raise the likeliest cause.

        Ranks that replaced them meanwhile are left alone.
        """
        ranks = self._ranks
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
        cause = _find_cause(errors)
        if self._ranks is ranks:
            self._kill()
            self._cause = cause
        raise cause


def _merge(updates: Sequence[WeightUpdate | None]) -> WeightUpdate:
    """Return rank 0's update with the memory handles of all ranks, for engines on each rank's GPU."""
    first = updates[0]
    assert first is not None, "rank 0 writes every update"
    others = [update.payload["handles"] for update in updates[1:] if update is not None]
    if not others:
        return first
    handles = dict(ChainMap(first.payload["handles"], *others))
    return replace(first, payload={**first.payload, "handles": handles})


async def _resolve(call: Any) -> Any:
    return await call


def _find_cause(errors: Sequence[tuple[int, BaseException]]) -> BaseException:
    """Prefer a death to an error of ours, and that to the broken connections that follow from them."""
    for rank, error in errors:
        if isinstance(error, RayActorError):
            return _chain(LearnerDied(f"learner rank {rank} died: {error}"), error)
    for _, error in errors:
        cause = _unwrap(error)
        if isinstance(cause, RaylearnerError):
            return cause
    rank, error = errors[0]
    return _chain(LearnerError(f"learner rank {rank} failed: {error}"), error)


def _unwrap(error: BaseException) -> BaseException:
    """Return the rank's own error, without the traceback that Ray puts into the message."""
    return error.cause if isinstance(error, RayTaskError) else error


def _chain(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error
