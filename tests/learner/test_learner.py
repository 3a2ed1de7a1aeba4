"""The learner against a naive padded loop, over ranks, and when numbers are not finite."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import learners
import numpy as np
import pytest
import torch
from learners import assert_same_weights, make_groups, one_batch, probe_of, weights_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from raylearner.config.memory import ModelSize, estimate
from raylearner.config.schema import LearnerSection, RlooAdvantage
from raylearner.errors import ConfigError, LearnerError
from raylearner.learner import optimizer
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.learner import Learner
from raylearner.learner.model import mesh
from raylearner.learner.model.loading import load_sharded
from raylearner.learner.model.policy import ModelOptions
from raylearner.types import TrajectoryGroup

CONFIG: dict[str, Any] = {
    "compute_dtype": "float64",
    "learning_rate": 1e-2,
    "max_tokens_per_micro_batch": 48,
    "logprob_chunk_tokens": 7,
    "num_epochs": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
}
TEMPERATURE = 0.9


def make_learner(folder: Path, **changes: Any) -> Learner:
    return learners.make_learner(folder, CONFIG | changes, temperature=TEMPERATURE)


def naive_loop(
    folder: Path, steps: list[list[TrajectoryGroup]], *, num_epochs: int
) -> tuple[list[list[float]], list[list[float]], dict[str, Tensor]]:
    """Padded batches, plain transformers, GRPO and decoupled PPO by hand."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        fused=False,
        foreach=False,
    )
    losses: list[list[float]] = []
    norms: list[list[float]] = []
    for groups in steps:
        rows = [t for group in groups for t in group.trajectories]
        width = max(row.num_tokens for row in rows)

        def padded(name: str, rows: Any = rows, width: int = width) -> Tensor:
            arrays = [np.nan_to_num(getattr(row, name)) for row in rows]
            return torch.tensor(np.stack([np.pad(a, (0, width - len(a))) for a in arrays]))[:, 1:]

        ids = torch.cat(
            [torch.tensor([[row.token_ids[0]] for row in rows]), padded("token_ids")], 1
        )
        mask, behavior = padded("train_mask"), padded("behavior_logprobs").double()
        rewards = torch.tensor([[t.reward for t in g.trajectories] for g in groups]).double()
        advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6)
        proximal = None
        losses.append([])
        norms.append([])
        for _ in range(num_epochs):
            logits = model(ids.long()).logits[:, :-1] / TEMPERATURE
            logprobs = logits.log_softmax(-1).gather(2, ids.long()[:, 1:, None]).squeeze(2)
            proximal = logprobs.detach() if proximal is None else proximal
            ratio = (logprobs - proximal).exp()
            weight = (proximal - behavior).exp().clamp(max=2.0)
            a = advantages.flatten()[:, None]
            values = weight * torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            loss = values[mask].sum() / mask.sum()
            loss.backward()
            norms[-1].append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
            losses[-1].append(loss.item())
            adamw.step()
            adamw.zero_grad()
    return losses, norms, dict(model.named_parameters())


@pytest.mark.parametrize("model", ["tiny_folder", "untied_folder"])
def test_three_steps_equal_a_naive_padded_loop(request: pytest.FixtureRequest, model: str) -> None:
    folder = request.getfixturevalue(model)
    steps = [make_groups(seed, policy_version=seed) for seed in range(3)]
    losses, norms, expected = naive_loop(folder, steps, num_epochs=2)
    learner = make_learner(folder)
    for version, groups in enumerate(steps):
        output = learner.step(one_batch(groups, policy_version=version))
        assert output.policy_version == version + 1
        assert output.metrics["learner/loss"] == pytest.approx(np.mean(losses[version]), abs=1e-7)
        assert output.metrics["learner/grad_norm"] == pytest.approx(
            np.mean(norms[version]), rel=1e-6
        )
    ours = weights_of(learner)
    assert set(ours) == set(expected)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-6)


def test_ranks_add_up_checksums_of_their_own_rows(two_ranks: Any) -> None:
    assert two_ranks.checksums == two_ranks.sent
    assert two_ranks.checksums.keys() == two_ranks.weights.keys()


def test_one_rank_and_two_give_the_same_numbers(tiny_folder: Path, two_ranks: Any) -> None:
    """Also where a rank had no row: the third step has one only."""
    learner = learners.make_learner(tiny_folder, two_ranks.config, temperature=TEMPERATURE)
    keys = ("loss", "grad_norm", "entropy", "clip_fraction", "importance_weight/ess", "tokens")
    for version, groups in enumerate(two_ranks.steps):
        ours = learner.step(one_batch(groups, policy_version=version, num_mini_batches=2))
        theirs = two_ranks.outputs[version]
        assert ours.policy_version == theirs.policy_version == version + 1
        assert set(ours.metrics) == set(theirs.metrics)
        for key in keys:
            expected = pytest.approx(theirs.metrics[f"learner/{key}"], rel=1e-9)
            assert ours.metrics[f"learner/{key}"] == expected, key
    assert_same_weights(learner, two_ranks.weights, atol=1e-9)
    probe = probe_of(learner, [[35, 36, 37], [20, 21, 22, 23]])
    for a, b in zip(probe, two_ranks.probe, strict=True):
        assert a == pytest.approx(b, abs=1e-9)


