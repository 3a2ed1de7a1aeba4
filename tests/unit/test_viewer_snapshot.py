"""The page of one step in a file, which contains its data whatever text completions have."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episodes import make_trajectory
from run_directories import make_record, save_tokenizer

from raylearner.errors import ConfigError
from raylearner.observability import transcripts
from raylearner.observability.viewer import snapshot


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    for step in (1, 12):
        record = make_record(prompt=f"step {step}: </script><b>")
        (folder / "trajectories" / f"step_{step:06d}.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def data_of(page: str) -> dict[str, Any]:
    blocks = re.findall(r'<script type="application/json" id="([a-z0-9-]+)">(.*)</script>', page)
    assert blocks[0][0] == "answers"
    return {name: json.loads(text) for name, text in blocks}


def test_the_page_holds_the_last_step_or_the_one_asked_for(run_dir: Path) -> None:
    data = data_of(snapshot.page(run_dir))
    assert (data["answers"]["run"]["id"], data["answers"]["step"]) == ("run", 12)
    assert data["trajectory-1"]["pieces"] == ["[5]", "[6]", "[7]"]
    assert data["trajectory-1"]["learner_logprobs"] == [None, -0.6, -1.0]
    assert [row["group_key"] for row in data["answers"]["groups"]["rows"]] == ["0"]
    assert data_of(snapshot.page(run_dir, step=1))["answers"]["step"] == 1


def test_no_completion_can_end_the_script_that_holds_it(run_dir: Path) -> None:
    page = snapshot.page(run_dir)
    assert page.count("</script>") == page.count("<script") == 3
    assert data_of(page)["trajectory-1"]["prompt"] == "step 12: </script><b>"


def test_the_page_has_all_modules_and_loads_nothing(run_dir: Path) -> None:
    page = snapshot.page(run_dir)
    assert not re.search(r"^(import|export) ", page, re.MULTILINE)
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "default-src 'none'" in page


def test_tokens_are_shown_as_text_where_the_run_has_a_tokenizer(run_dir: Path) -> None:
    save_tokenizer(run_dir, ["?", "0", "1", "2", "3", "a", "b", "<end>"])
    assert data_of(snapshot.page(run_dir))["trajectory-1"]["pieces"] == ["a", "b", "<end>"]


def test_images_are_written_once_and_shown_where_their_placeholders_stand(tmp_path: Path) -> None:
    pages = (b"one", b"two", b"one")
    token_ids = np.array([5, 9, 9, 6, 9, 6, 9, 7], np.int32)
    trajectory = make_trajectory(
        [-1] * 7 + [0], token_ids=token_ids, images=pages, image_token_id=9
    )
    for step in (1, 2):
        transcripts.write(tmp_path / "trajectories", step, [trajectory])
    files = {path.name: path.read_bytes() for path in (tmp_path / "trajectories/images").iterdir()}
    assert sorted(files.values()) == [b"one", b"two"]
    data = data_of(snapshot.page(tmp_path))
    shown = data["trajectory-1"]
    assert [files[name] for name in shown["images"]] == list(pages)
    assert shown["image_token_id"] == 9
    one = next(name for name, content in files.items() if content == b"one")
    assert data["answers"]["images"][one] == "data:image/png;base64,b25l"
    (tmp_path / "trajectories" / "images" / one).unlink()
    assert len(data_of(snapshot.page(tmp_path))["answers"]["images"]) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1]", "list"),
        ("[" * 5000, "JSON"),
        ("{}", "token_ids"),
        (json.dumps(make_record(token_ids=[-1, 2, 3])), "token_ids"),
        (json.dumps(make_record(token_ids=["a", 2, 3])), "token_ids"),
        (json.dumps(make_record(loss_mask=[True])), "loss_mask"),
        (json.dumps(make_record(turns=[1])), "turns"),
        (json.dumps(make_record(turns=[{"start": 0, "end": 9, "reply_end": 9}])), "turns"),
        (json.dumps(make_record(images=["../../config.yaml"])), "images"),
        (json.dumps(make_record(images=3)), "images"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_line_that_is_not_a_trajectory_is_named(run_dir: Path, line: str, problem: str) -> None:
    file = run_dir / "trajectories" / "step_000012.jsonl"
    file.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ConfigError, match=rf"step_000012\.jsonl:1.*{problem}"):
        snapshot.page(run_dir)


def test_other_files_are_not_steps_and_files_of_the_run_are_not_overwritten(
    run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "trajectories" / "step_abc.jsonl").write_text("")
    (run_dir / "trajectories" / "step_000099.jsonl").mkdir()
    assert data_of(snapshot.page(run_dir))["answers"]["step"] == 12
    with pytest.raises(ConfigError, match="/nowhere: "):
        snapshot.page(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="one run"):
        snapshot.page(tmp_path)
    with pytest.raises(ConfigError, match="no step 3; the last one is 12"):
        snapshot.page(run_dir, step=3)
    file = run_dir / "trajectories" / "step_000001.jsonl"
    before = file.read_text()
    with pytest.raises(ConfigError, match="--output"):
        snapshot.write(run_dir, file)
    assert file.read_text() == before
    snapshot.write(run_dir, run_dir / "page.html")
    (run_dir / "model").mkdir()
    (run_dir / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        snapshot.page(run_dir)


def test_damaged_files_and_failed_writes_are_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output .*page\.html: .*No such file"):
        snapshot.write(run_dir, tmp_path / "none" / "page.html")
    damaged = run_dir / "trajectories" / "step_000001.jsonl"
    damaged.write_text(damaged.read_text() + '{"group_id": 1\n')
    problems = data_of(snapshot.page(run_dir, step=1))["answers"]["groups"]["problems"]
    assert [problem.partition(": ")[0] for problem in problems] == ["step_000001.jsonl:2"]
    for broken in (b"model: [\n", b"\xff"):
        (run_dir / "config.yaml").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            snapshot.page(run_dir)


def test_a_run_without_a_step_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"/run: .*config\.yaml"):
        snapshot.page(folder)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"/run: .*log\.txt"):
        snapshot.page(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="trajectories_every_steps"):
        snapshot.page(folder)


def test_failures_on_record_are_in_the_file(run_dir: Path) -> None:
    error = "reward: mine raised KeyError: 'gold'\n  mine.py, line 3, in mine"
    lines = [json.dumps({"step": 2, "error": error}), "{torn", json.dumps({"step": 3})]
    (run_dir / "failures.jsonl").write_text("\n".join(lines) + "\n")
    found = data_of(snapshot.page(run_dir))["answers"]["run"]["failures"]
    assert found == [{"step": 2, "error": error}]
