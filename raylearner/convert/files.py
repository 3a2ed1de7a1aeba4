"""Files of other projects as text, and YAML with Hydra's `defaults`."""

from pathlib import Path
from typing import Any

from raylearner.config.document import Node, parse
from raylearner.config.problems import Problem, Where, did_you_mean, shown
from raylearner.convert.settings import Reading, Setting

MAX_BYTES = 4 << 20
"""Maximum size of a configuration or script."""
MAX_INCLUDED = 100
_SELF = "_self_"
_MISSING = "???"
"""OmegaConf's mark of a value that is not set."""
_CLASS = "._target_"
"""Ending of keys that name a class of the project."""


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file; False for one that cannot be one, such as a very long name."""
    try:
        return path.expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def read_text(path: Path, where: Where) -> str | Problem:
    """Return the text of a regular file, or the problem with it."""
    try:
        if not path.exists():
            siblings = path.parent.iterdir() if path.parent.is_dir() else ()
            near = did_you_mean(path.name, [sibling.name for sibling in siblings])
            return Problem(where, "", f"no such file{near}")
        if not path.is_file():
            return Problem(where, "", "is not a regular file; name a configuration or a script")
        if path.stat().st_size > MAX_BYTES:
            return Problem(where, "", f"is larger than {MAX_BYTES >> 20} MiB; name a configuration")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return Problem(where, "", "is not UTF-8 text; name a configuration or a script")
    except OSError as error:
        return Problem(where, "", f"cannot be read: {error.strerror or error}")
    return text if text.strip() else Problem(where, "", "is empty")


def read_yaml(path: Path, label: str, *, known: frozenset[str] = frozenset()) -> Reading:
    """Read a YAML file and those of its `defaults` that are beside it.

    `known` are names of the project's own files, whose values the table has as defaults.
    """
    reading = Reading()
    _Loader(reading, known).load(path, label, "")
    return reading


class _Loader:
    def __init__(self, reading: Reading, known: frozenset[str]) -> None:
        self._reading, self._known = reading, known
        self._open: list[Path] = []
        self._count = 0

    def load(self, path: Path, label: str, package: str) -> None:
        """Add the settings of a file below a package, defaults first."""
        where = Where(0, 0, label)
        text = read_text(path, where)
        if isinstance(text, Problem):
            self._reading.problems.append(text)
            return
        tree, problems = parse(text, where)
        self._reading.problems += problems
        if tree is None or tree.value is None:
            if not problems:
                self._refuse(where, "is empty")
            return
        if not isinstance(tree.value, dict):
            found = "a list" if isinstance(tree.value, list) else shown(tree.value)
            self._refuse(tree.where, f"must be a mapping of settings, got {found}")
            return
        self._count += 1
        entries = dict(tree.value)
        defaults = entries.pop("defaults", None)
        self._open.append(path.resolve())
        has_self = False
        for node in _items(defaults):
            if node.value == _SELF:
                has_self = True
                self._add(entries, package)
            else:
                self._include(node, path, label, package)
        if not has_self:
            self._add(entries, package)
        self._open.pop()

    def _include(self, node: Node, path: Path, label: str, package: str) -> None:
        group, name = _entry(node.plain())
        if name is None or "${" in name:  # null, or chosen by another key of the project's own file
            return
        place, _, target = group.partition("@")
        file = path.parent / place / f"{name.removesuffix('.yaml')}.yaml"
        below = target if target and target != "_global_" else place.strip("/").replace("/", ".")
        below = ".".join(part for part in (package, below) if part not in ("", ".."))
        if file.resolve() in self._open or self._count >= MAX_INCLUDED:
            self._refuse(node.where, f"defaults: {name!r} includes itself; remove it")
        elif is_file(file):
            self.load(file, str(Path(label).parent / file.relative_to(path.parent)), below)
        elif Path(name).stem not in self._known:
            self._refuse(
                node.where,
                f"defaults: {name!r} is not beside this file; copy it there, or convert the composed"
                " configuration, which Hydra prints with --cfg job",
            )

    def _add(self, entries: dict[str, Node], package: str) -> None:
        for name, node in entries.items():
            _flatten(node, f"{package}.{name}" if package else name, self._reading)

    def _refuse(self, where: Where, text: str) -> None:
        self._reading.problems.append(Problem(where, "", text))


def _items(defaults: Node | None) -> list[Node]:
    return defaults.value if defaults is not None and isinstance(defaults.value, list) else []


def _entry(value: Any) -> tuple[str, str | None]:
    """Return group and name of one entry of `defaults`; without a name it includes nothing."""
    if isinstance(value, str):
        name, _, package = value.partition("@")
        return f"@{package}" if package else "", name
    if isinstance(value, dict) and len(value) == 1:
        [(group, name)] = value.items()
        group = str(group).removeprefix("optional ").removeprefix("override ")
        return group, name if isinstance(name, str) else None
    return "", None


def _flatten(node: Node, key: str, reading: Reading) -> None:
    if isinstance(node.value, dict) and node.value:
        for name, child in node.value.items():
            _flatten(child, f"{key}.{name}", reading)
        return
    if node.value != _MISSING and not key.endswith(_CLASS):
        reading.add(Setting(key, node.plain(), node.where))
