"""The Ray actors for rewards in separate processes: reward models, and group reward functions."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raylearner.actors.process import prepare_process
from raylearner.config.rewards import RewardModel, RewardSection
from raylearner.errors import ConfigError, RewardError
from raylearner.rewards.catalogue import Conversation, ModelCall
from raylearner.rewards.model import ModelQueue
from raylearner.rewards.scorer import GroupScorer
from raylearner.types import EpisodeScore, Prompt, Trajectory

MAX_CALLS = 10_000
"""Maximum number of concurrent calls of an actor; the episodes of rollout actors limit them first."""

CLOSE_TIMEOUT_S = 5.0
"""Maximum time to close connections before an actor is killed."""
START_TIMEOUT_S = 600.0
"""Maximum time to load a reward model."""


@ray.remote
class RewardModelActor:
    """One sequence-classification model; calls that arrive while it is busy form the next batch."""

    def __init__(self, section: RewardModel) -> None:
        prepare_process()
        self._queue = ModelQueue(section)

    async def start(self) -> None:
        """Load the model. Raises `ConfigError` if it cannot be loaded."""
        await self._queue.start()

    async def score(self, conversation: Conversation) -> float:
        """Raises `RewardError` for an episode that the model cannot score."""
        return await self._queue.score(conversation)


@ray.remote
class GroupRewardActor:
    """The functions of a run that score whole groups."""

    def __init__(self, rewards: RewardSection) -> None:
        prepare_process()
        self._scorer = GroupScorer(rewards)

    async def score(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> dict[int, EpisodeScore]:
        """Return scores by sample index; see `GroupScorer.score`."""
        return await self._scorer.score(prompt, trajectories)

    async def close(self) -> None:
        await self._scorer.close()


class RewardActors:
    """Owns the reward actors of a run, if its reward functions need any.

    `groups` scores complete groups; None without functions of groups.
    """

    def __init__(self, run_name: str, rewards: RewardSection) -> None:
        """Create the actors, so that rollout actors can look them up; `start` loads their models."""
        model_actor: Any = RewardModelActor
        group_actor: Any = GroupRewardActor
        lasting = {"max_restarts": -1, "max_concurrency": MAX_CALLS}
        self._sections = {name: _make_absolute(model) for name, model in rewards.models.items()}
        self._models: dict[str, Any] = {
            name: model_actor.options(
                name=_name_actor(run_name, name),
                num_cpus=section.cpus,
                num_gpus=section.gpus,
                **lasting,
            ).remote(section)
            for name, section in self._sections.items()
        }
        self.groups: Any = None
        if rewards.sees_groups:
            self.groups = group_actor.options(num_cpus=0, **lasting).remote(rewards)

    async def start(self) -> None:
        """Load all models at once. Raises `ConfigError` for the first that cannot be loaded."""
        await asyncio.gather(*(self._start(name) for name in self._models))

    async def close(self) -> None:
        """End all actors. Safe to call twice."""
        if self.groups is not None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.groups.close.remote()
            ray.kill(self.groups)
            self.groups = None
        while self._models:
            ray.kill(self._models.popitem()[1])

    async def _start(self, name: str) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._models[name].start.remote()
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(str(error.cause)) from error
            raise
        except TimeoutError as error:
            raise ConfigError(
                f"the reward model {name!r} ({self._sections[name].path!r}) did not load within"
                f" {START_TIMEOUT_S:g} s; check that the cluster has the CPUs and GPUs that it reserves"
            ) from error


def model_calls(run_name: str, rewards: RewardSection) -> Mapping[str, ModelCall]:
    """Return the calls of the reward models of the run `run_name`, by function name."""
    return {
        name: partial(_score, name, ray.get_actor(_name_actor(run_name, name)))
        for name in rewards.models
    }


async def _score(name: str, actor: Any, conversation: Conversation) -> float:
    try:
        return await actor.score.remote(conversation)
    except RayError as error:
        cause = getattr(error, "cause", error)
        raise RewardError(f"the actor of the reward model {name!r}: {cause}") from error


def _make_absolute(section: RewardModel) -> RewardModel:
    """Make a local path absolute, since actors have other working directories."""
    folder = Path(section.path).expanduser()
    return (
        section.model_copy(update={"path": str(folder.absolute())}) if folder.is_dir() else section
    )


def _name_actor(run_name: str, function_name: str) -> str:
    return f"{run_name}/reward/{function_name}"
