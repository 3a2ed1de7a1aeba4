"""The recorder of a run: log, metrics, trajectories, trace and display, behind one object."""

import logging
import math
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

from raylearner.cleanup import clean_up_now
from raylearner.config.report import resolved_yaml
from raylearner.config.schema import ObservabilitySection, RunConfig
from raylearner.credentials import mask
from raylearner.errors import naming
from raylearner.observability import completions, logs, transcripts
from raylearner.observability.display import Display, Stage
from raylearner.observability.jsonl import JsonlFile
from raylearner.observability.lines import evaluation_lines
from raylearner.observability.run_directory import FAILURES_FILE
from raylearner.observability.sinks.sink import (
    Sink,
    StepRecord,
    finite_scalars,
    flatten,
    make_sinks,
)
from raylearner.observability.spans import Span, TraceFile, Tracer
from raylearner.observability.transcripts import Advantages, Logprobs
from raylearner.types import PolicyVersion, Trajectory

logger = logging.getLogger(__name__)

TOOL_FAILURES = re.compile(r"tools/.+/(errors|bad_pages)")


class Recorder:
    """Owns the recorded files of a run directory; an existing one is continued.

    After restoring step `n`, call `rewind(n)`: rows and files of later steps are removed, so that
    each step is recorded once.
    """

    def __init__(
        self,
        run_dir: Path,
        config: ObservabilitySection,
        *,
        num_steps: int,
        sinks: Sequence[Sink] = (),
        display: Display | None = None,
    ) -> None:
        """`sinks` receive finite numbers only, and are closed with the recorder, as is the display."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.log_file = run_dir / "log.txt"
        self._config = config
        self._log_handler = logs.add_file(self.log_file)
        self._metrics = JsonlFile(run_dir / "metrics.jsonl")
        self._evaluations = JsonlFile(run_dir / "eval.jsonl")
        self._failures = JsonlFile(run_dir / FAILURES_FILE)
        self._trajectories = run_dir / transcripts.TRAJECTORIES
        self._evaluated = run_dir / transcripts.EVALUATIONS
        self._trace = TraceFile(run_dir / "trace.json") if config.trace else None
        self._tracer = Tracer("controller", is_enabled=config.trace)
        self._display = display or Display(num_steps=num_steps)
        self._sinks = list(sinks)
        self._sinks_lock = threading.Lock()
        self._warned: set[str] = set()
        self._zero_s = time.monotonic() - self._recorded_s()

    @classmethod
    def of_run(
        cls, config: RunConfig, run_dir: Path, *, num_steps: int, display: Display | None = None
    ) -> Self:
        """Return the recorder of a configuration, with its sinks; the configuration is written to the directory."""
        run_dir.mkdir(parents=True, exist_ok=True)
        draft = run_dir / "config.yaml.partial"
        with naming(draft):
            draft.write_text(resolved_yaml(config), encoding="utf-8")
        draft.replace(run_dir / "config.yaml")
        sinks = make_sinks(
            config.recorded,
            run_dir,
            run_name=config.run.name,
            hparams=flatten(config.model_dump(mode="json")),
        )
        return cls(run_dir, config.recorded, num_steps=num_steps, sinks=sinks, display=display)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Show, log and trace a stage of startup or shutdown with its duration."""
        with self._tracer.span(name), self._display.stage(name) as stage:
            yield stage

    def waiting(self, name: str) -> AbstractContextManager[Stage]:
        """Return a stage that is shown only on a terminal, and neither logged nor traced."""
        return self._display.stage(name, is_logged=False)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one learner step; a missing `time_s` is filled in."""
        numbers: dict[str, float] = {"time_s": round(time.monotonic() - self._zero_s, 3), **metrics}
        version = numbers.pop("policy_version", None)
        head = {"step": step} if version is None else {"step": step, "policy_version": int(version)}
        row = {**head, **{key: value for key, value in numbers.items() if key != "step"}}
        row["observability/non_finite"] = sum(
            not math.isfinite(value) for value in numbers.values()
        )
        self._metrics.write(row)
        scalars = {key: value for key, value in row.items() if key != "step"}
        weights = completions.weight_samples(row)
        samples = {"learner/importance_weight": weights} if weights is not None else {}
        self._write(
            StepRecord(step=step, scalars=finite_scalars(scalars), samples=samples, is_whole=True)
        )
        self._display.step(row)
        self._warn_of_tools(step, numbers)
        self._write_spans([])

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Record one evaluation: at least `step`, `policy_version` and `reward/mean`."""
        self._warn_of_other_prompts(record)
        self._evaluations.write(record)
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        scalars = {f"evaluation/{key}": float(value) for key, value in numbers.items()}
        self._write(StepRecord(step=int(record["step"]), scalars=finite_scalars(scalars)))
        for line in evaluation_lines(record):
            logger.info("%s", line)

    def _warn_of_other_prompts(self, record: Mapping[str, Any]) -> None:
        """Warn if the rows of held-out data were edited before a resume."""
        rows = self._evaluations.rows()
        earlier = [row for row in rows if row.get("set") == record.get("set")][-1:]
        if earlier and earlier[0].get("prompts_hash") != record.get("prompts_hash"):
            logger.warning(
                "the evaluation %sat step %s has different prompts from the one at step %s, because "
                "their rows changed; the two are not comparable",
                f"of {record['set']} " if "set" in record else "",
                *(record["step"], earlier[0]["step"]),
            )

    def trajectories(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        *,
        policy_version: PolicyVersion,
        advantages: Advantages | None = None,
        learner_logprobs: Logprobs | None = None,
    ) -> None:
        """Write the file and table of one step's trajectories, at the configured intervals.

        `policy_version` is the version that was trained on them. May be called from another thread, one
        step after the other.
        """
        self._warn_of_non_finite(step, trajectories)
        if _is_due(self._config.trajectories_every_steps, step):
            transcripts.write(
                self._trajectories,
                step,
                trajectories,
                advantages=advantages,
                learner_logprobs=learner_logprobs,
            )
        texts: dict[str, str] = {}
        section = self._config.completions
        if section is not None and _is_due(section.every_steps, step):
            table = completions.rows(trajectories, section, advantages=advantages)
            texts["rollout/completions"] = completions.markdown(table)
            if section.log:
                logger.info("completions of step %d\n%s", step, completions.plain(table))
        samples = completions.samples(trajectories, policy_version=policy_version)
        self._write(StepRecord(step=step, scalars={}, samples=samples, texts=texts))

    def evaluation_trajectories(
        self, step: int, trajectories: Sequence[Trajectory], *, name: str = ""
    ) -> None:
        """Write the trajectories of one evaluation, unless trajectories are switched off.

        `name` is that of its set; all sets of a step are in one file. May be called from another thread.
        """
        if self._config.trajectories_every_steps:
            transcripts.write(self._evaluated, step, trajectories, evaluation_set=name)

    def spans(self, spans: Iterable[Span]) -> None:
        """Record spans drained from tracers, here or in actors."""
        self._write_spans(spans)

    def rewind(self, step: int) -> None:
        """Remove records of later steps, and log the rollback."""
        num_rows = self._metrics.rewind(step)
        num_evaluations = self._evaluations.rewind(step)
        folders = (self._trajectories, self._evaluated)
        files = [path for folder in folders for path in sorted(folder.glob("step_*.jsonl"))]
        late = [path for path in files if path.name > transcripts.step_file(path.parent, step).name]
        for path in late:
            path.unlink()
        with self._sinks_lock:
            for sink in self._sinks:
                sink.rewind(step)
        self._zero_s = time.monotonic() - self._recorded_s()
        if num_rows or num_evaluations or late:
            logger.warning(
                "back to step %d: removed %d later rows of metrics.jsonl, %d of eval.jsonl and "
                "%d trajectory files",
                step,
                num_rows,
                num_evaluations,
                len(late),
            )

    def failures(self, step: int, errors: Sequence[str]) -> None:
        """Log the first failed episodes of each kind, and keep them for `view`."""
        for error in errors:
            logger.warning("an episode for step %d failed: %s", step, error)
            self._failures.write({"step": step, "error": mask(error)})

    def close(self) -> None:
        """Close everything, then raise the first failure. Safe to call twice."""
        with self._sinks_lock:
            sinks, self._sinks = self._sinks, []
        clean_up_now(
            sys.exception(),
            self._display.close,
            self._metrics.close,
            self._evaluations.close,
            self._failures.close,
            self._close_trace,
            *(sink.close for sink in reversed(sinks)),
            lambda: logs.remove(self._log_handler),
        )

    def _close_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            try:
                trace.write(self._tracer.drain())
            finally:
                trace.close()

    def _warn_of_non_finite(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Warn of the first value that is not finite of each logged name."""
        for name, value in (pair for t in trajectories for pair in t.metrics.items()):
            key = f"logged {name}"
            if not math.isfinite(value) and key not in self._warned:
                self._warned.add(key)
                logger.warning(
                    "%s: a value logged at step %d is not finite and is left out of rollout/logged/%s/mean;"
                    " rollout/logged_non_finite counts such values",
                    *(name, step, name),
                )

    def _warn_of_tools(self, step: int, numbers: Mapping[str, float]) -> None:
        """Warn of the first failures of each tool, which otherwise are shown only to the policy."""
        for key, value in numbers.items():
            if TOOL_FAILURES.fullmatch(key) and value and key not in self._warned:
                self._warned.add(key)
                logger.warning(
                    "%s is %g at step %d; for the cause see the logs of rollout actors, in session_latest/logs of"
                    " Ray's temporary directory",
                    key,
                    value,
                    step,
                )

    def _write(self, record: StepRecord) -> None:
        with self._sinks_lock:
            for sink in self._sinks:
                sink.write(record)

    def _write_spans(self, spans: Iterable[Span]) -> None:
        if self._trace is not None:
            self._trace.write([*spans, *self._tracer.drain()])

    def _recorded_s(self) -> float:
        rows = self._metrics.rows()
        return float(rows[-1].get("time_s") or 0.0) if rows else 0.0


def _is_due(every_steps: int, step: int) -> bool:
    return bool(every_steps) and step % every_steps == 0
