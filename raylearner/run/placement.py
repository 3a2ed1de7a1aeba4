"""Placement groups of learner ranks, alone or with the engines that share their GPUs."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylearner.config.schema import RunConfig
from raylearner.config.section import number
from raylearner.errors import ConfigError

RESERVE_TIMEOUT_S = 60.0
"""Maximum wait for the placement group of learner ranks and engines."""


class RankPlaces:
    """Owns the placement group of learner ranks, which no rollout actor can take while they restart."""

    def __init__(self, config: RunConfig, group: Any) -> None:
        self._num_ranks = config.learner.num_ranks
        self._group: Any = group

    @classmethod
    async def reserve(cls, config: RunConfig) -> Self:
        """Reserve the CPUs and GPUs of all ranks. Raises `ConfigError` where the cluster has fewer free."""
        learner = config.learner
        amounts = {"CPU": learner.cpus_per_rank, "GPU": number(learner.gpus_per_rank)}
        bundle = {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001}
        return await cls._reserve(
            config,
            bundle,
            "an elastic run reserves the resources of its learner ranks; lower learner.num_ranks or"
            " learner.cpus_per_rank",
        )

    @classmethod
    async def _reserve(cls, config: RunConfig, bundle: Mapping[str, float], advice: str) -> Self:
        num_ranks = config.learner.num_ranks
        group = placement_group(
            [dict(bundle)] * num_ranks, "PACK", name=f"{config.run.name}/learner"
        )
        if not await asyncio.to_thread(group.wait, RESERVE_TIMEOUT_S):
            remove_placement_group(group)
            raise ConfigError(
                f"learner.num_ranks: the nodes of the cluster did not have {num_ranks} x {bundle} free within"
                f" {RESERVE_TIMEOUT_S:g} s; {advice}"
            )
        return cls(config, group)

    def release(self) -> None:
        """Remove the placement group. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def rank_options(self) -> list[Mapping[str, Any]]:
        """Return the actor options of every learner rank."""
        return [self._options(index) for index in range(self._num_ranks)]

    def _options(self, index: int) -> Mapping[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy}


class Colocation(RankPlaces):
    """Owns the placement group of learner ranks and engines on shared GPUs: one bundle for each GPU."""

    def __init__(self, config: RunConfig, group: Any) -> None:
        super().__init__(config, group)
        self._ranks: dict[str, int] = {}

    @classmethod
    async def reserve(cls, config: RunConfig) -> Self:
        """Reserve the GPUs of all ranks, with the CPUs of ranks and engines.

        Raises `ConfigError` where the cluster has fewer.
        """
        num_engines = config.engines_per_rank
        cpus = config.learner.cpus_per_rank + num_engines * config.actors.cpus_per_actor
        return await cls._reserve(
            config,
            {"GPU": 1.0} | ({"CPU": cpus} if cpus else {}),
            f"weights.transport 'ipc' puts a learner rank and {num_engines} engines on each GPU; lower"
            " actors.num_actors, learner.num_ranks, actors.cpus_per_actor or learner.cpus_per_rank",
        )

    def engine_options(self, actor_id: str) -> Mapping[str, Any]:
        """Return the actor options of an engine, in the bundle with the fewest engines."""
        num_engines = Counter(self._ranks.values())
        self._ranks[actor_id] = rank = min(
            range(self._num_ranks), key=lambda i: (num_engines[i], i)
        )
        return self._options(rank)

    def forget(self, actor_id: str) -> None:
        """Free the place of an engine that ended."""
        self._ranks.pop(actor_id, None)

    def rank_of(self, actor_id: str) -> int:
        """Return the learner rank on the GPU of this engine."""
        return self._ranks[actor_id]


async def answer(reference: Any) -> Any:
    """Await a Ray reference, as a coroutine."""
    return await reference
