"""Weights & Biases, imported only if it is configured."""

import html
import importlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylearner.config.schema import WandbSection
from raylearner.errors import ConfigError
from raylearner.observability.sinks.sink import StepRecord

STEP = "step"
ID_FILE = "wandb.json"
"""File in a run directory with the id of its W&B run, and the directory for which it was created."""


class WandbRun:
    """One W&B run per run directory, with its name, resumed with it.

    The id is created once and stored in the directory: other directories of the same name, and a restart
    in its place, are separate runs.

    The metric `step` is the x-axis of all others. W&B's own step count is not used: it drops late records,
    such as those of evaluations in parallel to training.
    """

    def __init__(self, config: WandbSection, run_dir: Path, *, hparams: Mapping[str, Any]) -> None:
        """Raises `ConfigError` if the package is missing or W&B does not open the run."""
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
        except Exception as error:  # W&B raises many types
            raise ConfigError(
                f"observability.wandb: run {run_id} of project {config.project!r} cannot be opened:"
                f" {_first_line(error)}; log in with `wandb login`, set mode to offline, or, if the run"
                f" was deleted there, delete {run_dir / ID_FILE} to continue in a new one"
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
        """Do nothing: W&B cannot remove rows, so a repeated step has both."""

    def close(self) -> None:
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    """Return the directory's id, a new one for a new directory or a copy of another."""
    run_dir.mkdir(parents=True, exist_ok=True)
    here = run_dir.absolute()
    known = _read(here)
    if known is not None:
        origin = Path(known["run_dir"])
        original = _read(origin) if origin != here else None
        if original is None or original["id"] != known["id"]:
            return known["id"]
    record = {"id": secrets.token_hex(8), "run_dir": str(here)}
    draft = here / f"{ID_FILE}.partial"
    draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
    draft.replace(here / ID_FILE)
    return record["id"]


def _read(run_dir: Path) -> dict[str, str] | None:
    try:
        return json.loads((run_dir / ID_FILE).read_text(encoding="utf-8"))
    except OSError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
