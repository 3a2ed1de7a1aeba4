"""Messages to tokens and back, append-only: sampled tokens are never tokenised again.

A prompt goes through the model's chat template once. The tokens of each later reply are cut out of the
template's rendering of a dialogue with that reply, so a transcript only grows. Contents never produce
control tokens.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from raylearner.config.schema import RendererSection
from raylearner.errors import ConfigError, PromptTooLong, RenderError
from raylearner.tokenization.continuation import (
    Continuation,
    calls_before,
    first_name,
    stand_in_id,
    stand_in_result,
)
from raylearner.tokenization.control import ControlTokens, Marked
from raylearner.tokenization.template import (
    STAND_IN_SCHEMA,
    ChatTemplate,
    adapted,
    frame_token_ids,
    images_of,
    result,
    template_message,
    texts_of,
)
from raylearner.tokenization.tokenizer import (
    TextCutter,
    TurnReader,
    end_token_ids,
    find_end_tokens,
    load_tokenizer,
    unknown_token_ids,
)
from raylearner.tokenization.vision import ImageFitter, Vision
from raylearner.types import IMAGE_MARK, Message

TEXT_ONLY = "a message has images, but the model is text-only"
SHOWN_CHARACTERS = 200
"""Characters of a rendered text that an error quotes."""
LOOP_CHARACTERS = 16_384
"""Longer contents are tokenized in a thread: an event loop that waits for them receives no weights."""

Result = TypeVar("Result")


async def unless_long(contents: Iterable[str], work: Callable[[], Result]) -> Result:
    """Return `work()`, run in a thread where the contents that it tokenizes are long."""
    if sum(map(len, contents)) <= LOOP_CHARACTERS:
        return work()
    return await asyncio.to_thread(work)


class Renderer:
    """One tokenizer with its chat template; stateless after construction, shared by all episodes."""

    def __init__(
        self,
        tokenizer: Any,
        config: RendererSection,
        vision: Vision | None = None,
        *,
        end_token_ids: Sequence[int] = (),
        unknown_token_ids: Sequence[int] = (),
    ) -> None:
        """`end_token_ids` are those of the model's own files, `unknown_token_ids` those that have logits
        but no token; with `vision` images are shown.

        Raises `ConfigError` where the chat template and `vision` write images differently, or where the
        template does not show observations in `observation_role`.
        """
        self._tokenizer = tokenizer
        self.vision = vision
        self._fitter = None if vision is None else ImageFitter(vision, config.images)
        self.config = config
        self._unknown_token_ids = tuple(unknown_token_ids)
        self.turns = TurnReader(tokenizer, config)
        self.end_token_ids = self.turns.turn_ends([*find_end_tokens(tokenizer), *end_token_ids])
        arguments = config.chat_template_arguments
        vision_ids = () if vision is None else vision.control_token_ids
        frame_ids = frame_token_ids(tokenizer, arguments, self.end_token_ids)
        self._control = ControlTokens(tokenizer, [*self.end_token_ids, *vision_ids, *frame_ids])
        self.chat = ChatTemplate(tokenizer, arguments, self._control)
        self.continuation = Continuation(self.chat, self._control, self.end_token_ids)
        self._image_mark = f"raylearner{secrets.token_hex(8)}"
        self._cutter = TextCutter(tokenizer, self._control.encode)
        if config.observation_role != "inline":
            self._refuse_lost_observations(config.observation_role)
        if vision is not None:
            self._refuse_other_images(vision)

    @classmethod
    def from_pretrained(cls, path: str, config: RendererSection) -> Self:
        """Load the tokenizer in `path` (directory or hub id).

        Raises `ConfigError` for a missing tokenizer or chat template, and for images in a form that is
        not supported or that the chat template does not write.
        """
        try:
            tokenizer, ends = load_tokenizer(path), end_token_ids(path)
            unknown = unknown_token_ids(path)
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
        vision = Vision.from_pretrained(path)
        return cls(tokenizer, config, vision, end_token_ids=ends, unknown_token_ids=unknown)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that a policy must not sample and learners give no probability: placeholders of images,
        and ids without a token."""
        placeholders = () if self.vision is None else self.vision.banned_token_ids
        return tuple(dict.fromkeys([*placeholders, *self._unknown_token_ids]))

    def refuse_lost_results(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises `RenderError` where the chat template has no place for results of tools."""
        answer = stand_in_result(tools)
        self.continuation.after_turn([answer], calls=calls_before([answer], tools), tools=tools)

    def with_prompt_limit(self, max_prompt_tokens: int) -> Self:
        """Return a copy with another limit."""
        other = copy(self)
        other.config = self.config.model_copy(update={"max_prompt_tokens": max_prompt_tokens})
        return other

    def stand_ins(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages with blank images of the sizes that `fit_images` gives.

        They render to as many tokens without decoding. Raises `RenderError` for images that cannot be
        shown.
        """
        if self._fitter is None and any(m.images for m in messages):
            raise RenderError(TEXT_ONLY)
        fitter = self._fitter
        return tuple(
            replace(m, images=tuple(map(fitter.stand_in, m.images))) if fitter and m.images else m
            for m in messages
        )

    def opening(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the opening tag of the thought in which the next turn begins; empty for none."""
        shown, prefill = self._dialogue(messages)
        return self.turns.opening(shown, tools, prefill=prefill)

    def _dialogue(self, messages: Sequence[Message]) -> tuple[list[Mapping[str, Any]], str]:
        """Return messages as the chat template takes them, and the beginning of the turn behind them."""
        is_prefilled = messages[-1].role == "assistant"
        shown = [template_message(m) for m in (messages[:-1] if is_prefilled else messages)]
        prefill = messages[-1].content if is_prefilled else ""
        return adapted(shown, self.continuation.form), prefill

    async def fit_images(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages with images as the model is shown them; `render` takes no others.

        Raises `RenderError` for images that cannot be shown.
        """
        if not any(m.images for m in messages):
            return tuple(messages)
        if self._fitter is None:
            raise RenderError(TEXT_ONLY)
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
        """Return the prompt's tokens, the header of the assistant's turn included.

        The content of a last message of the assistant follows the header, and the policy continues it.
        `tools` are function schemas that the chat template announces. Raises `RenderError` where the
        template fails, `PromptTooLong` beyond `max_prompt_tokens`.
        """
        shown, prefill = self._dialogue(messages)
        marked = self.chat.render(shown, tools) + prefill
        self._refuse_far_too_long(marked, self.config.max_prompt_tokens)
        token_ids = self._control.encode(marked)
        if self.vision is not None:
            token_ids = self.vision.expand(token_ids, images_of(messages))
        if len(token_ids) > self.config.max_prompt_tokens:
            raise PromptTooLong(
                f"prompt has {len(token_ids)} tokens, renderer.max_prompt_tokens is"
                f" {self.config.max_prompt_tokens}; raise it or shorten the prompt"
            )
        return token_ids

    def chat_opening(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return `opening` for messages as chat templates take them."""
        return self.turns.opening(adapted(messages, self.continuation.form), tools)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return `render` for messages as chat templates take them, up to the length of prompt and
        response together."""
        marked = self.chat.render(adapted(messages, self.continuation.form), tools)
        limits = self.config
        self._refuse_far_too_long(marked, limits.max_prompt_tokens + limits.max_response_tokens)
        return self._control.encode(marked)

    def _refuse_far_too_long(self, marked: Marked, limit: int) -> None:
        """Raises `PromptTooLong`, before tokenizing, for a text of more than `limit` tokens even of the
        longest kind."""
        size = len(self._control.plain(marked))
        if size > limit * self._longest_token:
            raise PromptTooLong(
                f"prompt has {size} characters, more than {limit} tokens can hold;"
                f" renderer.max_prompt_tokens is {self.config.max_prompt_tokens}; raise it or"
                " shorten the prompt"
            )

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def cut_text(self, text: str) -> str:
        """Return at most `max_observation_tokens` of the text, with a mark where it was cut."""
        return self._cutter.cut(text, self.config.max_observation_tokens)[0]

    def cut(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return observations as they are shown: `max_observation_tokens` of their text together."""
        room = self.config.max_observation_tokens
        shown: list[Message] = []
        for message in messages:
            pieces: list[str] = []
            for text in texts_of([message]):
                piece, size = self._cutter.cut(text, room)
                pieces.append(piece)
                room -= size
            shown.append(replace(message, content=IMAGE_MARK.join(pieces)))
        return tuple(shown)

    def render_continuation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        history: Sequence[Mapping[str, Any]] = (),
        calls: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        last_token_id: int | None,
    ) -> list[int]:
        """Return `render_reply` for messages in their own roles, each cut separately.

        `history` comes before the turn, `calls` are those of the turn. Raises `RewritesHistory`, and
        `RenderError` where the template does not show every message, in order.
        """
        shown = [{**m, "content": self.cut_text(m["content"])} for m in messages]
        calls = calls or calls_before(shown, tools)
        has_system = any(m["role"] == "system" for m in history)
        self.continuation.refuse_rewriting(
            shown[0],
            calls=calls_before(shown[:1], tools),
            tools=tools,
            has_system=has_system,
        )
        marked = self.continuation.after_turn(shown, history=history, calls=calls, tools=tools)
        return self._behind(last_token_id, marked)

    def render_reply(
        self,
        messages: Sequence[Message],
        *,
        opening: Sequence[Message] = (),
        replies: Sequence[Sequence[Message]] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        last_token_id: int | None,
    ) -> list[int]:
        """Return the tokens of `messages` after a turn of the assistant, up to the next turn's header.

        In the role of tools each message is one result, in the user's they are one message. `opening`
        and `replies` are the dialogue so far; `tools` are those of the prompt, or a stand-in. An end
        token that the policy sampled itself, as `last_token_id`, is not written twice. Contents are cut
        to `max_observation_tokens`. Raises `RenderError` where the template refuses the reply.
        """
        role = self.config.observation_role
        if tools is None:
            tools = [STAND_IN_SCHEMA] if role == "tool" else []
        contents, images = self._contents(messages), images_of(messages)
        if role == "inline":
            return self._control.encode(self._with_images("\n".join(contents), images))
        history = [
            template_message(m) for m in opening if m is not opening[-1] or m.role != "assistant"
        ]
        for number, reply in enumerate(replies):
            earlier = self._as_reply(reply, [f"-{number}.{i}" for i in range(len(reply))], tools)
            history += [self.continuation.turn("-", calls_before(earlier, tools)), *earlier]
        shown = self._as_reply(messages, contents, tools)
        marked = self.continuation.after_turn(
            shown, history=history, calls=calls_before(shown, tools), tools=tools
        )
        return self._behind(last_token_id, self._with_images(marked, images))

    def _as_reply(
        self,
        messages: Sequence[Message],
        contents: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[Mapping[str, Any]]:
        """Return observations with these contents, in the configured role."""
        if self.config.observation_role == "user":
            return [{"role": "user", "content": "\n".join(contents)}]
        return [
            result(m.call_id or stand_in_id(i), m.name or first_name(tools), content)
            for i, (m, content) in enumerate(zip(messages, contents, strict=True))
        ]

    def _contents(self, messages: Sequence[Message]) -> list[str]:
        """Return the contents of observations as they are shown, with a mark for each image."""
        return [self._image_mark.join(texts_of([message])) for message in self.cut(messages)]

    def _with_images(self, marked: Marked, images: Sequence[bytes]) -> Marked:
        if not images:
            return marked
        first, *others = marked.split(self._image_mark)
        assert self.vision is not None, "only a vision-language model has images fitted"
        blocks = ["".join(map(self._control.name, self.vision.block(image))) for image in images]
        return first + "".join(b + text for b, text in zip(blocks, others, strict=True))

    def _behind(self, last_token_id: int | None, marked: Marked) -> list[int]:
        """Return the tokens of a continuation without the end token that the policy sampled itself."""
        token_ids = self._control.encode(marked)
        is_sampled = last_token_id in self.end_token_ids and token_ids[:1] == [last_token_id]
        return token_ids[1:] if is_sampled else token_ids

    def collapse(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens as engines take them: one placeholder for each image."""
        return token_ids if self.vision is None else self.vision.collapse(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens other than those of reasoning tags."""
        return self.turns.decode(token_ids)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens included, one placeholder for each image."""
        shown = list(self.collapse(token_ids))
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))

    def encode(self, text: str, *, keeps_special: bool = False) -> list[int]:
        """Return the tokens of `text`; control tokens that it spells count as text unless kept."""
        return self._control.encode(self._control.mark(text) if keeps_special else text)

    def _refuse_other_images(self, vision: Vision) -> None:
        """Raises `ConfigError` unless images of prompts, which the template writes, are written like
        those of observations, which `Vision.block` writes."""
        image = Message(role="user", content=f"-{IMAGE_MARK}-", images=(b"",))
        cure = "use the model's original chat template and config.json"
        try:
            token_ids = self.render_chat([template_message(image)])
        except RenderError as error:
            raise ConfigError(f"of a message with one image {error}; {cure}") from error
        if difference := vision.find_difference(token_ids, self._quote):
            raise ConfigError(f"the chat template writes {difference}; {cure}")

    def _quote(self, token_ids: Sequence[int]) -> str:
        """Return the end of their text as errors quote it."""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        return repr(text[-SHOWN_CHARACTERS:]) if text else f"of ids {list(token_ids)}"

    def _refuse_lost_observations(self, role: str) -> None:
        try:
            if role == "tool":
                self.refuse_lost_results([STAND_IN_SCHEMA])
            else:
                self.continuation.after_turn([{"role": role, "content": "="}])
        except RenderError as error:
            raise ConfigError(
                f"renderer.observation_role: {role!r} does not work with the model's chat template:"
                f" {error}; choose another (user, tool or inline)"
            ) from error
