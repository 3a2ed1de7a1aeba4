"""Tool calls in the forms of other model families: recognised, so that none counts as an answer.

A call names a known tool in call position: it begins a line, and the turn begins or ends with it,
or a mark of its family stands before it. Text that mentions a call, or shows data and code, is not
a call.
"""

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

MAX_CANDIDATES = 16
"""Maximum number of places that are examined, from the beginning of a turn and from its end
each."""
MAX_CHARACTERS = 20_000
"""Maximum length of one call."""

_NAME_KEYS = ("name", "tool_name", "tool", "function_name", "function", "action", "recipient_name")
_ARGUMENT_KEYS = (
    "arguments",
    "parameters",
    "args",
    "kwargs",
    "input",
    "action_input",
    "tool_input",
    "params",
)
_FAMILY_MARK = re.compile(
    r"</?(?:tool|function|action|plugin)\w*>|<[|\uff5c][^<>\n]{1,40}[|\uff5c]>"
    r"|\[/?[A-Z_]*(?:TOOL|CALL|FUNC)[A-Z_]*\]|```tool\w*|functools\b|Action:|>>>",
    re.IGNORECASE,
)
_MARKS = re.compile(rf"(?:\s|{_FAMILY_MARK.pattern}|```\w*)*", re.IGNORECASE)
_END_MARKS = re.compile(rf"(?:\s|{_FAMILY_MARK.pattern}|```|;)*\Z", re.IGNORECASE)
_FENCED = re.compile(r"^```(?!tool)\w*[ \t]*\n.*?^```[ \t]*$", re.DOTALL | re.MULTILINE)
_FENCED_ALONE = re.compile(r"\s*```\w*[ \t]*\n((?:(?!```).)*)```\s*", re.DOTALL)
_FENCED_LAST = re.compile(
    r"^```(?:json|xml)?[ \t]*\n((?:(?!```).)*)```\s*\Z", re.DOTALL | re.MULTILINE
)
_EMPHASIZED = re.compile(r"\s*(`|\*\*)((?:(?!\1).)+)\1\s*", re.DOTALL)
_INLINE = re.compile(r"(?<=[\s:.,])[\[{]")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


def foreign_form(
    text: str, names: Collection[str], *, tags: Collection[str] = (), reads_json: bool = False
) -> str | None:
    """Describe the form of a call to a tool in `names` in the text; return None without a call.

    Names in `tags` count as tags around arguments too. With `reads_json`, JSON is not foreign.
    """
    if not any(name in text for name in names):
        return None
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    if re.search(
        rf"[|\uff5c]>\s*(?:functions\.)?(?:{known})(?::\d+)?\s*(?:<[|\uff5c]|```|\{{)", text
    ):
        return "tool call tokens"
    if re.search(rf"\bto=(?:functions\.)?(?:{known})\b", text):
        return "a recipient of a message"
    text = _unfenced(text)
    line = rf"(?im:^)(?:[ \t]*(?:{_FAMILY_MARK.pattern}))*[ \t]*"
    if re.search(
        rf"{line}<(?:function|tool|tool_call|invoke|call)(?:=|\s+name\s*=\s*)[\"']?(?:{known})[\"']?\s*/?>",
        text,
    ):
        return "<function=..>"
    if re.search(rf"{line}(?:{known})\s*<arg_key>", text):
        return "<arg_key>"
    if re.search(rf"{line}Action:\s*(?:{known})\s*\n\s*Action Input:", text, re.IGNORECASE):
        return "Action and Action Input"
    if tags and _is_tagged(text, tags):
        return "a tag of the tool's name"
    for start, marked in _candidates(text, known):
        form = _form_at(text, start, set(names), known, is_marked=marked, reads_json=reads_json)
        if form is not None:
            return form
    return None


def _unfenced(text: str) -> str:
    """Remove fenced code, which is shown and not called, unless the turn is nothing else or ends
    with data in a fence."""
    if emphasized := _EMPHASIZED.fullmatch(text):
        return emphasized[2]
    alone = _FENCED_ALONE.fullmatch(text)
    if alone and "```tool" not in text:
        return alone[1]
    return _FENCED.sub("", _FENCED_LAST.sub(lambda found: found[1], text))


def _is_tagged(text: str, tags: Collection[str]) -> bool:
    known = "|".join(re.escape(tag) for tag in tags)
    found = re.search(rf"(?m:^)[ \t]*<({known})>", text)
    if found is None or f"</{found[1]}>" not in text[found.end() :]:
        return False
    return not text[: found.start()].strip() or text.rstrip().endswith(f"</{found[1]}>")


def _candidates(text: str, known: str) -> Iterator[tuple[int, bool]]:
    """Yield places of JSON, lists and tools' names behind marks at the start of a line, and whether
    a mark of a family's calls is there; then places of JSON and lists within the text, which may
    end with them."""
    opening = re.compile(rf"[\[{{(]|(?:functions?[.:]?\s*)?(?:{known})\b|print\(")
    found: list[tuple[int, bool]] = []
    end = 0
    for line in re.finditer(r"^", text, re.MULTILINE):
        if line.start() < end:
            continue  # between marks that began in an earlier line
        marks = _MARKS.match(text, line.start())
        assert marks is not None, "no mark matches too"
        end = marks.end()
        if opening.match(text, marks.end()):
            found.append((marks.end(), bool(_FAMILY_MARK.search(marks[0]))))
    inline = [(place.start(), False) for place in _INLINE.finditer(text)]
    for unique in (sorted(set(found)), inline):
        if len(unique) > 2 * MAX_CANDIDATES:
            unique = unique[:MAX_CANDIDATES] + unique[-MAX_CANDIDATES:]
        yield from unique


