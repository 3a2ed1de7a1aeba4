"""Four ranks that share micro-batches or parameters by twos or all, and models that cannot be shared."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learners import assert_same_weights, make_groups, make_learner, step, with_prompts
from ranks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from raylearner.errors import ConfigError
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.batch.pack import pack
from raylearner.learner.model import mesh
from raylearner.learner.model.loading import load_sharded
from raylearner.learner.model.mesh import ContextGroup, connect
from raylearner.learner.model.policy import ModelOptions

CASES: dict[str, dict[str, Any]] = {
    "pairs": {
        "context_parallel_size": 2,
        "loss": {"kind": "gspo"},
        "advantage": {"kind": "gae"},
        "critic": {},
        "activation_checkpointing": "selective",
    },
    "four": {
        "context_parallel_size": 4,
        "kl": {"coefficient": 0.1, "reference": {"kind": "frozen"}},
        "activation_checkpointing": "full",
    },
    "copies": {
        "shard_size": 2,
        "advantage": {"kind": "gae"},
        "critic": {},
        "max_grad_norm": 0.01,
    },
    "copies_of_pairs": {"shard_size": 2, "context_parallel_size": 2, "offload": True},
    "copies_alone": {"shard_size": 1, "lora": {"rank": 3}},
}

SHARING = {"pairs", "copies", "copies_of_pairs"}
"""Cases whose rows share their prompts."""


@pytest.fixture(scope="session")
def grouped_folder(untied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads that share two key-value heads."""
    folder = tmp_path_factory.mktemp("grouped")
    config = AutoConfig.from_pretrained(untied_folder)
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_heads_of_whole_sequences_come_as_kernels_expect_them_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh, "_exchange_uncompiled", lambda rows, context: rows)
    group = ContextGroup(group=cast(Any, None), rank=0, size=2)
    query, key, value = (torch.randn(heads, 3, 8) for heads in (4, 2, 2))
    for before, whole in zip((query, key, value), group.to_heads(query, key, value), strict=True):
        # Each rank sent what it holds: half of the heads of all tokens.
        assert whole.shape == (len(before) // 2, 6, 8)
        assert whole.transpose(0, 1).is_contiguous()
        own, others = before.chunk(2)
        torch.testing.assert_close(whole, torch.cat((own, others), 1), rtol=0, atol=0)


def test_any_grouping_of_four_ranks_equals_one_rank(grouped_folder: Path, tmp_path: Path) -> None:
    groups = with_prompts(make_groups(5))
    options = {"compute_dtype": "float64", "learning_rate": 1e-2, "num_mini_batches": 2}
    jobs = {}
    for name, changes in CASES.items():
        size = changes.get("context_parallel_size", 1)
        batches = pack(
            groups,
            policy_version=0,
            num_ranks=4 // size,
            max_tokens_per_micro_batch=96,
            num_mini_batches=2,
            shares_prefixes=name in SHARING,
        )
        assert (batches[0].num_computed_tokens < batches[0].num_tokens) == (name in SHARING)
        jobs[name] = {
            "config": options | changes,
            "model": str(grouped_folder),
            "batches": [[batch for batch in batches for _ in range(size)]],
        }
    (tmp_path / "jobs.pkl").write_bytes(pickle.dumps(jobs))
    run_ranks(Path(__file__).with_name("objective_rank.py"), tmp_path, num_ranks=4)
    results = pickle.loads((tmp_path / "results.pkl").read_bytes())
    for name, changes in CASES.items():
        plain = {
            key: value
            for key, value in changes.items()
            if key in ("loss", "advantage", "critic", "kl", "lora", "max_grad_norm")
        }
        learner = make_learner(grouped_folder, options | plain, temperature=0.9)
        alone = step(learner, groups, num_mini_batches=2, max_tokens_per_micro_batch=96)
        ((shared,), their_weights) = results[name]
        for key in ("loss", "grad_norm", "entropy/mean", "clip_fraction", "value_loss", "kl"):
            key = f"learner/{key}"
            assert (key in alone.metrics) == (key in shared.metrics)
            if key in alone.metrics:
                assert shared.metrics[key] == pytest.approx(alone.metrics[key], rel=1e-6), key
        held = alone.metrics["learner/rank_tokens/mean"] / 4
        share = 1 - shared.metrics["learner/shared_prefix_fraction"]
        assert shared.metrics["learner/rank_tokens/mean"] == pytest.approx(held * share)
        for key, logprobs in shared.logprobs.items():
            np.testing.assert_allclose(logprobs, alone.logprobs[key], rtol=1e-6)
        # Norms round gradients to float32, before the sum over rows or after it.
        atol = 1e-5 if name in SHARING else 1e-9
        assert_same_weights(learner, their_weights, atol=atol)


def test_padding_is_a_sequence_of_its_own() -> None:
    tokens = PackedTokens.of([np.arange(5), np.arange(4)], [np.arange(5) > 1, np.arange(4) > 0])
    padded = tokens.pad(4)
    assert padded.input_ids.tolist() == [*range(5), *range(4), 0, 0, 0]
    assert padded.position_ids.tolist() == [*range(5), *range(4), 0, 1, 2]
    assert padded.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert torch.equal(padded.scored, tokens.scored)
    assert tokens.pad(3) is tokens


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 3, "4 attention heads, and divide its 2 key-value heads .* got 3"),
        ({"layer_types": ["full_attention", "linear_attention"]}, 2, "layers of linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 2, "of type dynamic"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_before_it_is_loaded(
    grouped_folder: Path, tmp_path: Path, changes: dict[str, Any], size: int, words: str
) -> None:
    config = AutoConfig.from_pretrained(grouped_folder)
    for key, value in changes.items():
        setattr(config, key, value)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    context = ContextGroup(group=cast(dist.ProcessGroup, SimpleNamespace()), rank=0, size=size)
    with pytest.raises(ConfigError, match=f"learner.context_parallel_size: .*{words}"):
        load_sharded(
            str(tmp_path),
            connect(),
            dtype=torch.float32,
            compute_dtype=torch.float32,
            options=ModelOptions(context=context),
        )
