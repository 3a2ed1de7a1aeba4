import logging

import pytest
from replays import make_section

from raylearner.observability.group_watch import REPEAT_STEPS, WINDOW_STEPS, GroupWatch


class Run:
    """Totals of groups, which grow with every step."""

    def __init__(self, **section: object) -> None:
        self.watch = GroupWatch(make_section(**section))
        self.totals: dict[str, float] = {}

    def make_steps(self, count: int, *, trained: int = 4, **dropped: int) -> None:
        keys = {"buffer/groups/trained": trained}
        keys |= {f"buffer/dropped/{why}": number for why, number in dropped.items()}
        for _ in range(count):
            for key, number in keys.items():
                self.totals[key] = self.totals.get(key, 0.0) + number
            self.watch.look(self.totals)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize(
    ("section", "why", "keys"),
    [
        ({"on_stale": "drop"}, "stale", ["replay.max_staleness", "replay.on_stale to mask"]),
        ({"on_stale": "mask"}, "stale", ["replay.max_staleness", "replay.max_concurrent_groups"]),
        ({"group_time_limit_s": 90.0}, "time_limit", ["90 s", "actors.num_actors"]),
    ],
)
def test_losing_a_third_of_the_groups_logs_an_occasional_warning_with_the_key(
    warnings: pytest.LogCaptureFixture, section: dict[str, object], why: str, keys: list[str]
) -> None:
    run = Run(**section)
    run.make_steps(WINDOW_STEPS, **{why: 2})
    assert not warnings.messages
    run.make_steps(REPEAT_STEPS, **{why: 2})
    [message] = warnings.messages
    assert f"{2 * WINDOW_STEPS} of the {6 * WINDOW_STEPS} groups" in message
    assert all(key in message for key in keys)
    run.make_steps(1, **{why: 2})
    assert len(warnings.messages) == 2


def test_fewer_losses_and_those_before_a_rollback_log_no_warning(
    warnings: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    run.make_steps(100, stale=1, time_limit=1, zero_variance=9)
    run = Run()
    run.make_steps(WINDOW_STEPS // 2, stale=50)
    run.totals = {}
    run.make_steps(WINDOW_STEPS + 1, trained=4)
    assert not warnings.messages


def test_masked_tokens_above_a_tenth_log_a_warning_with_the_keys(
    warnings: pytest.LogCaptureFixture,
) -> None:
    watch = GroupWatch(make_section(on_stale="mask", max_staleness=4))
    for step in range(WINDOW_STEPS):
        watch.look({"buffer/groups/trained": 8.0 * step, "buffer/masked_fraction": 0.1})
    assert not warnings.messages
    for step in range(WINDOW_STEPS, 2 * WINDOW_STEPS):
        watch.look({"buffer/groups/trained": 8.0 * step, "buffer/masked_fraction": 0.3})
    [message] = warnings.messages
    assert all(key in message for key in ("replay.max_staleness", "replay.on_stale", "4"))
