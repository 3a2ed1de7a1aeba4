"""Load YAML files and `key=value` overrides into a `RunConfig`, and report all problems together."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from stat import S_ISDIR, S_ISFIFO, S_ISREG
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raylearner.config.changed_keys import changed_keys
from raylearner.config.checks import check
from raylearner.config.document import DEFAULTS, Node, merge, parse
from raylearner.config.messages import describe, other_file
from raylearner.config.null_words import ambiguous_words
from raylearner.config.problems import ConfigProblems, Problem, Where, did_you_mean, shown
from raylearner.config.resources import check_credentials, check_variables
from raylearner.config.schema import RunConfig
from raylearner.config.section import (
    ONE_OR_MORE,
    item_type,
    section_for,
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
        (_read_file(Path(path), Where(i, 0, path), RunConfig) for i, path in enumerate(paths)),
        problems,
    )
    if not paths:
        problems.append(
            Problem(
                Where(0, 0, "command line"),
                "",
                "has no configuration file; name one, such as configs/quickstart.yaml",
            )
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
    tree, problems = _read_file(Path(path), Where(0, 0, path), root)
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


def _read_file(path: Path, where: Where, root: type[BaseModel]) -> _Read:
    def refuse(text: str, line: int = 0) -> tuple[None, list[Problem]]:
        return None, [Problem(Where(where.rank, line, where.label), "", text)]

    try:
        if not _is_readable(path):
            return refuse("is not a regular file; name a YAML file")
        content = path.read_bytes()
    except FileNotFoundError:
        siblings = path.parent.iterdir() if path.parent.is_dir() else ()
        near = did_you_mean(path.name, [sibling.name for sibling in siblings])
        missing = (
            "" if path.parent.is_dir() else "; `raylearner init` writes the example configurations"
        )
        return refuse(f"no such file{near}{missing if path.parent.name == 'configs' else ''}")
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
    if mistaken := other_file(tree.value, is_run=root is RunConfig):
        return refuse(mistaken)
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
    section becomes a list where one or more are allowed, and null an empty list where that is the default.
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
        if child.value is None and field.default == ():  # null switches off what a list adds
            child = Node([], child.where)
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
    text = describe(detail, path, annotation, tree, root)
    return Problem(tree.place(path), key, text, is_unknown_key=detail["type"] == "extra_forbidden")
