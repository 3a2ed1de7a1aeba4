"""User-defined functions as rewards, in either of two forms, distinguished by parameter names.

`f(episode)` takes an `EpisodeView` (with `per: group`, a list of them) and returns a number or None
(a list). A function with a parameter `prompts`, `completions` or `completion_ids` is called as TRL
calls it: lists by name, one entry an episode, and a list comes back. Lists have one entry unless
`per` is `group`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from raylearner.config.rewards import RewardSection, UserFunction
from raylearner.config.section import load_reference
from raylearner.data.dialogue import wire
from raylearner.errors import ConfigError, RewardError
from raylearner.rewards import foreign
from raylearner.rewards.functions import EpisodeView, RewardLog
from raylearner.types import Prompt
from raylearner.user_code import host

LIST_NAMES = ("prompts", "completions", "completion_ids")
"""Parameters of which any one marks a function of TRL's form."""
LOG_NAMES = ("log_extra", "log_metric")
"""Parameters that functions of either form receive if they name them."""
RESERVED_NAMES = frozenset({*LIST_NAMES, *LOG_NAMES, "trainer_state", "step", "policy_version"})
"""Names whose values a function of TRL's form always receives in place of the row's columns."""
SHOWN_CHARACTERS = 200
"""Characters of a wrong value that an error quotes."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """TRL's trainer state, as far as it exists here."""

    global_step: int | None
    """Learner steps committed when the episode was claimed; None in evaluations."""
    policy_version: int


class UserReward:
    """Calls the function through the host of user code: async on its loop, sync in a thread."""

    def __init__(
        self, section: UserFunction, *, name: str = "", timeout_s: float | None = None
    ) -> None:
        """`name` is the function's in the configuration.

        Raises `ConfigError` when it cannot be imported or takes other arguments.
        """
        self._name = f"reward {name or section.kind!r} ({section.kind})"
        self._timeout_s = timeout_s
        self._section = section
        self._function = load_reference(section.kind)
        self._parameters = _read_parameters(self._function, section)
        self._takes_lists = any(name in self._parameters for name in LIST_NAMES)

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        call = self._as_lists(episodes, log) if self._takes_lists else self._as_views(episodes, log)
        value: Any = await host.shared().call(call, name=self._name, timeout_s=self._timeout_s)
        if not self._takes_lists and self._section.per == "episode":
            return [value]
        values: Any = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list | tuple) or len(cast(list[Any], values)) != len(episodes):
            shown = repr(value)
            raise RewardError(
                f"must return a list of {len(episodes)} values, one number or None for each"
                f" completion, got {shown[:SHOWN_CHARACTERS]}"
            )
        return cast(list[float | None], list(cast(list[Any], values)))

    async def close(self) -> None:
        return None

    def _as_views(self, episodes: Sequence[EpisodeView], log: RewardLog) -> partial[Any]:
        logs: dict[str, Any] = {"log_extra": log.extra, "log_metric": log.metric}
        first: object = list(episodes)
        if self._section.per == "episode":
            first = episodes[0]
            logs["log_extra"] = partial(_log_one, log)
        wanted = {name: given for name, given in logs.items() if name in self._parameters}
        return partial(self._function, first, **wanted, **self._section.arguments)

    def _as_lists(self, episodes: Sequence[EpisodeView], log: RewardLog) -> partial[Any]:
        given = _collect_arguments(episodes, log) | self._section.arguments
        if not _takes_all(self._parameters):
            missing = [
                name
                for name, parameter in self._parameters.items()
                if name not in given and parameter.default is parameter.empty
            ]
            if missing:
                columns = ", ".join(sorted(_columns(episodes[0]))) or "none"
                raise ValueError(
                    f"needs the column {missing[0]!r}, but row {episodes[0].prompt.prompt_id!r} "
                    f"has: {columns}"
                )
            given = {name: value for name, value in given.items() if name in self._parameters}
        return partial(self._function, **given)


