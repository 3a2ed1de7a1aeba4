"""A run with a real vLLM engine goes on when its core is killed."""

from dataclasses import replace
from pathlib import Path

import chaos
import pytest

from benchmarks.faults.run import ROOT, FaultRun, make_model

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


@pytest.mark.timeout(280)
def test_a_killed_core_is_replaced_while_the_other_engine_continues(model: Path) -> None:
    kept = make_model(model)["path"]
    overrides = (
        f"model={{kind: pretrained, path: {kept}}}",
        *("run.num_steps=100000", "run.checkpoint_every_steps=5"),
        *("evaluation=null", "data.evaluation=null"),
        *("replay.groups_per_step=2", "actors.max_concurrent_episodes=8"),
        "actors.engine.max_sequences=8",
    )
    run = FaultRun(files=[f"{ROOT}/configs/quickstart.yaml"], overrides=overrides)
    report = chaos.torment(
        run, engine="vllm", faults=["kill engine core"], seed=1, every_s=0, is_brief=True
    )
    (fault,) = report.injected
    assert fault.recovered_s is not None, run.output[-4000:]
    assert not fault.was_resumed, run.output[-4000:]
    assert report.code == 143, run.output[-4000:]
    assert report.balance.is_balanced, report.balance
    # Sockets and logs of a killed engine go with the next start of a run.
    assert replace(report.left, temporary=()).names == []
