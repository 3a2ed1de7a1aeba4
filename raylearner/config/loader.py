"""Load YAML files and `key=value` overrides into a `RunConfig`, and report all problems together."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from stat import S_ISDIR, S_ISFIFO, S_ISREG
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raylearner.config.changed_keys import changed_keys
from raylearner.config.checks import check
from raylearner.config.document import DEFAULTS, NULL_WORDS, Node, merge, parse
from raylearner.config.problems import ConfigProblems, Problem, Where, did_you_mean, shown
from raylearner.config.resources import check_credentials, check_variables
from raylearner.config.schema import RunConfig
from raylearner.config.section import (
    FILE_NAME,
    ONE_OR_MORE,
    KeyPath,
    dotted_keys,
    item_type,
    kind_tag,
    section_for,
    sections_by_kind,
    user_path,
)


def load(
    paths: Sequence[str],
    overrides: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
) -> RunConfig:
    """Merge files from left to right and overrides over them, and validate. Raises `ConfigProblems`.

    `environment` is that of the run, if it is known: missing variables are problems.
    """
    problems: list[Problem] = []
    files = _collect(
        (_read_file(Path(path), Where(i, 0, path)) for i, path in enumerate(paths)), problems
    )
    if not paths:
        problems.append(
            Problem(Where(0, 0, "command line"), "", "has no configuration file; name one")
        )
    overlays = _collect(
        (_read_override(text, len(paths) + i) for i, text in enumerate(overrides)), problems
    )
    if not files or len(files) < len(paths):
        raise ConfigProblems(problems)
    tree = reduce(merge, files)
    if overlays:  # merged among themselves first: the order of a section's kind and keys is free
        tree = merge(tree, reduce(merge, overlays))
    tree = _over_defaults(tree, RunConfig)
    changed = changed_keys(tree)
    config, found = _validate(tree, RunConfig)
    known = {problem.key for problem in changed}
    problems += changed + [problem for problem in found if problem.key not in known]
    problems += ambiguous_words(tree, RunConfig)
    if config is not None and not problems:
        missing = () if environment is None else check_variables(config, environment)
        for finding in (*check(config), *check_credentials(config, environment or {}), *missing):
            path = tuple(int(part) if part.isdecimal() else part for part in finding.key.split("."))
            problems.append(Problem(tree.place(path), tree.key(path), finding.text))
    if config is None or problems:
        raise ConfigProblems(problems)
    return config


_Section = TypeVar("_Section", bound=BaseModel)


def load_section(path: str, root: type[_Section]) -> _Section:
    """Load a file that is one section. Raises `ConfigProblems`."""
    tree, problems = _read_file(Path(path), Where(0, 0, path))
    if tree is None:
        raise ConfigProblems(problems)
    section, found = _validate(tree, root)
    found += ambiguous_words(tree, root, allows_lower_case=True)
    if section is None or problems or found:
        raise ConfigProblems([*problems, *found])
    return section


_Read: TypeAlias = tuple[Node | None, list[Problem]]


def _collect(reads: Iterable[_Read], problems: list[Problem]) -> list[Node]:
    """Return the trees that could be read, and add problems to `problems`."""
    trees: list[Node] = []
    for tree, found in reads:
        problems += found
        trees += [tree] if tree is not None else []
    return trees


def _read_file(path: Path, where: Where) -> _Read:
    def refuse(text: str, line: int = 0) -> tuple[None, list[Problem]]:
        return None, [Problem(Where(where.rank, line, where.label), "", text)]

    try:
        if not _is_readable(path):
            return refuse("is not a regular file; name a YAML file")
        content = path.read_bytes()
    except FileNotFoundError:
        siblings = path.parent.iterdir() if path.parent.is_dir() else ()
        near = did_you_mean(path.name, [sibling.name for sibling in siblings])
        return refuse(f"no such file{near}")
    except IsADirectoryError:
        return refuse("is a directory; name a YAML file")
    except OSError as error:
        return refuse(f"cannot be read: {error.strerror or error}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return refuse(
            f"is not UTF-8 text: byte 0x{content[error.start]:02x}; save it as UTF-8", line
        )
    tree, problems = parse(text, where)
    if problems and tree is None:
        return None, problems
    if tree is None or tree.value is None:
        return refuse("is empty; a configuration is a mapping of sections such as `run:`")
    if not isinstance(tree.value, dict):
        found = "a list" if isinstance(tree.value, list) else shown(tree.value)
        return refuse(f"must be a mapping of sections, got {found}", tree.where.line)
    return tree, problems


def _is_readable(path: Path) -> bool:
    """Return whether reading the path ends: true for files, directories and the shell's
    `<(command)`.
    """
    mode = path.stat().st_mode
    is_pipe = path.parent in (Path("/dev/fd"), Path("/proc/self/fd")) or path == Path("/dev/stdin")
    return S_ISREG(mode) or S_ISDIR(mode) or (S_ISFIFO(mode) and is_pipe)


def _read_override(text: str, rank: int) -> _Read:
    where = Where(rank, 0, "override", override=text)
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return None, [Problem(where, "", "must read section.key=value")]
    tree, problems = parse(value, where)
    if problems and tree is None:
        return None, problems
    node = tree if tree is not None else Node(None, where)
    for part in reversed(parts):
        node = Node({part: node}, where)
    return node, [Problem(where, key.strip(), problem.text) for problem in problems]


def _over_defaults(node: Node, annotation: Any) -> Node:
    """Merge each section over the keys that the default of its field sets.

    So `learner.loss.clip_low=0.1` needs no kind, and a partial `evaluation.sampling` stays greedy. A single
    section becomes a list where one or more are allowed.
    """
    if isinstance(node.value, list):
        inner = item_type(annotation)
        return replace(node, value=[_over_defaults(child, inner) for child in node.value])
    if not isinstance(node.value, dict):
        return node
    model = section_for(annotation, node.plain())
    if model is None:
        return node
    entries = dict(node.value)
    for name, field in model.model_fields.items():
        child = entries.get(name)
        if child is None:
            continue
        if isinstance(field.default, BaseModel) and isinstance(child.value, dict):
            default = field.default.model_dump(mode="json", exclude_unset=True)
            child = merge(Node.of(default, DEFAULTS), child)
        if ONE_OR_MORE in field.metadata and isinstance(child.value, dict):
            child = Node([child], child.where, is_lone=True)
        entries[name] = _over_defaults(child, field.annotation)
    return Node(entries, node.where)


def _validate(tree: Node, root: type[_Section]) -> tuple[_Section | None, list[Problem]]:
    try:
        return root.model_validate_json(json.dumps(tree.plain()), strict=True), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    # Strict integers refuse 4e8, a common spelling of 400 million.
    is_rounded = False
    for detail in details:
        value = detail["input"]
        if detail["type"] == "int_type" and isinstance(value, float) and value.is_integer():
            path, _ = user_path(root, detail["loc"])
            tree, is_rounded = tree.with_value(path, int(value)), True
    if is_rounded:
        return _validate(tree, root)
    by_key: dict[str, Problem] = {}
    for detail in details:
        problem = _problem(detail, tree, root)
        by_key.setdefault(problem.key, problem)
    return None, list(by_key.values())


def _problem(detail: ErrorDetails, tree: Node, root: type[BaseModel]) -> Problem:
    path, annotation = user_path(root, detail["loc"])
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, "kind")
    key = tree.key(path)
    text = _describe(detail, path, annotation, tree, root)
    return Problem(tree.place(path), key, text, is_unknown_key=detail["type"] == "extra_forbidden")


def _describe(
    detail: ErrorDetails, path: KeyPath, annotation: Any, tree: Node, root: type[BaseModel]
) -> str:
    value: Any = detail["input"]
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(path, tree, root)
        case "missing":
            return _missing(path, annotation)
        case "union_tag_invalid":
            found, choices = context["tag"], list(sections_by_kind(annotation))
            return f"unknown kind {found!r}; must be one of {_listed(choices)}{did_you_mean(found, choices)}"
        case "union_tag_not_found":
            return f"required, but missing; must be one of {_listed(sections_by_kind(annotation))}"
        case "literal_error":
            expected = str(context["expected"])
            choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
            one_of = "must be" if len(choices) == 1 else "must be one of"
            return f"{one_of} {expected}, got {shown(value)}{did_you_mean(value, choices)}"
        case "greater_than_equal":
            return f"must be >= {_bound(context['ge'])}, got {shown(value)}"
        case "greater_than":
            return f"must be > {_bound(context['gt'])}, got {shown(value)}"
        case "less_than_equal":
            return f"must be <= {_bound(context['le'])}, got {shown(value)}"
        case "less_than":
            return f"must be < {_bound(context['lt'])}, got {shown(value)}"
        case "too_short":
            return f"must have at least {context['min_length']}, got {shown(value)}"
        case "string_too_short":
            return "must not be empty"
        case "string_pattern_mismatch" if context["pattern"] in _PATTERNS:
            return f"{_PATTERNS[context['pattern']]}, got {shown(value)}"
        case "value_error":
            message = str(context["error"])
            has_value = isinstance(detail["input"], dict) or ", got " in message
            return message if has_value else f"{message}, got {shown(value)}"
        case kind if kind in _EXPECTED:
            advice = ""
            if kind == "string_type" and _is_number(value):
                advice = "; put it in quotes"
            elif is_null_word(value) and admits_null(annotation):
                advice = "; write null for no value"
            return f"must be {_EXPECTED[kind]}, got {shown(value)}{advice}"
        case _:
            expected = detail["msg"].removeprefix("Input should be ")
            return f"must be {expected}, got {shown(value)}"


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


_PATTERNS = {
    FILE_NAME: "must be a name of letters, digits, '.', '_' and '-' that does not begin with '.' or '-'"
}

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section",
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _listed(choices: Any) -> str:
    return ", ".join(repr(choice) for choice in choices)


def _missing(path: KeyPath, annotation: Any) -> str:
    if isinstance(path[-1], int):
        return "required, but the list is shorter"
    options = list(sections_by_kind(annotation))
    return "required, but missing" + (f"; a section of kind {_listed(options)}" if options else "")


def _unknown_key(path: KeyPath, tree: Node, root: type[BaseModel]) -> str:
    """Suggest the nearest key of the section, or else the section that has this key."""
    node: Node = tree
    annotation: Any = root
    for part in path[:-1]:
        model = section_for(annotation, node.plain())
        annotation = model.model_fields[str(part)].annotation if model else item_type(annotation)
        child = node.child(part)
        assert child is not None
        node = child
    model = section_for(annotation, node.plain())
    assert model is not None, path
    name, valid = str(path[-1]), list(model.model_fields)
    if near := did_you_mean(name, valid):
        return f"unknown key{near}"
    elsewhere = [key for key in dotted_keys(root) if key.rsplit(".", 1)[-1] == name]
    if tree.key(path) in elsewhere:
        kind = kind_tag(node.plain())
        return f"unknown key for kind {kind!r}; another kind has it; valid keys: {', '.join(valid)}"
    if elsewhere:
        return f"unknown key; did you mean {min(elsewhere, key=lambda key: key.count('.'))!r}?"
    return f"unknown key; valid keys: {', '.join(valid)}"


def ambiguous_words(
    tree: Node, root: type[BaseModel], *, allows_lower_case: bool = False
) -> list[Problem]:
    """Return a problem for each spelling of null, such as `None`, that YAML reads as text.

    Where text may be null, such words are problems even in quotes; elsewhere quotes make them text.
    With `allows_lower_case`, `none` is a valid choice of that name.
    """
    return [
        Problem(tree.place(path), tree.key(path), text)
        for path, text in _ambiguous_in(tree, root, (), allows_lower_case)
    ]


def is_null_word(value: object) -> bool:
    """Return whether a value is a spelling of null."""
    return isinstance(value, str) and value.strip().lower() in NULL_WORDS


def admits_null(annotation: Any) -> bool:
    """Return whether null is valid."""
    return NoneType in _alternatives(annotation)


def _ambiguous_in(
    node: Node, annotation: Any, path: KeyPath, allows_lower_case: bool
) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(node.value, dict):
        model = section_for(annotation, node.plain())
        for key, child in node.value.items():
            if model is None:
                inner = Any if annotation is Any else item_type(annotation)
            else:
                field = model.model_fields.get(key)
                inner = field.annotation if field is not None else None
            yield from _ambiguous_in(child, inner, (*path, key), allows_lower_case)
    elif isinstance(node.value, list):
        inner = Any if annotation is Any else item_type(annotation)
        for index, child in enumerate(node.value):
            yield from _ambiguous_in(child, inner, (*path, index), allows_lower_case)
    elif isinstance(node.value, str):
        text = _ambiguity(node.value, node.is_bare, _alternatives(annotation), allows_lower_case)
        if text is not None:
            yield path, text


def _ambiguity(
    value: str, is_bare: bool, alternatives: frozenset[Any], allows_lower_case: bool
) -> str | None:
    if value in alternatives or not alternatives & {str, Any}:
        return None
    is_nullable_text = NoneType in alternatives and Any not in alternatives
    if is_null_word(value) and (is_nullable_text or is_bare):
        if allows_lower_case and value == value.lower():
            return None
        quoted = "" if is_nullable_text else ", or put it in quotes to use it as text"
        return f"{value!r} is text in YAML, not null; write null{quoted}"
    return None


def _alternatives(annotation: Any) -> frozenset[Any]:
    """Return the plain types and literal values of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return frozenset(found for part in get_args(annotation) for found in _alternatives(part))
    if origin is Literal:
        return frozenset(get_args(annotation))
    return frozenset({annotation})