def test_learning_rate_zero_leaves_every_bit(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder, learning_rate=0.0, compute_dtype="float32")
    before = weights_of(learner)
    output = learner.step(one_batch(make_groups(0)))
    assert not output.is_skipped
    assert output.metrics["learner/learning_rate"] == 0.0
    assert_same_weights(learner, before)


def test_a_step_that_is_not_finite_is_skipped_and_too_many_end_the_run(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder, max_skipped_steps=2)
    before = weights_of(learner)
    groups = make_groups(0)
    broken = one_batch(groups)
    broken.rewards[0] = np.inf
    output = learner.step(broken)
    assert output.is_skipped
    assert (output.policy_version, learner.num_steps) == (0, 1)
    assert output.metrics["learner/skipped_steps"] == 1
    assert_same_weights(learner, before)
    good = learner.step(one_batch(groups))
    assert (good.policy_version, good.is_skipped) == (1, False)
    again = replace(broken, policy_version=1)
    learner.step(again)
    with pytest.raises(LearnerError, match="2 steps"):
        learner.step(again)


def test_a_batch_without_a_trained_token_is_skipped(tiny_folder: Path) -> None:
    groups = [
        replace(
            group,
            trajectories=tuple(
                t.with_train_mask(np.zeros_like(t.train_mask)) for t in group.trajectories
            ),
        )
        for group in make_groups(0)
    ]
    output = make_learner(tiny_folder).step(one_batch(groups))
    assert output.is_skipped
    assert output.policy_version == 0


def test_the_gap_is_zero_where_the_learner_itself_sampled(tiny_folder: Path) -> None:
    """Behavior log-probabilities that a padded forward of the same weights would have recorded."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    groups: list[TrajectoryGroup] = []
    for group in make_groups(0):
        trajectories = []
        for t in group.trajectories:
            ids = torch.from_numpy(t.token_ids).long()
            with torch.no_grad():
                scores = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            sampled = scores[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
            logprobs = np.where(t.loss_mask, np.concatenate([[0.0], sampled]), np.nan)
            trajectories.append(replace(t, behavior_logprobs=logprobs.astype(np.float32)))
        groups.append(replace(group, trajectories=tuple(trajectories)))
    learner = make_learner(tiny_folder, num_epochs=1, advantage=RlooAdvantage(kind="rloo"))
    metrics = learner.step(one_batch(groups)).metrics
    assert metrics["learner/logprob_gap/max"] < 1e-5
    assert metrics["learner/on_policy_gap/mean"] < 1e-5
    assert metrics["learner/probability_gap/max"] < 1e-5
    assert metrics["learner/importance_weight/ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["learner/approx_kl"] == 0.0


def test_a_batch_of_another_version_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match="policy version 4"):
        make_learner(tiny_folder).step(one_batch(make_groups(0), policy_version=4))


def test_a_model_directory_that_cannot_be_trained_is_a_config_error(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        make_learner(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_learner(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        make_learner(tmp_path)
    quantised = json.loads((tiny_folder / "config.json").read_text())
    quantised["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"model\.path"):
        make_learner(tmp_path)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1 kB\n")
    monkeypatch.setattr("raylearner.learner.model.models.MEMORY", tmp_path / "meminfo")
    with pytest.raises(ConfigError, match=r"model\.path: .* 0\.0 GiB"):
        make_learner(tiny_folder)


def test_activation_memory_is_estimated_within_a_third(untied_folder: Path) -> None:
    model = load_sharded(
        str(untied_folder),
        mesh.connect(),
        dtype=torch.float32,
        compute_dtype=torch.float32,
        options=ModelOptions(),
    )
    sequences = [np.arange(64) for _ in range(4)]
    tokens = PackedTokens.of(sequences, [np.zeros(64, bool)] * 4)
    of_weights = {parameter.numel() * 4 for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        local = optimizer.local(tensor)
        if local.untyped_storage().nbytes() not in of_weights:
            kept[local.untyped_storage().data_ptr()] = local
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens)
    size = ModelSize.of(untied_folder)
    assert size is not None
    section = LearnerSection(
        compute_dtype="float32", max_tokens_per_micro_batch=256, share_prefixes=False
    )
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert found == pytest.approx(estimate(section, size).activations, rel=1 / 3)
