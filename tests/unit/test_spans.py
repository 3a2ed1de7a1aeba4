"""Spans: bounded, safe between tasks and threads, and a trace that viewers read."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from ray._private.state import GlobalState

from raylearner.observability.spans import Span, TraceFile, Tracer


def make_span(start_s: float, end_s: float, *, name: str = "s", context: int = 0) -> Span:
    return Span("track", name, start_s, end_s - start_s, context)


def events(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def write(path: Path, *batches: list[Span], **limits: int) -> TraceFile:
    file = TraceFile(path, **limits)
    for batch in batches:
        file.write(batch)
    return file


def lanes(path: Path, *batches: list[Span]) -> dict[object, object]:
    write(path, *batches).close()
    return {event["name"]: event["tid"] for event in events(path)}


def test_spans_keep_names_arguments_and_errors() -> None:
    tracer = Tracer("actor-1")
    with tracer.span("outer", group=3), pytest.raises(KeyError), tracer.span("inner"):
        raise KeyError
    inner, outer = tracer.drain()
    assert (inner.track, inner.name) == ("actor-1", "inner")
    assert dict(inner.arguments) == {"error": "KeyError"}
    assert dict(outer.arguments) == {"group": 3}
    assert outer.start_s <= inner.start_s
    assert outer.duration_s >= inner.duration_s >= 0
    assert tracer.drain() == []


def test_memory_is_bounded_and_dropped_spans_are_counted() -> None:
    tracer = Tracer("a", max_spans=3)
    for index in range(5):
        with tracer.span(str(index)):
            pass
    assert [span.name for span in tracer.drain()] == ["2", "3", "4"]
    assert tracer.num_forgotten == 2


def test_a_tracer_that_is_off_keeps_nothing() -> None:
    tracer = Tracer("a", is_enabled=False)
    with tracer.span("x"):
        pass
    assert tracer.drain() == []


async def test_concurrent_tasks_have_contexts_of_their_own() -> None:
    tracer = Tracer("a")

    async def play() -> None:
        with tracer.span("episode"), tracer.span("generate"):
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(play())
    spans = tracer.drain()
    assert len(spans) == 6
    assert len({span.context for span in spans}) == 3


def test_threads_lose_no_span() -> None:
    tracer = Tracer("a")

    def work() -> None:
        for _ in range(500):
            with tracer.span("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tracer.drain()) == 2000


def test_spans_nest_in_one_context_and_lie_side_by_side_in_several(tmp_path: Path) -> None:
    outer, inner = make_span(0, 10, name="outer"), make_span(2, 3, name="inner")
    later = make_span(11, 12, name="later", context=5)
    other = make_span(4, 6, name="other", context=9)
    placed = lanes(tmp_path / "trace.json", [inner, outer, later, other])
    assert placed["outer"] == placed["inner"] == placed["later"] == 0
    assert placed["other"] == 1


def test_spans_of_one_row_never_cross_whatever_order_batches_come_in(tmp_path: Path) -> None:
    batches = [[make_span(5, 6)], [make_span(1, 8)], [make_span(7, 9)], [make_span(2, 3)]]
    path = tmp_path / "trace.json"
    lanes(path, *batches)
    rows: dict[object, list[tuple[float, float]]] = {}
    for event in events(path):
        start, duration = event["ts"], event["dur"]
        assert type(start) is type(duration) is int
        rows.setdefault(event["tid"], []).append((start, start + duration))
    for spans in rows.values():
        for a, b in spans:
            for c, d in spans:
                assert not a < c < b < d


def test_a_trace_is_readable_after_a_crash_and_continues_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, [make_span(0, 1, name="first")])
    with path.open("a") as file:
        file.write('{"name": "torn", "ph"')
    resumed = write(path, [make_span(2, 3, name="second")])
    resumed.close()
    resumed.close()
    write(path, [make_span(4, 5, name="third")]).close()
    assert [event["name"] for event in events(path)] == ["first", "second", "third"]


def test_a_trace_file_stops_growing_and_counts_the_rest(tmp_path: Path) -> None:
    spans = [make_span(i, i + 0.5) for i in range(10)]
    file = write(tmp_path / "trace.json", spans, max_events=4)
    file.close()
    assert len(events(tmp_path / "trace.json")) == 3
    assert file.num_dropped == 7


def test_rays_timeline_and_the_trace_have_one_clock_and_different_tracks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merged file shows both below each other."""
    start_s = 1_700_000_000.125
    profiled = {
        "event_type": "task:execute",
        "extra_data": {},
        "node_ip_address": "10.0.0.1",
        "component_type": "worker",
        "component_id": "1f",
        "start_time": int(1e9 * start_s),
        "end_time": int(1e9 * (start_s + 0.5)),
    }
    cluster = GlobalState()
    monkeypatch.setattr(cluster, "_connect_and_get_accessor", lambda: None)
    monkeypatch.setattr(cluster, "profile_events", lambda: {"1f": [profiled]})
    monkeypatch.setattr("time.sleep", lambda _: None)
    file = TraceFile(tmp_path / "trace.json")
    file.write([Span("rollout-0", "episode", start_s, 0.5)])
    file.close()
    ours = json.loads((tmp_path / "trace.json").read_text())
    both = [*ours, *cluster.chrome_tracing_dump()]
    own, rays = (event for event in both if event["ph"] == "X")
    assert (own["ts"], own["dur"]) == (rays["ts"], rays["dur"]) == (start_s * 1e6, 5e5)
    assert own["pid"] != rays["pid"]