def check_columns(rewards: RewardSection, prompts: Sequence[Prompt]) -> None:
    """Raises `ConfigError` for columns that functions of TRL's form ask for and would never receive.

    Such a column has a reserved name, or that of one of `arguments`.
    """
    problems: list[str] = []
    rows: dict[str, Prompt] = {}
    for prompt in prompts:
        for column in prompt.columns:
            rows.setdefault(column, prompt)
    for index, (name, section) in enumerate(zip(rewards.names, rewards.functions, strict=True)):
        if not isinstance(section, UserFunction):
            continue
        try:
            parameters = _read_parameters(load_reference(section.kind), section)
            if section.kind in foreign.FUNCTIONS:
                foreign.check_file(section.arguments)
        except ConfigError as error:
            raise ConfigError(f"rewards.functions.{index}: {error}") from error
        if not any(given in parameters for given in LIST_NAMES):
            continue
        hidden = dict.fromkeys(RESERVED_NAMES, "an argument of every function")
        hidden |= dict.fromkeys(section.arguments, "one of its arguments")
        problems += [
            f"data: row {rows[column].prompt_id!r} has a column {column!r}, which the reward"
            f" function {name!r} would never receive: the name is taken by {taker}; rename the column"
            for column, taker in hidden.items()
            if column in rows and (column in parameters or _takes_all(parameters))
        ]
    if problems:
        raise ConfigError("\n".join(sorted(problems)))


def _log_one(log: RewardLog, column: str, value: object) -> None:
    log.extra(column, [value])


def _collect_arguments(episodes: Sequence[EpisodeView], log: RewardLog) -> dict[str, Any]:
    """Return all arguments of TRL's form by name; columns that one row lacks are None there."""
    first = episodes[0]
    rows = [_columns(episode) for episode in episodes]
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        **{name: [row.get(name) for row in rows] for name in names},
        "prompts": [_prompt(episode) for episode in episodes],
        "completions": [_completion(episode) for episode in episodes],
        "completion_ids": [list(episode.completion_ids) for episode in episodes],
        "trainer_state": TrainingState(first.step, first.policy_version),
        "step": first.step,
        "policy_version": first.policy_version,
        "log_extra": log.extra,
        "log_metric": log.metric,
    }


def _columns(episode: EpisodeView) -> dict[str, Any]:
    prompt = episode.prompt
    own = {
        "answer": prompt.answer,
        "doc_id": prompt.doc_id,
        "source": prompt.source,
        "prompt_id": prompt.prompt_id,
    }
    return {**{name: value for name, value in own.items() if value is not None}, **prompt.columns}


def _prompt(episode: EpisodeView) -> str | list[dict[str, Any]]:
    if not episode.prompt.is_conversational:
        return episode.prompt_text
    return [wire(message) for message in episode.prompt.messages]


def _completion(episode: EpisodeView) -> str | list[dict[str, str]]:
    """Return text for a plain row; for messages, those of the policy and its tools in turn."""
    return episode.new_messages if episode.prompt.is_conversational else episode.completion


def _read_parameters(
    function: Callable[..., Any], section: UserFunction
) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{section.kind!r} has no signature to read: {error}") from error
    if not parameters:
        raise ConfigError(
            f"{section.kind!r} takes no arguments; expected an episode, or parameters named as in "
            "TRL"
        )
    taken = sorted(RESERVED_NAMES & set(section.arguments))
    if taken:
        raise ConfigError(
            f"{section.kind!r}: arguments must not hold {taken[0]!r}, which every function receives"
        )
    unknown = sorted(set(section.arguments) - set(parameters))
    if unknown and not _takes_all(parameters):
        raise ConfigError(f"{section.kind!r} takes no {unknown[0]!r}; see `arguments`")
    if not any(name in parameters for name in LIST_NAMES):
        _require_known(parameters, section)
    return parameters


def _require_known(parameters: Mapping[str, inspect.Parameter], section: UserFunction) -> None:
    """Raises `ConfigError` for a parameter that a function of episodes would never receive."""
    _, *others = parameters.values()
    for parameter in others:
        is_required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if is_required and parameter.name not in {*LOG_NAMES, *section.arguments}:
            raise ConfigError(
                f"{section.kind!r} needs {parameter.name!r}, which it is not given: a function of "
                f"episodes receives {' and '.join(LOG_NAMES)}; add others to `arguments`"
            )


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())
