"""Sampled tokens as the text of a turn, and the thought that a turn begins in."""

from collections.abc import Iterable, Sequence
from typing import Any

from raylearner.config.schema import RendererSection
from raylearner.tokenization.reasoning import Reasoning, mentioned
from raylearner.tokenization.template import Json, written

_MARK = "\u2402turn\u2403"
_PROBE: Json = {"role": "user", "content": "-"}


class TurnReader:
    """One tokenizer with its chat template and the reasoning tags that are looked for."""

    def __init__(self, tokenizer: Any, config: RendererSection) -> None:
        self._tokenizer = tokenizer
        self._arguments = config.chat_template_arguments
        header = self._header([_PROBE])
        self._has_header = bool(header.strip())
        if config.reasoning_tags == "auto":
            self.reasoning = Reasoning(mentioned([*self._template_texts(), header]))
        else:
            self.reasoning = Reasoning(config.reasoning_tags or ())
        self._special = self._special_tags()

    def turn_ends(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Without those of which reasoning tags consist: they end a thought, and the turn goes on."""
        tags = [tag for pair in self.reasoning.tags for tag in pair]
        unique = dict.fromkeys(token_ids)
        texts = {token: str(self._tokenizer.convert_ids_to_tokens(token)) for token in unique}
        return tuple(t for t in unique if not any(texts[t] in tag for tag in tags))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out but for those of reasoning tags."""
        parts: list[str] = []
        start = 0
        for index, token in enumerate(token_ids):
            if token in self._special:
                parts += [self._plain(token_ids[start:index]), self._special[token]]
                start = index + 1
        return "".join((*parts, self._plain(token_ids[start:])))

    def opening(
        self, messages: Sequence[Json], tools: Sequence[Json] = (), *, prefill: str = ""
    ) -> str:
        """The opening tag of the thought that the header behind `messages`, or what is prefilled behind
        it, leaves open; empty for none.

        `messages` are as chat templates take them. What their contents mention opens nothing.
        """
        if not self.reasoning.tags:
            return ""
        return self.reasoning.opened_in(self._header(messages, tools) + prefill)

    def opening_behind(self, token_ids: Sequence[int]) -> str:
        """As `opening`, of the tokens of a reply that end with the next turn's header."""
        if not self.reasoning.tags or not self._has_header:
            return ""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False)).rstrip()
        return next((tag for tag, _ in self.reasoning.tags if text.endswith(tag)), "")

    def _header(self, messages: Sequence[Json], tools: Sequence[Json] = ()) -> str:
        """What the template writes for the assistant's turn behind the last message."""
        whole = self._render(messages, tools, opens=True)
        bare = self._render(messages, tools, opens=False)
        if whole != bare:
            return whole[_num_shared(whole, bare) :]
        marked = [*messages[:-1], {**messages[-1], "content": _MARK}]
        return self._render(marked, tools, opens=True).rpartition(_MARK)[2]

    def _render(self, messages: Sequence[Json], tools: Sequence[Json], *, opens: bool) -> str:
        return written(self._tokenizer, self._arguments, messages, tools, opens=opens)

    def _template_texts(self) -> list[str]:
        template: Any = self._tokenizer.chat_template
        return (
            [str(t) for t in template.values()] if isinstance(template, dict) else [str(template)]
        )

    def _plain(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _special_tags(self) -> dict[int, str]:
        """Special tokens by id that reasoning tags hold, which plain decoding would drop."""
        tags = [tag for pair in self.reasoning.tags for tag in pair]
        pairs = zip(
            self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True
        )
        return {token: text for token, text in pairs if any(text in tag for tag in tags)}


def _num_shared(first: str, second: str) -> int:
    """Characters at the start that both have."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
