"""The replay actor of a run, which is replaced when its process is gone."""

import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import ray

from raylearner.config.schema import RunConfig
from raylearner.deaths import is_death
from raylearner.errors import ReplayDied
from raylearner.replay.replay_actor import ReplayActor
from raylearner.types import Prompt

T = TypeVar("T")


class ReplayProcess:
    """Owns the replay actor. No claim key of one that died is issued again."""

    def __init__(
        self, config: RunConfig, training: list[Prompt], *, folder: Path, group_rewards: Any
    ) -> None:
        """`group_rewards` is the actor that scores complete groups, if there is one.

        The journal in the run directory `folder` is that of this process alone: a resumed run plays again.
        """
        self._journal = folder / "replay_journal"
        shutil.rmtree(self._journal, ignore_errors=True)
        self._config = config
        self._training = training
        self._group_rewards = group_rewards
        self._num_lost = 0
        self.actor: Any = self._start()

    def replace(self) -> None:
        """Start another actor in place of one that is gone or stuck; `load` gives it its state."""
        ray.kill(self.actor)
        self._num_lost += 1
        self.actor = self._start()

    async def load(self, checkpoint: Path | None) -> None:
        """Restore the state of a checkpoint, or that at the start of the run. Raises `ReplayDied`."""
        folder = None if checkpoint is None else str(checkpoint / "replay")
        await asked(self.actor.load.remote(folder, self._num_lost))

    def close(self) -> None:
        ray.kill(self.actor)
        shutil.rmtree(self._journal, ignore_errors=True)

    def _start(self) -> Any:
        config = self._config
        # The name of a killed actor stays taken for a while.
        suffix = f"-{self._num_lost}" if self._num_lost else ""
        options = {"name": f"{config.run.name}/replay{suffix}", "num_cpus": 0}
        actor: Any = ReplayActor
        return actor.options(**options, max_concurrency=10_000).remote(
            config.replay,
            self._training,
            config.run.seed,
            sampler=config.data.sampler,
            weights=config.data.weights,
            group_rewards=self._group_rewards,
            journal=str(self._journal),
        )


async def asked(call: Awaitable[T]) -> T:
    """Await a call of the replay actor. Raises `ReplayDied` where its process is gone."""
    try:
        return await call
    except Exception as error:
        if not is_death(error):
            raise
        raise ReplayDied(f"the replay actor died: {str(error).splitlines()[0]}") from error
