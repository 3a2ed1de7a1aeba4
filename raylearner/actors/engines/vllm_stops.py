"""Tokens that may complete a stop string, so that the text of a request is searched only where it can end."""

import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LAST_CHARACTERS = frozenset(string.printable) - frozenset(string.whitespace)
"""Last characters of stop strings whose tokens are known: a token's own text has them wherever it stands."""


class StopTokens:
    """Finds them in the texts of a vocabulary, which are read when the first request has stop strings."""

    def __init__(self, make_tokenizer: Callable[[], Any]) -> None:
        self._make_tokenizer = make_tokenizer
        self._texts: Sequence[str] = ()
        self._found: dict[frozenset[str], frozenset[int] | None] = {}

    def of(self, stops: Iterable[str]) -> frozenset[int] | None:
        """Return the tokens, or None where every token may complete one of `stops`."""
        ends = frozenset(stop[-1:] for stop in stops)
        if ends not in self._found:
            self._found[ends] = self._find(ends)
        return self._found[ends]

    def _find(self, ends: frozenset[str]) -> frozenset[int] | None:
        if not ends <= LAST_CHARACTERS:
            return None
        texts = self._texts = self._texts or self._read()
        return frozenset(i for i, text in enumerate(texts) if not ends.isdisjoint(text)) or None

    def _read(self) -> Sequence[str]:
        """Return the text of every token; nothing without a tokenizer."""
        tokenizer = self._make_tokenizer()
        if tokenizer is None:
            return ()
        return tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
