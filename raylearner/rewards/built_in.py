"""Built-in rewards of one episode: matches with accepted answers, format, tools, length and pages shown.

A missing answer earns nothing: blank accepted answers do not count as answers, and a blank reply never
matches. Normalization never makes two different answers equal, see `normalize_words`.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import cast
from unicodedata import normalize

from raylearner.config.rewards import AnswerFormat, ResponseLength, RetrievalHit, ToolUseShaping
from raylearner.data.cells import scalar_text
from raylearner.errors import RewardError
from raylearner.rewards.functions import EpisodeView, last_answer

_ARTICLES = frozenset({"a", "an", "the"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_QUOTES = "\"'`"
_ENDINGS = ".,;:?"
_PAIRS = {")": "(", "]": "[", "}": "{"}
_MEANING = re.compile(r"[0-9+*/\\=<>^%#&@$~|{}]|^[-!]|-$|\w[(\[_]\w")
"""Marks a word in which every character counts: a number, a formula, `c++`, `a-`, `{a}`, `!p`."""
_MARKED = re.compile(r"[^\W\d](?:'+|!)")
"""A letter with a prime or a factorial."""
_EMPHASIZED = re.compile(r"\s*(\*\*|\$)((?:(?!\1).)+)\1\s*", re.DOTALL)
"""Text that is entirely bold or mathematics."""
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_WHOLE = re.compile(r"(?<![0-9.,])([0-9]+)\.0+(?!\.?[0-9])")


def compose(text: str) -> str:
    """Return `text` stripped, in Unicode's composed form (NFC), `42.0` as `42`."""
    return _WHOLE.sub(r"\1", unicodedata.normalize("NFC", text).strip())


def normalize_words(text: str) -> str:
    """Apply SQuAD's normalization where it only removes prose: case, punctuation, articles, white space.

    Words with digits or operators keep their punctuation (`-5`, `4.2`, `1/2`, `c++`), but for
    thousands separators and the marks that end a sentence. A text that is entirely bold or
    mathematics (`**4**`, `$4$`) is compared without these marks. An article is dropped only before
    another word. Where nothing would be left, the text itself in lower case is compared.
    """
    if emphasized := _EMPHASIZED.fullmatch(text):
        text = emphasized[2]
    lowered = compose(_THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)).lower()
    words = [bare for word in lowered.split() if (bare := _strip_punctuation(word))]
    kept = [word for word in words[:-1] if word not in _ARTICLES]
    return " ".join([*kept, *words[-1:]]) or " ".join(lowered.split())


