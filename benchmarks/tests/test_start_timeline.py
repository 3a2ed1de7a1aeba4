"""The timeline of a start, from the spans of its processes."""

from pathlib import Path

from benchmarks.gpu.start import timeline
from raylearner.observability.spans import Span, TraceFile


def test_a_phase_lasts_from_its_first_begin_to_its_last_end(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.write(
        [
            Span("controller", "preparing the model", 101.0, 2.0),
            Span("rollout-0", "start: loading weights", 104.0, 2.0),
            Span("rollout-11", "start: loading weights", 105.0, 4.0),
            Span("learner-0", "start: compiling", 103.0, 10.0),
            Span("learner-0", "step", 120.0, 1.0),
        ]
    )
    expected = {
        "controller: preparing the model": (1.0, 3.0),
        "learner: compiling": (3.0, 13.0),
        "rollout: loading weights": (4.0, 9.0),
    }
    assert timeline(tmp_path / "trace.json", started_s=100.0) == expected  # of a run that goes on
    file.close()
    assert timeline(tmp_path / "trace.json", started_s=100.0) == expected
