"""The markup of chat templates: which parts of a rendered prompt are messages, and whose."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# fmt: off
_OPENINGS = re.compile("|".join((
    r"<\|im_start\|>(?P<chatml>[\w.-]+)\n?",
    r"<\|start_header_id\|>(?P<llama>[\w.-]+)<\|end_header_id\|>\n{0,2}",
    r"<start_of_turn>(?P<gemma>\w+)\n?",
    r"<\|start\|>(?P<harmony>[\w.-]+)(?:<\|channel\|>\w+)?(?:<\|message\|>)?",
    r"<\|(?P<phi>system|user|assistant|tool|observation)\|>\n?",
    r"<\uff5c(?P<deepseek>User|Assistant)\uff5c>",
    r"(?P<inst>\[INST\] ?)",
    r"(?P<reply> ?\[/INST\])",
)))
_OTHERS = re.compile("|".join((
    r"<\|(?:im_end|eot_id|end|eom_id|return|call|endoftext|begin_of_text)\|>\n?",
    r"<end_of_turn>\n?", r"<(?:bos|eos|s|/s)>", r"<\uff5c(?:begin|end)▁of▁sentence\uff5c>",
)))
# fmt: on
ROLES = {"human": "user", "model": "assistant", "ipython": "tool", "observation": "tool"}
"""Names of roles in templates that have another name here."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A span of markup; an opening also starts a message of a role."""

    start: int
    end: int
    role: str | None = None


def find_marks(text: str) -> list[Mark]:
    """Return the markup of a text in order. Text without known markup has none."""
    found = [_opening(match) for match in _OPENINGS.finditer(text)]
    found += [Mark(*match.span()) for match in _OTHERS.finditer(text)]
    return sorted(found, key=lambda mark: mark.start)


def _opening(match: re.Match[str]) -> Mark:
    kind = match.lastgroup
    if kind in ("inst", "reply"):
        return Mark(*match.span(), "user" if kind == "inst" else "assistant")
    role = match[kind or 0].lower()
    return Mark(*match.span(), ROLES.get(role, role))


def messages(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield the messages of a rendered text with their roles, without markup and empty ones."""
    role: str | None = None
    at = 0
    content: list[str] = []
    for mark in [*find_marks(text), Mark(len(text), len(text), "end")]:
        content.append(text[at : mark.start])
        at = max(at, mark.end)
        if mark.role is not None:
            if joined := "".join(content).strip():
                yield role, joined
            role, content = mark.role, []


def question(prompt: str) -> str:
    """Return what a prompt asks: its last message of the user, otherwise its last message."""
    found = list(messages(prompt))
    asked = [text for role, text in found if role == "user"] or [text for _, text in found]
    return asked[-1] if asked else ""
