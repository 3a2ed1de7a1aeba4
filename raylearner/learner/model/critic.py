"""The value of each prefix, from a separate transformer.

Waits for: the other ranks, in every forward and update.
Legend: `T` packed tokens, `R` rows.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from raylearner.config.schema import CriticSection
from raylearner.learner.batch.metric import Metrics
from raylearner.learner.batch.micro_batch import MicroBatch, PackedTokens
from raylearner.learner.batch.rows import Rows
from raylearner.learner.checkpoint.state import Save, restore_tensors, save_tensors
from raylearner.learner.model.policy import PackedModel
from raylearner.learner.objective.aggregation import aggregate
from raylearner.learner.objective.value_loss import value_loss
from raylearner.learner.optimizer import ClippedAdamW


class Critic:
    """Owns a sharded model with a value head, and its optimizer. Its language head is unused."""

    def __init__(self, config: CriticSection, model: PackedModel) -> None:
        self._config = config
        self.model = model
        self.optimizer = ClippedAdamW(
            self.model.parameters(),
            learning_rate=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )

    def state_values(self, tokens: PackedTokens) -> Tensor:
        """Return the value of the state after each token: `[T]`."""
        scores = self.model(replace(tokens, scored=tokens.scored[:0]))
        assert scores.state_values is not None
        return scores.state_values

    def backward(self, share: Tensor, *, is_last: bool) -> None:
        """Add a micro-batch's gradients, as `PackedModel.backward` does."""
        self.model.backward(share, is_last=is_last)

    def discard_gradients(self) -> None:
        self.model.discard_gradients()

    @torch.no_grad()
    def score(self, tokens: PackedTokens) -> Tensor:  # [T]
        """Return the same without gradients."""
        values = self.state_values(tokens)
        self.model.reshard_all()
        return values

    def save(self, folder: Path, save: Save) -> None:
        save_tensors(folder, self.model.own_parameters(), self.optimizer, save)

    def restore(self, folder: Path, *, num_updates: int) -> None:
        restore_tensors(
            folder, self.model.own_parameters(), self.optimizer, num_updates=num_updates
        )


def prefix_values(state_values: Tensor) -> Tensor:
    """Return the value before each token, for estimators; undefined at a row's first token: `[T]`."""
    return torch.cat([state_values.new_zeros(1), state_values[:-1]])


def end_values(state_values: Tensor, micro: MicroBatch) -> Tensor:
    """Return the value after a row's last token if the row was cut off, else 0: `[R]`."""
    everywhere = torch.ones_like(micro.train_mask)
    ends = state_values[micro.rows.last(everywhere)]
    return torch.where(micro.is_truncated, ends, torch.zeros_like(ends))


def value_share(
    config: CriticSection,
    state_values: Tensor,  # [T]
    *,
    old_values: Tensor,  # [T]
    targets: Tensor,  # [T]
    is_target: Tensor,  # [T] bool
    rows: Rows,
    num_targets: float,
    row_copies: Tensor | None = None,  # [R]
) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's share of the mean value loss over the `num_targets` of all ranks.

    With `row_copies` a row counts as often as it was drawn, in `num_targets` as well.
    """
    values, metrics = value_loss(
        prefix_values(state_values),
        old_values,
        targets,
        is_target,
        config,
    )
    if row_copies is not None:
        values = values * rows.spread(row_copies.to(values.dtype))
    share = aggregate(
        values, is_target, rows, mode="token_mean", num_tokens=num_targets, num_rows=1
    )
    return share, metrics
