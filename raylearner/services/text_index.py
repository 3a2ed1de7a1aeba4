"""BM25 over texts, with a scope that keeps the results within one document."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import bm25s
import numpy as np
from numpy.typing import NDArray

_EMPTY = "\u2063"
"""Substitute for a text without words: the index needs a token from each."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A row of the index and its score."""

    row: int
    score: float


class TextIndex:
    """Finds the rows whose text fits a query best; ties go to the earlier row."""

    def __init__(self, texts: Sequence[str], *, scopes: Sequence[str] | None = None) -> None:
        assert scopes is None or len(scopes) == len(texts), (len(texts), len(scopes))
        self._num_rows = len(texts)
        self._rows_of: dict[str, NDArray[np.int64]] = {}
        for scope in set(scopes or ()):
            rows = [row for row, other in enumerate(scopes or ()) if other == scope]
            self._rows_of[scope] = np.array(rows, dtype=np.int64)
        self._index = bm25s.BM25()
        self._index.index([words(text) or [_EMPTY] for text in texts], show_progress=False)

    def has_scope(self, scope: str) -> bool:
        return scope in self._rows_of

    def search(self, query: str, *, top_n: int, scope: str | None = None) -> list[Hit]:
        """Return at most `top_n` hits with a positive score, best first."""
        vocabulary = self._index.vocab_dict
        known = [word for word in words(query) if word in vocabulary]
        if not known:
            return []
        scores = self._index.get_scores(known)
        rows = self._rows_of.get(scope) if scope else np.arange(self._num_rows)
        if rows is None:
            return []
        held = scores[rows]
        best = np.argsort(-held, kind="stable")[:top_n]
        return [Hit(int(rows[i]), float(held[i])) for i in best if held[i] > 0]


def words(text: str) -> list[str]:
    """Split into lower-case words; stop words stay, since a query may ask for `In` or `As`."""
    return _WORD.findall(text.lower())
