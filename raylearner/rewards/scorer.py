"""Scores an episode: several functions, sync or async, summed by weight; None does not apply."""

import asyncio
import importlib
import inspect
import math
from collections.abc import Sequence
from functools import partial

from raylearner.config.schema import RewardFunction, RewardSection
from raylearner.errors import ConfigError, RewardError
from raylearner.rewards.functions import REWARDS, EpisodeView, RewardFunctionCall


class Scorer:
    """All reward functions of a run. A function that raises or times out fails its trajectory."""

    def __init__(self, config: RewardSection) -> None:
        """Raises `ConfigError` naming every function that cannot be found."""
        self._timeout_s = config.timeout_s
        self.names = _unique_names(config.functions)
        self.weights = {n: f.weight for n, f in zip(self.names, config.functions, strict=True)}
        self._functions = [partial(find_reward(f.kind), **f.arguments) for f in config.functions]

    async def score(self, episode: EpisodeView) -> tuple[float | None, dict[str, float | None]]:
        """The weighted sum over the functions that apply (None when none does), and each part.

        Raises `RewardError` with the function's name.
        """
        parts = await asyncio.gather(
            *(
                self._call(name, function, episode)
                for name, function in zip(self.names, self._functions, strict=True)
            )
        )
        rewards = dict(zip(self.names, parts, strict=True))
        applied = [
            weight * part
            for weight, part in zip(self.weights.values(), parts, strict=True)
            if part is not None
        ]
        return (sum(applied) if applied else None), rewards

    async def _call(
        self, name: str, function: partial[object], episode: EpisodeView
    ) -> float | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(function.func):
                    value = await function(episode)  # type: ignore[misc]
                else:
                    value = await asyncio.to_thread(function, episode)
        except TimeoutError as error:
            raise RewardError(f"reward {name!r} took longer than {self._timeout_s} s") from error
        except Exception as error:  # a user's function: its failure is its trajectory's
            raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}") from error
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RewardError(f"reward {name!r} must return a finite number or None, got {value!r}")
        return float(value)


def find_reward(kind: str) -> RewardFunctionCall:
    """A built-in by name, or `module:function`. Raises `ConfigError`."""
    if kind in REWARDS:
        return REWARDS[kind]
    module_name, colon, attribute = kind.partition(":")
    if not colon:
        raise ConfigError(
            f"rewards.functions: unknown reward {kind!r}; built-in: {', '.join(sorted(REWARDS))};"
            " your own is named module:function"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rewards.functions: {kind!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"rewards.functions: {kind!r} is not callable")
    return found


def _unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    names: list[str] = []
    for function in functions:
        base = function.kind.rpartition(":")[2]
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names
