"""Trajectories as a page shows them: the text of each token, and whose message it belongs to."""

import bisect
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from raylearner.config.document import parse
from raylearner.config.problems import Where
from raylearner.errors import ConfigError
from raylearner.observability.viewer.markup import find_marks, messages

IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.png")
TOKEN_KEYS = ("token_ids", "loss_mask", "train_mask", "behavior_logprobs", "policy_versions")
"""Keys of a trajectory with a value for each token."""
MAX_TOKENS_PER_CHARACTER = 8
"""Maximum number of tokens that are joined to get a whole character."""
BROKEN = "\ufffd"

Record = dict[str, Any]


def parse_record(line: str | bytes) -> tuple[Record, str]:
    """Return a line's object, empty if it has none, and why it cannot be shown, empty if it can."""
    try:
        record: object = json.loads(line)
    except UnicodeDecodeError as error:
        return {}, f"is not UTF-8 text: {error}"
    except (ValueError, RecursionError) as error:
        return {}, f"is not JSON: {error}"
    problem = _find_problem(record)
    known = cast(Record, record) if isinstance(record, dict) else {}
    return known, f"is not a trajectory: {problem}" if problem else ""


def _find_problem(record: Any) -> str:
    if not isinstance(record, dict):
        return f"it is of type {type(record).__name__}"
    values = cast(Record, record)
    for key in (*TOKEN_KEYS, "turns"):
        if not isinstance(values.get(key), list):
            return f"{key} is not a list"
    num_tokens = len(values["token_ids"])
    for key in TOKEN_KEYS:
        if len(values[key]) != num_tokens:
            return f"{key} differs in length from token_ids"
    if not all(type(x) is int and 0 <= x < 2**32 for x in values["token_ids"]):
        return "token_ids are not all integers >= 0"
    if not all(isinstance(turn, dict) for turn in values["turns"]):
        return "turns are not all objects"
    for turn in cast(list[Record], values["turns"]):
        ends = [turn.get("start"), turn.get("end"), turn.get("reply_end")]
        if not all(type(x) is int and 0 <= x <= num_tokens for x in ends):
            return "turns do not have token ranges"
    images: Any = values.get("images") or []
    if not isinstance(images, list) or not all(map(is_image_name, cast(list[Any], images))):
        return "images are not all file names as written by a run"
    return ""


def is_image_name(value: object) -> bool:
    """Whether the value is a plain image name; a path could put any file into the page."""
    return isinstance(value, str) and IMAGE_NAME.fullmatch(value) is not None


def find_tokenizer(run_dir: Path) -> Path | None:
    """Return the tokenizer of the latest checkpoint, or of the initial model, or None.

    Raises `ConfigError` if the run's configuration is damaged.
    """
    folders = [*sorted((run_dir / "checkpoints").glob("step_*/model"), reverse=True)]
    folders.append(run_dir / "model")
    found = _first_tokenizer(folders)
    return found or _first_tokenizer([_model_path(run_dir)])


def _first_tokenizer(folders: list[Path]) -> Path | None:
    files = (folder / "tokenizer.json" for folder in folders)
    return next((file for file in files if os.path.isfile(file)), None)


