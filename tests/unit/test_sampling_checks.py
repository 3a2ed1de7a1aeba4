"""Sampling that engine and learner would read differently is refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from raylearner.config.checks import check
from raylearner.config.engine_checks import SAFE
from raylearner.config.schema import RunConfig

VLLM = {"kind": "vllm", "max_model_tokens": 512}
TRANSFORMERS = {"kind": "transformers", "max_model_tokens": 512}
REGEX = {"regex": "[0-9]+"}


def findings(engine: dict[str, Any] = VLLM, **sections: Any) -> list[tuple[str, str]]:
    config = {
        "model": {"kind": "tiny"},
        "data": {"train": {"kind": "calculator"}},
        "environment": {"kind": "single_turn"},
        "actors": {"engine": engine},
        **sections,
    }
    return [(f.key, f.text) for f in check(RunConfig.model_validate(config))]


@pytest.mark.parametrize(
    ("sampling", "key"),
    [
        (REGEX, "sampling.regex"),
        ({"extra_arguments": {"bad_words": ["x"]}}, "sampling.extra_arguments.bad_words"),
        ({"extra_arguments": {"min_tokens": 3}}, "sampling.extra_arguments.min_tokens"),
    ],
)
def test_what_shapes_the_distribution_is_refused_in_training(
    sampling: dict[str, Any], key: str
) -> None:
    ((found, text),) = findings(sampling=sampling)
    assert found == key
    assert "must be absent in training" in text
    assert "the learner applies the temperature only" in text
    assert findings(evaluation={"sampling": {"temperature": 0.0, **sampling}}) == []


def test_a_regex_trains_where_no_engine_probability_enters() -> None:
    assert findings(sampling=REGEX, learner={"loss": {"kind": "ppo"}}) == []


@pytest.mark.parametrize("name", ["logprobs", "temperature", "no_such", "watermarking"])
def test_arguments_that_raylearner_sets_or_vllm_lacks_are_refused(name: str) -> None:
    ((key, text),) = findings(sampling={"extra_arguments": {name: 1}})
    assert key == f"sampling.extra_arguments.{name}"
    assert "further ones are allowed_token_ids, bad_words" in text


def test_arguments_that_shape_nothing_train() -> None:
    assert findings(sampling={"extra_arguments": {"ignore_eos": True}}) == []


@pytest.mark.parametrize("part", [REGEX, {"extra_arguments": {"ignore_eos": True}}])
def test_both_need_vllm(part: dict[str, Any]) -> None:
    ((key, text),) = findings(TRANSFORMERS, evaluation={"sampling": part})
    assert key == f"evaluation.sampling.{next(iter(part))}"
    assert "needs actors.engine.kind 'vllm', got 'transformers'" in text


def test_a_broken_regex_is_named() -> None:
    ((key, text),) = findings(evaluation={"sampling": {"regex": "[a"}})
    assert key == "evaluation.sampling.regex"
    assert "is no regular expression" in text


@pytest.mark.parametrize(
    "name",
    [
        *("logprobs_mode", "logits_processors", "worker_extension_cls", "skip_tokenizer_init"),
        *("max_logprobs", "speculative_config", "hf_overrides", "max_num_seqs", "quantization"),
        *("tokenizer", "reasoning_parser", "override_generation_config", "no_such_argument"),
    ],
)
def test_engine_arguments_that_break_the_contract_are_refused(name: str) -> None:
    ((key, _),) = findings({**VLLM, "extra_arguments": {name: "x"}})
    assert key == f"actors.engine.extra_arguments.{name}"


def test_engine_arguments_that_change_speed_and_memory_alone_are_taken() -> None:
    arguments = {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 4096,
        "compilation_config": {"mode": 0},
    }
    assert findings({**VLLM, "extra_arguments": arguments}) == []


def test_the_arguments_that_are_taken_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    assert [name for name in sorted(SAFE) if f"`{name}`" not in text] == []


def test_a_transformers_engine_must_take_the_longest_sequence() -> None:
    ((key, text),) = findings({**TRANSFORMERS, "max_model_tokens": 500})
    assert key == "actors.engine.max_model_tokens"
    assert "must be >=" in text


def test_a_context_holds_at_least_the_prompt() -> None:
    ((key, _),) = findings(renderer={"max_context_tokens": 100})
    assert key == "renderer.max_context_tokens"
