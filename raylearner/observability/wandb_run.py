"""Weights & Biases, where a configuration asks for it; imported then only."""

import html
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylearner.config.schema import WandbSection
from raylearner.errors import ConfigError
from raylearner.observability.sinks import StepRecord

STEP = "step"


class WandbRun:
    """One W&B run under the name of the run directory, gone on with on a resume.

    Steps are a metric there, `step`, against which all others are drawn. W&B's own count is left to
    itself: it drops what comes late, as an evaluation made beside training does.
    """

    def __init__(self, config: WandbSection, run_dir: Path, *, hparams: Mapping[str, Any]) -> None:
        """Raises `ConfigError` where the package is missing."""
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError(
                "observability.wandb: the package wandb is not installed; `pip install wandb`, or"
                " leave the section out"
            ) from error
        self._run: Any = self._wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            name=run_dir.name,
            id=run_dir.name,
            resume="allow",
            dir=str(run_dir),
            config=dict(hparams),
        )
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
