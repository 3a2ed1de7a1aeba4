"""Reward functions written for verl and EasyR1, called unchanged from their files.

`kind: raylearner.rewards.foreign:verl_score` with `arguments: {path: my_reward.py}`. The text that they
receive is all of the response, with thoughts and the replies of tools, as in these projects.
"""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from raylearner.errors import ConfigError
from raylearner.rewards.functions import EpisodeView

LogMetric = Callable[[str, float], None]
_BATCH = "batch"


async def verl_score(
    episode: EpisodeView,
    *,
    path: str,
    log_metric: LogMetric,
    name: str = "compute_score",
    options: Mapping[str, Any] | None = None,
) -> float:
    """Call `compute_score(data_source, solution_str, ground_truth, extra_info)` of verl.

    Of a mapping `score` is the reward, and its other numbers are logged.
    """
    columns = episode.prompt.columns
    value = _load(path, name)(
        data_source=columns.get("data_source", episode.prompt.source),
        solution_str=episode.response,
        ground_truth=_ground_truth(episode),
        extra_info=columns.get("extra_info"),
        **dict(options or {}),
    )
    if inspect.isawaitable(value):
        value = await value
    return _reward(value, "score", log_metric)


def easyr1_score(
    episode: EpisodeView,
    *,
    path: str,
    log_metric: LogMetric,
    name: str = "compute_score",
    options: Mapping[str, Any] | None = None,
) -> float:
    """Call `compute_score` of EasyR1 with the response, its length and the answer.

    Of the result `overall` is the reward, and its other numbers are logged.
    """
    function = _load(path, name)
    given = {
        "response": episode.response,
        "response_length": len(episode.completion_ids),
        "ground_truth": _ground_truth(episode),
    }
    is_batch = function.__globals__.get("REWARD_TYPE", _BATCH) == _BATCH
    value: Any = function([given] if is_batch else given, **dict(options or {}))
    return _reward(value[0] if is_batch else value, "overall", log_metric)


FUNCTIONS = frozenset(f"{__name__}:{function.__name__}" for function in (verl_score, easyr1_score))


def check_file(arguments: Mapping[str, Any]) -> None:
    """Load the function that `arguments` name. Raises `ConfigError` where that fails."""
    path, name = str(arguments.get("path")), str(arguments.get("name", "compute_score"))
    try:
        _load(path, name)
    except ConfigError:
        raise
    except Exception as error:  # a user's file may raise anything while it is imported
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


def _ground_truth(episode: EpisodeView) -> object:
    """Return the answer of the row as it was written."""
    held: Any = episode.prompt.columns.get("reward_model")
    if isinstance(held, Mapping) and "ground_truth" in held:
        return cast(Mapping[str, Any], held)["ground_truth"]
    return episode.prompt.answer


def _reward(value: Any, key: str, log_metric: LogMetric) -> float:
    if not isinstance(value, Mapping):
        return value
    found = cast(Mapping[str, Any], value)
    for name, number in found.items():
        if name != key and isinstance(number, int | float):
            log_metric(name, float(number))
    return found[key]


@cache
def _load(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a file, which is imported once in a process."""
    file = Path(path).expanduser()
    spec = importlib.util.spec_from_file_location(f"raylearner_reward_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{path} is not a Python file; check `arguments.path`")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}; check `arguments.name`")
    return function
