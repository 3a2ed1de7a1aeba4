"""Cross-field checks: each refuses its combination, names the key and the nearest way out."""

import json
from pathlib import Path
from typing import Any

import pytest

from raylearner.config.checks import check, notes
from raylearner.config.loader import load
from raylearner.config.schema import RunConfig

MINIMAL: dict[str, Any] = {
    "model": {"kind": "tiny"},
    "data": {"train": {"kind": "calculator"}},
    "environment": {"kind": "single_turn"},
    "actors": {"engine": {"kind": "vllm", "max_model_tokens": 512}},
}


def make_config(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(MINIMAL | sections)


def test_the_defaults_clash_with_nothing() -> None:
    assert check(make_config()) == []


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        (
            {"weights": {"every_steps": 2}, "replay": {"max_staleness": 0}},
            "weights.every_steps",
            "set it to 1, or replay.max_staleness to 1",
        ),
        ({"weights": {"every_steps": 4}}, "weights.every_steps", "<= replay.max_staleness + 1 = 3"),
        (
            {"actors": {"engine": {"kind": "vllm", "max_model_tokens": 512, "sleep": True}}},
            "actors.engine.sleep",
            "needs replay.max_staleness 0, got 2",
        ),
        (
            {
                "weights": {"transport": "ipc"},
                "actors": {
                    "engine": {"kind": "vllm", "max_model_tokens": 512, "tensor_parallel_size": 2}
                },
            },
            "weights.transport",
            "tensor_parallel_size = 2; use 'nccl'",
        ),
        (
            {"learner": {"lora": {}}, "weights": {"transport": "nccl"}},
            "weights.transport",
            "loses most of a small update",
        ),
        (
            {
                "learner": {"lora": {}},
                "actors": {
                    "engine": {
                        "kind": "transformers",
                        "max_model_tokens": 512,
                        "dtype": "bfloat16",
                    }
                },
            },
            "actors.engine.dtype",
            "loses most of a small update",
        ),
        (
            {"replay": {"group_size": 1, "partial_groups": "drop"}},
            "replay.group_size",
            "must be >= 2 with learner.advantage.kind 'grpo'",
        ),
        (
            {
                "replay": {"group_size": 1, "partial_groups": "drop"},
                "learner": {"advantage": {"kind": "rloo"}},
            },
            "replay.group_size",
            "'rloo'",
        ),
        (
            {
                "learner": {"num_mini_batches": 9},
                "replay": {"groups_per_step": 2, "group_size": 4},
            },
            "learner.num_mini_batches",
            "= 8, got 9",
        ),
        (
            {"learner": {"max_tokens_per_micro_batch": 500}},
            "learner.max_tokens_per_micro_batch",
            "= 512, got 500",
        ),
        (
            {"actors": {"engine": {"kind": "vllm", "max_model_tokens": 400}}},
            "actors.engine.max_model_tokens",
            "256 + 256 = 512, got 400",
        ),
        (
            {"actors": {"engine": {"kind": "vllm", "max_model_tokens": 513}}},
            "actors.engine.max_model_tokens",
            "model.max_length = 512",
        ),
        (
            {
                "model": {"kind": "tiny", "max_length": 256},
                "actors": {"engine": {"kind": "scripted", "script": "a:B"}},
            },
            "model.max_length",
            "got 256",
        ),
        ({"sampling": {"max_turn_tokens": 300}}, "sampling.max_turn_tokens", "= 256, got 300"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p", "must be 1.0 (off)"),
        ({"sampling": {"top_k": 5}}, "sampling.top_k", "must be 0 (off)"),
        ({"sampling": {"min_p": 0.1}}, "sampling.min_p", "the temperature only"),
        ({"sampling": {"repetition_penalty": 1.1}}, "sampling.repetition_penalty", "got 1.1"),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature", "must be > 0"),
        ({"evaluation": {"every_steps": 5}}, "evaluation.every_steps", "data.evaluation"),
        ({"model": {"kind": "tiny", "num_heads": 8}}, "model.num_heads", "set it to 4"),
        ({"model": {"kind": "tiny", "num_heads": 3}}, "model.hidden_size", "set it to 192"),
        (
            {"model": {"kind": "tiny", "hidden_size": 99, "num_heads": 3}},
            "model.hidden_size",
            "must be a multiple of 32 * model.num_heads = 96, got 99; set it to 192",
        ),
        (
            {"model": {"kind": "tiny", "hidden_size": 30, "num_heads": 1}},
            "model.num_heads",
            "gives heads 30 wide (30 / 1), and they must be >= 32; set model.hidden_size to 32",
        ),
        (
            {"learner": {"num_ranks": 2, "gpus_per_rank": 0.5}},
            "learner.gpus_per_rank",
            "must be 0 or 1",
        ),
        (
            {"learner": {"num_ranks": 6, "shard_size": 4}},
            "learner.shard_size",
            "must divide learner.num_ranks = 6, got 4",
        ),
        (
            {"learner": {"num_ranks": 6, "context_parallel_size": 4}},
            "learner.context_parallel_size",
            "must divide learner.num_ranks = 6, got 4",
        ),
        (
            {"learner": {"num_ranks": 3, "context_parallel_size": 3}},
            "learner.context_parallel_size",
            "the model's 4 attention heads, and divide its 4 key-value heads",
        ),
        (
            {
                "model": {"kind": "tiny", "vision": {}},
                "renderer": {"images": {"min_pixels": 784, "max_pixels": 50_176}},
                "learner": {"num_ranks": 2, "context_parallel_size": 2},
            },
            "learner.context_parallel_size",
            "sees images",
        ),
        (
            {
                "actors": {
                    "gpus_per_actor": 1,
                    "engine": {
                        "kind": "vllm",
                        "max_model_tokens": 512,
                        "tensor_parallel_size": 2,
                    },
                }
            },
            "actors.gpus_per_actor",
            ">= actors.engine.tensor_parallel_size = 2",
        ),
        ({"model": {"kind": "pretrained", "path": "./nowhere"}}, "model.path", "no such directory"),
        ({"model": {"kind": "pretrained", "path": "/a/b"}}, "model.path", "'/a/b'"),
        (
            {"data": {"train": {"kind": "jsonl", "path": "no.jsonl"}}},
            "data.train.0.path",
            "no such file",
        ),
    ],
)
def test_a_clash_is_refused_with_its_key_and_a_way_out(
    sections: dict[str, Any], key: str, words: str
) -> None:
    (finding,) = check(make_config(**sections))
    assert finding.key == key
    assert words in finding.text


