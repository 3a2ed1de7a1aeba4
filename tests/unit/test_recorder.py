"""The recorder: what a run directory holds, also after a crash and after a rollback."""

import io
import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from episodes import make_trajectory, make_turn
from rich.console import Console

from raylearner.config.schema import ObservabilitySection, WandbSection
from raylearner.observability import logs
from raylearner.observability.display import Display
from raylearner.observability.jsonl import JsonlFile, dumps, read_lines
from raylearner.observability.recorder import Recorder
from raylearner.observability.sinks.sink import StepRecord
from raylearner.observability.sinks.wandb import WandbRun
from raylearner.observability.spans import Tracer
from raylearner.types import CompletionStop, StopReason, Trajectory

NO_EXTRAS = ObservabilitySection(tensorboard=False, trace=False)


@pytest.fixture(autouse=True)
def info_lines(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="raylearner"):
        yield


def open_recorder(folder: Path, config: ObservabilitySection = NO_EXTRAS) -> Recorder:
    return Recorder(folder / "run", config, num_steps=10)


def rows(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def make_episode(**changes: Any) -> Trajectory:
    turn = make_turn(
        "<calc>1+1</calc>",
        start=2,
        end=4,
        reply_end=5,
        reply="2",
        stop_reason=CompletionStop.STOP_STRING,
        min_policy_version=3,
        max_policy_version=4,
        tool="calculator",
    )
    values: dict[str, Any] = {
        "group_id": 7,
        "sample_index": 1,
        "prompt_text": "1+1?",
        "answer": "2",
        "token_ids": np.array([5, 6, 7, 8, 9], np.int32),
        "train_mask": np.array([0, 0, 0, 1, 0], np.bool_),
        "behavior_logprobs": np.array([np.nan, np.nan, -0.1, -1e-7, np.nan], np.float32),
        "claim_policy_version": 3,
        "turns": (turn,),
        "reward": 1.0,
        "rewards": {"exact_answer": 1.0, "format": None},
        "stop_reason": StopReason.ANSWER,
        "metrics": {"x": math.nan},
    }
    return make_trajectory([-1, -1, 3, 4, -1], **values | changes)


def test_a_models_text_stays_on_its_line_for_every_reader(tmp_path: Path) -> None:
    text = "a\x1f\x1e\x85\u2028\u2029\ud800\r\n\f\x00é😀"
    file = JsonlFile(tmp_path / "rows.jsonl")
    file.write({"step": 1, "text": text})
    file.write({"step": 2, "text": text})
    assert [row["text"] for row in file.rows()] == [text, text]
    assert [row["text"] for row in rows(file.path)] == [text, text]
    assert file.rewind(1) == 1
    assert [row["text"] for row in rows(file.path)] == [text]
    file.path.write_text('{"text": "raw \u2028 separator"}\n{"text": "torn', encoding="utf-8")
    assert [json.loads(line) for line in read_lines(file.path)] == [
        {"text": "raw \u2028 separator"}
    ]


def test_steps_become_json_lines_with_null_for_values_that_are_not_finite(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        recorder.step(1, {"policy_version": 1.0, "learner/loss": math.nan, "a/b": math.inf})
        recorder.step(2, {"policy_version": 2.0, "learner/loss": np.float32(0.5)})
    first, second = rows(tmp_path / "run" / "metrics.jsonl")
    assert (first["step"], first["policy_version"]) == (1, 1)
    assert (first["learner/loss"], first["a/b"]) == (None, None)
    assert first["observability/non_finite"] == 2
    assert second["learner/loss"] == 0.5
    assert second["observability/non_finite"] == 0
    assert second["time_s"] >= first["time_s"] >= 0


def test_a_rewind_removes_later_steps_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with open_recorder(tmp_path) as recorder:
        for step in range(1, 6):
            recorder.step(step, {"policy_version": step})
            recorder.trajectories(step, [make_episode()], policy_version=4)
        for step in (0, 5):
            recorder.evaluation({"step": step, "policy_version": step, "reward/mean": 0.5})
    with open_recorder(tmp_path) as recorder:
        recorder.rewind(3)
        recorder.step(4, {"policy_version": 4, "again": 1.0})
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert rows(run / "metrics.jsonl")[-1]["again"] == 1.0
    assert [row["step"] for row in rows(run / "eval.jsonl")] == [0]
    files = [path.name for path in sorted((run / "trajectories").iterdir())]
    assert files == ["step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl"]
    assert "back to step 3: removed 2 later rows" in caplog.text
    assert "back to step 3" in (run / "log.txt").read_text()


def test_time_continues_from_the_last_row_after_a_resume(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        recorder.step(1, {"policy_version": 1, "time_s": 500.0})
        recorder.step(2, {"policy_version": 2, "time_s": 900.0})
    with open_recorder(tmp_path) as recorder:
        recorder.rewind(1)
        recorder.step(2, {"policy_version": 2})
    assert 500 <= rows(tmp_path / "run" / "metrics.jsonl")[-1]["time_s"] < 600


def test_a_line_torn_by_a_crash_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    file = JsonlFile(path)
    file.write({"step": 2})
    file.close()
    assert rows(path) == [{"step": 1}, {"step": 2}]


def test_dumps_cleans_nested_values_and_numpy_scalars() -> None:
    value = {"a": [math.nan, {"b": -math.inf}], "c": np.int64(3), "d": (np.float32(0.5),)}
    assert json.loads(dumps(value)) == {"a": [None, {"b": None}], "c": 3, "d": [0.5]}


def test_a_transcript_has_equal_arrays_and_marks_what_was_not_sampled(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        recorder.trajectories(
            12,
            [make_episode()],
            policy_version=5,
            advantages={(7, 1, 0, 0): 0.25},
            learner_logprobs={(7, 1, 0, 0): np.array([0, 0, -0.5, -0.25, 0], np.float32)},
        )
    (row,) = rows(tmp_path / "run" / "trajectories" / "step_000012.jsonl")
    arrays = ("token_ids", "loss_mask", "train_mask", "behavior_logprobs", "policy_versions")
    assert {len(row[name]) for name in arrays} == {5}
    assert row["policy_versions"] == [-1, -1, 3, 4, -1]
    assert [value is None for value in row["behavior_logprobs"]] == [True, True, False, False, True]
    assert [np.float32(x) for x in row["behavior_logprobs"][2:4]] == [
        np.float32(-0.1),
        np.float32(-1e-7),
    ]
    assert row["learner_logprobs"] == [None, None, -0.5, -0.25, None]
    assert (row["prompt_id"], row["group_id"], row["sample_index"]) == ("p", 7, 1)
    assert (row["reward"], row["stop_reason"], row["advantage"]) == (1.0, "answer", 0.25)
    assert row["rewards"] == {"exact_answer": 1.0, "format": None}
    assert (row["prompt"], row["text"], row["answer"]) == ("1+1?", "<calc>1+1</calc>2", "2")
    assert row["turns"][0]["tool"] == "calculator"
    assert row["metrics"] == {"x": None}


def test_trajectories_are_written_every_k_steps(tmp_path: Path) -> None:
    for every, expected in ((2, 2), (0, 0)):
        config = NO_EXTRAS.model_copy(update={"trajectories_every_steps": every})
        with Recorder(tmp_path / str(every), config, num_steps=5) as recorder:
            for step in range(1, 6):
                recorder.trajectories(step, [make_episode()], policy_version=4)
        assert len(list((tmp_path / str(every)).glob("trajectories/*.jsonl"))) == expected


def test_failed_episodes_are_logged_with_their_frames_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    error = "environment: mine raised KeyError: 'secret'\n  mine.py, line 3, in step"
    with open_recorder(tmp_path) as recorder:
        recorder.failures(3, [error])
        recorder.failures(4, [])
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert error in warning
    assert rows(tmp_path / "run" / "failures.jsonl") == [{"step": 3, "error": error}]


def test_a_tool_that_begins_to_fail_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_recorder(tmp_path) as recorder:
        for step, errors, bad_pages in ((1, 0.0, 2.0), (2, 3.0, 1.0), (3, 4.0, 0.0)):
            counts = {"tools/look/errors": errors, "tools/look/bad_pages": bad_pages}
            recorder.step(step, counts | {"tools/look/calls": 9.0, "rollout/errors/tool": 1.0})
    warnings = [
        r.getMessage().partition(";")[0] for r in caplog.records if r.levelname == "WARNING"
    ]
    assert warnings == ["tools/look/bad_pages is 2 at step 1", "tools/look/errors is 3 at step 2"]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from raylearner.observability.sinks.tensorboard import TensorBoardFile

    folder = tmp_path / "run" / "tensorboard"
    sink = TensorBoardFile(folder, hparams={"learner.learning_rate": 1e-3, "run.name": "x"})
    with Recorder(tmp_path / "run", NO_EXTRAS, num_steps=10, sinks=[sink]) as recorder:
        recorder.step(1, {"policy_version": 1, "learner/loss": 0.5, "learner/kl": math.nan})
        recorder.step(2, {"policy_version": 2, "learner/loss": 0.25})
        recorder.trajectories(2, [make_episode()], policy_version=5)
        recorder.evaluation({"step": 2, "policy_version": 2, "reward/mean": 0.75})
        recorder.rewind(1)
        recorder.step(
            2,
            {
                "policy_version": 2,
                "learner/loss": 0.125,
                "learner/importance_weight/share_5": 0.75,
                "learner/importance_weight/share_9": 0.25,
            },
        )
        recorder.trajectories(2, [make_episode()], policy_version=5)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("learner/loss")] == [(1, 0.5), (2, 0.125)]
    assert "learner/kl" not in events.Tags()["scalars"]
    assert [e.value for e in events.Scalars("observability/non_finite")] == [1.0, 0.0]
    tensors = events.Tags()["tensors"]
    wanted = {"rollout/reward", "rollout/sampled_tokens", "rollout/turns", "buffer/staleness"}
    assert wanted | {"learner/importance_weight", "rollout/completions"} <= set(tensors)
    *_, text = events.Tensors("rollout/completions")
    assert b"&lt;calc>1+1&lt;/calc>2" in text.tensor_proto.string_val[0]
    hparams = events.PluginTagToContent("hparams")
    assert set(hparams) == {"_hparams_/session_start_info", "_hparams_/session_end_info"}


class FakeWandbRun:
    """Rows as W&B 0.31 makes them: what names a step that is past is dropped."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._axes: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self._step = 0

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        if step_metric is not None:
            self._axes[name.removesuffix("*")] = step_metric

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        if step is not None and step < self._step:
            return
        if step is not None and step > self._step:
            self._flush(step)
        self._open |= data
        if commit or (commit is None and step is None):
            self._flush(self._step + 1)

    def finish(self) -> None:
        self._flush(self._step + 1)

    def points(self, key: str) -> list[tuple[int, Any]]:
        """As they are drawn."""
        (axis,) = (axis for prefix, axis in self._axes.items() if key.startswith(prefix))
        return [(row[axis], row[key]) for row in self.rows if key in row]

    def _flush(self, step: int) -> None:
        if self._open:
            self.rows.append(self._open)
        self._open, self._step = {}, step


def test_wandb_keeps_a_late_evaluation_and_the_steps_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeWandbRun()
    wandb = SimpleNamespace(init=lambda **_: run, Histogram=list, Html=str)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = WandbRun(WandbSection(), tmp_path / "run", hparams={})
    with Recorder(tmp_path / "run", NO_EXTRAS, num_steps=10, sinks=[sink]) as recorder:
        for step in range(1, 5):
            recorder.step(step, {"policy_version": step, "learner/loss": step / 8})
            if step == 3:
                for late in (1, 2):
                    recorder.evaluation({"step": late, "policy_version": late, "reward/mean": 0.5})
            recorder.trajectories(step, [make_episode()], policy_version=4)
    assert run.points("learner/loss") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert run.points("evaluation/reward/mean") == [(1, 0.5), (2, 0.5)]
    assert [step for step, _ in run.points("rollout/reward")] == [1, 2, 3, 4]


def test_sinks_are_called_by_one_thread_at_a_time(tmp_path: Path) -> None:
    """The trajectories of a step are written beside the loop, which an evaluation may reach."""

    class Slow:
        num_inside = most_inside = num_written = 0

        def write(self, record: StepRecord) -> None:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
            time.sleep(0.02)
            self.num_inside -= 1
            self.num_written += 1

        def rewind(self, step: int) -> None: ...

        def close(self) -> None: ...

    sink = Slow()
    with Recorder(tmp_path / "run", NO_EXTRAS, num_steps=10, sinks=[sink]) as recorder:
        beside = threading.Thread(
            target=lambda: recorder.trajectories(1, [make_episode()], policy_version=4)
        )
        beside.start()
        for step in range(5):
            recorder.evaluation({"step": step, "policy_version": step, "reward/mean": 0.5})
        beside.join()
    assert (sink.num_written, sink.most_inside) == (6, 1)


def test_evaluation_transcripts_are_written_beside_those_of_steps_and_rolled_back(
    tmp_path: Path,
) -> None:
    with open_recorder(tmp_path) as recorder:
        for step in (2, 4):
            recorder.evaluation_trajectories(step, [make_episode()])
        files = [path.name for path in sorted((tmp_path / "run" / "evaluations").iterdir())]
        assert files == ["step_000002.jsonl", "step_000004.jsonl"]
        recorder.rewind(3)
    files = [path.name for path in (tmp_path / "run" / "evaluations").iterdir()]
    assert files == ["step_000002.jsonl"]
    config = ObservabilitySection(trajectories_every_steps=0, tensorboard=False, trace=False)
    with Recorder(tmp_path / "other", config, num_steps=10) as recorder:
        recorder.evaluation_trajectories(2, [make_episode()])
    assert not (tmp_path / "other" / "evaluations").exists()


def test_stages_and_spans_end_up_in_one_trace(tmp_path: Path) -> None:
    actor = Tracer("actor-0")
    with actor.span("episode", group=3):
        pass
    config = ObservabilitySection(tensorboard=False)
    with open_recorder(tmp_path, config) as recorder:
        with recorder.stage("starting engines"):
            pass
        recorder.spans(actor.drain())
    events = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names == {"starting engines", "episode"}
    tracks = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert tracks == {"actor-0", "controller"}


def test_a_failed_stage_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = open_recorder(tmp_path)
    with pytest.raises(RuntimeError), recorder.stage("starting engines"):
        raise RuntimeError
    recorder.close()
    recorder.close()
    assert "starting engines ..." in caplog.text
    assert "starting engines failed after" in caplog.text


def test_a_terminal_shows_the_running_stage_and_the_progress() -> None:
    console = Console(force_terminal=True, width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    display = Display(num_steps=10, console=console)
    with display.stage("starting engines"):
        console.print(display)
    assert "starting engines  0:00" in console.export_text()
    display.step({"step": 4, "rollout/reward/mean": 0.5, "rollout/tokens_per_s": 1200.0})
    display.step({"step": 5, "rollout/reward/mean": 0.5, "rollout/tokens_per_s": 1200.0})
    console.print(display)
    display.close()
    text = console.export_text()
    for part in ("step 5/10", "50%", "reward 0.500", "tok/s 1.2k", "stale -", "ETA 0:0"):
        assert part in text


def test_the_panel_fits_into_80_columns_and_no_text_controls_the_terminal() -> None:
    console = Console(force_terminal=True, width=80, file=io.StringIO())
    display = Display(num_steps=1000, console=Console(file=io.StringIO()))
    metrics = {"rollout/reward/mean": -123.4, "rollout/tokens_per_s": 999.6}
    idle = {"learner/idle_fraction": 1.0, "rollout/idle_fraction": 1.0}
    display.step({"step": 999, "buffer/staleness/mean": 12.3, **metrics, **idle})
    with display.stage("starting") as stage, console.capture() as capture:
        stage.wait_for(["model \x1b[2J" + "x" * 90, "engines 1/2 ready"])
        console.print(display)
    progress, figures, first, second = re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()
    assert max(map(len, (progress, figures, first, second))) <= 80
    assert "step 999/1000" in progress
    assert figures.startswith("reward")
    assert "model \\x1b[2Jxxx" in first
    assert second.strip() == "engines 1/2 ready"


def test_setting_up_logs_twice_adds_one_console(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    logs.set_up()
    logs.set_up()
    assert len(root.handlers) == 1
    assert logging.getLogger("vllm").level == logging.WARNING
