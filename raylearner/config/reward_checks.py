"""What single keys of the reward section cannot tell. The user's modules are imported."""

from collections.abc import Iterator

from raylearner.config.files import is_missing_directory
from raylearner.config.finding import Finding
from raylearner.config.kind import load_reference
from raylearner.config.rewards import (
    Judge,
    PairwiseJudge,
    RewardModel,
    ToolUseShaping,
    UserFunction,
)
from raylearner.config.schema import CustomEnvironment, RunConfig, ToolUse
from raylearner.errors import ConfigError

PENALTY_NAME = "invalid_action_penalty"


def check_rewards(config: RunConfig) -> list[Finding]:
    """Functions that cannot be imported, ranges that are empty, and what has no part in a run."""
    return [*_section(config), *_functions(config), *_needs(config)]


def _section(config: RunConfig) -> Iterator[Finding]:
    rewards = config.rewards
    if not rewards.functions:
        yield Finding("rewards.functions", "is empty: no episode would have a reward; name one")
    if rewards.clip is not None and rewards.clip[0] >= rewards.clip[1]:
        low, high = rewards.clip
        yield Finding("rewards.clip", f"must rise, got {low:g} to {high:g}")
    for index, name in enumerate(rewards.names):
        if name == PENALTY_NAME:
            yield Finding(
                f"rewards.functions.{index}.name",
                f"{name!r} is the environment's part of a reward; choose another",
            )
    if rewards.sees_groups and config.replay.play_greedy:
        yield Finding(
            "replay.play_greedy",
            "the greedy episode is in no group, so functions that see groups would give it nothing"
            " to compare with; set it to false, or take functions that see episodes",
        )


def _functions(config: RunConfig) -> Iterator[Finding]:
    for index, function in enumerate(config.rewards.functions):
        key = f"rewards.functions.{index}"
        match function:
            case Judge() | PairwiseJudge() if problem := _overridden(function):
                yield Finding(f"{key}.extra_arguments", problem)
            case UserFunction():
                try:
                    load_reference(function.kind)
                except ConfigError as error:
                    yield Finding(f"{key}.kind", str(error))
            case ToolUseShaping() if function.min > function.max:
                yield Finding(
                    f"{key}.min", f"must be <= max = {function.max:g}, got {function.min:g}"
                )
            case Judge() if function.min_score >= function.max_score:
                yield Finding(
                    f"{key}.min_score",
                    f"must be < max_score = {function.max_score:g}, got {function.min_score:g}",
                )
            case RewardModel() if is_missing_directory(function.path):
                yield Finding(
                    f"{key}.path",
                    f"no such directory {function.path!r}; name a checkpoint directory or a hub id",
                )
            case RewardModel() if function.device == "cuda" and function.gpus == 0:
                yield Finding(f"{key}.gpus", "must be > 0 for device 'cuda', got 0")
            case _:
                pass


def _overridden(function: Judge | PairwiseJudge) -> str | None:
    """Fields of a request that have keys of their own, or that would change the form of the reply."""
    own = ["model", "messages", "temperature", function.max_tokens_parameter, "stream", "n"]
    if function.max_tokens_parameter in own[:3]:
        return f"max_tokens_parameter must not be {function.max_tokens_parameter!r}"
    found = [name for name in own if name in function.extra_arguments]
    return f"must not hold {', '.join(found)}; the judge's other keys set these" if found else None


def _needs(config: RunConfig) -> Iterator[Finding]:
    """Rewards that no prompt of the run could get."""
    kinds = {source.kind for source in config.data.train}
    for index, function in enumerate(config.rewards.functions):
        if function.kind == "reasoning_gym" and "reasoning_gym" not in kinds:
            yield Finding(
                f"rewards.functions.{index}.kind",
                "'reasoning_gym' scores prompts of data.train sources of that kind, and there is"
                " none",
            )
        if function.kind == "tool_use" and config.environment.kind == "single_turn":
            yield Finding(
                f"rewards.functions.{index}.kind",
                "'tool_use' needs tool calls, and environment.kind is 'single_turn'",
            )
        if function.kind == "retrieval_hit" and not _shows_pages(config):
            yield Finding(
                f"rewards.functions.{index}.kind",
                "'retrieval_hit' looks at pages that tools showed, and none shows any; give"
                " environment.tools a page_search or a page_fetch",
            )


def _shows_pages(config: RunConfig) -> bool:
    environment = config.environment
    if isinstance(environment, ToolUse):
        return any(tool.kind in ("page_search", "page_fetch") for tool in environment.tools)
    return isinstance(environment, CustomEnvironment)
