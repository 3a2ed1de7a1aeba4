"""Blocks of code in documents work: YAML loads, Python runs, JSON parses, commands and files exist.

A first line `# name.py` or `# name.yaml` makes a block a file, which other blocks of its document use.
"""

import importlib
import importlib.util
import json
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from raylearner.cli import app
from raylearner.config.loader import load
from raylearner.jobs.sweep import plan

ROOT = Path(__file__).parents[2]
QUICKSTART = "configs/quickstart.yaml"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LANGUAGES = {"bash", "json", "python", "text", "yaml", "{toctree}"}
OTHER_COMMANDS = {
    "export",
    "jq",
    "kubectl",
    "ray",
    "sbatch",
    "scancel",
    "source",
    "ssh",
    "tensorboard",
}
ROW = '{"prompt": "1+1=", "answer": 2}'
CLI: Any = typer.main.get_command(app)


class Block(NamedTuple):
    """A fenced block of a document."""

    place: str
    language: str
    code: str

    @property
    def file(self) -> str | None:
        """Name that its first line gives it."""
        found = re.match(r"# (\w+\.(?:py|yaml))$", self.code.partition("\n")[0])
        return found.group(1) if found else None


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for found in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{document.name}:{line}", found.group(1), found.group(2))


BLOCKS = {document: list(blocks(document)) for document in DOCUMENTS}


def blocks_in(language: str) -> list[Any]:
    return [
        pytest.param(document, block, id=block.place)
        for document, found in BLOCKS.items()
        for block in found
        if block.language == language
    ]


@pytest.fixture
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the repository's folders and the files of one document."""
    document: Path = request.getfixturevalue("document")
    for name in ("configs", "raylearner", "runs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    row = next(
        (b.code for b in BLOCKS[document] if '"prompt"' in b.code and b.language == "json"), ROW
    )
    for block in BLOCKS[document]:
        for name in re.findall(r"path: (\w+\.jsonl)", block.code):
            (tmp_path / name).write_text(row)
        if block.file is None:
            continue
        (tmp_path / block.file).write_text(block.code)
        if block.language == "python":
            name = block.file.removesuffix(".py")
            module = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(block.code, block.place, "exec"), module.__dict__)
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_names_its_language(document: Path) -> None:
    assert [b.place for b in BLOCKS[document] if b.language not in LANGUAGES] == []


@pytest.mark.parametrize(("document", "block"), blocks_in("python"))
def test_python_runs(document: Path, block: Block, files: Path) -> None:
    if block.file is None:
        exec(compile(block.code, block.place, "exec"), {"__name__": "example"})


@pytest.mark.parametrize(("document", "block"), blocks_in("json"))
def test_json_parses(document: Path, block: Block) -> None:
    json.loads(block.code)


@pytest.mark.parametrize(("document", "block"), blocks_in("yaml"))
def test_yaml_loads_over_the_quickstart(document: Path, block: Block, files: Path) -> None:
    (files / "block.yaml").write_text(block.code)
    if re.search(r"^axes:", block.code, re.MULTILINE):
        assert plan.read("block.yaml").trials
    else:
        load([QUICKSTART, "block.yaml"], [])


@pytest.mark.parametrize(("document", "block"), blocks_in("bash"))
def test_commands_exist_and_take_their_arguments(
    document: Path, block: Block, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in block.code.replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            run(words, monkeypatch)


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a command as far as possible without starting anything."""
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    match program, arguments:
        case "raylearner", _:
            parse(arguments)
        case "python", ["-m", "raylearner", *rest]:
            parse(rest)
        case "python", ["-m", module, *rest]:
            assert (
                importlib.util.find_spec(module) is not None
                or (ROOT / module.split(".")[0]).is_dir()
            )
            if re.fullmatch(r"raylearner\.services\.\w+", module):
                service = importlib.import_module(module)
                monkeypatch.setattr(service, "serve", lambda make, options: 0)
                assert service.main(rest) == 0
        case "python", [file, *_]:
            assert (ROOT / file).is_file(), file
        case "bash", [("launch/local.sh" | "launch/submit.sh") as script, *rest]:
            assert (ROOT / script).is_file()
            parse(["train" if script.endswith("local.sh") else "submit", *rest])
        case "bash", [script, *_]:
            assert (ROOT / script).is_file(), script
        case "make", [target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case "pre-commit", _:
            pass
        case _:
            assert program in OTHER_COMMANDS, words


def parse(arguments: list[str]) -> None:
    """Parse a command of ours, and load its configuration if that is a file of the repository."""
    if arguments[0].startswith("--"):
        return
    command = CLI.commands[arguments[0]]
    given = command.make_context(arguments[0], list(arguments[1:])).params
    values = [word for word in given.get("arguments") or () if not word.startswith("checkpoint=")]
    configs = [word for word in values if "=" not in word and word.endswith(".yaml")]
    if configs and not any(config.startswith("runs/") for config in configs):
        load(configs, [word for word in values if "=" in word])
    for path in filter(None, (given.get("file"), given.get("sweep_file"))):
        assert path == "FILE" or path.startswith("runs/") or Path(path).is_file(), path