def _form_at(
    text: str, start: int, names: set[str], known: str, *, is_marked: bool, reads_json: bool
) -> str | None:
    is_first = _MARKS.fullmatch(text, 0, start) is not None
    if text[start] in "{[":
        end, is_whole = _balanced(text, start)
        is_last = not is_whole or _END_MARKS.match(text, end) is not None
        block = text[start:end]
        if not (is_marked or is_first or is_last):
            return None
        if not reads_json and _is_json_call(block, names, needs_arguments=not is_marked):
            return "JSON"
        return "Python" if _is_python(block, names) else None
    bare = re.compile(
        rf"(?:functions?[.:]?\s*)?(?:{known})(?::\d+)?\s*(?:(?:{_FAMILY_MARK.pattern}|\[ARGS\])\s*)?"
        r"(?:```\w*\s*)?(?=\{)",
        re.IGNORECASE,
    ).match(text, start)
    if bare is not None:
        end, is_whole = _balanced(text, bare.end())
        is_last = not is_whole or _END_MARKS.match(text, end) is not None
        if (is_marked or is_first) and (is_last or is_marked) and _value(text[bare.end() : end]):
            return "a name before JSON"
        return None
    rest = text[start : start + MAX_CHARACTERS]
    is_alone = is_first or is_marked
    return "Python" if is_alone and _is_python(_without_end_marks(rest), names) else None


def _balanced(text: str, start: int) -> tuple[int, bool]:
    """Return where the bracket at `start` closes, strings skipped, and whether it does."""
    open_brackets: list[str] = []
    quote = ""
    limit = min(len(text), start + MAX_CHARACTERS)
    position = start
    while position < limit:
        character = text[position]
        if quote:
            if character == "\\":
                position += 1
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in _CLOSERS:
            open_brackets.append(_CLOSERS[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                return position + 1, True
        position += 1
    return limit, False


def _is_json_call(block: str, names: set[str], *, needs_arguments: bool) -> bool:
    value = _value(block)
    if value is not None:
        return _is_call(value, names, needs_arguments=needs_arguments)
    known = "|".join(re.escape(name) for name in names)
    keys, arguments = "|".join(_NAME_KEYS), "|".join(_ARGUMENT_KEYS)
    return bool(
        re.match(rf"[\[\s]*\{{\s*[\"'](?:{keys})[\"']\s*:\s*[\"'](?:{known})[\"']\s*,", block)
        and re.search(rf"[\"'](?:{arguments})[\"']\s*:", block)
    )


def _is_call(value: object, names: set[str], *, needs_arguments: bool) -> bool:
    if isinstance(value, list):
        items = cast(list[object], value)
        return any(_is_call(item, names, needs_arguments=needs_arguments) for item in items)
    if not isinstance(value, dict):
        return False
    fields = cast(dict[str, Any], value)
    for key in ("tool_calls", "function", "tool_call", "function_call"):
        if isinstance(fields.get(key), dict | list):
            return _is_call(fields[key], names, needs_arguments=needs_arguments)
    named = any(isinstance(fields.get(key), str) and fields[key] in names for key in _NAME_KEYS)
    given = [
        fields[key] for key in _ARGUMENT_KEYS if key in fields and _are_arguments(key, fields[key])
    ]
    if not named or "description" in fields or any(_is_schema(value) for value in given):
        return False  # for example the tool's definition
    return bool(given) or not needs_arguments


def _are_arguments(key: str, value: object) -> bool:
    """Return whether a value is an object, also as JSON text; other text only under keys of
    calls."""
    if isinstance(value, str):
        return key.endswith("_input") or isinstance(_value(value), dict)
    return value is None or isinstance(value, dict | list)


def _is_schema(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    fields = cast(Mapping[str, object], value)
    return fields.get("type") == "object" and "properties" in fields


def _value(block: str) -> Any:
    """Parse JSON or a literal of Python; None for any other text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(block)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return None


def _is_python(code: str, names: set[str]) -> bool:
    """Return whether code only calls tools with literal arguments."""
    try:
        body = ast.parse(code.strip()).body
        values = [node.value for node in body if isinstance(node, ast.Expr)]
        if not values or len(values) < len(body):
            return False
        calls = [
            item
            for value in values
            for item in (value.elts if isinstance(value, ast.List | ast.Tuple) else [value])
        ]
        return bool(calls) and all(_is_python_call(call, names) for call in calls)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _is_python_call(node: ast.expr, names: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if ast.unparse(node.func) == "print" and len(node.args) == 1:
        return _is_python_call(node.args[0], names)
    parts = ast.unparse(node.func).split(".")
    if not names & {*parts, ".".join(parts)}:
        return False
    try:
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            ast.literal_eval(argument)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _without_end_marks(text: str) -> str:
    found = _END_MARKS.search(text)
    return text[: found.start()] if found else text
