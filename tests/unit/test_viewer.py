"""The trajectory page, which contains its data whatever text completions have."""

import json
import re
import shutil
import subprocess
import threading
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from episodes import make_trajectory
from tokenizers import Tokenizer, models

from raylearner.errors import ConfigError
from raylearner.observability import transcripts, viewer


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


def save_tokenizer(run_dir: Path, vocabulary: dict[str, int]) -> None:
    (run_dir / "model").mkdir()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.save(str(run_dir / "model" / "tokenizer.json"))


def data_of(page: str) -> dict[str, Any]:
    blocks = re.findall(r'<script type="application/json" id="([a-z0-9-]+)">(.*)</script>', page)
    assert [name for name, _ in blocks] == [
        "data",
        *(f"trajectory-{number}" for number in range(len(blocks) - 1)),
    ]
    listed, *whole = (json.loads(text) for _, text in blocks)
    pairs = zip(listed["trajectories"], whole, strict=True)
    return {**listed, "trajectories": [{"listed": head, **record} for head, record in pairs]}


def test_the_page_holds_the_last_step_or_the_one_asked_for(run_dir: Path) -> None:
    data = data_of(viewer.page(run_dir))
    assert (data["run"], data["step"], data["steps"]) == ("run", 12, [1, 12])
    (shown,) = data["trajectories"]
    assert shown["pieces"] == ["[5]", "[6]", "[7]"]
    assert shown["learner_logprobs"] == [None, -0.6, -1.0]
    assert data_of(viewer.page(run_dir, step=1))["step"] == 1


def test_no_completion_can_end_the_script_that_holds_it(run_dir: Path) -> None:
    page = viewer.page(run_dir)
    assert page.count("</script>") == 3
    assert page.count("<script") == 3
    assert data_of(page)["trajectories"][0]["prompt"] == "step 12: </script><b>"


def test_tokens_are_shown_as_text_where_the_run_has_a_tokenizer(run_dir: Path) -> None:
    save_tokenizer(run_dir, {"a": 5, "b": 6, "<end>": 7})
    assert data_of(viewer.page(run_dir))["trajectories"][0]["pieces"] == ["a", "b", "<end>"]


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
    data = data_of(viewer.page(tmp_path))
    (shown,) = data["trajectories"]
    assert [files[name] for name in shown["images"]] == list(pages)
    assert shown["image_token_id"] == 9
    one = next(name for name, content in files.items() if content == b"one")
    assert data["images"][one] == "data:image/png;base64,b25l"
    (tmp_path / "trajectories" / "images" / one).unlink()
    assert len(data_of(viewer.page(tmp_path))["images"]) == 1


