"""Rewards that compare the answer with those of the prompt, word by word or as a whole."""

import re
import string
from collections import Counter

from raylearner.rewards.functions import EpisodeView, last_answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_answer(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """1 when the last turn's answer equals one of the prompt's, white space around it aside."""
    if not episode.prompt.answers:
        return None
    given = last_answer(episode, tag)
    return float(
        bool(episode.turns) and any(given == answer.strip() for answer in episode.prompt.answers)
    )


def exact_match(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """1 when the answer equals one of the prompt's after normalisation."""
    if not episode.prompt.answers:
        return None
    given = normalized(last_answer(episode, tag))
    return float(
        bool(episode.turns) and any(given == normalized(a) for a in episode.prompt.answers)
    )


def f1(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """The best F1 over the prompt's answers, of words after normalisation."""
    if not episode.prompt.answers:
        return None
    if not episode.turns:
        return 0.0
    given = normalized(last_answer(episode, tag)).split()
    return max(_word_f1(given, normalized(a).split()) for a in episode.prompt.answers)


def _word_f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    num_shared = (Counter(given) & Counter(wanted)).total()
    return 2 * num_shared / (len(given) + len(wanted))
