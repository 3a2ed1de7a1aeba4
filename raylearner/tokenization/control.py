"""Control tokens, and the encoding of texts in which only marked places are control tokens.

In a marked text every control token that the chat template wrote has a secret name. Everything else
is ordinary text, even where it spells a control token.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from tokenizers import Tokenizer

from raylearner.errors import RenderError

Marked: TypeAlias = str
"""A text with control tokens under their secret names."""


class ControlTokens:
    """The control tokens of one tokenizer: encodes marked texts, and marks those that it is given."""

    def __init__(self, tokenizer: Any, token_ids: Iterable[int]) -> None:
        """`token_ids` count as control tokens besides those that the tokenizer declares special."""
        self._tokenizer = tokenizer
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special.update(tokenizer.all_special_ids)
        ids = dict.fromkeys([*sorted(special), *token_ids])
        ids.pop(tokenizer.unk_token_id, None)  # stands for text that cannot be encoded
        self._ids = {str(tokenizer.convert_ids_to_tokens(i)): i for i in ids}
        self.declared = tuple(text for text, i in self._ids.items() if i in special)
        secret = secrets.token_hex(8)
        self._names = {text: f"\ue000{secret}.{i}\ue001" for text, i in self._ids.items()}
        self._texts = {name: text for text, name in self._names.items()}
        self._control_ids = frozenset(self._ids.values())
        self._name = re.compile(f"\ue000{secret}\\.\\d+\ue001")
        self.spelling = re.compile(
            "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or r"(?!)"
        )

    @property
    def texts(self) -> Sequence[str]:
        """Spellings of the control tokens."""
        return tuple(self._ids)

    def name(self, token_id: int) -> Marked:
        """Return a marked text of one control token."""
        return self._names[str(self._tokenizer.convert_ids_to_tokens(token_id))]

    def mark(self, text: str) -> Marked:
        """Mark every control token that `text` spells."""
        return self.spelling.sub(lambda found: self._names[found[0]], text)

    def plain(self, marked: Marked) -> str:
        """Return the text without marks."""
        return self._name.sub(lambda found: self._texts[found[0]], marked)

    def begins(self, marked: Marked) -> bool:
        """Whether the text begins with a control token."""
        return self._name.match(marked) is not None

    def first(self, marked: Marked, token_ids: Iterable[int]) -> int | None:
        """Return the place of the first of these control tokens."""
        places = (marked.find(self.name(i)) for i in token_ids if i in self._control_ids)
        return min((place for place in places if place >= 0), default=None)

    def encode(self, marked: Marked) -> list[int]:
        """Return the tokens of a marked text: those of its plain text, where that has the same
        control tokens.

        Raises `RenderError` where the tokenizer cannot keep spelled control tokens as text.
        """
        if not marked:
            return []
        text = self.plain(marked)
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        expected = [self._ids[self._texts[name]] for name in self._name.findall(marked)]
        if self._controls(token_ids) == expected:
            return token_ids
        token_ids = [
            self._renamed_ids.get(i, i)
            for i in self._renamed.encode(marked, add_special_tokens=False).ids
        ]
        if self._controls(token_ids) != expected:
            raise RenderError("this tokenizer encodes ordinary text as control tokens")
        return token_ids

    def _controls(self, token_ids: Sequence[int]) -> list[int]:
        return [i for i in token_ids if i in self._control_ids]

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer with its control tokens under their secret names, so that their spellings
        are text."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RenderError(
                "a text spells a control token, and this tokenizer cannot encode it as text; use "
                "one with a tokenizer.json"
            )
        state: dict[str, Any] = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        vocabulary: dict[str, int] | list[tuple[str, float]] = state["model"]["vocab"]
        if isinstance(vocabulary, dict):
            vocabulary = {self._names.get(text, text): i for text, i in vocabulary.items()}
        else:  # pieces with their scores
            vocabulary = [(self._names.get(text, text), score) for text, score in vocabulary]
        state["model"]["vocab"] = vocabulary
        renamed = Tokenizer.from_str(json.dumps(state))
        renamed.no_truncation()
        renamed.no_padding()
        renamed.encode_special_tokens = False
        return renamed

    @cached_property
    def _renamed_ids(self) -> Mapping[int, int]:
        """Map ids of the renamed tokenizer to the model's; those of added tokens may differ."""
        added = self._tokenizer.added_tokens_decoder
        pairs = {
            self._renamed.token_to_id(self._names.get(str(token), str(token))): i
            for i, token in added.items()
        }
        return {ours: i for ours, i in pairs.items() if ours is not None}
