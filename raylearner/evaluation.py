"""Evaluation on held-out prompts: played by the rollout actors at one policy version."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raylearner.actors.rollout_worker import EvaluateCall
from raylearner.config.schema import EvaluationSection
from raylearner.errors import RaylearnerError
from raylearner.types import PolicyVersion, Prompt, StopReason, Trajectory

logger = logging.getLogger(__name__)

MAX_ROUNDS = 3
"""How often the share of an actor that died is given to the others."""


class Evaluator:
    """Plays `num_prompts` held-out prompts, spread over the actors, and reports rewards by source."""

    def __init__(self, config: EvaluationSection, prompts: Sequence[Prompt]) -> None:
        self._config = config
        self._prompts = list(prompts)[: config.num_prompts]

    async def evaluate(
        self,
        actors: Callable[[], Mapping[str, EvaluateCall]],
        *,
        step: int,
        policy_version: PolicyVersion,
    ) -> dict[str, Any]:
        """One record for `eval.jsonl`. `actors` gives those alive now.

        Raises `RaylearnerError` when an episode was sampled by another version, or when no actor
        lived long enough to play.
        """
        left = self._prompts
        played: list[Trajectory] = []
        for _ in range(MAX_ROUNDS):
            done, left = await self._play(left, actors())
            played.extend(done)
            if not left:
                return self._record(played, step=step, policy_version=policy_version)
        raise RaylearnerError(
            f"evaluation at step {step}: {len(left)} of {len(self._prompts)} prompts were not"
            f" played in {MAX_ROUNDS} rounds, since rollout actors kept dying"
        )

    async def _play(
        self, prompts: list[Prompt], actors: Mapping[str, EvaluateCall]
    ) -> tuple[list[Trajectory], list[Prompt]]:
        if not actors:
            await asyncio.sleep(1.0)
            return [], prompts
        shares = [prompts[i :: len(actors)] for i in range(len(actors))]
        results = await asyncio.gather(
            *(
                call(share, self._config.sampling)
                for call, share in zip(actors.values(), shares, strict=True)
                if share
            ),
            return_exceptions=True,
        )
        played: list[Trajectory] = []
        left: list[Prompt] = []
        for share, result in zip(shares, results, strict=False):
            if isinstance(result, BaseException):
                logger.warning("a rollout actor failed during evaluation: %s", result)
                left.extend(share)
            else:
                played.extend(result)
        return played, left

    def _record(
        self, played: list[Trajectory], *, step: int, policy_version: PolicyVersion
    ) -> dict[str, Any]:
        versions = {v for t in played for v in (t.min_policy_version, t.max_policy_version)}
        if versions - {policy_version}:
            raise RaylearnerError(
                f"evaluation was to be pinned to version {policy_version}, but tokens carry"
                f" versions {sorted(versions)}"
            )
        by_source: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in played:
            by_source[trajectory.source].append(trajectory)
        record: dict[str, Any] = {
            "step": step,
            "policy_version": policy_version,
            **_summary(played, prefix=""),
        }
        for source, trajectories in sorted(by_source.items()):
            record.update(_summary(trajectories, prefix=f"{source}/"))
        return record


def _summary(trajectories: list[Trajectory], *, prefix: str) -> dict[str, float | int | None]:
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return {
        f"{prefix}reward/mean": sum(rewards) / len(rewards) if rewards else None,
        f"{prefix}num_prompts": len(trajectories),
        f"{prefix}errors": sum(t.stop_reason is StopReason.ERROR for t in trajectories),
        f"{prefix}turns/mean": sum(len(t.turns) for t in trajectories) / max(1, len(trajectories)),
        f"{prefix}sampled_tokens/mean": sum(t.num_sampled_tokens for t in trajectories)
        / max(1, len(trajectories)),
    }
