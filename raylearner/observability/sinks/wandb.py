"""Weights & Biases, where a configuration asks for it; imported then only."""

import html
import importlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylearner.config.schema import WandbSection
from raylearner.errors import ConfigError
from raylearner.observability.sinks.sinks import StepRecord

STEP = "step"
ID_FILE = "wandb.json"
"""In a run directory: the id of its run there, and the path that it was made for."""


class WandbRun:
    """One W&B run for each run directory, named after it and resumed with it.

    Its id is made once and lives in the directory: other directories of the same name, and one that
    starts over in its place, are runs of their own.

    Steps are a metric there, `step`, against which all others are drawn. W&B's own count is left to
    itself: it drops what comes late, as an evaluation made beside training does.
    """

    def __init__(self, config: WandbSection, run_dir: Path, *, hparams: Mapping[str, Any]) -> None:
        """Raises `ConfigError` where the package is missing, and where W&B does not open the run."""
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError(
                "observability.wandb: the package wandb is not installed; `pip install wandb`, or"
                " leave the section out"
            ) from error
        run_id = _run_id(run_dir)
        try:
            self._run: Any = self._wandb.init(
                project=config.project,
                entity=config.entity,
                mode=config.mode,
                name=run_dir.name,
                id=run_id,
                resume="allow",
                dir=str(run_dir),
                config=dict(hparams),
            )
        except Exception as error:  # of many kinds, and all of them end here
            raise ConfigError(
                f"observability.wandb: run {run_id} of project {config.project!r} cannot be opened:"
                f" {_first_line(error)}; log in with `wandb login`, set mode to offline, or, where it"
                f" was deleted there, delete {run_dir / ID_FILE} to go on in a new one"
            ) from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, record: StepRecord) -> None:
        values: dict[str, Any] = {STEP: record.step, **record.scalars}
        values |= {k: self._wandb.Histogram(v) for k, v in record.samples.items()}
        values |= {
            k: self._wandb.Html(f"<pre>{html.escape(v)}</pre>") for k, v in record.texts.items()
        }
        self._run.log(values)

    def rewind(self, step: int) -> None:
        """Rows cannot be taken back there: a step that is made again has those of both times."""

    def close(self) -> None:
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    """The directory's id; a new one for a new directory, and for a copy beside its original."""
    run_dir.mkdir(parents=True, exist_ok=True)
    here = run_dir.absolute()
    known = _read(here)
    if known is not None:
        origin = Path(known["run_dir"])
        original = _read(origin) if origin != here else None
        if original is None or original["id"] != known["id"]:
            return known["id"]
    made = {"id": secrets.token_hex(8), "run_dir": str(here)}
    draft = here / f"{ID_FILE}.partial"
    draft.write_text(json.dumps(made) + "\n", encoding="utf-8")
    draft.replace(here / ID_FILE)
    return made["id"]


def _read(run_dir: Path) -> dict[str, str] | None:
    try:
        return json.loads((run_dir / ID_FILE).read_text(encoding="utf-8"))
    except OSError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
