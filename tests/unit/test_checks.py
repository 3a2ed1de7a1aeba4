"""Configurations that are refused: the key of each, and the messages in a snapshot."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from minimal import MINIMAL, problems_of
from snapshots import assert_snapshot

from raylearner.config.checks import warnings
from raylearner.config.engine_checks import SAFE
from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems
from raylearner.config.schema import RunConfig
from raylearner.learner.optimizer import learning_rate_at

VLLM = "actors.engine={kind: vllm, max_model_tokens: 512"
TRANSFORMERS = "actors.engine={kind: transformers, max_model_tokens: 512"
FUNCTIONS = "rewards.functions=[{kind: "
JUDGE = FUNCTIONS + "judge, url: 'http://h', model: m"
PAGES = "environment={kind: tool_use, tools: [{kind: page_fetch, url: 'http://h'"
IMAGES = "data.train={kind: jsonl, path: rows.jsonl, image_column: image}"
SEES = "model.vision={}"

CASES: list[tuple[str, ...]] = [
    ("weights.every_steps", "weights.every_steps=2", "replay.max_staleness=0"),
    ("weights.every_steps", "weights.every_steps=4"),
    ("actors.engine.sleep", VLLM + ", sleep: true}"),
    (
        "weights.cache",
        "weights.cache=keep",
        VLLM + ", sleep: true}",
        "replay={max_staleness: 0}",
    ),
    ("weights.cache", SEES, "weights.cache=keep"),
    ("weights.transport", "weights.transport=ipc", VLLM + ", tensor_parallel_size: 2}"),
    ("weights.transport", "learner.lora={}", "weights.transport=nccl"),
    ("weights.transport", "weights.transport=adapter"),
    ("actors.engine.dtype", "learner.lora={}", TRANSFORMERS + ", dtype: bfloat16}"),
    ("replay.group_size", "replay={group_size: 1, partial_groups: drop}"),
    (
        "replay.group_size",
        "replay={group_size: 1, partial_groups: drop}",
        "learner.advantage.kind=rloo",
    ),
    ("replay.partial_groups", "replay.group_size=1"),
    (
        "learner.num_mini_batches",
        "learner.num_mini_batches=9",
        "replay={groups_per_step: 2, group_size: 4}",
    ),
    ("learner.max_tokens_per_micro_batch", "learner.max_tokens_per_micro_batch=500"),
    ("actors.engine.max_model_tokens", "actors.engine.max_model_tokens=400"),
    ("actors.engine.max_model_tokens", "actors.engine.max_model_tokens=513"),
    ("actors.engine.max_model_tokens", "actors.engine={kind: transformers, max_model_tokens: 500}"),
    ("model.max_length", "model.max_length=256", "actors.engine={kind: scripted, script: 'a:B'}"),
    ("renderer.max_context_tokens", "renderer.max_context_tokens=100"),
    ("sampling.max_turn_tokens", "sampling.max_turn_tokens=300"),
    ("sampling.top_p", "sampling.top_p=0.9"),
    ("sampling.top_k", "sampling.top_k=5"),
    ("sampling.min_p", "sampling.min_p=0.1"),
    ("sampling.repetition_penalty", "sampling.repetition_penalty=1.1"),
    ("sampling.temperature", "sampling.temperature=0"),
    ("sampling.regex", "sampling.regex='[0-9]+'"),
    ("sampling.extra_arguments.bad_words", "sampling.extra_arguments.bad_words=[x]"),
    ("sampling.extra_arguments.min_tokens", "sampling.extra_arguments.min_tokens=3"),
    *(
        (f"sampling.extra_arguments.{name}", f"sampling.extra_arguments.{name}=1")
        for name in ("logprobs", "temperature", "no_such", "watermarking")
    ),
    ("evaluation.sampling.regex", TRANSFORMERS + "}", "evaluation.sampling.regex='[0-9]+'"),
    (
        "evaluation.sampling.extra_arguments",
        TRANSFORMERS + "}",
        "evaluation.sampling.extra_arguments.ignore_eos=true",
    ),
    ("evaluation.sampling.regex", "evaluation.sampling.regex='[a'"),
    ("evaluation.every_steps", "evaluation.every_steps=5"),
    *(
        (
            f"actors.engine.extra_arguments.{name}",
            f"actors.engine.extra_arguments.{name}=x",
        )
        for name in (
            *("logprobs_mode", "logits_processors", "worker_extension_cls", "skip_tokenizer_init"),
            *("max_logprobs", "speculative_config", "hf_overrides", "max_num_seqs", "quantization"),
            *("tokenizer", "reasoning_parser", "override_generation_config", "no_such_argument"),
        )
    ),
    ("model.num_heads", "model.num_heads=8"),
    ("model.hidden_size", "model.num_heads=3"),
    ("model.hidden_size", "model={hidden_size: 99, num_heads: 3}"),
    ("model.num_heads", "model={hidden_size: 30, num_heads: 1}"),
    ("model.path", "model={kind: pretrained, path: ./nowhere}"),
    ("model.path", "model={kind: pretrained, path: /a/b}"),
    ("learner.gpus_per_rank", "learner={num_ranks: 2, gpus_per_rank: 0.5}"),
    ("learner.shard_size", "learner={num_ranks: 6, shard_size: 4}"),
    ("learner.context_parallel_size", "learner={num_ranks: 6, context_parallel_size: 4}"),
    ("learner.context_parallel_size", "learner={num_ranks: 3, context_parallel_size: 3}"),
    (
        "learner.context_parallel_size",
        SEES,
        "renderer.images={min_pixels: 784, max_pixels: 50_176}",
        "learner={num_ranks: 2, context_parallel_size: 2}",
    ),
    ("learner.warmup_steps", "run.num_steps=5", "learner.warmup_steps=6"),
    ("actors.gpus_per_actor", "actors.gpus_per_actor=1", VLLM + ", tensor_parallel_size: 2}"),
    ("data.train.path", "data.train={kind: jsonl, path: no.jsonl}"),
    ("data.train.1.path", "data.train=[{kind: calculator}, {kind: parquet, path: no.parquet}]"),
    ("data.train", "data.train=[]"),
    ("data.train.0.source", "data.train=[{kind: calculator}, {kind: calculator}]"),
    ("data.train.weight", "data.train.weight=0"),
    (
        "data.train.parameters.seed",
        "data.train={kind: reasoning_gym, task: x, parameters: {seed: 3}}",
    ),
    ("data.sampler.kind", "data.sampler.kind=nil:Class"),
    ("data.sampler.kind", "data.sampler.kind=shufle"),
    ("rewards.clip", "rewards.clip=[1, 1]"),
    ("rewards.functions", "rewards.functions=[]"),
    ("rewards.functions.0.name", FUNCTIONS + "f1, name: a/b}]"),
    ("rewards.functions.0.kind", FUNCTIONS + "exact_anser}]"),
    ("rewards.functions.0.wieght", FUNCTIONS + "f1, wieght: 2}]"),
    ("rewards.functions.0.kind", FUNCTIONS + "':x'}]"),
    ("rewards.functions.0.kind", FUNCTIONS + "mine:no}]"),
    ("rewards.functions.0.kind", FUNCTIONS + "nil:f}]"),
    (
        "rewards.functions.0.min",
        FUNCTIONS + "tool_use, min: 1, max: 0}]",
        "environment.kind=tool_use",
    ),
    ("rewards.functions.0.kind", FUNCTIONS + "tool_use}]"),
    ("rewards.functions.0.kind", FUNCTIONS + "retrieval_hit}]"),
    ("rewards.functions.0.kind", FUNCTIONS + "retrieval_hit}]", "environment.kind=tool_use"),
    ("rewards.functions.0.kind", FUNCTIONS + "reasoning_gym}]"),
    ("rewards.functions.0.path", FUNCTIONS + "model, path: ./no/such}]"),
    ("rewards.functions.0.min_score", JUDGE + ", min_score: 10}]"),
    ("rewards.functions.0.template", JUDGE + ", template: 'x {who}'}]"),
    ("rewards.functions.0.extra_arguments", JUDGE + ", extra_arguments: {stream: true, n: 2}}]"),
    (
        "replay.play_greedy",
        FUNCTIONS + "mine:reward, per: group}]",
        "replay.play_greedy=true",
        "learner.advantage.kind=remax",
    ),
    *(
        (
            "environment.tools.0.url",
            f"environment={{kind: tool_use, tools: [{{kind: search, {u}}}]}}",
        )
        for u in ("url: 'localhost:8000'", "url: 'ftp://host/x'", "url: 'http://'", "url: search")
    ),
    ("environment", "environment={kind: openai_proxy}"),
    ("environment", "environment={kind: openai_proxy, program: 'mine:play', command: [x]}"),
    ("environment.program", "environment={kind: openai_proxy, program: 'mine:narrow'}"),
    (
        "environment.arguments.columns",
        "environment={kind: openai_proxy, program: 'mine:play', arguments: {columns: 1}}",
    ),
    (
        "environment.answer_from",
        "environment={kind: openai_proxy, program: 'mine:play', answer_from: stdout}",
    ),
    ("environment.arguments", "environment={kind: openai_proxy, command: [x], arguments: {a: 1}}"),
    ("data.train.image_column", IMAGES),
    ("data.train.image_column", IMAGES, "environment={kind: openai_proxy, command: [x]}"),
    ("environment.tools.0.contents", PAGES + "}]}"),
    ("model.vision.hidden_size", "model.vision={hidden_size: 68}"),
    ("model.vision.num_heads", "model.vision={hidden_size: 100, num_heads: 4}"),
    ("renderer.images.max_pixels", SEES),
    ("renderer.images", "renderer.images={min_pixels: 9, max_pixels: 8}"),
    ("renderer.images.min_pixels", SEES, "renderer.images={min_pixels: 100, max_pixels: 800}"),
    (
        "renderer.images.max_pixels",
        SEES,
        "renderer.images={min_pixels: 49_000, max_pixels: 49_100}",
    ),
    (
        "renderer.max_prompt_tokens",
        SEES,
        IMAGES,
        "renderer={images: {min_pixels: 49_393, max_pixels: 100_000}, max_prompt_tokens: 64}",
    ),
    (
        "renderer.max_response_tokens",
        SEES,
        PAGES + "}]}",
        "renderer={images: {min_pixels: 100_000, max_pixels: 100_352}, max_response_tokens: 128}",
        "sampling.max_turn_tokens=128",
    ),
    ("learner.vision_learning_rate", "learner.vision_learning_rate=1e-5"),
    (
        "learner.vision_learning_rate",
        SEES,
        "learner={vision_learning_rate: 1e-5, vision_tower: frozen}",
    ),
]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(MINIMAL)
    Path("rows.jsonl").write_text('{"prompt": "x", "image": "x.png"}\n')
    module = types.ModuleType("mine")
    module.reward = lambda episode: 1.0
    module.play = lambda base_url, api_key, messages, columns, depth=1: None
    module.narrow = lambda base_url: None
    monkeypatch.setitem(sys.modules, "mine", module)
    return "base.yaml"


def problems(base: str, *overrides: str) -> dict[str, str]:
    return problems_of(base, overrides)


def make_config(base: str, *overrides: str) -> RunConfig:
    return load([base], list(overrides))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_clash_is_refused_at_its_key(base: str, case: tuple[str, ...]) -> None:
    key, *overrides = case
    assert key in problems(base, *overrides)


def test_messages(base: str) -> None:
    lines: list[str] = []
    for _, *overrides in CASES:
        lines.append(" ".join(overrides))
        lines += [f"    {key}: {text}" for key, text in problems(base, *overrides).items()]
    assert_snapshot("config_checks", "\n".join(lines) + "\n")


def test_all_wrong_functions_are_named_at_once(base: str) -> None:
    kinds = "[{kind: exact_anser}, {kind: judge}, {kind: f1, wieght: 2}, {kind: ':x'}]"
    assert list(problems(base, f"rewards.functions={kinds}")) == [
        "rewards.functions.0.kind",
        "rewards.functions.1.url",
        "rewards.functions.1.model",
        "rewards.functions.2.wieght",
        "rewards.functions.3.kind",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("replay={max_staleness: 0, on_stale: mask}",),
        ("replay.max_staleness=0", "weights.every_steps=1"),
        ("weights.every_steps=3", "replay.max_staleness=2"),
        ("model.warm_start={}", "actors.engine={kind: scripted, script: 'a:B'}"),
        ("model={kind: pretrained, path: owner/name}",),
        ("model={kind: pretrained, path: name}",),
        ("evaluation.sampling={temperature: 0, top_p: 0.5, regex: '[0-9]+'}",),
        ("evaluation.sampling.extra_arguments={bad_words: [x], min_tokens: 3}",),
        ("sampling.regex='[0-9]+'", "learner.loss.kind=ppo"),
        ("sampling.extra_arguments.ignore_eos=true",),
        (
            "actors.engine.extra_arguments={enable_prefix_caching: false, max_num_batched_tokens: 4096}",
        ),
        ("environment={kind: openai_proxy, program: 'mine:play', arguments: {depth: 2}}",),
        ("environment={kind: openai_proxy, command: [python, agent.py]}",),
        ("run.num_steps=2", "learner={warmup_steps: 9, learning_rate: 0}"),
    ],
)
def test_valid_combinations_are_accepted(base: str, overrides: tuple[str, ...]) -> None:
    assert problems(base, *overrides) == {}


def test_files_of_a_model_that_cannot_be_trained_are_named(base: str) -> None:
    def texts() -> list[str]:
        return [
            text.replace(str(folder), "FOLDER")
            for text in problems(base, f"model={{kind: pretrained, path: {folder}}}").values()
        ]

    folder = Path.cwd() / "model"
    folder.mkdir()
    (text,) = texts()
    assert "config.json" in text
    quantized = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(quantized))
    assert any("awq" in text for text in texts())
    (folder / "config.json").write_text("{}")
    (text,) = texts()
    assert "*.safetensors" in text
    (folder / "model.safetensors").touch()
    assert texts() == []


def test_a_missing_directory_below_an_existing_one_is_no_hub_id(base: str) -> None:
    Path("models").mkdir()
    model = "model={kind: pretrained, path: models/absent}"
    assert "no such directory" in problems(base, model)["model.path"]
    Path("models/absent").mkdir()
    assert "config.json" in problems(base, model)["model.path"]


def test_ranks_share_micro_batches_as_the_heads_of_a_checkpoint_allow(base: str) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 2}
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(heads))
    Path("model/model.safetensors").touch()
    model = f"model={{kind: pretrained, path: {Path('model').absolute()}}}"
    for size in (2, 4):
        learner = f"learner={{num_ranks: {size}, context_parallel_size: {size}}}"
        assert problems(base, model, learner) == {}
    learner = "learner={num_ranks: 3, context_parallel_size: 3}"
    text = problems(base, model, learner)["learner.context_parallel_size"]
    assert text.endswith("one of 1, 2, 4, 6, 12")
    Path("model/config.json").write_text(json.dumps(heads | {"vision_config": {}}))
    text = problems(base, model, learner)["learner.context_parallel_size"]
    assert "vision" in text


def test_a_problem_has_the_line_that_set_the_key(base: str) -> None:
    Path("overlay.yaml").write_text("replay: {group_size: 4}\nsampling: {top_k: 3}\n")
    with pytest.raises(ConfigProblems) as error:
        load([base, "overlay.yaml"], [])
    (problem,) = error.value.problems
    assert (str(problem.where), problem.key) == ("overlay.yaml:2", "sampling.top_k")


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("", ()),
        ("learner.compute_dtype", ("learner={gpus_per_rank: 0, compute_dtype: bfloat16}",)),
        ("cluster.num_cpus", ("cluster.num_cpus=1",)),
        ("replay.extra", ("replay.extra=2", "actors={num_actors: 1, max_concurrent_episodes: 4}")),
        ("replay.on_stale", ("replay.on_stale=train",)),
        (
            "learner.num_ranks",
            ("replay={groups_per_step: 7, group_size: 5}", "learner.num_ranks=2"),
        ),
        (
            "learner.num_ranks",
            ("replay={groups_per_step: 1, group_size: 2}", "learner.num_ranks=3"),
        ),
        ("", ("replay={groups_per_step: 4, group_size: 3}", "learner.num_ranks=2")),
        ("learner.warmup_steps", ("run.num_steps=5", "learner.warmup_steps=5")),
        ("", ("run.num_steps=5", "learner.warmup_steps=4")),
    ],
)
def test_unwise_combinations_are_warned_of(base: str, key: str, overrides: tuple[str, ...]) -> None:
    found = warnings(make_config(base, "learner.compute_dtype=float32", *overrides))
    assert [text.partition(":")[0] for text in found] == ([key] if key else [])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_is_compared_with_the_updates_of_the_run(base: str, schedule: str) -> None:
    run = (
        "run.num_steps=5",
        f"learner={{schedule: {schedule}, num_mini_batches: 2, num_epochs: 3}}",
    )
    assert list(problems(base, *run, "learner.warmup_steps=31")) == ["learner.warmup_steps"]
    assert problems(base, *run, "learner.warmup_steps=30") == {}


def test_steps_that_train_the_critic_alone_do_not_count_as_warm_up(base: str) -> None:
    critic = ("run.num_steps=6", "learner={advantage: {kind: gae}, critic: {warmup_steps: 4}}")
    assert "learner.warmup_steps" in problems(base, *critic, "learner.warmup_steps=3")
    assert "learner.warmup_steps" not in problems(base, *critic, "learner.warmup_steps=2")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("num_updates", "warmup"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5)])
def test_every_update_of_a_run_trains(schedule: Any, num_updates: int, warmup: int) -> None:
    rates = [
        learning_rate_at(u, peak=1.0, schedule=schedule, warmup=warmup, num_updates=num_updates)
        for u in range(num_updates)
    ]
    assert min(rates) > 0
    assert max(rates) == 1.0


def test_the_accepted_engine_arguments_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    assert [name for name in sorted(SAFE) if f"`{name}`" not in text] == []
