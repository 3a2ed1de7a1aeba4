"""Messages to tokens and back, append-only: what the policy sampled is never tokenised again.

A prompt goes through the model's chat template once. Each later reply is rendered as the text that
the template puts after an assistant turn, found once by rendering marked messages, so a transcript
only grows. The content of observations never produces special tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from raylearner.config.schema import RendererSection
from raylearner.errors import ConfigError, RenderError
from raylearner.types import Message

_CONTENT_MARK = "\u2402observation\u2403"
_TURN_MARK = "\u2402completion\u2403"
CUT_MARK = " ...[cut]"


class Renderer:
    """One tokenizer with its chat template; stateless after construction, shared by all episodes."""

    def __init__(self, tokenizer: Any, config: RendererSection) -> None:
        self._tokenizer = tokenizer
        self.config = config
        self.end_token_ids = _end_token_ids(tokenizer)
        self._end_texts = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in self.end_token_ids}
        self._cut_mark = self.encode(CUT_MARK)
        self._reply_head, self._reply_tail = "", ""
        if config.observation_role != "inline":
            self._reply_head, self._reply_tail = self._find_reply_frame(config.observation_role)

    @classmethod
    def from_pretrained(cls, path: str, config: RendererSection) -> Self:
        """Loads the tokenizer in `path` (directory or hub id).

        Raises `ConfigError` when there is no tokenizer or it has no chat template.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            where = "has no tokenizer that loads" if Path(path).is_dir() else "cannot be loaded"
            raise ConfigError(
                f"model.path {path!r} {where}: {str(error).splitlines()[0]}"
            ) from error
        if not tokenizer.chat_template:
            raise ConfigError(
                f"model.path {path!r}: the tokenizer has no chat template; add a"
                " chat_template.jinja beside it (an instruct model ships one)"
            )
        return cls(tokenizer, config)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The prompt's tokens, the header of the assistant's turn included.

        `tools` are function schemas that the chat template announces.

        Raises `RenderError` when the template fails or the prompt exceeds `max_prompt_tokens`.
        """
        text = self._template(
            [{"role": m.role, "content": m.content} for m in messages], tools=list(tools) or None
        )
        token_ids = self.encode(text, keeps_special=True)
        if len(token_ids) > self.config.max_prompt_tokens:
            raise RenderError(
                f"prompt has {len(token_ids)} tokens, renderer.max_prompt_tokens is"
                f" {self.config.max_prompt_tokens}; raise it or shorten the prompt"
            )
        return token_ids

    def render_reply(self, messages: Sequence[Message], *, last_token_id: int | None) -> list[int]:
        """The tokens that carry `messages` after an assistant turn, up to the next turn's header.

        `last_token_id` is the last token sampled: an end token that the policy sampled itself is
        not written twice. Contents are cut to `max_observation_tokens` with a visible mark.
        """
        if any(m.images for m in messages):
            raise RenderError(
                "an observation holds images, which this model's renderer cannot show"
            )
        content = "\n".join(m.content for m in messages)
        content_ids = self.encode(content)
        limit = self.config.max_observation_tokens
        if len(content_ids) > limit:
            keep = max(0, limit - len(self._cut_mark))
            content_ids = content_ids[:keep] + self._cut_mark[: limit - keep]
        if self.config.observation_role == "inline":
            return content_ids
        head = self._reply_head
        ended_by = self._end_texts.get(last_token_id) if last_token_id is not None else None
        if ended_by is not None:
            head = head.removeprefix(ended_by)
        head_ids = self.encode(head, keeps_special=True)
        return head_ids + content_ids + self.encode(self._reply_tail, keeps_special=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _template(
        self, messages: list[dict[str, str]], *, tools: list[Mapping[str, Any]] | None = None
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self.config.chat_template_arguments,
                )
            )
        except Exception as error:  # Jinja raises whatever a template raises
            raise RenderError(
                f"the chat template refused {len(messages)} messages: {error}"
            ) from error

    def encode(self, text: str, *, keeps_special: bool = False) -> list[int]:
        """The tokens of `text`; special tokens written in it count as text unless kept."""
        if not text:
            return []
        return list(
            self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=not keeps_special
            )
        )

    def _find_reply_frame(self, role: str) -> tuple[str, str]:
        messages = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _TURN_MARK},
            {"role": role, "content": _CONTENT_MARK},
        ]
        text = self._template(messages)
        _, found_turn, rest = text.partition(_TURN_MARK)
        head, found_content, tail = rest.partition(_CONTENT_MARK)
        if not found_turn or not found_content:
            raise RenderError(
                f"the chat template drops a {role!r} message after an assistant turn;"
                " choose another renderer.observation_role (user, tool or inline)"
            )
        return head, tail


def _end_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """eos, pad and the token that the chat template puts at the end of an assistant turn."""
    ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"):
        index = tokenizer.convert_tokens_to_ids(name)
        if index is not None and index != tokenizer.unk_token_id:
            ids.append(index)
    return tuple(dict.fromkeys(i for i in ids if i is not None))