def _model_path(run_dir: Path) -> Path:
    saved = run_dir / "config.yaml"
    if not saved.is_file():
        return run_dir
    try:
        tree, _ = parse(saved.read_text(encoding="utf-8"), Where(0, 0, str(saved)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{saved}: cannot be read ({error}); restore it") from error
    model = tree.child("model") if tree is not None else None
    if model is None:
        raise ConfigError(f"{saved}: is not the configuration of a run; restore it")
    path = model.child("path")
    return Path(str(path.value if path is not None else run_dir))


def load_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower type
        raise ConfigError(f"{file}: is not a tokenizer ({error}); restore it") from error


def pieces(token_ids: list[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of each token, or its id without a tokenizer.

    Tokens that are parts of one character give it to the first of them; the others are empty.
    """
    if tokenizer is None:
        return [f"[{number}]" for number in token_ids]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    found = [decode([number]) for number in token_ids]
    at = 0
    while at < len(found):
        if BROKEN in found[at]:
            for end in range(at + 2, min(at + MAX_TOKENS_PER_CHARACTER, len(found)) + 1):
                joined = decode(token_ids[at:end])
                if BROKEN not in joined:
                    found[at:end] = [joined, *[""] * (end - at - 1)]
                    at = end - 1
                    break
        at += 1
    return found


def view(record: Record, tokenizer: Tokenizer | None) -> Record:
    """Return a record with `pieces`, the text of each token, and `parts`, its messages.

    A part has a `role`, the number of its `turn` (null in the prompt), whether it is the policy's own
    (`is_sampled`) and its tokens `start` to `end`; `markup` has 1 for tokens of the chat template.
    """
    found = pieces(record["token_ids"], tokenizer)
    markup, openings = _mark_tokens(found, record["loss_mask"])
    turns = [{**turn, "calls": _calls(turn)} for turn in record["turns"]]
    return {
        **record,
        "turns": turns,
        "pieces": found,
        "markup": markup,
        "parts": _parts(record["turns"], openings, len(found)),
        "texts": None if tokenizer is not None else _texts(record),
    }


def _mark_tokens(found: list[str], sampled: list[bool]) -> tuple[list[int], dict[int, str]]:
    """Return which tokens are markup, and the roles of the messages by their first token.

    What the policy sampled is never markup: it trains, whatever its text.
    """
    starts = [0, *itertools.accumulate(map(len, found))]
    flags = [0] * len(found)
    openings: dict[int, str] = {}
    for mark in find_marks("".join(found)):
        first = bisect.bisect_left(starts, mark.start)
        last = bisect.bisect_right(starts, mark.end) - 1
        if first < last and not any(sampled[first:last]):
            flags[first:last] = [1] * (last - first)
            if mark.role is not None:
                openings[first] = mark.role
    return flags, openings


def _parts(turns: list[Record], openings: dict[int, str], num_tokens: int) -> list[Record]:
    owners: list[tuple[int, int, int, bool]] = []
    at = 0
    for number, turn in enumerate(turns):
        start, end, reply_end = (max(at, turn[key]) for key in ("start", "end", "reply_end"))
        owners += [(at, start, -1 if not number else number - 1, False), (start, end, number, True)]
        owners.append((end, reply_end, number, False))
        at = reply_end
    owners.append((at, num_tokens, len(turns) - 1, False))
    parts: list[Record] = []
    for start, end, turn, is_sampled in owners:
        cuts = [start, *(i for i in openings if start < i < end and not is_sampled), end]
        for first, last in itertools.pairwise(sorted(cuts)):
            if first == last:
                continue
            role = "assistant" if is_sampled else openings.get(first)
            if role is None and turn >= 0:
                role = "environment"
            if role in ("user", "environment") and turn >= 0 and turns[turn].get("tool"):
                role = "tool"
            parts.append(
                {
                    "role": role or "prompt",
                    "turn": None if turn < 0 else turn,
                    "is_sampled": is_sampled,
                    "start": first,
                    "end": last,
                }
            )
    return parts


def _texts(record: Record) -> list[Record]:
    """Return the messages as text, for runs whose tokenizer is not at hand."""
    found: list[Record] = [
        {"role": role or "prompt", "turn": None, "text": text}
        for role, text in messages(str(record.get("prompt") or ""))
    ]
    for number, turn in enumerate(record["turns"]):
        found.append({"role": "assistant", "turn": number, "text": str(turn.get("text") or "")})
        if turn.get("reply"):
            role = "tool" if turn.get("tool") else "environment"
            found.append({"role": role, "turn": number, "text": str(turn["reply"])})
    return found


_JSON_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_TAG_CALL = re.compile(r"<([A-Za-z_][\w.-]*)>(.*?)</\1>", re.DOTALL)


def _calls(turn: Record) -> list[Record]:
    """Return the tool calls of a turn, with their arguments as text."""
    tool, text = turn.get("tool"), str(turn.get("text") or "")
    if not tool:
        return []
    found: list[Record] = []
    for match in _JSON_CALL.finditer(text):
        try:
            call = json.loads(match[1])
            arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
            found.append({"name": str(call.get("name")), "arguments": arguments})
        except (ValueError, AttributeError, RecursionError):
            continue
    if not found and (match := list(_TAG_CALL.finditer(text))):
        found = [{"name": str(tool), "arguments": match[-1][2].strip()}]
    return found or [{"name": str(tool), "arguments": ""}]
