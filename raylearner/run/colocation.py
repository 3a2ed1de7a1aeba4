"""Learner ranks and engines on the same GPUs: one placement group, a bundle for each GPU.

Waits for the group's reservation, bounded by `RESERVE_TIMEOUT_S`.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError

RESERVE_TIMEOUT_S = 60.0


class Colocation:
    """Owns the placement group; promises that an engine has the GPU of the rank it is dealt to."""

    def __init__(self, config: RunConfig) -> None:
        learner, actors = config.learner, config.actors
        self._name = f"{config.run.name}/colocated"
        self._num_bundles = learner.num_ranks
        self._engines_per_bundle = config.engines_per_rank
        self._bundle = {
            "GPU": 1.0,
            "CPU": learner.cpus_per_rank + self._engines_per_bundle * actors.cpus_per_actor,
        }
        self._group: Any = None
        self._ranks: dict[str, int] = {}

    async def reserve(self) -> None:
        """Raises `ConfigError` where the cluster does not have so many GPUs with CPUs beside them."""
        bundle = {resource: number for resource, number in self._bundle.items() if number}
        self._group = placement_group([bundle] * self._num_bundles, "PACK", name=self._name)
        if not await asyncio.to_thread(self._group.wait, RESERVE_TIMEOUT_S):
            self.release()
            raise ConfigError(
                f"weights.transport: 'ipc' puts a learner rank and {self._engines_per_bundle} engines "
                f"on each of {self._num_bundles} GPUs, and within {RESERVE_TIMEOUT_S:g} s the cluster "
                f"had no {self._num_bundles} x {bundle} to spare on its nodes; lower "
                "actors.num_actors, learner.num_ranks, actors.cpus_per_actor or learner.cpus_per_rank"
            )

    def release(self) -> None:
        """Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def rank_options(self) -> list[Mapping[str, Any]]:
        """Actor options of every learner rank."""
        return [self._options(index) for index in range(self._num_bundles)]

    def engine_options(self, actor_id: str) -> Mapping[str, Any]:
        """Actor options of an engine, in the bundle with the fewest."""
        taken = Counter(self._ranks.values())
        self._ranks[actor_id] = rank = min(range(self._num_bundles), key=lambda i: (taken[i], i))
        return self._options(rank)

    def forget(self, actor_id: str) -> None:
        """An engine that is gone; another may take its place."""
        self._ranks.pop(actor_id, None)

    def rank_of(self, actor_id: str) -> int:
        """The learner rank on the GPU of this engine."""
        return self._ranks[actor_id]

    def _options(self, index: int) -> Mapping[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy}
