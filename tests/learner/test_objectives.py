"""Objectives in the learner against a naive padded loop in float64, written here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learners import assert_same_weights, make_groups, make_learner, step
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from raylearner.config.schema import LearnerSection
from raylearner.types import StopReason, Trajectory, TrajectoryGroup

TEMPERATURE = 0.9
LEARNING_RATE = 1e-2
MAX_GRAD_NORM = 0.5


@dataclass
class Padded:
    """Groups as `[B, W]` arrays, the first token of each row left out of all but `ids`."""

    ids: Tensor
    mask: Tensor  # [B, W - 1]
    behavior: Tensor
    rewards: Tensor  # [G, S]
    is_truncated: Tensor  # [B]

    @property
    def flat_rewards(self) -> Tensor:
        return self.rewards.flatten()


def pad(groups: list[TrajectoryGroup]) -> Padded:
    rows = [t for group in groups for t in group.trajectories]
    width = max(row.num_tokens for row in rows)

    def padded(name: str) -> Tensor:
        arrays = [np.nan_to_num(getattr(row, name)) for row in rows]
        return torch.tensor(np.stack([np.pad(a, (0, width - len(a))) for a in arrays]))

    return Padded(
        ids=padded("token_ids").long(),
        mask=padded("train_mask")[:, 1:],
        behavior=padded("behavior_logprobs").double()[:, 1:],
        rewards=torch.tensor([[t.reward for t in g.trajectories] for g in groups]).double(),
        is_truncated=torch.tensor([row.stop_reason is StopReason.MAX_TOKENS for row in rows]),
    )


class Naive:
    """A plain transformers model and AdamW."""

    def __init__(self, folder: Path, *, learning_rate: float = LEARNING_RATE) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.head = nn.Linear(self.model.config.hidden_size, 1, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.adamw = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)

    def logprobs(self, data: Padded) -> Tensor:
        scores = (self.model(data.ids).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
        return scores.gather(2, data.ids[:, 1:, None]).squeeze(2)

    def values(self, data: Padded) -> Tensor:
        """Of the state after each token: `[B, W]`."""
        return self.head(self.model.model(data.ids).last_hidden_state).squeeze(2)

    def step(self, loss: Tensor, *, max_norm: float = MAX_GRAD_NORM) -> float:
        loss.backward()
        used = [p for group in self.adamw.param_groups for p in group["params"]]
        norm = float(
            torch.nn.utils.clip_grad_norm_([p for p in used if p.grad is not None], max_norm)
        )
        self.adamw.step()
        self.adamw.zero_grad()
        return norm


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values[mask].sum() / mask.sum()


def clipped(logprobs: Tensor, start: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    ratio = (logprobs - start).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def dual_clipped(logprobs: Tensor, start: Tensor, advantages: Tensor) -> Tensor:
    values = clipped(logprobs, start, advantages, 0.2, 0.2)
    return torch.where(advantages < 0, torch.minimum(values, -3 * advantages), values)


def grpo(data: Padded) -> Tensor:
    rewards = data.rewards
    return by_token((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6), data)


def gae(data: Padded, states: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Token by token; `states [B, W]` are values after each token."""
    advantages, targets = torch.zeros_like(data.behavior), torch.zeros_like(data.behavior)
    for row in range(len(data.mask)):
        trained = data.mask[row].nonzero().squeeze(1).tolist()
        following, trace = 0.0, 0.0
        if data.is_truncated[row]:
            following = float(states[row, trained[-1] + 1])
        for number, t in enumerate(reversed(trained)):
            reward = float(data.flat_rewards[row]) if number == 0 else 0.0
            value = float(states[row, t])
            trace = reward + gamma * following - value + gamma * lam * trace
            advantages[row, t], targets[row, t] = trace, trace + value
            following = value
    return advantages, targets


