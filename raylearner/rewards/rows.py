"""What the rows of a run must hold for its reward functions; known before anything starts."""

import logging
from collections.abc import Sequence

from raylearner.config.rewards import RewardSection
from raylearner.errors import ConfigError
from raylearner.rewards.user import check_columns
from raylearner.types import Prompt

logger = logging.getLogger(__name__)

MAX_NAMED_ROWS = 5
_NEED_ANSWERS = frozenset({"exact_answer", "exact_match", "f1", "math_verify"})


def check_rows(rewards: RewardSection, prompts: Sequence[Prompt]) -> None:
    """Warns of rows that no function can score, and raises `ConfigError` where that is all of them.

    Raises it too for columns that functions would never see; see `check_columns`.
    """
    check_columns(rewards, prompts)
    if not all(function.kind in _NEED_ANSWERS for function in rewards.functions):
        return
    without = [p for p in prompts if not any(answer.strip() for answer in p.answers)]
    if not without:
        return
    named = ", ".join(prompt.prompt_id for prompt in without[:MAX_NAMED_ROWS])
    more = ", ..." if len(without) > MAX_NAMED_ROWS else ""
    found = f"{len(without)} of {len(prompts)} rows have no accepted answer ({named}{more})"
    names = ", ".join(rewards.names)
    if len(without) == len(prompts):
        raise ConfigError(
            f"data: {found}, and every reward function ({names}) compares with one; name the column"
            " that holds it as answer_column"
        )
    logger.warning("data: %s: no reward function (%s) applies, so they do not train", found, names)