def test_files_of_a_model_that_cannot_be_trained_are_named(tmp_path: Path) -> None:
    def findings() -> list[str]:
        model = {"kind": "pretrained", "path": str(tmp_path)}
        return [f"{f.key} {f.text}" for f in check(make_config(model=model))]

    (said,) = findings()
    assert said.startswith("model.path")
    assert "no config.json" in said
    quantised = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    no_weights, is_quantised = findings()
    assert "no *.safetensors" in no_weights
    assert "is quantised (awq)" in is_quantised
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert findings() == []


def test_a_group_of_one_needs_the_partial_rule_drop() -> None:
    keys = [finding.key for finding in check(make_config(replay={"group_size": 1}))]
    assert keys == ["replay.group_size", "replay.partial_groups"]


@pytest.mark.parametrize(
    "sections",
    [
        {"replay": {"max_staleness": 0, "on_stale": "mask"}},
        {"replay": {"max_staleness": 0}, "weights": {"every_steps": 1}},
        {
            "model": {"kind": "tiny", "warm_start": {}},
            "actors": {"engine": {"kind": "scripted", "script": "a:B"}},
        },
        {"model": {"kind": "pretrained", "path": "owner/name"}},
        {"model": {"kind": "pretrained", "path": "name"}},
        {"evaluation": {"sampling": {"temperature": 0.0, "top_p": 0.5}}},
        {"weights": {"every_steps": 3}, "replay": {"max_staleness": 2}},
    ],
)
def test_what_works_is_not_refused(sections: dict[str, Any]) -> None:
    assert check(make_config(**sections)) == []


def test_a_missing_directory_below_an_existing_one_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    config = make_config(model={"kind": "pretrained", "path": "models/absent"})
    assert [finding.key for finding in check(config)] == ["model.path"]
    (tmp_path / "models" / "absent").mkdir()
    (finding,) = check(config)
    assert "no config.json" in finding.text


def test_ranks_share_micro_batches_as_the_heads_of_a_checkpoint_allow(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(heads))
    (tmp_path / "model.safetensors").touch()
    model = {"kind": "pretrained", "path": str(tmp_path)}
    for size in (2, 4):
        learner = {"num_ranks": size, "context_parallel_size": size}
        assert check(make_config(model=model, learner=learner)) == []
    learner = {"num_ranks": 3, "context_parallel_size": 3}
    (finding,) = check(make_config(model=model, learner=learner))
    assert finding.key == "learner.context_parallel_size"
    assert finding.text.endswith(
        "12 attention heads, and divide its 2 key-value heads or be a multiple of them, got 3; set it "
        "to one of 1, 2, 4, 6, 12"
    )
    (tmp_path / "config.json").write_text(json.dumps(heads | {"vision_config": {}}))
    found = {f.key: f.text for f in check(make_config(model=model, learner=learner))}
    assert "sees images" in found["learner.context_parallel_size"]


def test_notes_tell_what_is_allowed_and_unwise() -> None:
    assert any(
        "bfloat16 on a CPU" in note for note in notes(make_config(learner={"gpus_per_rank": 0}))
    )
    quiet = make_config(learner={"compute_dtype": "float32"})
    assert notes(quiet) == []
    cramped = make_config(cluster={"num_cpus": 1})
    assert any(note.startswith("cluster.num_cpus: a local cluster of 1") for note in notes(cramped))
    wasteful = make_config(
        learner={"compute_dtype": "float32"},
        replay={"extra": 2},
        actors={
            "num_actors": 1,
            "max_concurrent_episodes": 4,
            "engine": {"kind": "vllm", "max_model_tokens": 512},
        },
    )
    assert any(note.startswith("replay.extra") for note in notes(wasteful))


def test_checks_run_when_a_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {kind: tiny}\ndata: {train: {kind: calculator}}\n"
        "environment: {kind: single_turn}\nactors: {engine: {kind: vllm, max_model_tokens: 512}}\n"
        "sampling: {top_k: 3}\n"
    )
    with pytest.raises(ValueError, match=r"config\.yaml:5  sampling\.top_k: must be 0"):
        load([str(path)], [])


@pytest.mark.parametrize(
    ("replay", "num_ranks", "words"),
    [
        ({"groups_per_step": 7, "group_size": 5}, 2, "35 episodes"),
        ({"groups_per_step": 1, "group_size": 2}, 3, "1 of them have none"),
        ({"groups_per_step": 4, "group_size": 3}, 2, None),
    ],
)
def test_episodes_that_do_not_divide_by_ranks_are_noted(
    replay: dict[str, int], num_ranks: int, words: str | None
) -> None:
    config = make_config(replay=replay, learner={"num_ranks": num_ranks})
    found = [note for note in notes(config) if note.startswith("learner.num_ranks")]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]
