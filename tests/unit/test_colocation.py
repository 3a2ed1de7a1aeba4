"""Which engine lives on which rank's GPU; the reservation itself is Ray's."""

from raylearner.config.loader import load
from raylearner.run.colocation import Colocation


def test_engines_are_dealt_evenly_and_a_replacement_takes_the_place_of_the_dead() -> None:
    colocation = Colocation(
        load(
            ["configs/quickstart.yaml"],
            [
                "weights.transport=ipc",
                "learner.num_ranks=2",
                "actors.num_actors=4",
                "cluster.num_cpus=8",
            ],
        )
    )
    for index in range(4):
        colocation.engine_options(f"rollout-{index}")
    assert [colocation.rank_of(f"rollout-{index}") for index in range(4)] == [0, 1, 0, 1]
    colocation.forget("rollout-2")
    options = colocation.engine_options("rollout-4")
    assert colocation.rank_of("rollout-4") == 0
    assert options["scheduling_strategy"].placement_group_bundle_index == 0
    assert [
        o["scheduling_strategy"].placement_group_bundle_index for o in colocation.rank_options()
    ] == [0, 1]
