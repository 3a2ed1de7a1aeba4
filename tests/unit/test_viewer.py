"""The trajectory page: its data is in it, whatever a completion says."""

import json
import threading
import urllib.request
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raylearner.errors import ConfigError
from raylearner.observability import transcripts, viewer
from raylearner.types import Trajectory


def make_record(**changes: Any) -> dict[str, Any]:
    return {
        "prompt_id": "p",
        "group_id": 0,
        "sample_index": 1,
        "reward": 0.5,
        "rewards": {"exact_answer": 0.5},
        "advantage": 0.25,
        "prompt": "1+1?",
        "stop_reason": "answer",
        "turns": [{"start": 1, "end": 3, "reply_end": 3, "tool": None, "is_valid": True}],
        "token_ids": [5, 6, 7],
        "loss_mask": [False, True, True],
        "train_mask": [False, True, False],
        "behavior_logprobs": [None, -0.5, -1.0],
        "learner_logprobs": [None, -0.6, -1.0],
        "policy_versions": [-1, 3, 4],
        "metrics": {},
        **changes,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    for step in (1, 12):
        record = make_record(prompt=f"step {step}: </script><b>")
        (folder / "trajectories" / f"step_{step:06d}.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def data_of(page: str) -> dict[str, Any]:
    line = next(line for line in page.splitlines() if line.startswith("const data = "))
    return json.loads(line.removeprefix("const data = ").removesuffix(";"))


def test_the_page_holds_the_last_step_or_the_one_asked_for(run_dir: Path) -> None:
    data = data_of(viewer.page(run_dir))
    assert (data["run"], data["step"], data["steps"]) == ("run", 12, [1, 12])
    (shown,) = data["trajectories"]
    assert shown["pieces"] == ["[5]", "[6]", "[7]"]
    assert shown["learner_logprobs"] == [None, -0.6, -1.0]
    assert data_of(viewer.page(run_dir, step=1))["step"] == 1


def test_no_completion_can_end_the_script_that_holds_it(run_dir: Path) -> None:
    page = viewer.page(run_dir)
    assert page.count("</script>") == 1
    assert data_of(page)["trajectories"][0]["prompt"] == "step 12: </script><b>"


def test_tokens_are_shown_as_text_where_the_run_has_a_tokenizer(run_dir: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 5, "b": 6, "<end>": 7}, unk_token="a"))
    (run_dir / "model").mkdir()
    tokenizer.save(str(run_dir / "model" / "tokenizer.json"))
    assert data_of(viewer.page(run_dir))["trajectories"][0]["pieces"] == ["a", "b", "<end>"]


def test_images_are_written_once_and_shown_where_their_placeholders_stand(tmp_path: Path) -> None:
    pages = (b"one", b"two", b"one")
    token_ids = np.array([5, 9, 9, 6, 9, 6, 9, 7], np.int32)
    is_sampled = token_ids == 7
    trajectory = Trajectory(
        group_id=0,
        sample_index=0,
        attempt=0,
        prompt_id="p",
        token_ids=token_ids,
        loss_mask=is_sampled,
        train_mask=is_sampled,
        behavior_logprobs=np.where(is_sampled, -1.0, np.nan).astype(np.float32),
        policy_versions=np.where(is_sampled, 0, -1).astype(np.int32),
        claim_policy_version=0,
        images=pages,
        image_token_id=9,
    )
    for step in (1, 2):
        transcripts.write(tmp_path / "trajectories", step, [trajectory])
    files = {path.name: path.read_bytes() for path in (tmp_path / "trajectories/images").iterdir()}
    assert sorted(files.values()) == [b"one", b"two"]
    data = data_of(viewer.page(tmp_path))
    (shown,) = data["trajectories"]
    assert [files[name] for name in shown["images"]] == list(pages)
    assert shown["image_token_id"] == 9
    one = next(name for name, content in files.items() if content == b"one")
    assert data["images"][one] == "data:image/png;base64,b25l"
    (tmp_path / "trajectories" / "images" / one).unlink()
    assert len(data_of(viewer.page(tmp_path))["images"]) == 1


def test_what_is_not_there_is_said(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no step 3; the last one is step_000012"):
        viewer.page(run_dir, step=3)
    with pytest.raises(ConfigError, match="holds no trajectories"):
        viewer.page(tmp_path)


def test_it_is_served_by_step(run_dir: Path) -> None:
    handler = viewer._handler(lambda step: viewer.page(run_dir, step=step))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/?step=1"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert data_of(answer.read().decode())["step"] == 1
        server.shutdown()


def test_what_is_damaged_or_cannot_be_written_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--output .*page\.html: cannot be written: No such file"
    ):
        viewer.write(run_dir, tmp_path / "none" / "page.html")
    damaged = run_dir / "trajectories" / "step_000001.jsonl"
    damaged.write_text(damaged.read_text() + '{"group_id": 1\n')
    with pytest.raises(ConfigError, match=r"step_000001\.jsonl:2: is not JSON"):
        viewer.page(run_dir, step=1)
    (run_dir / "config.yaml").write_text("model: [\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: is no run's configuration"):
        viewer.page(run_dir)
