"""Messages to tokens and back, append-only: what the policy sampled is never tokenised again.

A prompt goes through the model's chat template once. Each later reply is rendered as the text that
the template puts after an assistant turn, found once by rendering marked messages, so a transcript
only grows. The content of observations never produces special tokens.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

from raylearner.config.schema import EnvironmentSection, RendererSection, ToolUse
from raylearner.errors import ConfigError, RenderError
from raylearner.tokenization.tokenizer import end_token_ids, load_tokenizer
from raylearner.tokenization.vision import ImageFitter, Vision
from raylearner.types import IMAGE_MARK, Message

_CONTENT_MARK = "\u2402observation\u2403"
_TURN_MARK = "\u2402completion\u2403"
_TOOL_MARK = "raylearner_marked_tool"
CUT_MARK = " ...[cut]"
SHOWN_CHARACTERS = 200
"""Of a rendered text that an error quotes."""


class Renderer:
    """One tokenizer with its chat template; stateless after construction, shared by all episodes."""

    def __init__(
        self,
        tokenizer: Any,
        config: RendererSection,
        vision: Vision | None = None,
        *,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """`vision` makes it one that shows images, `end_token_ids` are what the model names itself.

        Raises `ConfigError` where the chat template writes images otherwise than `vision` does.
        """
        self._tokenizer = tokenizer
        self.vision = vision
        self._fitter = None if vision is None else ImageFitter(vision, config.images)
        self.config = config
        self.end_token_ids = tuple(dict.fromkeys([*_end_token_ids(tokenizer), *end_token_ids]))
        self._end_texts = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in self.end_token_ids}
        self._cut_mark = self.encode(CUT_MARK)
        self._reply_head, self._reply_tail = "", ""
        if config.observation_role != "inline":
            self._reply_head, self._reply_tail = self._find_reply_frame(config.observation_role)
        if vision is not None:
            self._refuse_other_images(vision)

    @classmethod
    def from_pretrained(cls, path: str, config: RendererSection) -> Self:
        """Loads the tokenizer in `path` (directory or hub id).

        Raises `ConfigError` when there is no tokenizer, it has no chat template, or the model sees
        images in a way that is not known or that its chat template does not know.
        """
        try:
            tokenizer, ends = load_tokenizer(path), end_token_ids(path)
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
        return cls(tokenizer, config, Vision.from_pretrained(path), end_token_ids=ends)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """What a policy must not sample: placeholders of images."""
        return () if self.vision is None else self.vision.banned_token_ids

    def refuse_untold_tools(self, environment: EnvironmentSection) -> None:
        """Raises `ConfigError` where calls are the model's own, and its template tells of no tool."""
        if not isinstance(environment, ToolUse) or environment.dialect.kind != "json":
            return
        tool = {"name": _TOOL_MARK, "description": "-", "parameters": {"type": "object"}}
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": "-"}]
        text = self._template(messages, tools=[{"type": "function", "function": tool}])
        if _TOOL_MARK not in text:
            raise ConfigError(
                "environment.dialect.kind: 'json' needs a chat template that tells of tools, and the"
                " model's does not; use 'tags', and say in data.system_prompt how tools are called"
            )

    async def fit_images(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with images as the model sees them; `render` takes no others.

        Raises `RenderError` for images that cannot be shown.
        """
        if not any(m.images for m in messages):
            return tuple(messages)
        if self._fitter is None:
            raise RenderError("a message holds images, which this model cannot see")
        fit = self._fitter.fit
        return await asyncio.to_thread(
            lambda: tuple(replace(m, images=tuple(map(fit, m.images))) for m in messages)
        )

    async def check_image(self, image: bytes) -> None:
        """Raises `RenderError` for an image that cannot be shown; what it fits is kept for `fit_images`."""
        if self._fitter is not None:
            await asyncio.to_thread(self._fitter.fit, image)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The prompt's tokens, the header of the assistant's turn included.

        `tools` are function schemas that the chat template announces.

        Raises `RenderError` when the template fails or the prompt exceeds `max_prompt_tokens`.
        """
        token_ids = self.render_chat(
            [{"role": m.role, "content": _template_content(m)} for m in messages], tools=tools
        )
        if self.vision is not None:
            token_ids = self.vision.expand(token_ids, images_of(messages))
        if len(token_ids) > self.config.max_prompt_tokens:
            raise RenderError(
                f"prompt has {len(token_ids)} tokens, renderer.max_prompt_tokens is"
                f" {self.config.max_prompt_tokens}; raise it or shorten the prompt"
            )
        return token_ids

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """As `render`, of messages as chat templates take them, and of any length."""
        text = self._template(list(messages), tools=list(tools) or None)
        return self.encode(text, keeps_special=True)

    def render_continuation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        last_token_id: int | None,
    ) -> list[int]:
        """As `render_reply`, each message in its own role and cut by itself, whatever the
        configuration says of roles.

        Raises `RenderError` where the template does not show every message, in order.
        """
        marks = [f"\u2402message {index}\u2403" for index in range(len(messages))]
        marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
        text = self._template(
            [
                {"role": "user", "content": "-"},
                {"role": "assistant", "content": _TURN_MARK},
                *marked,
            ],
            tools=list(tools) or None,
        )
        _, found, rest = text.partition(_TURN_MARK)
        token_ids: list[int] = []
        for index, (message, mark) in enumerate(zip(messages, marks, strict=True)):
            frame, found_mark, rest = rest.partition(mark)
            if not found or not found_mark:
                raise RenderError(
                    f"the chat template drops a {message['role']!r} message after an assistant turn"
                )
            if index == 0:
                frame = self._without_end(frame, last_token_id)
            token_ids += self.encode(frame, keeps_special=True)
            token_ids += self._cut(
                self.encode(str(message["content"])), self.config.max_observation_tokens
            )
        return token_ids + self.encode(rest, keeps_special=True)

    def render_reply(self, messages: Sequence[Message], *, last_token_id: int | None) -> list[int]:
        """The tokens that carry `messages` after an assistant turn, up to the next turn's header.

        `last_token_id` is the last token sampled: an end token that the policy sampled itself is
        not written twice. Contents are cut to `max_observation_tokens` with a visible mark.
        """
        content_ids = self._content(messages)
        if self.config.observation_role == "inline":
            return content_ids
        head_ids = self.encode(
            self._without_end(self._reply_head, last_token_id), keeps_special=True
        )
        return head_ids + content_ids + self.encode(self._reply_tail, keeps_special=True)

    def _content(self, messages: Sequence[Message]) -> list[int]:
        """Texts and images of an observation; of its text at most `max_observation_tokens`."""
        room = self.config.max_observation_tokens
        token_ids: list[int] = []
        for text, image in zip_longest(texts_of(messages), images_of(messages)):
            text_ids = self._cut(self.encode(text), room)
            room -= len(text_ids)
            token_ids += text_ids
            if image is not None:
                assert self.vision is not None, "only a model that sees has images fitted"
                token_ids += self.vision.block(image)
        return token_ids

    def _cut(self, content_ids: list[int], limit: int) -> list[int]:
        if len(content_ids) <= limit:
            return content_ids
        keep = max(0, limit - len(self._cut_mark))
        return content_ids[:keep] + self._cut_mark[: limit - keep]

    def _without_end(self, head: str, last_token_id: int | None) -> str:
        ended_by = self._end_texts.get(last_token_id) if last_token_id is not None else None
        return head if ended_by is None else head.removeprefix(ended_by)

    def collapse(self, token_ids: Sequence[int]) -> Sequence[int]:
        """As engines take tokens: one placeholder for each image."""
        return token_ids if self.vision is None else self.vision.collapse(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included, one placeholder for each image."""
        shown = list(self.collapse(token_ids))
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))

    def _template(
        self, messages: list[Mapping[str, Any]], *, tools: list[Mapping[str, Any]] | None = None
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

    def _refuse_other_images(self, vision: Vision) -> None:
        """Observations get their images from `Vision.block`, prompts from the template."""
        image = Message(role="user", content=f"-{IMAGE_MARK}-", images=(b"",))
        cure = "take the chat template and the config.json that the model came with"
        try:
            token_ids = self.render_chat([{"role": "user", "content": _template_content(image)}])
        except RenderError as error:
            raise ConfigError(f"of a message with one image {error}; {cure}") from error
        count = token_ids.count(vision.image_token_id)
        if count != 1:
            raise ConfigError(
                f"the chat template writes {count} placeholders {self._shown(vision.image_token_id)}"
                f" (image_token_id of config.json) for one image: {self._shown(*token_ids)}; {cure}"
            )
        place = token_ids.index(vision.image_token_id)
        written = token_ids[max(0, place - 1) : place + 2]
        expected = [vision.start_token_id, vision.image_token_id, vision.end_token_id]
        if written != expected:
            raise ConfigError(
                f"the chat template writes an image as {self._shown(*written)}, and the start and end"
                f" tokens of config.json make it {self._shown(*expected)}; {cure}"
            )

    def _shown(self, *token_ids: int) -> str:
        """Their text as errors quote it, its end where it is long."""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        return repr(text[-SHOWN_CHARACTERS:]) if text else f"of ids {list(token_ids)}"

    def _find_reply_frame(self, role: str) -> tuple[str, str]:
        messages: list[Mapping[str, Any]] = [
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


def images_of(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """All images of the messages, in order."""
    return tuple(image for message in messages for image in message.images)


def texts_of(messages: Sequence[Message]) -> list[str]:
    """What stands before, between and behind all images of the messages, which are a line apart.

    Raises `RenderError` when a message has other marks than images.
    """
    texts: list[str] = []
    for message in messages:
        first, *others = _texts(message)
        texts[-1:] = [f"{texts[-1]}\n{first}" if texts else first, *others]
    return texts


def _texts(message: Message) -> list[str]:
    """Of one message, in which marks without images are text like any other."""
    if not message.images:
        return [message.content]
    texts, num_images = message.content.split(IMAGE_MARK), len(message.images)
    if len(texts) != num_images + 1:
        raise RenderError(f"{len(texts) - 1} marks in the content for {num_images} images")
    return texts


def _template_content(message: Message) -> str | list[dict[str, str]]:
    """Content as chat templates take it: text, or parts where there are images."""
    if not message.images:
        return message.content
    parts: list[dict[str, str]] = []
    for index, text in enumerate(_texts(message)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _end_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """eos, pad and the token that the chat template puts at the end of an assistant turn."""
    ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"):
        index = tokenizer.convert_tokens_to_ids(name)
        if index is not None and index != tokenizer.unk_token_id:
            ids.append(index)
    return tuple(dict.fromkeys(i for i in ids if i is not None))
