"""Rewards that compare the answer with those of the prompt, word by word or as a whole.

An answer that is not there earns nothing: blank accepted answers do not count as answers, and a
blank reply never matches. Normalization never makes two different answers equal, see `normalized`.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable

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
"""Text that is bold, or mathematics, as a whole."""
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_WHOLE = re.compile(r"(?<![0-9.,])([0-9]+)\.0+(?!\.?[0-9])")


def composed(text: str) -> str:
    """`text` without white space around it, in Unicode's composed form (NFC), `42.0` as `42`."""
    return _WHOLE.sub(r"\1", unicodedata.normalize("NFC", text).strip())


def normalized(text: str) -> str:
    """SQuAD's normalization where it only removes prose: case, punctuation, articles, white space.

    Words with digits or operators keep their punctuation (`-5`, `4.2`, `1/2`, `c++`), but for
    thousands separators and the marks that end a sentence. A text that is bold or mathematics as a
    whole (`**4**`, `$4$`) is compared without these marks. An article is dropped only before another
    word. Where nothing would be left, the text itself in lower case is compared.
    """
    if emphasized := _EMPHASIZED.fullmatch(text):
        text = emphasized[2]
    lowered = composed(_THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)).lower()
    words = [bare for word in lowered.split() if (bare := _bare(word))]
    kept = [word for word in words[:-1] if word not in _ARTICLES]
    return " ".join([*kept, *words[-1:]]) or " ".join(lowered.split())


def exact_answer(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """1 when the last turn's answer equals one of the prompt's, see `composed`."""
    return _best(episode, tag, composed, lambda given, gold: float(given == gold))


def exact_match(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """1 when the answer equals one of the prompt's after normalization."""
    return _best(episode, tag, normalized, lambda given, gold: float(given == gold))


def f1(episode: EpisodeView, *, tag: str | None = "answer") -> float | None:
    """The best F1 over the prompt's answers, of words after normalization."""
    return _best(episode, tag, normalized, _word_f1)


def _best(
    episode: EpisodeView,
    tag: str | None,
    prepare: Callable[[str], str],
    compare: Callable[[str, str], float],
) -> float | None:
    """The best comparison with an accepted answer; None where the prompt has none, 0 for a blank."""
    golds = [gold for answer in episode.prompt.answers if (gold := prepare(answer))]
    if not golds:
        return None
    given = prepare(last_answer(episode, tag))
    return max(compare(given, gold) for gold in golds) if given else 0.0


def _bare(word: str) -> str:
    """One word without the punctuation that carries no meaning in it."""
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
