"""Models whose rows do not score as their own forward does, or not beside others, are refused by name and,
where no key tells, by measurement."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_tokenizer
from learners import make_learner
from transformers import AutoConfig, AutoModelForCausalLM

from raylearner.config.checks import check
from raylearner.config.model_files import scoring_errors
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model import loading
from raylearner.learner.model.loading import load_model

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Lengths that no row of the measurement reaches by itself.
ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
FAMILIES: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({"model_type": "qwen3", "head_dim": 32}, None),
    "sliding": (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        None,
    ),
    "divides": ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling"),
    "multiplies": ({"model_type": "cohere", "logit_scale": 0.0625}, "logit_scale"),
    "bounds": ({"model_type": "nanochat", "num_key_value_heads": 2}, "final_logit_softcapping"),
    "dynamic": (
        {
            "model_type": "qwen3",
            "head_dim": 32,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", **ROPE},
        },
        "of type dynamic",
    ),
    "longrope": (
        {
            "model_type": "phi3",
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 16,
                "long_factor": [1.0 + 0.5 * i for i in range(16)],
                **ROPE,
            },
        },
        "of type longrope",
    ),
}


def make_model(folder: Path, values: dict[str, Any], *, width: float = 0.3) -> Path:
    torch.manual_seed(0)
    values = SIZES | copy.deepcopy(values)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, width)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_family_scores_as_transformers_does_or_is_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, word = FAMILIES[family]
    folder = make_model(tmp_path, values)
    if word is None:
        model = load_model(str(folder), dtype=torch.float32)
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        rows = [np.arange(5, 25), np.arange(40, 10, -1)]
        scored = [np.arange(len(row)) > 0 for row in rows]
        ours = model.score(PackedTokens.of(rows, scored)).logprobs.split([20, 30])
        for row, logprobs in zip(rows, ours, strict=True):
            ids = torch.tensor(row)[None]
            with torch.no_grad():
                right = theirs(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            torch.testing.assert_close(logprobs[1:], right[:, 0], rtol=0, atol=1e-4)
        assert not list(scoring_errors(folder))
        return
    # By name, in check and at load.
    config = RunConfig.model_validate(
        {
            "model": {"kind": "pretrained", "path": str(folder)},
            "data": {"train": {"kind": "calculator"}},
            "environment": {"kind": "single_turn"},
            "actors": {"engine": {"kind": "vllm", "max_model_tokens": 512}},
        }
    )
    named = [f.text for f in check(config) if f.key == "model.path"]
    assert len(named) == 1
    assert word in named[0]
    with pytest.raises(ConfigError, match=word):
        load_model(str(folder), dtype=torch.float32)
    # By measurement, as of a family whose keys nobody knows, alone and as a learner's shards.
    monkeypatch.setattr(loading, "scoring_errors", lambda folder: iter(()))
    with pytest.raises(ConfigError, match=rf"\({values['model_type']}\).* nats"):
        load_model(str(folder), dtype=torch.float32)
    make_tokenizer().save_pretrained(folder)
    with pytest.raises(ConfigError, match=rf"\({values['model_type']}\).* nats"):
        make_learner(folder, {"compute_dtype": "float32"})


STATEFUL: dict[str, Any] = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_leaks_into_the_next_row_is_detected_in_half_precision_too(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    leaking = make_model(tmp_path / "leaking", STATEFUL, width=0.1)
    with pytest.raises(ConfigError, match=r"\(lfm2\).*"):
        load_model(str(leaking), dtype=dtype)
    load_model(str(make_model(tmp_path / "right", EXPERTS, width=0.1)), dtype=dtype)


def test_values_that_change_no_logits_are_not_refused(tmp_path: Path) -> None:
    def faults(**values: Any) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", **values}))
        return list(scoring_errors(tmp_path))

    assert not faults(logit_scale=1.0, logits_scaling=1, final_logit_softcapping=None)
    assert not faults(hidden_size=64, dim_model_base=64)
    assert not faults(text_config={"rope_scaling": {"type": "yarn"}, "lm_head_multiplier": 1.0})
    assert len(faults(hidden_size=64, dim_model_base=32)) == 1
    assert len(faults(text_config={"logit_scale": 0.5, "rope_scaling": {"type": "dynamic"}})) == 2
