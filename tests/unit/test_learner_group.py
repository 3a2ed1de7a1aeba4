"""The controller's handle on the learner, where no rank is left."""

from pathlib import Path

import pytest

from raylearner.config.schema import LearnerSection, WeightsSection
from raylearner.errors import LearnerDied
from raylearner.learner.learner_group import LearnerGroup


@pytest.mark.parametrize("transport", ["shared_files", "nccl"])
async def test_every_call_tells_a_learner_that_another_call_found_dead(transport: str) -> None:
    group = LearnerGroup(
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
