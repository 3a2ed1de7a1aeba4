"""The reward of an episode: several functions at once, summed by weight; None does not apply."""

import asyncio
import logging
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from raylearner.cleanup import clean_up
from raylearner.config.rewards import RewardFunction, RewardSection, UserFunction
from raylearner.errors import ConfigError, RewardError
from raylearner.rewards.catalogue import ModelCall, make_reward
from raylearner.rewards.functions import EpisodeView, Reward, RewardLog, view_of
from raylearner.types import EpisodeScore, Prompt, StopReason, Trajectory
from raylearner.user_code.frames import describe
from raylearner.user_code.host import CallFailed, CallTimeout

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 200
"""Maximum length of a wrong value in an error."""
MAX_WARNED_ROWS = 1000
"""Maximum number of rows without any reward that are logged; metrics count all."""


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    reward: Reward
    timeout_s: float | None


class Scorer:
    """The functions of a run for single episodes, or with `sees_groups` those for groups.

    A function that raises or times out fails the episodes that it was called with.
    """

    def __init__(
        self,
        config: RewardSection,
        *,
        models: Mapping[str, ModelCall] | None = None,
        sees_groups: bool = False,
    ) -> None:
        """`models` are the reward models by function name.

        Raises `ConfigError` naming every unusable user function.
        """
        self._config = config
        self.weights = config.weights
        self._warned: set[str] = set()
        self._functions: list[_Function] = []
        problems: list[str] = []
        for index, (name, section) in enumerate(zip(config.names, config.functions, strict=True)):
            if section.sees_groups is not sees_groups:
                continue
            try:
                limit_s = _time_limit_s(section, config.timeout_s)
                reward = make_reward(name, section, models or {}, timeout_s=limit_s)
            except ConfigError as error:
                problems.append(f"rewards.functions.{index}: {error}")
            else:
                if isinstance(section, UserFunction):
                    limit_s = None  # it keeps the limit itself
                self._functions.append(_Function(name, reward, limit_s))
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def is_partial(self) -> bool:
        """Whether group reward functions add to its scores later."""
        return self._config.sees_groups

    async def score(self, episode: EpisodeView) -> EpisodeScore:
        """Return the weighted, clipped sum over the functions that apply, and each part.

        Raises `RewardError` with the function's name. Warns of a row to which none applies, unless
        functions of groups add to it later.
        """
        (score,) = await self.score_all([episode])
        if score.reward is None and self._functions and not self.is_partial:
            self.warn_of_row(episode.prompt)
        return score

    async def score_all(
        self, episodes: Sequence[EpisodeView], *, taken: Sequence[Collection[str]] | None = None
    ) -> list[EpisodeScore]:
        """Return the scores of several episodes, each function called once with all of them.

        `taken` are names of columns that each episode has; a logged one of that name, or of that of
        another function, gets its function's name before it.
        """
        results = await asyncio.gather(
            *(self._call(function, episodes) for function in self._functions),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        done = [result for result in results if not isinstance(result, BaseException)]
        names = taken or [()] * len(episodes)
        return [self._make_score(index, done, names[index]) for index in range(len(episodes))]

    def total(self, rewards: Mapping[str, float | None]) -> float | None:
        """Return the weighted sum of rewards that apply, within the clip range; None when none does."""
        applied = [
            self.weights[name] * value
            for name, value in rewards.items()
            if value is not None and name in self.weights
        ]
        if not applied:
            return None
        if self._config.clip is None:
            return sum(applied)
        low, high = self._config.clip
        return min(high, max(low, sum(applied)))

    def warn_of_row(self, prompt: Prompt) -> None:
        """Log a row to which no function applies, once."""
        if prompt.prompt_id in self._warned or len(self._warned) >= MAX_WARNED_ROWS:
            return
        self._warned.add(prompt.prompt_id)
        logger.warning(
            "no reward function applies to the row %r of source %r: all of %s gave None, so its"
            " episodes do not train",
            *(prompt.prompt_id, prompt.source, ", ".join(self._config.names)),
        )

    async def close(self) -> None:
        await clean_up(sys.exception(), *(function.reward.close for function in self._functions))

    def _make_score(
        self,
        index: int,
        done: Sequence[tuple[Sequence[float | None], RewardLog]],
        taken: Collection[str],
    ) -> EpisodeScore:
        rewards: dict[str, float | None] = {}
        columns: dict[str, Any] = {}
        metrics: dict[str, float] = {}
        for function, (values, log) in zip(self._functions, done, strict=True):
            rewards[function.name] = values[index]
            for column, value in log.columns[index].items():
                is_taken = column in columns or column in taken
                columns[f"{function.name}/{column}" if is_taken else column] = value
            metrics |= log.metrics
        return EpisodeScore(
            reward=self.total(rewards), rewards=rewards, columns=columns, metrics=metrics
        )

    async def _call(
        self, function: _Function, episodes: Sequence[EpisodeView]
    ) -> tuple[Sequence[float | None], RewardLog]:
        log = RewardLog(function.name, len(episodes))
        limit = asyncio.timeout(function.timeout_s)
        try:
            async with limit:
                values = await function.reward.score(episodes, log)
        except Exception as error:  # fails the episodes of the call
            raise RewardError(
                f"reward {function.name!r} {_describe_failure(error, limit, function)}"
            ) from error
        checked = [_check_number(function.name, value) for value in values]
        return checked, log


def _time_limit_s(section: RewardFunction, default_s: float) -> float | None:
    if isinstance(section, UserFunction) and section.timeout_s is not None:
        return section.timeout_s
    return None if section.limits_itself else default_s


def _describe_failure(error: Exception, limit: asyncio.Timeout, function: _Function) -> str:
    if isinstance(error, TimeoutError) and limit.expired():
        return f"took longer than {function.timeout_s:g} s"
    cause: BaseException = error
    while isinstance(cause, ExceptionGroup):  # of the requests of a judge
        cause = cast(ExceptionGroup[Exception], cause).exceptions[0]
    if isinstance(cause, CallTimeout | CallFailed):
        return str(cause)
    return describe(cause)


def _check_number(name: str, value: object) -> float | None:
    """Return a finite number, of numpy and torch too, and None for NaN. Raises `RewardError`."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        value = item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        shown = repr(value)[:SHOWN_CHARACTERS]
        advice = "; log parts of it by log_extra" if isinstance(value, Mapping) else ""
        raise RewardError(
            f"reward {name!r} must return a finite number or None, got {shown}{advice}"
        )
    return float(value)


class GroupScorer:
    """Adds the rewards of group reward functions to those of single episodes."""

    def __init__(self, config: RewardSection) -> None:
        """Raises `ConfigError` naming every unusable user function."""
        self._scorer = Scorer(config, sees_groups=True)

    async def score(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> dict[int, EpisodeScore]:
        """Return the scores by sample index, for every episode without an error.

        Each holds the whole reward, all parts, and the log of this call only. When a function raises or
        times out, every score carries the error.
        """
        episodes: dict[int, list[Trajectory]] = {}
        for segment in sorted(trajectories, key=lambda t: (t.sample_index, t.segment)):
            if segment.stop_reason is not StopReason.ERROR:
                episodes.setdefault(segment.sample_index, []).append(segment)
        if not episodes:
            return {}
        names = self._scorer.weights.keys()
        views = [view_of(prompt, segments, names) for segments in episodes.values()]
        try:
            taken = [segments[0].columns.keys() for segments in episodes.values()]
            scores = await self._scorer.score_all(views, taken=taken)
        except RewardError as error:
            return {index: EpisodeScore(error=error) for index in episodes}
        found = {
            index: self._add_parts(segments[0], score)
            for (index, segments), score in zip(episodes.items(), scores, strict=True)
        }
        if all(score.reward is None for score in found.values()):
            self._scorer.warn_of_row(prompt)
        return found

    async def close(self) -> None:
        await self._scorer.close()

    def _add_parts(self, trajectory: Trajectory, score: EpisodeScore) -> EpisodeScore:
        """Add parts that do not come from a function, such as the environment's penalty, after the clip."""
        rewards = {**trajectory.rewards, **score.rewards}
        total = self._scorer.total(rewards)
        if total is not None:
            weights = self._scorer.weights
            total += sum(v for name, v in rewards.items() if name not in weights and v is not None)
        return EpisodeScore(
            reward=total, rewards=rewards, columns=score.columns, metrics=score.metrics
        )
