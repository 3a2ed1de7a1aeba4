"""Scale: simulated rollout actors on the real replay, and the model against measured points."""

from pathlib import Path

import pytest
import scale
import scale_costs
import scale_model
from scale_model import FOUR_GPUS, NETWORKS, STORIES, TWO_GPUS, fit, rate


@pytest.mark.parametrize("profile", ["text", "images"])
async def test_simulated_actors_fill_the_replay_and_receive_every_push(profile: str) -> None:
    """In one process: the claims, puts and reports of the product, with a learner that takes no time."""
    cell = await scale.measure(
        20, mode="paced", profile=profile, warm_s=1.0, window_s=2.0, rate=8.0, is_local=True
    )
    assert cell.trajectories_per_s > 0
    assert cell.taken_per_s > 0
    assert cell.num_pushes > 0
    assert cell.num_reached == 20


async def test_costs_by_waiting_claims_are_measured() -> None:
    cost = await scale_costs.measure(20)
    assert min(cost.put_us, cost.commit_us, cost.version_us) > 0
    episode = scale_costs.measure_episode("short", num_rounds=1)
    assert 0 < episode.put_us < episode.total_us


def test_the_model_fits_the_measured_points_and_predicts_those_of_four_gpus() -> None:
    engines = fit(TWO_GPUS, STORIES)
    for layout in (*TWO_GPUS, *FOUR_GPUS):
        assert layout.measured is not None
        assert abs(rate(layout, engines, STORIES) / layout.measured - 1) < 0.1, layout.name


def test_the_document_has_the_tables_of_the_model() -> None:
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    tables = scale_model.throughput_table, scale_model.staleness_table, scale_model.plan_table
    for make_table in (*tables, scale_model.distribution_table):
        rows = [line for line in make_table() if line.startswith("|")]
        assert "\n".join(rows) in text, make_table.__name__


def test_no_scheme_is_faster_than_the_link_of_one_node() -> None:
    size = 16e9
    for network in NETWORKS:
        for name, scheme in scale_model.SCHEMES.items():
            for nodes in (1, 100):
                assert scheme(size, nodes, network) >= size / network.node_bytes_s, name
        assert scale_model.broadcast(size, 100, network) < scale_model.one_by_one(
            size, 100, network
        )
