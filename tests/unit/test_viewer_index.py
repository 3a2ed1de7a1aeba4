"""The index of trajectories: filters, pages, groups, and files that change under it."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from episodes import make_trajectory
from run_directories import make_record, write_lines, write_run

from raylearner.observability.transcripts import write
from raylearner.observability.viewer.index import Index
from raylearner.observability.viewer.query import Filters
from raylearner.observability.viewer.series import Series

ALL: Mapping[str, Any] = {"sort": "step", "is_descending": False, "offset": 0, "limit": 1000}


def read(run_dir: Path) -> Index:
    index = Index(run_dir, Series(run_dir / "metrics.jsonl"))
    index.refresh("training")
    index.wait()
    return index


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """100 steps of 62 groups of 8 and one of 4: 50,000 trajectories."""
    folder = tmp_path_factory.mktemp("large")
    line = json.dumps(make_record(text="@text", prompt="<|im_start|>user\n@prompt<|im_end|>\n"))
    line = line.replace('"group_id": 0', '"group_id": @group').replace(
        '"sample_index": 1, "segment": 0, "source": "sums", "reward": 0.5',
        '"sample_index": @sample, "segment": 0, "source": "sums", "reward": @reward',
    )
    (folder / "trajectories").mkdir()
    for step in range(1, 101):
        rows = [
            line.replace("@group", str(i // 8))
            .replace("@sample", str(i % 8))
            .replace("@reward", str(i % 8 / 7))
            .replace("@prompt", f"What is {step}+{i // 8}?")
            .replace("@text", f"number {i} of step {step}" + " rare needle" * (i == 77))
            for i in range(500)
        ]
        (folder / f"trajectories/step_{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
    index = read(folder)
    yield index
    index.close()


def test_fifty_thousand_trajectories_are_counted_filtered_sorted_and_paged(large: Index) -> None:
    page: Mapping[str, Any] = {**ALL, "sort": "reward", "is_descending": True, "limit": 100}
    total, rows = large.trajectories(Filters(), **page)
    assert (total, len(rows), {row["reward"] for row in rows}) == (50_000, 100, {1.0})
    last = {**page, "offset": 49_950}
    assert [row["reward"] for row in large.trajectories(Filters(), **last)[1]] == [0.0] * 50
    assert large.trajectories(Filters(reward_min=0.99), **page)[0] == 6200
    assert large.trajectories(Filters(text="NEEDLE rare"), **page)[0] == 100
    assert large.trajectories(Filters(text="needle", step=7), **page)[0] == 1
    assert large.trajectories(Filters(text="need%e"), **page)[0] == 0
    total, groups = large.groups(Filters(), **page)
    assert (total, len(groups), len(groups[0]["members"])) == (6300, 100, 8)
    assert groups[0]["question"] == "What is 100+0?"
    assert large.groups(Filters(text="needle"), **page)[0] == 100
    assert large.refresh("training") == (100, 100)


def test_a_group_has_its_mean_and_spread_and_counts_each_episode_once(tmp_path: Path) -> None:
    records = [
        make_record(sample_index=0, reward=1.0),
        make_record(sample_index=0, segment=1, reward=1.0),
        make_record(sample_index=1, reward=0.0),
        make_record(sample_index=2, reward=None, error="tool: gone\n line", stop_reason="error"),
        make_record(group_id=1, reward=1.0),
    ]
    index = read(write_run(tmp_path, steps={2: records}))
    group = index.group("training", 2, "0")
    assert (group["mean"], group["spread"], len(group["members"])) == (0.5, 0.5, 4)
    total, groups = index.groups(Filters(), **{**ALL, "sort": "spread", "is_descending": True})
    assert [g["group_key"] for g in groups] == ["0", "1"]
    facets = index.facets("training")
    assert facets["stop"] == [["answer", 4], ["error", 1]]
    assert facets["error_kind"] == [["tool", 1]]
    assert total == 2


@pytest.mark.parametrize(
    ("filters", "lines"),
    [
        ({"stop": "max_tokens"}, [2]),
        ({"source": "words"}, [3]),
        ({"tool": "search"}, [2]),
        ({"error": "any"}, [3]),
        ({"error": "none"}, [1, 2]),
        ({"error": "engine"}, [3]),
        ({"turns_min": 2}, [2]),
        ({"tokens_max": 1}, [3]),
        ({"staleness_min": 2}, [3]),
        ({"group": "5"}, [2]),
        ({"step": 1}, []),
        ({"text": "lost 1+1"}, [3]),
    ],
)
def test_a_filter_selects_its_rows(
    tmp_path: Path, filters: dict[str, Any], lines: Sequence[int]
) -> None:
    turn = {"start": 1, "end": 2, "reply_end": 2, "text": "", "tool": "search", "is_valid": True}
    records = [
        make_record(),
        make_record(stop_reason="max_tokens", turns=[turn, {**turn, "start": 2}], group_id=5),
        make_record(
            source="words",
            error="engine: lost",
            loss_mask=[False, True, False],
            train_mask=[False, True, False],
            policy_versions=[-1, 1, -1],
        ),
    ]
    index = read(write_run(tmp_path, steps={5: records}, num_steps=4))
    found = index.trajectories(Filters(**filters), **ALL)[1]
    assert [row["line"] for row in found] == list(lines)


def test_files_that_are_added_rewritten_and_removed_are_followed(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps={1: [make_record()], 2: [make_record(), make_record()]})
    index = read(run_dir)
    assert index.trajectories(Filters(), **ALL)[0] == 3
    write_lines(run_dir / "trajectories/step_000003.jsonl", [make_record()] * 4)
    assert index.refresh("training", 3) == (3, 3)
    file = run_dir / "trajectories/step_000002.jsonl"
    write_lines(file, [make_record(reward=0.25)])
    os.utime(file, ns=(1, 1))
    index.refresh("training")
    index.wait()
    assert index.trajectories(Filters(), **ALL)[0] == 6
    assert [r["reward"] for r in index.trajectories(Filters(step=2), **ALL)[1]] == [0.25]
    file.unlink()
    index.refresh("training")
    assert index.trajectories(Filters(step=2), **ALL)[0] == 0
    assert index.load("training", 2, 1) is None


def test_a_half_written_line_waits_and_damaged_lines_are_reported(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps={1: [make_record()]})
    file = run_dir / "trajectories/step_000001.jsonl"
    whole = file.read_text()
    file.write_text(whole + "{torn\n" + json.dumps({"version": 0}) + "\n" + whole + whole[:40])
    index = read(run_dir)
    assert [row["line"] for row in index.trajectories(Filters(), **ALL)[1]] == [1, 4]
    problems = index.problems("training")
    assert ["000001.jsonl:2: " in problems[0], "000001.jsonl:3: " in problems[1]] == [True, True]
    loaded = index.load("training", 1, 4)
    assert loaded == json.loads(whole)


def test_metrics_are_read_on_while_a_run_writes_them_and_again_after_a_rollback(
    tmp_path: Path,
) -> None:
    file = tmp_path / "metrics.jsonl"
    series = Series(file)
    assert (series.refresh(), series.num_rows) == ("none", 0)
    file.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "b": 5')
    first = series.refresh()
    assert (series.points("a", 10), series.num_rows) == (([1], [1.0]), 1)
    assert series.refresh() == first
    with file.open("a") as appended:
        appended.write('.5}\nnot json\n[]\n{"step": 3, "a": 3, "b": null}\n')
    assert series.refresh() != first
    assert (series.points("a", 10), series.points("b", 10)) == (([1, 3], [1.0, 3.0]), ([2], [5.5]))
    assert series.num_damaged == 2
    draft = tmp_path / "draft"
    draft.write_text('{"step": 1, "a": 9.0}\n')
    draft.replace(file)
    series.refresh()
    assert series.points("a", 10) == ([1], [9.0])


def test_long_curves_are_thinned_to_means(tmp_path: Path) -> None:
    write_lines(tmp_path / "m.jsonl", [{"step": s, "a": float(s)} for s in range(1, 1001)])
    series = Series(tmp_path / "m.jsonl")
    series.refresh()
    assert series.points("a", 2) == ([500, 1000], [250.5, 750.5])
    assert len(series.points("a", 300)[0]) == 250


def test_samples_of_a_prompt_are_a_group_within_their_evaluation_set(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    samples = [make_trajectory(prompt_id="p", sample_index=i, reward=float(i)) for i in (0, 1)]
    write(folder, 4, samples)
    write(folder, 4, [make_trajectory(prompt_id="p", reward=0.5)], evaluation_set="hard")
    index = Index(tmp_path, Series(tmp_path / "metrics.jsonl"))
    index.refresh("evaluation", 4)
    total, groups = index.groups(Filters(kind="evaluation"), **ALL)
    means = {group["group_key"]: (group["mean"], len(group["members"])) for group in groups}
    assert (total, means) == (2, {"p": (0.5, 2), "hard/p": (0.5, 1)})
    assert {group["source"] for group in groups} == {"default", "hard/default"}
    index.close()
