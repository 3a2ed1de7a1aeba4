"""Rows of a group that share their prompt train as rows that are computed whole."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_qwen3
from learners import (
    assert_same_weights,
    make_episodes,
    make_groups,
    make_learner,
    one_batch,
    prepend,
)
from pictures import make_folder, make_image
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from raylearner.learner.batch.micro_batch import MicroBatch
from raylearner.learner.batch.pack import LearnerBatch, TokenRow, num_computed_tokens
from raylearner.learner.batch.sharing import SharedKeys
from raylearner.learner.model.fidelity import can_share_prefixes
from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.loading import load_model
from raylearner.learner.model.policy import PackedModel
from raylearner.tokenization.vision import Vision
from raylearner.types import Trajectory, TrajectoryGroup

BUDGET = 160


def batches(groups: list[TrajectoryGroup], **options: Any) -> tuple[LearnerBatch, LearnerBatch]:
    """One whole, one shared."""
    options = {"max_tokens_per_micro_batch": BUDGET, **options}
    whole, shared = (one_batch(groups, shares_prefixes=s, **options) for s in (False, True))
    assert shared.num_computed_tokens < 0.7 * whole.num_computed_tokens
    return whole, shared


CASES: dict[str, dict[str, Any]] = {
    "mini-batches": {"num_mini_batches": 2, "num_epochs": 2, "activation_checkpointing": "full"},
    "critic": {
        "advantage": {"kind": "gae"},
        "critic": {"trunk": "own"},
        "kl": {"coefficient": 0.1, "reference": {"kind": "frozen"}},
    },
    "value head": {
        "advantage": {"kind": "gae"},
        "critic": {"trunk": "shared"},
        "activation_checkpointing": "selective",
    },
    "adapter": {
        "lora": {"rank": 3},
        "kl": {"coefficient": 0.1, "reference": {"kind": "adapter_off"}},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_that_on_whole_rows(case: str, tiny_folder: Path) -> None:
    config = {"compute_dtype": "float64", "learning_rate": 1e-3, **CASES[case]}
    num_mini_batches = config.get("num_mini_batches", 1)
    learners = [make_learner(tiny_folder, config, temperature=0.9) for _ in range(2)]
    assert all(learner.models.shares_prefixes for learner in learners)
    outputs = [
        learner.step(batch)
        for learner, batch in zip(
            learners, batches(make_episodes(), num_mini_batches=num_mini_batches), strict=True
        )
    ]
    whole, shared = (output.metrics for output in outputs)
    ignored = ("tokens_per_s", "step_s", "rank_tokens", "shared_prefix", "padding", "peak")
    assert whole.keys() == shared.keys()
    for key, value in whole.items():
        if not any(word in key for word in ignored):
            assert shared[key] == pytest.approx(value, rel=1e-5, abs=1e-8), key
    assert whole["learner/shared_prefix_fraction"] == 0.0
    assert shared["learner/shared_prefix_fraction"] > 0.3
    assert outputs[0].logprobs.keys() == outputs[1].logprobs.keys()
    for key, logprobs in outputs[0].logprobs.items():
        np.testing.assert_allclose(outputs[1].logprobs[key], logprobs, rtol=0, atol=1e-6)
    assert_same_weights(learners[1], learners[0], atol=1e-6)  # of steps of 1e-3


def gradients(
    model: PackedModel, rows: Sequence[TokenRow], reader: ImageReader | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """A weighted sum of log-probabilities and entropies, and its gradients."""
    micro = MicroBatch.of(rows, policy_version=0, dtype=torch.float32, reader=reader)
    scores = model(micro.tokens, 0.9)
    weight = torch.linspace(0.5, 1.5, len(scores.logprobs), dtype=scores.logprobs.dtype)
    total = (weight * (scores.logprobs + 0.1 * scores.entropy)).sum()
    model.zero_grad(set_to_none=True)
    total.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return total.detach(), found


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], atol: float) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max()) + 1.0
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=atol * scale, msg=name)


def assert_shares_right(
    model: PackedModel,
    groups: list[TrajectoryGroup],
    *,
    atol: float,
    reader: ImageReader | None = None,
) -> None:
    """In values and gradients."""
    whole, shared = (
        batch.mini_batches[0].micro_batches[0]
        for batch in batches(groups, max_tokens_per_micro_batch=4096)
    )
    assert num_computed_tokens(shared) < num_computed_tokens(whole)
    total, wanted = gradients(model, whole, reader)
    again, found = gradients(model, shared, reader)
    torch.testing.assert_close(again, total, rtol=atol, atol=atol)
    assert_same(found, wanted, atol)


# Norms of Qwen are in float32 in any model, so that only another family is exact in float64.
MODELS: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "grouped": ({"model_type": "qwen2"}, torch.float32, 1e-5),
    "exact": ({"model_type": "starcoder2"}, torch.float64, 1e-10),
    "sliding": (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 16,  # longer than some pieces, shorter than a row
            "layer_types": ["full_attention", "sliding_attention"],
        },
        torch.float32,
        1e-5,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_whole_rows(
    name: str, untied_folder: Path, tmp_path: Path
) -> None:
    values, dtype, atol = MODELS[name]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": AutoConfig.from_pretrained(untied_folder).vocab_size,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, **values))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 5.0
    model.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((untied_folder / file).read_bytes())
    assert_shares_right(load_model(str(tmp_path), dtype=dtype), make_episodes(), atol=atol)


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def vision_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("vision"))
    if request.param == "qwen2_5":
        return folder
    return make_qwen3(folder, tmp_path_factory.mktemp("qwen3"))


def test_prompts_with_images_equal_whole_rows(vision_folder: Path) -> None:
    """Each row shows the images of the prompt, and another in a reply."""
    vision = Vision.from_pretrained(str(vision_folder))
    reader = ImageReader.from_pretrained(str(vision_folder))
    assert vision is not None
    assert reader is not None
    pages = [make_image(seed, *size) for seed, size in enumerate(((56, 56), (84, 56), (56, 112)))]
    groups: list[TrajectoryGroup] = []
    for group in make_groups(1, num_groups=2):
        prompt = [*range(20, 50), *vision.block(pages[0]), 30, *vision.block(pages[1]), 31]
        trajectories: list[Trajectory] = []
        for number, trajectory in enumerate(group.trajectories):
            reply = [*vision.block(pages[number % 3]), 40 + number]
            both = np.array(prompt + reply, np.int32)
            shown = (pages[0], pages[1], pages[number % 3])
            if number == 3:  # another image of the same size in the same place
                shown = (make_image(9, 56, 56), *shown[1:])
            trajectories.append(
                replace(
                    prepend(trajectory, both), images=shown, image_token_id=vision.image_token_id
                )
            )
        groups.append(replace(group, trajectories=tuple(trajectories)))
    model = load_model(str(vision_folder), dtype=torch.float32)
    assert_shares_right(model, groups, atol=1e-5, reader=reader)
    (rows,) = (
        one_batch(groups, shares_prefixes=True, max_tokens_per_micro_batch=4096)
        .mini_batches[0]
        .micro_batches
    )
    # Three rows share both images; what the fourth shares ends before its own.
    assert [None if row.prefix is None else row.prefix.num_images for row in rows[:4]] == [
        2,
        2,
        2,
        None,
    ]
    packed = MicroBatch.of(rows, policy_version=0, dtype=torch.float32, reader=reader).tokens.images
    assert packed is not None
    assert len(packed.order) == 2 * (2 + 3 + 3)


def test_models_with_other_layers_do_not_share(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(str(tiny_folder), dtype=torch.float32)
    options: dict[str, Any] = {"noise": 0.0, "compute_dtype": torch.float32}
    assert can_share_prefixes(model, tiny_folder, **options)

    def warnings() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    assert not warnings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SharedKeys, "gather", lambda self, x: x.flip(0).repeat(9, 1, 1)[: len(self.index)]
        )
        assert not can_share_prefixes(model, tiny_folder, **options)
    config: Any = model.causal_lm.config
    config.layer_types = ["full_attention", "chunked_attention"]
    assert not can_share_prefixes(model, tiny_folder, **options)
    changed, named = warnings()
    assert "nats" in changed
    assert "chunked_attention" in named


def test_sharing_can_be_disabled(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder, {"share_prefixes": False})
    assert not learner.models.shares_prefixes
