"""Generate docs/configuration.md, the table of docs/observability.md and the Grafana dashboard from
code. `make docs` runs this; a test fails if the files are out of date.
"""

import json
import re
from pathlib import Path

from raylearner.config import report
from raylearner.jobs.sweep.section import SweepSection
from raylearner.observability import grafana, metrics

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"\| key \| unit \| meaning \|\n\|---\|---\|---\|\n(?:\|.*\n)*")


def documents() -> dict[Path, str]:
    """Return every generated file with its content."""
    observability = ROOT / "docs" / "observability.md"
    text = observability.read_text(encoding="utf-8")
    return {
        ROOT / "docs" / "configuration.md": report.markdown(SweepSection),
        observability: TABLE.sub(lambda _: metrics.markdown(), text),
        ROOT / "launch" / "grafana" / "raylearner.json": json.dumps(grafana.dashboard(), indent=2)
        + "\n",
    }


if __name__ == "__main__":
    for path, content in documents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
