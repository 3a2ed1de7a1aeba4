"""Rewards for how an episode is written, not for what it says."""

import re

from raylearner.config.rewards import AnswerFormat, ResponseLength, ToolUseShaping
from raylearner.rewards.functions import EpisodeView


def answer_format(episode: EpisodeView, section: AnswerFormat) -> float:
    """1 when the last turn is reasoning, then one answer between tags and nothing after it."""
    if not episode.turns:
        return 0.0
    answer = re.escape(section.answer_tag)
    text = episode.turns[-1].text.strip()
    body = f"<{answer}>(?P<answer>.*)</{answer}>"
    if section.reasoning_tag is None:
        found = re.fullmatch(f"(?P<before>.*?){body}", text, re.DOTALL)
    else:
        reasoning = re.escape(section.reasoning_tag)
        found = re.fullmatch(
            rf"<{reasoning}>(?P<before>.*?)</{reasoning}>\s*{body}", text, re.DOTALL
        )
    if found is None or not found["answer"].strip():
        return 0.0
    tags = {f"<{section.answer_tag}>", f"</{section.answer_tag}>"}
    if section.reasoning_tag is not None:
        tags |= {f"<{section.reasoning_tag}>", f"</{section.reasoning_tag}>"}
    inside = found["before"] + found["answer"]
    return float(not any(tag in inside for tag in tags))


def tool_use(episode: EpisodeView, section: ToolUseShaping) -> float:
    """`valid` for each call that was answered, `invalid` for each invalid turn or failed call."""
    num_calls = sum(len(turn.tool.split(",")) for turn in episode.turns if turn.tool)
    num_failed = int(episode.metrics.get("failed_tool_calls", 0))
    num_invalid = num_failed + sum(not turn.is_valid for turn in episode.turns)
    total = section.valid * (num_calls - num_failed) + section.invalid * num_invalid
    return min(section.max, max(section.min, total))


def response_length(episode: EpisodeView, section: ResponseLength) -> float:
    """1 at `target_tokens` sampled tokens, falling linearly to 0 at none or twice as many."""
    target = section.target_tokens
    return max(0.0, 1.0 - abs(len(episode.completion_ids) - target) / target)
