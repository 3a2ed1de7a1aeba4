"""The learner group when no rank is left, and when a rank fails beside training."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from raylearner.config.schema import LearnerSection, WeightsSection
from raylearner.errors import CheckpointError, LearnerDied, RaylearnerError, WeightTransferError
from raylearner.learner import learner_group
from raylearner.learner.learner_group import LearnerGroup
from raylearner.learner.spec import LearnerSpec

DIED = RayActorError("0", "killed by the system")
RAISED: RayTaskError = RayTaskError(
    "finish_save", "Traceback: ..", OSError("no space left")
).as_instanceof_cause()
REFUSED = "learner rank 1: OSError: read-only file system"


def make_group(transport: str = "shared_files") -> LearnerGroup:
    weights = WeightsSection.model_validate({"transport": transport})
    return LearnerGroup(LearnerSpec(learner=LearnerSection(), model_path="none", weights=weights))


@pytest.mark.parametrize("transport", ["shared_files", "nccl"])
async def test_every_call_fails_after_another_call_found_a_rank_dead(transport: str) -> None:
    group = make_group(transport)
    calls = (
        group.step([object()]),  # pyright: ignore[reportArgumentType] - never looked at
        group.write(0, ["rollout-0"]),
        group.save(Path("none")),
        group.restore(Path("none")),
    )
    for call in calls:
        with pytest.raises(LearnerDied):
            await call
    assert await group.drain_spans() == []


@pytest.mark.parametrize(
    ("outcomes", "kind", "message"),
    [
        ([None, RAISED], CheckpointError, "learner rank 1: OSError: no space left"),
        ([RAISED, REFUSED], CheckpointError, f"learner rank 0: OSError: no space left; {REFUSED}"),
        ([RAISED, REFUSED, DIED], LearnerDied, f"learner rank 2 died: {DIED}"),
    ],
)
async def test_a_failed_checkpoint_names_the_ranks_that_raised_or_died(
    outcomes: list[Any], kind: type[RaylearnerError], message: str
) -> None:
    async def ended(outcome: Any) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    group = make_group()
    group._ranks = [
        SimpleNamespace(finish_save=SimpleNamespace(remote=lambda outcome=outcome: ended(outcome)))
        for outcome in outcomes
    ]
    with pytest.raises(kind) as refused:
        await group.finish_save()
    assert str(refused.value) == message


async def test_a_push_that_broke_off_names_the_rank() -> None:
    group = make_group("nccl")
    group._sending = asyncio.get_running_loop().create_future()
    group._sending.set_result([{"send_s": 1.0}, "policy version 3: a member is gone"])
    with pytest.raises(WeightTransferError, match="learner rank 1: policy version 3"):
        await group.send(None)  # pyright: ignore[reportArgumentType] - never looked at


async def test_a_rank_that_cannot_write_ends_no_rank() -> None:
    async def ended(outcome: str | None) -> str | None:
        return outcome

    group = make_group()
    outcomes = (None, REFUSED)
    ranks: list[Any] = [
        SimpleNamespace(save=SimpleNamespace(remote=lambda *_, outcome=outcome: ended(outcome)))
        for outcome in outcomes
    ]
    group._ranks = ranks
    with pytest.raises(CheckpointError, match="rank 1"):
        await group.save(Path("none"))
    assert group._ranks is ranks


async def test_a_late_failure_of_dead_ranks_leaves_those_that_replaced_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(learner_group, "ray", SimpleNamespace(kill=killed.append))
    group = make_group()
    group._ranks = ["old"]
    call = asyncio.get_running_loop().create_future()
    writing = asyncio.create_task(group._gather([call]))
    await asyncio.sleep(0)
    group._kill()
    group._ranks = ["new"]
    call.set_exception(DIED)
    with pytest.raises(LearnerDied):
        await writing
    assert killed == ["old"]
    group.check()


async def test_a_death_that_a_call_in_the_background_found_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_group, "ray", SimpleNamespace(kill=lambda _: None))
    group = make_group()
    group._ranks = ["rank"]
    call = asyncio.get_running_loop().create_future()
    call.set_exception(DIED)
    with pytest.raises(LearnerDied):
        await group._gather([call])
    with pytest.raises(LearnerDied, match="learner rank 0 died"):
        group.check()
