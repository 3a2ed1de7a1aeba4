"""The viewer's endpoints: what they answer for runs of all kinds, and whose message a token is."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from run_directories import (
    VOCABULARY,
    chat_record,
    make_record,
    save_tokenizer,
    write_lines,
    write_run,
    write_sweep,
)
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from raylearner.errors import ConfigError
from raylearner.observability.viewer import records
from raylearner.observability.viewer.app import make_app
from raylearner.observability.viewer.markup import messages, question
from raylearner.observability.viewer.runs import Library
from raylearner.observability.viewer.server import serve


class Page:
    """A client of the viewer of some directories."""

    def __init__(self, *roots: Path) -> None:
        self.library = Library(roots)
        self.client = TestClient(make_app(self.library), base_url="http://127.0.0.1:8266")

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self.client.get(f"/api/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, **parameters: Any) -> tuple[int, str]:
        answer = self.client.get(f"/api/{path}", params=parameters)
        return answer.status_code, answer.json()["error"]


def test_runs_are_listed_with_their_progress_and_paged_at_five_hundred(tmp_path: Path) -> None:
    for number in range(500):
        folder = tmp_path / f"group-{number % 5}" / f"run-{number:03d}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("run:\n  name: x\n  num_steps: 2\n")
        write_lines(folder / "metrics.jsonl", [{"step": 1, "rollout/reward/mean": 0.5}])
    write_run(tmp_path / "newest", steps={})
    page = Page(tmp_path)
    found = page.get("runs", limit=50)
    assert (found["total"], len(found["runs"])) == (501, 50)
    newest = next(run for run in found["runs"] if run["id"] == "newest")
    assert (newest["step"], newest["num_steps"], newest["state"]) == (2, 2, "complete")
    assert (newest["reward_first"], newest["reward_last"]) == (0.1, 0.2)
    assert page.get("runs", text="group-3 run-00")["total"] == 2
    assert page.get("runs", state="stopped")["total"] == 500
    assert len(page.get("runs", offset=500)["runs"]) == 1


def test_runs_of_several_directories_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a/runs/first", "b/runs/first"):
        write_run(tmp_path / folder, steps={})
    several = Library([tmp_path / "a/runs", tmp_path / "b/runs"])
    assert sorted(several.runs()) == ["b/runs/first", "runs/first"]
    single = Library([tmp_path / "a/runs/first", tmp_path / "b/runs/first"])
    assert sorted(single.runs()) == ["first", "runs/first"]


def test_a_directory_without_runs_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Library([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"no runs.*config\.yaml"):
        Library([tmp_path])


def test_curves_of_several_runs_come_together_and_unchanged_ones_are_not_sent(
    tmp_path: Path,
) -> None:
    first = write_run(tmp_path / "a", steps={}, num_steps=3)
    write_lines(first / "eval.jsonl", [{"step": 0, "reward/mean": 0.0}])
    write_run(tmp_path / "b", steps={})
    page = Page(tmp_path)
    keys = ["rollout/reward/mean", "evaluation/reward/mean"]
    found = page.get("metrics", run=["a", "b"], key=keys)
    assert found["curves"]["a"][keys[0]][0] == [1, 2, 3]
    assert found["curves"]["a"][keys[1]] == [[0], [0.0]]
    assert found["curves"]["b"][keys[1]] == [[], []]
    again = page.get("metrics", run=["a", "b"], key=keys, stamp=found["stamp"])
    assert again["is_unchanged"]
    with (first / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/reward/mean": 0.9}\n')
    found = page.get("metrics", run=["a", "b"], key=keys, stamp=found["stamp"])
    assert found["curves"]["a"][keys[0]][0] == [1, 2, 3, 4]
    described = page.get("keys", run=["a"])
    assert described["rollout/reward/mean"]["unit"] == "reward"
    rows = page.get("configuration", run=["a", "b"])["rows"]
    assert {"key": "run.num_steps", "values": ["3", "2"]} in rows


def test_a_trajectory_is_cut_into_messages_and_its_template_is_marked(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps={1: [chat_record()]})
    save_tokenizer(run_dir)
    shown = Page(run_dir).get("trajectory", run="run", step=1, line=1)
    assert shown["pieces"] == [VOCABULARY[i] for i in shown["token_ids"]]
    visible = [
        (part["role"], part["turn"], "".join(p for p, m in pairs if not m))
        for part in shown["parts"]
        for pairs in [
            list(zip(shown["pieces"], shown["markup"], strict=True))[part["start"] : part["end"]]
        ]
    ]
    assert [part for part in visible if part[2]] == [
        ("user", None, "1+1?"),
        ("assistant", 0, "<calc>1+1</calc>"),
        ("tool", 0, "2"),
        ("assistant", 1, "2"),
    ]
    assert shown["turns"][0]["calls"] == [{"name": "calculator", "arguments": "1+1"}]


def test_sampled_markup_is_shown_since_it_trains() -> None:
    record = make_record(
        token_ids=[0, 1, 1], loss_mask=[False, True, False], train_mask=[False, True, False]
    )
    vocabulary = {"<|im_start|>": 0, "<|im_end|>": 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|im_end|>"))
    assert records.view(record, tokenizer)["markup"][1] == 0
    assert records.view(record, tokenizer)["markup"][2] == 1


def test_tokens_of_one_character_show_it_once() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "Ã": 1, "©": 2}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode("aéa").ids
    assert records.pieces(ids, tokenizer) == ["a", "é", "", "a"]
    assert records.pieces([7, 8], None) == ["[7]", "[8]"]


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] 2+2? [/INST]",
        "<|start|>user<|message|>2+2?<|end|><|start|>assistant",
        "<|user|>\n2+2?<|end|>\n<|assistant|>\n",
        "<\uff5cbegin▁of▁sentence\uff5c>Be brief.<\uff5cUser\uff5c>2+2?<\uff5cAssistant\uff5c>",
        "2+2?",
    ],
)
def test_the_question_of_a_prompt_is_found_in_the_templates_of_many_models(prompt: str) -> None:
    assert question(prompt) == "2+2?"
    assert ("Be brief." in prompt) == (len(list(messages(prompt))) == 2)


def test_runs_without_trajectories_and_of_other_versions_say_so(tmp_path: Path) -> None:
    write_run(tmp_path / "bare", steps={})
    early = tmp_path / "early"
    write_lines(early / "failures.jsonl", [{"step": 1, "error": "tool: broken"}])
    write_lines(early / "metrics.jsonl", [])
    old = write_run(tmp_path / "old", steps={1: [{"prompt": "x", "completion": "y"}]})
    (old / "config.yaml").write_text("[1]\n")
    page = Page(tmp_path)
    assert "trajectories_every_steps" in page.get("run", run="bare")["empty"]
    found = page.get("run", run="early")
    assert "log.txt" in found["empty"]
    assert [failure["error"] for failure in found["failures"]] == ["tool: broken"]
    listed = page.get("trajectories", run="old", step=1)
    assert (listed["total"], len(listed["problems"])) == (0, 1)
    assert "token_ids" in listed["problems"][0]


def test_wrong_requests_get_a_reason(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps={1: [make_record()]})
    page = Page(tmp_path)
    assert page.refusal("run", run="gone")[0] == 404
    assert page.refusal("trajectory", run="run", step=1, line=9)[0] == 404
    status, text = page.refusal("trajectory", run="run", step=7, line=1)
    assert (status, "last step is 1" in text) == (404, True)
    assert page.refusal("group", run="run", step=1, group="x")[0] == 404
    assert page.refusal("trajectories", run="run", step=-1)[0] == 422
    assert page.refusal("trajectories", run="run", step="9" * 500)[0] == 422
    assert page.refusal("trajectories", run="run", sort="; DROP TABLE rows")[0] == 422
    assert page.refusal("nothing")[0] == 404
    (run_dir / "config.yaml").write_bytes(b"\xff")
    status, text = page.refusal("trajectory", run="run", step=1, line=1)
    assert (status, "config.yaml" in text) == (404, True)


def test_images_of_a_run_are_served_by_their_names_alone(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps={1: [make_record()]})
    name = "0" * 32 + ".png"
    (run_dir / "trajectories/images").mkdir()
    (run_dir / "trajectories/images" / name).write_bytes(b"picture")
    page = Page(tmp_path)
    answer = page.client.get("/api/image", params={"run": "run", "name": name})
    assert (answer.content, answer.headers["content-type"]) == (b"picture", "image/png")
    assert page.refusal("image", run="run", name="../../config.yaml")[0] == 404
    assert page.refusal("image", run="run", name="1" * 32 + ".png")[0] == 404


def test_the_page_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps={})
    client = Page(tmp_path).client
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    for name in ("main.js", "base.css", "icon.svg"):
        found = client.get(f"/static/{name}")
        assert found.status_code == 200
        assert "://" not in found.text.replace("http://www.w3.org/2000/svg", "")


def test_a_port_in_use_and_a_missing_step_are_named(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps={1: [make_record()]})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: is in use.*--port"):
            serve([run_dir], step=None, port=port, on_ready=print)
    with pytest.raises(ConfigError, match=r"--step 9: .*the last one is 1"):
        serve([run_dir], step=9, port=8266, on_ready=print)


def test_evaluations_have_their_own_list_by_prompt(tmp_path: Path) -> None:
    played = [make_record(prompt_id=f"p{i}", reward=float(i)) for i in range(3)]
    run_dir = write_run(tmp_path / "run", steps={1: [make_record()]}, evaluations={0: played})
    page = Page(run_dir)
    found = page.get("trajectories", run="run", kind="evaluation", step=0, sort="reward")
    assert [row["group_key"] for row in found["rows"]] == ["p2", "p1", "p0"]
    shown = page.get("trajectory", run="run", kind="evaluation", step=0, line=3)
    assert (shown["prompt_id"], shown["reward"]) == ("p2", 2.0)
    assert json.loads(json.dumps(shown["texts"]))[-1]["role"] == "assistant"


def test_a_sweep_has_its_axes_trials_and_runs(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "grid")
    command = "python -m raylearner train x.yaml run.dir=there"
    (folder / "results.csv").write_text(f"trial,command\n0,{command}\n")
    page = Page(tmp_path)
    assert page.get("runs")["sweeps"] == [{"id": "grid", "statuses": {"done": 8}}]
    sweep = page.get("sweep", sweep="grid")
    assert [(axis["is_number"], axis["labels"]) for axis in sweep["axes"]] == [
        (False, ["ppo", "gspo"]),
        (True, ["0.001", "0.01"]),
    ]
    trial = sweep["trials"][0]
    assert (trial["run"], trial["value"], trial["command"]) == ("grid/trials/000", 0.5, command)


def test_a_running_trial_has_its_value_so_far_and_other_versions_are_refused(
    tmp_path: Path,
) -> None:
    folder = write_sweep(tmp_path / "grid")
    page = Page(tmp_path)
    record = json.loads((folder / "sweep.json").read_text())
    record["trials"][0] |= {"status": "running", "value": None, "step": 0}
    (folder / "sweep.json").write_text(json.dumps(record))
    trial = page.get("sweep", sweep="grid")["trials"][0]
    assert (round(trial["value"], 6), trial["step"]) == (0.3, 3)
    del record["points"]
    (folder / "sweep.json").write_text(json.dumps(record))
    status, text = page.refusal("sweep", sweep="grid")
    assert (status, "sweep.json" in text, "version" in text) == (404, True, True)
    (folder / "sweep.json").write_text("{")
    assert page.refusal("sweep", sweep="grid")[0] == 404
