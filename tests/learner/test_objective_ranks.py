"""One rank, two ranks, two that share every micro-batch, and any micro-batching give the same numbers."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learners import make_groups
from ranks import run_ranks

from raylearner.learner.batch.pack import LearnerBatch, pack
from raylearner.observability.metrics import undocumented

OF_THE_LAYOUT = (
    "learner/rank_tokens",
    "learner/padding",
    "learner/step_s",
    "learner/tokens_per_s",
)
SCRIPT = Path(__file__).with_name("objective_rank.py")
BASE: dict[str, Any] = {
    "compute_dtype": "float64",
    "learning_rate": 1e-2,
    "num_mini_batches": 2,
}
FROZEN = {"kind": "refreshed", "every_steps": 1, "mix": 0.5}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gae": {"advantage": {"kind": "gae", "bootstrap": True}, "critic": {}},
    "shared_gae": {"advantage": {"kind": "bilevel_gae"}, "critic": {"trunk": "shared"}},
    "vtrace": {
        "advantage": {"kind": "vtrace"},
        "critic": {"learning_rate": 1e-3},
        "loss": {"kind": "gpg"},
    },
    "turn_gae": {"advantage": {"kind": "turn_gae"}, "critic": {"warmup_steps": 1}},
    "reinforce_plus_plus": {"advantage": {"kind": "reinforce_plus_plus", "gamma": 0.9}},
    "normalized_corrections": {
        "loss": {"kind": "ppo"},
        "corrections": [
            {"kind": "tis", "level": "geometric", "normalize": "row"},
            {"kind": "veto", "threshold": 0.008},
            {"kind": "m2po", "threshold": 0.5},
        ],
    },
    "rejected": {
        "loss": {"kind": "gspo", "form": "sequence"},
        "corrections": [{"kind": "rejection", "high": 8.0}],
        "count_rejected": False,
    },
    "gmpo": {"loss": {"kind": "gmpo"}},
    "lora": {
        "lora": {"rank": 3},
        "kl": {"coefficient": 0.1, "reference": {"kind": "adapter_off"}},
    },
    "gspo": {"loss": {"kind": "gspo"}, "aggregation": "sequence_mean_of_means"},
    "clip_cov": {
        "loss": {
            "kind": "clip_cov",
            "drop_ratio": 0.2,
            "covariance_low": 0.01,
            "covariance_high": 50.0,
        }
    },
    "kl_cov": {"loss": {"kind": "kl_cov", "top_ratio": 0.1}},
    "otb": {"advantage": {"kind": "tir_otb"}, "loss": {"kind": "ppo"}},
    "gigpo": {"advantage": {"kind": "gigpo"}, "loss": {"kind": "cispo"}},
    "gdpo": {"advantage": {"kind": "gdpo"}},
    "kl_in_reward": {
        "advantage": {"kind": "rloo"},
        "loss": {"kind": "sequence_ratio"},
        "kl": {
            "place": "reward",
            "coefficient": 0.1,
            "reference": FROZEN,
            "controller": {"kind": "adaptive", "horizon": 100},
        },
    },
    "kl_in_loss": {
        "compute_dtype": "float32",
        "learning_rate": 1e-3,
        "kl": {"coefficient": 0.1, "reference": {"kind": "frozen"}},
        "entropy_coefficient": 0.01,
        "num_epochs": 2,
    },
    "resampled": {
        "advantage": {"kind": "gae"},
        "critic": {},
        "resampling": {"kind": "max_random"},
        "num_mini_batches": 1,
        "aggregation": "sequence_mean_of_sums",
    },
}
SHARED = (
    "clip_cov",
    "gae",
    "gspo",
    "kl_in_loss",
    "kl_in_reward",
    "lora",
    "normalized_corrections",
    "otb",
    "shared_gae",
)
"""Objectives that are also tried by ranks of one context group."""


def batches(name: str, *, num_ranks: int, max_tokens: int) -> list[list[LearnerBatch]]:
    """Two steps; one episode has two segments, one no reward, one ran out of tokens."""
    num_mini_batches = OBJECTIVES[name].get("num_mini_batches", 2)
    version, steps = 0, []
    for seed in (2, 3):
        groups = [
            replace(
                group,
                trajectories=tuple(
                    replace(t, rewards={"a": t.reward, "b": float(t.num_tokens)})
                    for t in group.trajectories
                ),
            )
            for group in make_groups(seed, policy_version=version)
        ]
        first, second, *rest, last = groups[0].trajectories
        second = replace(second, sample_index=0, segment=1, reward=first.reward)
        last = replace(last, reward=None, rewards={})
        groups[0] = replace(groups[0], trajectories=(first, second, *rest, last))
        steps.append(
            pack(
                groups,
                policy_version=version,
                num_ranks=num_ranks,
                max_tokens_per_micro_batch=max_tokens,
                num_mini_batches=num_mini_batches,
            )
        )
        version += not OBJECTIVES[name].get("critic", {}).get("warmup_steps")
    return steps


@pytest.fixture(scope="session")
def on_two_ranks(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("objectives")
    jobs = {
        (name, 1): {
            "config": BASE | changes,
            "model": str(tiny_folder),
            "batches": batches(name, num_ranks=2, max_tokens=48),
        }
        for name, changes in OBJECTIVES.items()
    }
    for name in SHARED:
        steps = batches(name, num_ranks=1, max_tokens=48)
        jobs[name, 2] = {
            "config": BASE | OBJECTIVES[name] | {"context_parallel_size": 2},
            "model": str(tiny_folder),
            "batches": [[batch, batch] for (batch,) in steps],
        }
    (folder / "jobs.pkl").write_bytes(pickle.dumps(jobs))
    run_ranks(SCRIPT, folder, num_ranks=2)
    return pickle.loads((folder / "results.pkl").read_bytes())


@pytest.fixture(scope="session")
def play() -> Callable[..., Any]:
    spec = spec_from_file_location("objective_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.play


@pytest.mark.parametrize(
    ("name", "context_size"),
    [*((name, 1) for name in sorted(OBJECTIVES)), *((name, 2) for name in SHARED)],
)
def test_one_rank_and_two_and_any_micro_batching_agree(
    name: str,
    context_size: int,
    tiny_folder: Path,
    on_two_ranks: dict[str, Any],
    play: Callable[..., Any],
) -> None:
    theirs, their_weights = on_two_ranks[name, context_size]
    steps = batches(name, num_ranks=1, max_tokens=400)
    config = BASE | OBJECTIVES[name]
    ours, our_weights = play(config, str(tiny_folder), [step[0] for step in steps])
    is_double = config["compute_dtype"] == "float64"
    near = {"rel": 1e-6, "abs": 1e-9} if is_double else {"rel": 1e-5, "abs": 1e-6}
    for mine, other in zip(ours, theirs, strict=True):
        assert undocumented(mine.metrics) == []
        assert set(mine.metrics) == set(other.metrics)
        for key, value in mine.metrics.items():
            if not key.startswith(OF_THE_LAYOUT):
                assert value == pytest.approx(other.metrics[key], **near), key
        assert context_size == 1 or set(other.logprobs) == set(mine.logprobs)
        for key, logprobs in other.logprobs.items():
            np.testing.assert_allclose(logprobs, mine.logprobs[key], rtol=near["rel"], atol=0)
    assert set(our_weights) == set(their_weights)
    for key, tensor in our_weights.items():
        if key.endswith("k_proj.bias") and not is_double:
            continue  # softmax cancels it: rounding errors are all its gradient
        # Adam divides small gradients by their own size, rounding errors included.
        limit = 1e-6 if is_double else 4e-5 * np.abs(tensor).max()
        np.testing.assert_allclose(tensor, their_weights[key], rtol=0, atol=limit)
