"""Placement of learner ranks and engines on shared GPUs."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError

RESERVE_TIMEOUT_S = 60.0
"""Maximum wait for the placement group of learner ranks and engines."""


class Colocation:
    """Owns the placement group of learner ranks and engines on shared GPUs: one bundle for each GPU."""

    def __init__(self, config: RunConfig, group: Any) -> None:
        self._num_bundles = config.learner.num_ranks
        self._group: Any = group
        self._ranks: dict[str, int] = {}

    @classmethod
    async def reserve(cls, config: RunConfig) -> "Colocation":
        """Reserve the GPUs of all ranks, with the CPUs of ranks and engines.

        Raises `ConfigError` where the cluster has fewer.
        """
        learner, num_engines = config.learner, config.engines_per_rank
        cpus = learner.cpus_per_rank + num_engines * config.actors.cpus_per_actor
        bundle = {"GPU": 1.0} | ({"CPU": cpus} if cpus else {})
        name = f"{config.run.name}/colocated"
        group = placement_group([bundle] * learner.num_ranks, "PACK", name=name)
        if not await asyncio.to_thread(group.wait, RESERVE_TIMEOUT_S):
            remove_placement_group(group)
            raise ConfigError(
                f"weights.transport: 'ipc' puts a learner rank and {num_engines} engines on each of"
                f" {learner.num_ranks} GPUs, but within {RESERVE_TIMEOUT_S:g} s the cluster had no"
                f" {learner.num_ranks} x {bundle} free on its nodes; lower actors.num_actors,"
                " learner.num_ranks, actors.cpus_per_actor or learner.cpus_per_rank"
            )
        return cls(config, group)

    def release(self) -> None:
        """Remove the placement group. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def rank_options(self) -> list[Mapping[str, Any]]:
        """Return the actor options of every learner rank."""
        return [self._options(index) for index in range(self._num_bundles)]

    def engine_options(self, actor_id: str) -> Mapping[str, Any]:
        """Return the actor options of an engine, in the bundle with the fewest engines."""
        num_engines = Counter(self._ranks.values())
        self._ranks[actor_id] = rank = min(
            range(self._num_bundles), key=lambda i: (num_engines[i], i)
        )
        return self._options(rank)

    def forget(self, actor_id: str) -> None:
        """Free the place of an engine that ended."""
        self._ranks.pop(actor_id, None)

    def rank_of(self, actor_id: str) -> int:
        """Return the learner rank on the GPU of this engine."""
        return self._ranks[actor_id]

    def _options(self, index: int) -> Mapping[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy}


async def answer(reference: Any) -> Any:
    """Await a Ray reference, as a coroutine."""
    return await reference
