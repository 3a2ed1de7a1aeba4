"""Sections of objectives as a YAML makes them, and inputs of their formulas."""

from dataclasses import replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective.aggregation import aggregate, aggregate_rows
from raylearner.learner.objective.corrections import CORRECTIONS, CorrectionSection
from raylearner.learner.objective.covariance_losses import select_tokens
from raylearner.learner.objective.episodes import EpisodeTable
from raylearner.learner.objective.estimate import (
    EPISODE_ADVANTAGES,
    AdvantageSection,
    token_result,
)
from raylearner.learner.objective.importance import Correction, CorrectionInputs
from raylearner.learner.objective.loss import LossInputs, LossOutput
from raylearner.learner.objective.losses import POLICY_LOSSES, LossSection
from raylearner.learner.objective.returns import TokenInputs, TokenResult

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "loss": TypeAdapter(LossSection),
    "advantage": TypeAdapter(AdvantageSection),
    "correction": TypeAdapter(CorrectionSection),
}


def section_of(sort: str, kind: str, **keys: Any) -> Any:
    """The section of a loss, an advantage or a correction."""
    return _ADAPTERS[sort].validate_python({"kind": kind, **keys})


def make_table(
    rewards: Tensor,
    groups: Tensor | None = None,
    *,
    num_tokens: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    parts: Tensor | None = None,
    part_weights: Tensor | None = None,
) -> EpisodeTable:
    """Episodes of one group and one token each, unless said otherwise."""
    ones = torch.ones(len(rewards), dtype=torch.int64)
    parts = rewards[:, None] if parts is None else parts
    return EpisodeTable(
        rewards=rewards,
        groups=ones if groups is None else groups,
        num_tokens=ones if num_tokens is None else num_tokens,
        num_rows=ones,
        greedy_rewards=torch.full_like(rewards, torch.nan)
        if greedy_rewards is None
        else greedy_rewards,
        parts=parts,
        part_weights=parts.new_ones(parts.shape[1]) if part_weights is None else part_weights,
    )


def episode_advantages(
    kind: str, rewards: Tensor, groups: Tensor, table: dict[str, Any] | None = None, **keys: Any
) -> Tensor:
    """Advantages per episode of a kind with the given keys: `[E]`."""
    section = section_of("advantage", kind, **keys)
    return EPISODE_ADVANTAGES[kind](make_table(rewards, groups, **(table or {})), section)


def token_advantages(
    kind: str,
    rewards: Tensor,  # [T]
    mask: Tensor,
    rows: Rows,
    *,
    inputs: dict[str, Any] | None = None,
    table: EpisodeTable | None = None,
    **keys: Any,
) -> TokenResult:
    """Advantages and returns per token, not whitened unless asked for; a row is an episode."""
    section = section_of("advantage", kind, **keys)
    if getattr(section, "normalize", None) is True and "normalize" not in keys:
        section = section.model_copy(update={"normalize": False})
    zeros = torch.zeros_like(rows.index)
    defaults: dict[str, Any] = {
        "episodes": make_table(rewards.new_zeros(rows.num_rows)) if table is None else table,
        "row_episodes": torch.arange(rows.num_rows),
        "turns": zeros,
        "anchors": zeros,
    }
    made = TokenInputs(rewards=rewards, mask=mask, rows=rows, **(defaults | (inputs or {})))
    return token_result(section, made)


def correction_inputs(
    log_ratio: Tensor, mask: Tensor, rows: Rows, *, advantages: Tensor | None = None, **keys: Any
) -> CorrectionInputs:
    """Inputs of a correction; advantages are 0 unless given."""
    advantages = torch.zeros_like(log_ratio) if advantages is None else advantages
    return CorrectionInputs(
        log_ratio=log_ratio, mask=mask, rows=rows, advantages=advantages, **keys
    )


def correct(kind: str, inputs: CorrectionInputs, **keys: Any) -> Correction:
    """The correction of a kind with the given keys."""
    return CORRECTIONS[kind](inputs, section_of("correction", kind, **keys))


def loss_of(inputs: LossInputs, kind: str, **keys: Any) -> LossOutput:
    """The loss of a kind with the given keys; losses that select tokens do so among these."""
    section = section_of("loss", kind, **keys)
    if section.selects_tokens:
        inputs = replace(inputs, selected_tokens=select_tokens(inputs, section, seed=0))
    return POLICY_LOSSES[section.kind](inputs, section)


def aggregate_output(
    output: LossOutput, inputs: LossInputs, *, num_rows: float, **counts: Any
) -> Tensor:
    """The share of a batch's loss; row losses take the mean over rows."""
    if output.level == "row":
        return aggregate_rows(output.values, inputs.mask, inputs.rows, num_rows=num_rows)
    return aggregate(output.values, inputs.mask, inputs.rows, num_rows=num_rows, **counts)
