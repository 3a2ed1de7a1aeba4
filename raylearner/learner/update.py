"""The result of an optimizer update, and the metrics of a step.

Waits for: the other ranks, in `step_metrics`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raylearner.learner.batch import metric
from raylearner.learner.batch.metric import Metrics
from raylearner.learner.batch.pack import LearnerBatch, TokenRow, num_computed_tokens
from raylearner.learner.model.mesh import BatchLayout
from raylearner.learner.objective import diagnostics
from raylearner.learner.objective.prepare import (
    PreparedBatch,
    PreparedMicroBatch,
    PreparedMiniBatch,
)
from raylearner.observability import transcripts
from raylearner.types import TrajectoryKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of one optimizer update; the same on every rank, except for `non_finite_rows`."""

    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    vision_learning_rate: float | None = None
    value_loss: float | None = None
    critic_grad_norm: float | None = None
    is_made: bool = False
    exceeds_max_kl: bool = False
    metrics: Sequence[Metrics] = ()
    non_finite_rows: Sequence[TokenRow] = ()
    """This rank's rows in micro-batches whose loss was not finite."""

    def __str__(self) -> str:
        parts = {
            "loss": self.loss,
            "gradient norm": self.grad_norm,
            "value loss": self.value_loss,
            "critic's gradient norm": self.critic_grad_norm,
        }
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


def step_metrics(
    batch: LearnerBatch,
    prepared_batch: PreparedBatch,
    updates: Sequence[Update],
    *,
    layout: BatchLayout,
    step_s: float,
    pixel_wait_s: float | None = None,
    device: torch.device | str,
) -> dict[str, float]:
    """Combine metrics over micro-batches and ranks; leave out those without any value."""
    combined = metric.combine([*prepared_batch.measured, *(m for u in updates for m in u.metrics)])
    combined |= diagnostics.groups(prepared_batch.table.rewards, prepared_batch.table.groups)
    rewards = torch.tensor(batch.rewards, device=device)  # before any shaping
    combined |= metric.summary("reward", rewards, ~rewards.isnan())
    num_held, size = 0, 1 if layout.context is None else layout.context.size
    num_padded = 0
    for rows in (rows for mini in batch.mini_batches for rows in mini.micro_batches):
        num_tokens = num_computed_tokens(rows)
        num_held += num_tokens
        num_padded += math.ceil(max(num_tokens, 1) / size) * size - num_tokens
    mine = torch.tensor(num_held / size, dtype=torch.float64, device=device)
    padding = torch.tensor(num_padded / size, dtype=torch.float64, device=device)
    combined["rank_tokens/max"] = metric.Max.of(mine)
    combined["rank_tokens/mean"] = metric.Mean.of(mine)
    if pixel_wait_s is not None:
        combined["pixel_wait_s"] = metric.Max.of(torch.tensor([pixel_wait_s], device=device))
    combined["padding_fraction"] = metric.Mean(padding, padding + mine)
    values = metric.values(layout.combine(combined, device=device))
    tried = [update for update in updates if not update.exceeds_max_kl]
    made = [update for update in tried if update.is_made] or tried
    for key in ("loss", "grad_norm", "value_loss", "critic_grad_norm"):
        known = [v for update in made if (v := getattr(update, key)) is not None]
        values |= {key: sum(known) / len(known)} if known else {}
    if "gradient_power/total" in values and "grad_norm" in values:
        values |= diagnostics.gradient_noise(
            values["gradient_power/total"], values["grad_norm"], batch.num_rows
        )
    for key in ("learning_rate", "vision_learning_rate"):
        if made and (rate := getattr(made[-1], key)) is not None:
            values[key] = rate
    for rule, count in batch.num_masked_tokens.items():
        values[f"masked_fraction/{rule}"] = count / max(batch.num_sampled_tokens, 1)
    values |= {
        "tokens": batch.num_tokens,
        "trained_tokens": batch.num_trained_tokens,
        "tokens_per_s": batch.num_computed_tokens / max(step_s, 1e-9),
        "shared_prefix_fraction": 1 - batch.num_computed_tokens / max(batch.num_tokens, 1),
        "step_s": step_s,
        "num_updates": sum(update.is_made for update in updates),
        "skipped_updates": sum(not update.is_made for update in tried),
        "stopped_early": len(tried) < len(updates),
    }
    return {f"learner/{key}": float(v) for key, v in values.items() if not math.isnan(v)}


def split_by_trajectory(
    values: Sequence[tuple[PreparedMicroBatch, Tensor]],
) -> dict[TrajectoryKey, NDArray[np.float32]]:
    """Split values `[T]` of micro-batches by row, in one copy to the host; a dummy has none."""
    real = [(prepared, found) for prepared, found in values if prepared.source]
    if not real:
        return {}
    rows = [row.trajectory for prepared, _ in real for row in prepared.source]
    whole = torch.cat([found.float() for _, found in real]).cpu()
    parts = whole.split([trajectory.num_tokens for trajectory in rows])
    return {row.key: part.numpy() for row, part in zip(rows, parts, strict=True)}


def mean_advantages(batch: PreparedBatch) -> dict[TrajectoryKey, float]:
    """Return the mean advantage of the trained tokens of each of this rank's trajectories."""
    micros = [p for mini_batch in batch.mini_batches for p in mini_batch.micro_batches]
    masks = split_by_trajectory([(p, p.mask) for p in micros])
    advantages = split_by_trajectory([(p, p.advantages) for p in micros])
    return {
        key: float(advantages[key][mask > 0].mean()) for key, mask in masks.items() if mask.any()
    }


def find_non_finite_rows(
    mini_batch: PreparedMiniBatch,
    shares: Sequence[Tensor] | None,
    value_shares: Sequence[Tensor] | None,
) -> list[TokenRow]:
    """Return the rows of micro-batches whose share is not finite; all rows if no single one is."""
    bad = [
        any(s is not None and not bool(s[number].isfinite()) for s in (shares, value_shares))
        for number in range(len(mini_batch.micro_batches))
    ]
    return [
        row
        for prepared, is_bad in zip(mini_batch.micro_batches, bad, strict=True)
        if is_bad or not any(bad)
        for row in prepared.source
    ]


def write_rows(updates: Sequence[Update], folder: Path, *, step: int) -> str | None:
    """Write this rank's non-finite rows; return where those of all ranks are, None without updates."""
    if not updates:
        return None
    rows = {id(row): row for update in updates for row in update.non_finite_rows}
    trajectories = [row.trajectory for row in rows.values()]
    path = transcripts.write(folder / f"rank_{dist.get_rank()}", step, trajectories)
    return f"{folder}/rank_*/{path.name}"
