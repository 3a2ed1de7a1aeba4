"""Places of engines beside learner ranks."""

from raylearner.config.loader import load
from raylearner.run.placement import Colocation


def test_engines_are_dealt_evenly_and_a_replacement_takes_the_place_of_the_dead() -> None:
    changes = ["learner.num_ranks=2", "actors.num_actors=4", "cluster.num_cpus=8"]
    config = load(["configs/quickstart.yaml"], ["weights.transport=ipc", *changes])
    colocation = Colocation(config, None)
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
