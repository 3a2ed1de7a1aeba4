"""The controller's handle on the learner, where no rank is left, and where one fails beside training."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from raylearner.config.schema import LearnerSection, WeightsSection
from raylearner.errors import CheckpointError, LearnerDied, RaylearnerError, WeightTransferError
from raylearner.learner.learner_group import LearnerGroup

DIED = RayActorError("0", "killed by the system")
RAISED: RayTaskError = RayTaskError(
    "finish_save", "Traceback: ..", OSError("no space left")
).as_instanceof_cause()
REFUSED = "learner rank 1: OSError: read-only file system"


def make_group(transport: str = "shared_files") -> LearnerGroup:
    return LearnerGroup(
        LearnerSection(),
        weights=WeightsSection.model_validate({"transport": transport}),
        model_path="none",
        temperature=1.0,
        num_steps=1,
        seed=0,
        reward_weights={},
        dump_folder=Path("none"),
        run_name="run",
        engine_dtype="float32",
    )


@pytest.mark.parametrize("transport", ["shared_files", "nccl"])
async def test_every_call_tells_a_learner_that_another_call_found_dead(transport: str) -> None:
    group = make_group(transport)
    calls = (
        group.step([object()]),  # pyright: ignore[reportArgumentType] - never looked at
        group.write(0, ["rollout-0"]),
        group.save(Path("none")),
        group.restore(Path("none")),
    )
    for call in calls:
        with pytest.raises(LearnerDied, match="no running ranks"):
            await call
    assert await group.drain_spans() == []


@pytest.mark.parametrize(
    ("outcomes", "kind", "said"),
    [
        ([None, RAISED], CheckpointError, "learner rank 1: OSError: no space left"),
        ([RAISED, REFUSED], CheckpointError, f"learner rank 0: OSError: no space left; {REFUSED}"),
        ([RAISED, REFUSED, DIED], LearnerDied, f"learner rank 2 died: {DIED}"),
    ],
)
async def test_a_rank_that_raised_in_a_checkpoint_is_told_from_one_that_died(
    outcomes: list[Any], kind: type[RaylearnerError], said: str
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
    assert str(refused.value) == said


async def test_a_push_that_broke_off_names_the_rank() -> None:
    group = make_group("nccl")
    group._sending = asyncio.get_running_loop().create_future()
    group._sending.set_result([{"send_s": 1.0}, "policy version 3: a member is gone"])
    with pytest.raises(WeightTransferError, match="learner rank 1: policy version 3: a member"):
        await group.send(None)  # pyright: ignore[reportArgumentType] - never looked at
