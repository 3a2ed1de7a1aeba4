"""Separation of reasoning from the rest of a turn's text.

A thought is opened by the header that the chat template writes before the turn, or by the policy,
and ends at its closing tag. Text in a thought is neither parsed, nor scored, nor a stop string.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]

KNOWN_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<reason>", "</reason>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("\N{WHITE LEFT-POINTING TRIANGLE}think\u25b7", "\N{WHITE LEFT-POINTING TRIANGLE}/think\u25b7"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
)
"""Opening and closing tags as model families write them."""

QUOTES = "`'\"\N{LEFT DOUBLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}"


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The thoughts of one turn. `spans` are characters of its text, tags included, in order."""

    spans: tuple[Span, ...] = ()
    contents: tuple[str, ...] = ()
    """Text between the tags of each."""
    unclosed: str = ""
    """Opening tag of the last thought where it has no end; the span then ends with the text."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Finds thoughts between `tags`, pairs of an opening and a closing tag; none finds nothing."""

    tags: tuple[tuple[str, str], ...] = ()

    def opened_in(self, header: str) -> str:
        """Return the opening tag of the thought that `header` leaves open; empty for none."""
        return self.thoughts(header).unclosed

    def thoughts(self, text: str, *, opening: str = "") -> Thoughts:
        """Find the thoughts of a text; `opening` is the tag of a thought that is open where the
        text begins."""
        spans: list[Span] = []
        contents: list[str] = []
        start, position = 0, 0
        while True:
            if not opening:
                start, opening = self._next_opening(text, position)
                if not opening:
                    return Thoughts(tuple(spans), tuple(contents))
                position = start + len(opening)
            closing = self._closing(opening)
            end = text.find(closing, position)
            if end < 0:
                spans.append((start, len(text)))
                contents.append(text[position:])
                return Thoughts(tuple(spans), tuple(contents), unclosed=opening)
            contents.append(text[position:end])
            position = end + len(closing)
            spans.append((start, position))
            opening = ""

    def _next_opening(self, text: str, position: int) -> tuple[int, str]:
        """Find the next opening tag; a tag in quotes is a mention, not an opening."""
        found = [
            (place, tag)
            for tag, _ in self.tags
            if (place := _unquoted(text, tag, position)) is not None
        ]
        return min(found, default=(len(text), ""))

    def _closing(self, opening: str) -> str:
        return next(closing for tag, closing in self.tags if tag == opening)


def mentioned(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the known tags whose opening or closing tag is in one of `texts`."""
    return tuple(pair for pair in KNOWN_TAGS if any(tag in text for text in texts for tag in pair))


def _unquoted(text: str, tag: str, position: int) -> int | None:
    place = text.find(tag, position)
    while place > 0 and text[place - 1] in QUOTES:
        place = text.find(tag, place + len(tag))
    return place if place >= 0 else None
