"""What is made from code is current: `make docs` writes it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raylearner.config.report import markdown
from raylearner.config.schema import RunConfig
from raylearner.config.section import dotted_keys
from raylearner.jobs.sweep.section import SweepSection

ROOT = Path(__file__).parents[2]


def generated() -> dict[Path, str]:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.documents()


@pytest.mark.parametrize("path", sorted(generated()), ids=lambda path: path.name)
def test_a_generated_file_is_current(path: Path) -> None:
    assert path.read_text() == generated()[path], f"{path.name} is out of date: run `make docs`"


def test_the_generators_hide_no_module_of_the_tests() -> None:
    names = [
        {path.stem for path in (ROOT / folder).glob("*.py")} for folder in ("docs", "tests/support")
    ]
    assert names[0] & names[1] == set()


def test_every_key_and_kind_of_the_schema_is_documented() -> None:
    text = markdown(SweepSection)
    for key in dotted_keys(RunConfig):
        name = key.rsplit(".", 1)[-1]
        assert name == "kind" or f"| `{name}` |" in text or f"## `{key}`" in text, key
    for loss in ("gspo", "decoupled_ppo"):
        assert f"`{loss}`" in text


def test_no_key_is_without_a_meaning() -> None:
    rows = [line for line in markdown(SweepSection).splitlines() if re.match(r"\| `", line)]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_ways_through_the_code_exist_and_are_counted() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "raylearner").rglob("*.py"))
    text = (ROOT / "docs" / "architecture.md").read_text()
    ways = re.findall(r"^\| [^|]*\((\d+)\) \| (.*) \|$", text, re.MULTILINE)
    assert len(ways) == 4
    for count, way in ways:
        names = re.findall(r"`([\w.]+)`", way.partition("the formula")[0])
        assert len(names) + ("the formula" in way) == int(count), way
        for name in names:
            assert re.search(rf"def {name.rpartition('.')[2]}\b", source), name


def test_the_tests_named_in_reliability_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 15
    for file, name in named:
        assert re.search(rf"def {name}\(", (ROOT / file).read_text()), f"{file}::{name}"


@pytest.mark.skipif(
    importlib.util.find_spec("furo") is None, reason="the extra `docs` is not installed"
)
def test_the_site_builds_without_warnings_or_other_hosts(tmp_path: Path) -> None:
    """Links, anchors and the menu are checked by the build, other hosts by docs/conf.py."""
    options = ["-b", "html", "-W", "--keep-going", "-q"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)]
    build = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert build.returncode == 0, build.stderr
    assert (tmp_path / "index.html").is_file()