def test_steps_are_served_and_errors_are_answered(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HTTPServer(("127.0.0.1", 0), viewer._handler(run_dir, 12)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def get(path: str) -> tuple[int, str]:
            url = f"http://127.0.0.1:{server.server_port}{path}"
            answer = requests.get(url, timeout=10)
            return answer.status_code, answer.text

        assert data_of(get("/?step=1")[1])["step"] == 1
        assert data_of(get("/")[1])["step"] == 12
        assert get("/?step=0")[0] == get("/?step=x")[0] == get("/favicon.ico")[0] == 404
        assert "step_000012" in get("/?step=0")[1]
        monkeypatch.setattr(viewer, "page", lambda *_, **__: 1 / 0)
        assert get("/") == (500, "ZeroDivisionError: division by zero")
        server.shutdown()


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
        (json.dumps(make_record(images=["../../config.yaml"])), "images"),
        (json.dumps(make_record(images=3)), "images"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_line_that_is_not_a_trajectory_is_named(run_dir: Path, line: str, problem: str) -> None:
    file = run_dir / "trajectories" / "step_000012.jsonl"
    file.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ConfigError, match=rf"step_000012\.jsonl:.*{problem}"):
        viewer.page(run_dir)


def test_other_files_are_not_steps_and_files_of_the_run_are_not_overwritten(
    run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / "trajectories" / "step_abc.jsonl").write_text("")
    (run_dir / "trajectories" / "step_000099.jsonl").mkdir()
    assert data_of(viewer.page(run_dir))["steps"] == [1, 12]
    with pytest.raises(ConfigError, match="/nowhere: "):
        viewer.page(tmp_path / "nowhere")
    file = run_dir / "trajectories" / "step_000001.jsonl"
    before = file.read_text()
    with pytest.raises(ConfigError, match="--output"):
        viewer.write(run_dir, file)
    assert file.read_text() == before
    viewer.write(run_dir, run_dir / "page.html")
    (run_dir / "model").mkdir()
    (run_dir / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        viewer.page(run_dir)


def test_damaged_files_and_failed_writes_are_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output .*page\.html: .*No such file"):
        viewer.write(run_dir, tmp_path / "none" / "page.html")
    damaged = run_dir / "trajectories" / "step_000001.jsonl"
    damaged.write_text(damaged.read_text() + '{"group_id": 1\n')
    with pytest.raises(ConfigError, match=r"step_000001\.jsonl:2: "):
        viewer.page(run_dir, step=1)
    for broken in (b"model: [\n", b"\xff"):
        (run_dir / "config.yaml").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            viewer.page(run_dir)


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium in PATH")


def shown_by_a_browser(page: Path, tmp_path: Path) -> str:
    """The document after its scripts ran."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.partition('<div id="shown">')[2].partition("<script")[0]


@needs_chromium
def test_a_browser_shows_hostile_completions_and_very_long_ones(
    run_dir: Path, tmp_path: Path
) -> None:
    pieces = ("<!-- <script>", "</script>", "<img src=x onerror=alert(1)>")
    pieces += ("\x1b[2J", "]]>-->", "&lt;")
    size = 200_000
    names = {f"w{number}": number for number in range(len(pieces), 10)}
    save_tokenizer(run_dir, {piece: number for number, piece in enumerate(pieces)} | names)
    record = make_record(
        prompt="".join(pieces),
        answer="\ud83d",
        error="<!-- <script>",
        token_ids=[number % len(pieces) for number in range(size)],
        loss_mask=[True] * size,
        train_mask=[True] * size,
        behavior_logprobs=[-0.5] * size,
        learner_logprobs=[-0.5] * (size - 1) + [-0.75],
        policy_versions=[3] * size,
        turns=[{"start": 1, "end": size, "reply_end": size, "tool": None, "is_valid": True}],
    )
    file = run_dir / "trajectories" / "step_000013.jsonl"
    file.write_text(json.dumps(record) + "\n")
    viewer.write(run_dir, tmp_path / "page.html")
    shown = shown_by_a_browser(tmp_path / "page.html", tmp_path)
    for written in ("&lt;!-- &lt;script&gt;", "&lt;/script&gt;", "&lt;img src=x", r"\x1b[2J"):
        assert f">{written}" in shown
    assert "&amp;lt;" in shown
    assert "0.25 nats" in shown
    assert r"\ud83d" in shown
    assert "197999 more tokens" in shown
    assert "<img" not in shown


def test_a_run_without_a_step_is_refused_with_its_last_failure(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"/run: .*config\.yaml"):
        viewer.page(folder)
    (folder / "config.yaml").write_text("run: {}\n")
    (folder / "metrics.jsonl").write_text("")
    error = "environment: program p:play raised KeyError: 'secret'\n  p.py, line 3, in play"
    (folder / "failures.jsonl").write_text(json.dumps({"step": 1, "error": error}) + "\n")
    with pytest.raises(ConfigError, match="completed no step") as raised:
        viewer.page(folder)
    assert error in str(raised.value)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="trajectories_every_steps"):
        viewer.page(folder)


def test_failures_on_record_are_on_the_page(run_dir: Path) -> None:
    error = "reward: mine raised KeyError: 'gold'\n  mine.py, line 3, in mine"
    lines = [json.dumps({"step": 2, "error": error}), "{torn", json.dumps({"step": 3})]
    (run_dir / "failures.jsonl").write_text("\n".join(lines) + "\n")
    assert data_of(viewer.page(run_dir))["failures"] == [{"step": 2, "error": error}]
