"""The wheel has every file that the program needs, and the project's metadata agree."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from raylearner import __version__, cli
from raylearner.config.loader import load

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def sources() -> list[str]:
    """The repository's files from which a wheel is built; those of `raylearner/configs` are a link."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "raylearner", "configs"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def test_the_wheel_has_every_file_of_the_package_and_the_configurations(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in (*sources(), "pyproject.toml", "README.md", "LICENSE"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    build = "from setuptools import build_meta; build_meta.build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = (tree / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"raylearner/{name}" if name.startswith("configs/") else name
        for name in sources()
        if name != "raylearner/configs"
    }
    assert packed == expected
    assert wheel.name.startswith(f"raylearner-{__version__}-")


def test_init_writes_configurations_that_load_where_only_the_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli.app, ["init"]).exit_code == 0
    written = {str(path.relative_to(tmp_path)) for path in Path.cwd().rglob("*.yaml")}
    assert written == {name for name in sources() if name.startswith("configs/")}
    config = load(["configs/search_qa.yaml"], [])
    for source in (*config.data.train, *(config.data.evaluation or ())):
        assert Path(getattr(source, "path", "")).is_file()
    again = CliRunner().invoke(cli.app, ["init"])
    assert again.exit_code == 2
    assert again.stderr.startswith("configs: ")
    elsewhere = CliRunner().invoke(cli.app, ["init", "a b"])
    assert "cd 'a b' && " in elsewhere.stdout
    assert Path("a b/configs/data/questions.jsonl").is_file()


def test_a_missing_example_is_answered_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["train", "configs/quickstart.yaml"])
    assert result.exit_code == 2
    assert "raylearner init" in result.stderr


def test_version_and_licence_agree_with_the_citation() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert {"message", "title", "authors", "cff-version"} <= set(citation)


def test_issue_forms_have_what_github_requires() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
    assert len(forms) >= 2
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(content)
        for part in content["body"]:
            assert part["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
            assert "value" in part["attributes"] or "label" in part["attributes"]


def test_every_extra_is_documented() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    assert [name for name in PROJECT["optional-dependencies"] if f"`{name}`" not in text] == []


def test_the_image_copies_no_local_files_and_runs_as_a_user() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER (?!root|0)\w+", dockerfile, re.MULTILINE)
    assert re.search(r"^FROM \S+:\S+", dockerfile, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs"} <= set(ignored)
    for name in re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", dockerfile, re.MULTILINE):
        for source in name.split():
            assert source == "." or (ROOT / source).exists(), source
