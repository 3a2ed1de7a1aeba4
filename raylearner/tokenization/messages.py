"""Messages as chat templates take them, and the texts and images that they hold."""

import json
from collections.abc import Sequence

from raylearner.errors import RenderError
from raylearner.text import encodable_values
from raylearner.tokenization.template import Json, call
from raylearner.types import IMAGE_MARK, Message


def template_message(message: Message) -> Json:
    """Content as text, or in parts where there are images; arguments of calls as objects."""
    found: dict[str, object] = {"role": message.role, "content": _content(message)}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.calls:
        found["tool_calls"] = [
            call(
                made.call_id,
                made.name,
                encodable_values(encodable_values(json.loads(made.arguments))),
            )
            for made in message.calls
        ]
    if message.call_id is not None:
        found["tool_call_id"] = message.call_id
    if message.name is not None:
        found["name"] = message.name
    return found


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


def _content(message: Message) -> str | list[dict[str, str]]:
    if not message.images:
        return message.content
    parts: list[dict[str, str]] = []
    for index, text in enumerate(_texts(message)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
