"""A run of the scripted engine goes on under faults, loses and repeats nothing, and leaves nothing."""

from pathlib import Path

import chaos
import pytest

from benchmarks.faults import kill_points
from benchmarks.faults.run import FaultRun, make_model

pytestmark = [pytest.mark.ray]

FAULTS = [
    "kill rollout actor",
    "kill learner rank",
    "kill replay actor",
    "kill replacement",
    "kill reward actor",
]


@pytest.mark.timeout(280)
def test_a_run_recovers_from_each_fault_and_accounts_for_every_group(model: Path) -> None:
    run = FaultRun(config={"model": make_model(model)})
    report = chaos.torment(run, engine="scripted", faults=FAULTS, seed=5, every_s=0, is_brief=True)
    assert sorted(fault.fault for fault in report.injected) == sorted(FAULTS)
    for fault in report.injected:
        assert not fault.skipped, fault
        assert fault.recovered_s is not None, run.output[-4000:]
        assert not fault.was_resumed, run.output[-4000:]
    assert report.code == 143, run.output[-4000:]
    assert report.balance.is_balanced, report.balance
    assert report.left.names == []


@pytest.mark.timeout(280)
def test_a_driver_killed_three_times_reproduces_the_uninterrupted_run() -> None:
    points = kill_points.draw(2, seed=2, phases=("checkpoint write", "restore"))
    found = kill_points.compare(points, num_steps=8, is_brief=True)
    assert len(found.kills) == 3, found.kills
    assert found.num_keys > 50
    assert found.different == {}
    assert found.num_steps == 8
    assert found.balance.is_balanced, found.balance
    assert list(found.left) == []
