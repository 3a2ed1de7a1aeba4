"""Who may import whom: the tables of pyproject.toml hold for every module of the package."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "raylearner"
TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["raylearner"]
FREE = {"observability", "config", "types", "errors", "text"}
"""Rooms that every room may import."""
LEAVES = {"types", "errors", "text"}
LEAF_LIBRARIES = set(sys.stdlib_module_names) | {"numpy", "raylearner"}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
ROOMS = {name.split(".")[0] for name in MODULES} - {"__init__", "__main__"}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of all imports, lazy ones and those under TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports are not used here"
            assert node.module is not None
            if node.module == "raylearner":
                yield from ((f"raylearner.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def breaches(names: list[str]) -> list[str]:
    """Imports of rooms that the table does not list for the importing room."""
    found: list[str] = []
    for name in names:
        room = name.split(".")[0]
        listed: list[str] = TABLES["layers"][room]
        allowed = {room, *FREE, *listed}
        if room in LEAVES:
            allowed = LEAVES
        for imported, line in imports(MODULES[name]):
            parts = imported.split(".")
            is_listed = any(f"{imported}.".startswith(f"raylearner.{part}.") for part in listed)
            if is_listed or parts[0] != "raylearner" or len(parts) < 2:
                continue
            if parts[1] in ROOMS - allowed:
                found.append(f"raylearner.{name}:{line} imports {imported}")
    return found


def test_every_room_is_in_the_table() -> None:
    assert ROOMS - set(TABLES["layers"]) == set()


def test_the_table_has_no_cycle() -> None:
    layers: dict[str, list[str]] = TABLES["layers"]

    def below(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, " -> ".join((*path, room))
        for lower in layers.get(room, ()):
            below(lower, (*path, room))

    for room in layers:
        below(room, ())


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    assert breaches([name for name in MODULES if name.split(".")[0] == room]) == []


@pytest.mark.parametrize("library", sorted(TABLES["fences"]))
def test_a_fenced_library_is_imported_inside_its_fence_only(library: str) -> None:
    fence: list[str] = TABLES["fences"][library]
    outside = [
        f"raylearner.{name}:{line}"
        for name, path in MODULES.items()
        if not any(
            fnmatch(name, pattern)
            or fnmatch(name, f"{pattern}.*")
            or name.startswith(f"{pattern}.")
            for pattern in fence
        )
        for imported, line in imports(path)
        if imported.split(".")[0] == library
    ]
    assert outside == []


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_types_and_errors_import_the_standard_library_and_numpy_only(leaf: str) -> None:
    assert {name.split(".")[0] for name, _ in imports(MODULES[leaf])} <= LEAF_LIBRARIES


def test_the_rooms_without_torch_load_without_torch() -> None:
    """Transitive and as Python sees it: all modules of these rooms in one fresh process."""
    names = [name for name in MODULES if name.split(".")[0] in TABLES["no_torch"]["modules"]]
    code = "\n".join(
        ["import importlib, sys"]
        + [
            f"importlib.import_module('raylearner.{name}')\n"
            f"assert 'torch' not in sys.modules, 'raylearner.{name} loads torch'"
            for name in names
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_breach_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from raylearner.learner import losses\n    import ray\n")
    monkeypatch.setitem(MODULES, "actors.bad", path)
    assert breaches(["actors.bad"]) == ["raylearner.actors.bad:2 imports raylearner.learner"]


def test_no_module_prints() -> None:
    calls = [
        f"raylearner.{name}:{node.lineno}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert calls == []
