"""Prompts from data sources: generated arithmetic, JSONL files."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from raylearner.config.schema import CalculatorData, DataSource, JsonlData
from raylearner.errors import ConfigError
from raylearner.tools.calculator import calculate
from raylearner.types import Message, Prompt, Role

_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
_EVALUATION_SHARE = 5
"""One operand pair in so many is held out."""


def load_prompts(source: DataSource, *, system_prompt: str | None = None) -> list[Prompt]:
    """All prompts of `source`. Raises `ConfigError` naming the file, the row and what is wrong."""
    prompts = _calculator(source) if isinstance(source, CalculatorData) else _jsonl(source)
    if not prompts:
        raise ConfigError(f"data: source {source.kind!r} holds no prompts; nothing to train on")
    if system_prompt is None:
        return prompts
    return [_with_system(prompt, system_prompt) for prompt in prompts]


def _with_system(prompt: Prompt, text: str) -> Prompt:
    if any(m.role == "system" for m in prompt.messages):
        return prompt
    messages = (Message(role="system", content=text), *prompt.messages)
    return Prompt(
        prompt_id=prompt.prompt_id,
        messages=messages,
        answer=prompt.answer,
        doc_id=prompt.doc_id,
        source=prompt.source,
        columns=prompt.columns,
    )


def _calculator(source: CalculatorData) -> list[Prompt]:
    rng = random.Random(source.seed)
    seen: dict[str, Prompt] = {}
    possible = len(source.operations) * source.max_operand**2
    for _ in range(50 * source.num_prompts):
        if len(seen) >= min(source.num_prompts, possible):
            break
        a, b = rng.randint(1, source.max_operand), rng.randint(1, source.max_operand)
        operation = rng.choice(source.operations)
        held_out = _is_held_out(a, b)
        expression = f"{a}{operation}{b}"
        if held_out != (source.split == "evaluation") or expression in seen:
            continue
        seen[expression] = Prompt(
            prompt_id=f"calculator/{expression}",
            messages=(Message(role="user", content=f"{expression}="),),
            answer=calculate(expression),
            source="calculator",
            columns={"expression": expression},
        )
    return list(seen.values())


def _is_held_out(a: int, b: int) -> bool:
    """Pairs are split without order, so a held-out pair is unseen under every operation."""
    low, high = min(a, b), max(a, b)
    digest = hashlib.sha256(f"{low},{high}".encode()).digest()
    return digest[0] % _EVALUATION_SHARE == 0


def _jsonl(source: JsonlData) -> list[Prompt]:
    path = Path(source.path)
    if not path.is_file():
        raise ConfigError(f"data: {source.path} does not exist; give the path of a JSONL file")
    prompts: list[Prompt] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompts.append(_row(source, line, f"{source.path}:{number}"))
    return prompts


def _row(source: JsonlData, line: str, where: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be an object, got {type(row).__name__}")
    raw = row.get(source.prompt_column)
    if raw is None:
        columns = ", ".join(sorted(map(str, row))) or "none"
        raise ConfigError(
            f"{where}: no prompt in column {source.prompt_column!r}; the row has: {columns}"
        )
    answer = row.get(source.answer_column)
    known = {source.prompt_column, source.answer_column, "prompt_id", "doc_id"}
    return Prompt(
        prompt_id=str(row.get("prompt_id", where)),
        messages=_messages(raw, where),
        answer=None if answer is None else str(answer),
        doc_id=None if row.get("doc_id") is None else str(row["doc_id"]),
        source=source.source,
        columns={str(k): v for k, v in row.items() if k not in known},
    )


def _messages(raw: object, where: str) -> tuple[Message, ...]:
    if isinstance(raw, str):
        if not raw.strip():
            raise ConfigError(f"{where}: the prompt is empty")
        return (Message(role="user", content=raw),)
    if not isinstance(raw, list) or not raw:
        raise ConfigError(
            f"{where}: a prompt is text or a list of messages, got {type(raw).__name__}"
        )
    messages: list[Message] = []
    for message in raw:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or message.get("role") not in _ROLES:
            raise ConfigError(
                f"{where}: a message needs a role ({', '.join(_ROLES)}) and text content,"
                f" got {message!r}"
            )
        messages.append(Message(role=message["role"], content=message["content"]))
    return tuple(messages)