def exact_answer(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """Return 1 when the last turn's answer equals one of the prompt's, see `compose`."""
    return _compare_best(episode, tag, compose, lambda given, gold: float(given == gold))


def exact_match(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """Return 1 when the answer equals one of the prompt's after normalization."""
    return _compare_best(episode, tag, normalize_words, lambda given, gold: float(given == gold))


def f1(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """Return the best F1 over the prompt's answers, of words after normalization."""
    return _compare_best(episode, tag, normalize_words, _word_f1)


def _compare_best(
    episode: EpisodeView,
    tag: str | None,
    prepare: Callable[[str], str],
    compare: Callable[[str, str], float],
) -> float | None:
    """Return the best comparison with an accepted answer; None without any, 0 for a blank reply."""
    golds = [gold for answer in episode.prompt.answers if (gold := prepare(answer))]
    if not golds:
        return None
    given = prepare(last_answer(episode, tag))
    return max(compare(given, gold) for gold in golds) if given else 0.0


def _strip_punctuation(word: str) -> str:
    """Return one word without the punctuation that carries no meaning in it."""
    if not _carries_meaning(word):
        return word.translate(_PUNCTUATION)
    if _MARKED.fullmatch(word.rstrip(_ENDINGS)):
        return word.rstrip(_ENDINGS)
    stripped = word.strip(_QUOTES).rstrip(_ENDINGS).strip(_QUOTES)
    for closing, opening in _PAIRS.items():
        if stripped.endswith(closing) and opening not in stripped:
            stripped = stripped[:-1]
        elif stripped.startswith(opening) and closing not in stripped:
            stripped = stripped[1:]
    return stripped


def _carries_meaning(word: str) -> bool:
    core = word.strip(_QUOTES + _ENDINGS)
    if _MEANING.search(core) or _MARKED.fullmatch(word.rstrip(_ENDINGS)):
        return True
    parts = core.split("-")
    return len(parts) > 1 and all(len(part) == 1 for part in parts)


def _word_f1(given: str, gold: str) -> float:
    given_words, gold_words = given.split(), gold.split()
    num_shared = (Counter(given_words) & Counter(gold_words)).total()
    return 2 * num_shared / (len(given_words) + len(gold_words))


def answer_format(episode: EpisodeView, section: AnswerFormat) -> float:
    """Return 1 when the last turn is reasoning, then one answer between tags and nothing after it.

    Tags inside a thought do not count; a thought that the chat template's header opened is the turn's.
    """
    if not episode.turns:
        return 0.0
    turn, tag = episode.turns[-1], section.reasoning_tag
    text = turn.content.strip()
    if tag is None:
        before, opening, rest = text.partition(f"<{section.answer_tag}>")
        return _is_one_answer(before, opening + rest, section)
    if turn.thoughts:
        (start, _), end = turn.thoughts[0], turn.thoughts[-1][1]
        thought = turn.opening + turn.text[:end].strip()
        is_first = not turn.text[:start].strip() and turn.text[end:].strip() == text
        if not (is_first and thought.startswith(f"<{tag}>") and thought.endswith(f"</{tag}>")):
            return 0.0
        return _is_one_answer("", text, section)
    if not text.startswith(f"<{tag}>"):
        return 0.0
    before, _, rest = text.removeprefix(f"<{tag}>").partition(f"</{tag}>")
    return _is_one_answer(before, rest.lstrip(), section)


def _is_one_answer(before: str, rest: str, section: AnswerFormat) -> float:
    """Return 1 if `rest` is one pair of the answer's tags, and neither it nor `before` has more tags."""
    opening, closing = f"<{section.answer_tag}>", f"</{section.answer_tag}>"
    answer = rest[len(opening) : -len(closing)]
    if not answer.strip() or rest != f"{opening}{answer}{closing}":
        return 0.0
    inside = before + answer
    names = [name for name in (section.answer_tag, section.reasoning_tag) if name is not None]
    return float(not any(f"<{name}>" in inside or f"</{name}>" in inside for name in names))


def tool_use(episode: EpisodeView, section: ToolUseShaping) -> float:
    """Return `valid` for each answered call and `invalid` for each invalid turn or failed call, summed.

    A turn that was cut at its token limit before its action is neither.
    """
    num_calls = sum(len(turn.tool.split(",")) for turn in episode.turns if turn.tool)
    num_failed = int(episode.metrics.get("failed_tool_calls", 0))
    num_invalid = num_failed + sum(not turn.is_valid for turn in episode.turns)
    total = section.valid * (num_calls - num_failed) + section.invalid * num_invalid
    return min(section.max, max(section.min, total))


def response_length(episode: EpisodeView, section: ResponseLength) -> float:
    """Return 1 at `target_tokens` sampled tokens, falling linearly to 0 at none or twice as many."""
    target = section.target_tokens
    return max(0.0, 1.0 - abs(len(episode.completion_ids) - target) / target)


def retrieval_hit(episode: EpisodeView, section: RetrievalHit) -> float | None:
    """Return the share of the row's right pages that were shown; None where the row names none.

    Raises `RewardError` for a column that holds no ids.
    """
    value = episode.prompt.columns.get(section.column)
    values = cast(list[object], value) if isinstance(value, list | tuple) else [value]
    try:
        wanted = {
            _normalize_id(scalar_text(one)) for one in values if one is not None and one != ""
        }
    except ValueError as error:
        raise RewardError(f"an id in column {section.column!r} {error}") from error
    if not wanted:
        return None
    return len(wanted & {_normalize_id(shown) for shown in episode.shown}) / len(wanted)


def _normalize_id(text: str) -> str:
    return normalize("NFC", text).strip()
