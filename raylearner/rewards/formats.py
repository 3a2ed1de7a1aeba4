"""Rewards for how an episode is written, not for what it says."""

import re

from raylearner.config.rewards import AnswerFormat, ResponseLength, ToolUseShaping
from raylearner.rewards.functions import EpisodeView


def answer_format(episode: EpisodeView, section: AnswerFormat) -> float:
    """1 when the last turn is reasoning, then one answer between tags and nothing after it.

    What a thought holds does not count; one that the chat template's header opened is the turn's.
    """
    if not episode.turns:
        return 0.0
    turn, tag = episode.turns[-1], section.reasoning_tag
    text = turn.said.strip()
    if tag is None:
        return _is_one_answer(text, section, before="(?P<before>.*?)")
    if turn.thoughts:
        (start, _), end = turn.thoughts[0], turn.thoughts[-1][1]
        thought = turn.opening + turn.text[:end].strip()
        is_first = not turn.text[:start].strip() and turn.text[end:].strip() == text
        if not (is_first and thought.startswith(f"<{tag}>") and thought.endswith(f"</{tag}>")):
            return 0.0
        return _is_one_answer(text, section, before="(?P<before>)")
    name = re.escape(tag)
    return _is_one_answer(text, section, before=rf"<{name}>(?P<before>.*?)</{name}>\s*")


def _is_one_answer(text: str, section: AnswerFormat, *, before: str) -> float:
    answer = re.escape(section.answer_tag)
    found = re.fullmatch(f"{before}<{answer}>(?P<answer>.*)</{answer}>", text, re.DOTALL)
    if found is None or not found["answer"].strip():
        return 0.0
    inside = found["before"] + found["answer"]
    names = [name for name in (section.answer_tag, section.reasoning_tag) if name is not None]
    return float(not any(f"<{name}>" in inside or f"</{name}>" in inside for name in names))


def tool_use(episode: EpisodeView, section: ToolUseShaping) -> float:
    """`valid` for each call that was answered, `invalid` for each invalid turn or failed call. A turn that
    its length cut before its action is neither."""
    num_calls = sum(len(turn.tool.split(",")) for turn in episode.turns if turn.tool)
    num_failed = int(episode.metrics.get("failed_tool_calls", 0))
    num_invalid = num_failed + sum(not turn.is_valid for turn in episode.turns)
    total = section.valid * (num_calls - num_failed) + section.invalid * num_invalid
    return min(section.max, max(section.min, total))


def response_length(episode: EpisodeView, section: ResponseLength) -> float:
    """1 at `target_tokens` sampled tokens, falling linearly to 0 at none or twice as many."""
    target = section.target_tokens
    return max(0.0, 1.0 - abs(len(episode.completion_ids) - target) / target)
