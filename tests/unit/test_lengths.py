"""The lengths of trained and finished episodes over a run, simulated around the real replay classes."""

from typing import Any

import numpy as np
import pytest
from lengths import Lengths, Outcome, Setting, log_normal, log_uniform, simulate

from raylearner.config.schema import ReplaySection

PROMPT = log_uniform(40, 800)
ROUGHLY = log_uniform(40, 800, spread=0.5)
INDEPENDENT = log_normal(200, 1.3)
RATIO = "buffer/trained_to_finished_length"


def run(lengths: Lengths, *, num_slots: int = 80, **values: Any) -> Outcome:
    section = ReplaySection(**{"groups_per_step": 4, "group_size": 4, "max_staleness": 4} | values)
    return simulate(Setting(lengths=lengths, num_slots=num_slots, replay=section))


@pytest.mark.parametrize("num_slots", [24, 80])
@pytest.mark.parametrize("lengths", [PROMPT, ROUGHLY, INDEPENDENT])
def test_trained_length_is_within_3_percent_of_finished_length_over_60_steps(
    lengths: Lengths, num_slots: int
) -> None:
    outcome = run(lengths, num_slots=num_slots)
    ratios = [step[RATIO] for step in outcome.metrics]
    assert len(ratios) == 60
    assert np.abs(np.array(ratios) - 1).max() < 0.03
    assert abs(outcome.trained_to(outcome.finished) - 1) < 0.03


def test_dropped_groups_of_long_episodes_show_in_the_ratio() -> None:
    outcome = run(ROUGHLY, on_stale="drop")
    assert outcome.metrics[-1][RATIO] < 0.9
    assert outcome.metrics[-1][RATIO] == pytest.approx(
        outcome.trained_to(outcome.finished), abs=0.05
    )


def test_waiting_for_old_groups_trains_all_their_tokens_and_costs_idle_time() -> None:
    masking, waiting = run(INDEPENDENT), run(INDEPENDENT, on_stale="wait")
    assert masking.masked > 0.1
    assert waiting.masked < 0.03
    assert masking.metrics[-1]["buffer/masked_fraction"] > 0
    assert abs(waiting.trained_to(waiting.finished) - 1) < 0.03
    assert masking.learner_idle < waiting.learner_idle < masking.learner_idle + 0.15