def vtrace(data: Padded, states: Tensor, ratio: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    advantages, targets = torch.zeros_like(data.behavior), torch.zeros_like(data.behavior)
    for row in range(len(data.mask)):
        next_value = next_target = 0.0
        for number, t in enumerate(reversed(data.mask[row].nonzero().squeeze(1).tolist())):
            reward = float(data.flat_rewards[row]) if number == 0 else 0.0
            value, rho = float(states[row, t]), min(float(ratio[row, t]), 1.0)
            target = value + rho * (reward + gamma * next_value - value)
            target += gamma * rho * (next_target - next_value)
            advantages[row, t] = rho * (reward + gamma * next_target - value)
            targets[row, t] = target
            next_value, next_target = value, target
    return advantages, targets


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    known = values[mask]
    return (values - known.mean()) * (known.var() + 1e-8).rsqrt()


def value_loss(values: Tensor, old: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    plain = (values - targets).square() / 2
    moved = (old + (values - old).clamp(-0.5, 0.5) - targets).square() / 2
    return token_mean(torch.maximum(plain, moved), mask)


def change_each(
    groups: list[TrajectoryGroup], change: Callable[[int, Trajectory], Trajectory]
) -> list[TrajectoryGroup]:
    return [
        replace(g, trajectories=tuple(change(i, t) for i, t in enumerate(g.trajectories)))
        for g in groups
    ]


def near(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Behavior policies on both sides of the tiny model, which is close to uniform."""
    shift = np.float32(2.1)
    return change_each(
        groups, lambda _, t: replace(t, behavior_logprobs=t.behavior_logprobs - shift)
    )


def cut_some(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Every third episode ran out of tokens."""
    return change_each(
        groups, lambda i, t: t if i % 3 else replace(t, stop_reason=StopReason.MAX_TOKENS)
    )


def play_naive(
    naive: Naive, data: Padded, loss_of: Callable[[Tensor, Tensor], Tensor], num_epochs: int
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms; `loss_of` takes current and starting log-probabilities."""
    losses, norms, start = [], [], None
    for _ in range(num_epochs):
        logprobs = naive.logprobs(data)
        start = logprobs.detach() if start is None else start
        loss = loss_of(logprobs, start)
        losses.append(loss.item())
        norms.append(naive.step(loss))
    return losses, norms


def assert_same_step(
    naive: Naive,
    groups: list[TrajectoryGroup],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    **changes: Any,
) -> dict[str, float]:
    """Train two epochs by the naive loop and by the learner; return the learner's metrics.

    Adam makes steps of like size of all gradients, so rounding of the smallest ones shows.
    """
    section = LearnerSection(
        **{
            "compute_dtype": "float64",
            "learning_rate": LEARNING_RATE,
            "max_tokens_per_micro_batch": 48,
            "logprob_chunk_tokens": 7,
            "max_grad_norm": MAX_GRAD_NORM,
            "num_epochs": 2,
            "loss": {"kind": "ppo"},
        }
        | changes
    )
    losses, norms = play_naive(naive, pad(groups), loss_of, section.num_epochs)
    learner = make_learner(naive.folder, section, temperature=TEMPERATURE)
    metrics = dict(step(learner, groups).metrics)
    assert metrics["learner/loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert metrics["learner/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-6)
    expected = {name: p.detach() for name, p in naive.model.named_parameters()}
    assert_same_weights(learner, expected, atol=2e-5)
    return metrics


def ppo_loss(advantages: Tensor, mask: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logprobs, start: token_mean(dual_clipped(logprobs, start, advantages), mask)


def by_token(advantages: Tensor, data: Padded) -> Tensor:
    """Advantages `[G, S]` as `[B, W - 1]`."""
    return advantages.flatten()[:, None].expand(data.mask.shape)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_gae_and_ppo_with_a_critic(tiny_folder: Path, untied_folder: Path, bootstrap: bool) -> None:
    """Two epochs, so that clips act; the critic's values are not all 0, since its second step sees them."""
    groups = cut_some(make_groups(0))
    data = pad(groups)
    if not bootstrap:
        data.is_truncated[:] = False
    critic = Naive(untied_folder, learning_rate=3e-3)
    with torch.no_grad():
        states = critic.values(data)
    advantages, targets = gae(data, states, gamma=0.97, lam=0.9)
    value_losses = []
    for _ in range(2):
        loss = value_loss(critic.values(data)[:, :-1], states[:, :-1], targets, data.mask)
        value_losses.append(loss.item())
        critic.step(loss, max_norm=1.0)
    metrics = assert_same_step(
        Naive(tiny_folder),
        groups,
        ppo_loss(whitened(advantages, data.mask), data.mask),
        advantage={"kind": "gae", "gamma": 0.97, "lam": 0.9, "bootstrap": bootstrap},
        critic={"path": str(untied_folder), "learning_rate": 3e-3},
    )
    assert metrics["learner/value_loss"] == pytest.approx(np.mean(value_losses), abs=1e-9)


def test_vtrace_and_the_policy_gradient(tiny_folder: Path, untied_folder: Path) -> None:
    groups = near(make_groups(1))
    data, naive, critic = pad(groups), Naive(tiny_folder), Naive(untied_folder)
    with torch.no_grad():
        states = critic.values(data)
        # Far from the behavior policy in both directions.
        ratio = (naive.logprobs(data) - data.behavior).exp()
    assert bool((ratio[data.mask] > 1).any())
    assert bool((ratio[data.mask] < 1).any())
    advantages, targets = vtrace(data, states, ratio, gamma=0.9)
    loss = value_loss(critic.values(data)[:, :-1], states[:, :-1], targets, data.mask)
    metrics = assert_same_step(
        naive,
        groups,
        lambda logprobs, _: token_mean(-advantages * logprobs, data.mask),
        num_epochs=1,
        loss={"kind": "gpg"},
        advantage={"kind": "vtrace", "gamma": 0.9},
        critic={"path": str(untied_folder)},
    )
    assert metrics["learner/value_loss"] == pytest.approx(loss.item(), abs=1e-9)


def test_reinforce_plus_plus_and_truncated_reinforce(tiny_folder: Path) -> None:
    groups = near(make_groups(2))
    data = pad(groups)
    returns = torch.zeros_like(data.behavior)
    for row in range(len(data.mask)):
        for number, t in enumerate(reversed(data.mask[row].nonzero().squeeze(1).tolist())):
            returns[row, t] = 0.9**number * data.flat_rewards[row]
    advantages = whitened(returns, data.mask)

    def loss_of(logprobs: Tensor, _: Tensor) -> Tensor:
        weight = (logprobs - data.behavior).detach().exp().clamp(max=1.5)
        return token_mean(-weight * advantages * logprobs, data.mask)

    assert_same_step(
        Naive(tiny_folder),
        groups,
        loss_of,
        loss={"kind": "reinforce", "ratio_cap": 1.5},
        advantage={"kind": "reinforce_plus_plus", "gamma": 0.9},
    )


def test_rloo_and_the_sequence_ratio_with_the_kl_in_the_reward(
    tiny_folder: Path, untied_folder: Path
) -> None:
    groups = make_groups(3)
    data, naive, reference = pad(groups), Naive(tiny_folder), Naive(untied_folder)
    with torch.no_grad():
        difference = naive.logprobs(data) - reference.logprobs(data)
    kl = torch.where(data.mask, difference, 0.0).sum(1)
    rewards = data.rewards - 0.2 * kl.reshape(data.rewards.shape)
    size = rewards.shape[1]
    advantages = (rewards - (rewards.sum(1, True) - rewards) / (size - 1)).flatten()

    def loss_of(logprobs: Tensor, start: Tensor) -> Tensor:
        ratio = torch.where(data.mask, logprobs - start, 0.0).sum(1).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    kl_keys = {"place": "reward", "estimator": "k1", "coefficient": 0.2}
    metrics = assert_same_step(
        naive,
        groups,
        loss_of,
        loss={"kind": "sequence_ratio"},
        advantage={"kind": "rloo"},
        kl={**kl_keys, "reference": {"kind": "frozen", "path": str(untied_folder)}},
    )
    assert metrics["learner/kl_coefficient"] == 0.2


def test_gspo(tiny_folder: Path) -> None:
    groups = make_groups(4)
    data = pad(groups)
    count, a = data.mask.sum(1), grpo(data)[:, 0]

    def loss_of(logprobs: Tensor, start: Tensor) -> Tensor:
        mean = torch.where(data.mask, logprobs - start, 0.0).sum(1) / count
        return torch.maximum(-a * mean.exp(), -a * mean.exp().clamp(1 - 3e-4, 1 + 4e-4)).mean()

    assert_same_step(
        Naive(tiny_folder),
        groups,
        loss_of,
        loss={"kind": "gspo"},
        aggregation="sequence_mean_of_means",
    )


def test_cispo_with_truncated_and_normalized_importance_weights(tiny_folder: Path) -> None:
    groups = near(make_groups(5))
    data = pad(groups)
    advantages = grpo(data)

    def loss_of(logprobs: Tensor, start: Tensor) -> Tensor:
        weight = (start - data.behavior).exp().clamp(max=1.7)
        weight = weight / weight[data.mask].mean()
        ratio = (logprobs - start).detach().exp().clamp(max=1.1)
        return token_mean(-weight * ratio * advantages * logprobs, data.mask)

    assert_same_step(
        Naive(tiny_folder),
        groups,
        loss_of,
        loss={"kind": "cispo", "ratio_max": 1.1},
        corrections=[{"kind": "tis", "high": 1.7, "normalize": "token"}],
    )


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("k2", lambda d: d.square() / 2), ("k3", lambda d: (-d).exp() - 1 + d)],
)
def test_the_kl_loss_and_the_entropy_bonus(
    tiny_folder: Path, untied_folder: Path, estimator: str, formula: Callable[[Tensor], Tensor]
) -> None:
    groups = make_groups(6)
    data, naive, frozen = pad(groups), Naive(tiny_folder), Naive(untied_folder)
    advantages = grpo(data)
    with torch.no_grad():
        reference = frozen.logprobs(data)

    def loss_of(logprobs: Tensor, start: Tensor) -> Tensor:
        kl = formula(logprobs - reference) * (logprobs - start).exp()
        scores = (naive.model(data.ids).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
        entropy = -(scores.exp() * scores).sum(2)
        values = dual_clipped(logprobs, start, advantages) + 0.3 * kl - 0.1 * entropy
        return (torch.where(data.mask, values, 0.0).sum(1) / data.mask.sum(1)).mean()

    kl_keys = {"coefficient": 0.3, "estimator": estimator, "value_limit": None, "weighted": True}
    assert_same_step(
        naive,
        groups,
        loss_of,
        aggregation="sequence_mean_of_means",
        entropy_coefficient=0.1,
        kl={**kl_keys, "reference": {"kind": "frozen", "path": str(untied_folder)}},
    )


def test_ppo_around_the_behavior_policy_and_rejected_tokens_out_of_the_count(
    tiny_folder: Path,
) -> None:
    groups = near(make_groups(7))
    data = pad(groups)
    advantages = grpo(data)
    ppo = ppo_loss(advantages, data.mask)
    assert_same_step(
        Naive(tiny_folder),
        groups,
        lambda logprobs, _: ppo(logprobs, data.behavior),
        proximal="behavior",
    )

    naive = Naive(tiny_folder)
    with torch.no_grad():
        ratio = (naive.logprobs(data) - data.behavior).exp()
    keep = data.mask & (ratio > 1 / 4) & (ratio < 4)
    assert 0 < int(keep.sum()) < int(data.mask.sum())
    assert_same_step(
        naive,
        groups,
        ppo_loss(advantages, keep),
        corrections=[{"kind": "rejection", "high": 4}],
        count_rejected=False,
    )


def test_dr_grpo_divides_by_a_constant_and_clips_rewards(tiny_folder: Path) -> None:
    groups = make_groups(8)
    data = pad(groups)
    rewards = data.rewards.clamp(max=0.6)
    advantages = by_token(rewards - rewards.mean(1, True), data)

    def loss_of(logprobs: Tensor, start: Tensor) -> Tensor:
        values = dual_clipped(logprobs, start, advantages)
        return torch.where(data.mask, values, 0.0).sum() / (20 * len(values))

    assert_same_step(
        Naive(tiny_folder),
        groups,
        loss_of,
        advantage={"kind": "dr_grpo"},
        reward={"clip_high": 0.6},
        aggregation="sequence_mean_of_sums_scaled",
        aggregation_scale=20,
    )


def test_a_shared_trunk_trains_by_the_sum_of_both_losses(tiny_folder: Path) -> None:
    groups = make_groups(9)
    data, naive = pad(groups), Naive(tiny_folder)
    with torch.no_grad():
        states = naive.values(data)
    advantages, targets = gae(data, states, gamma=1.0, lam=1.0)
    policy_loss = ppo_loss(whitened(advantages, data.mask), data.mask)

    def loss_of(logprobs: Tensor, start: Tensor) -> Tensor:
        value = value_loss(naive.values(data)[:, :-1], states[:, :-1], targets, data.mask)
        return policy_loss(logprobs, start) + 0.5 * value

    advantage, critic = {"kind": "gae"}, {"trunk": "shared"}
    assert_same_step(naive, groups, loss_of, advantage=advantage, critic=critic)


def test_remax_subtracts_the_greedy_reward(tiny_folder: Path) -> None:
    groups = [replace(g, greedy_reward=0.25 * i) for i, g in enumerate(make_groups(10))]
    data = pad(groups)
    baseline = torch.tensor([g.greedy_reward for g in groups])[:, None]
    loss_of = ppo_loss(by_token(data.rewards - baseline, data), data.mask)
    assert_same_step(Naive(tiny_folder), groups, loss_of, advantage={"kind": "remax"})
