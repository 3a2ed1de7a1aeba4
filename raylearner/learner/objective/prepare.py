"""Scores, advantages and counts of a step's batch, computed before its first update.

Waits for: the other ranks, in every forward and wherever a whole batch is needed.
Legend: `T` packed tokens and `R` rows of a micro-batch, `E` episodes of the whole batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from raylearner.config.schema import LearnerSection
from raylearner.learner.batch import metric
from raylearner.learner.batch.metric import Metrics
from raylearner.learner.batch.micro_batch import MicroBatch
from raylearner.learner.batch.pack import TokenRow
from raylearner.learner.batch.whole_batch import WholeBatch
from raylearner.learner.model.critic import end_values, prefix_values
from raylearner.learner.model.mesh import BatchLayout
from raylearner.learner.model.policy import Scores
from raylearner.learner.objective import diagnostics
from raylearner.learner.objective.behavior_losses import (
    DecoupledPpo,
    Reinforce,
    Topr,
    behavior_weights,
)
from raylearner.learner.objective.corrections import (
    correct,
    is_normalized,
    needs_whole_batch,
    weight_means,
)
from raylearner.learner.objective.episodes import EpisodeTable, resample
from raylearner.learner.objective.estimate import (
    EPISODE_ADVANTAGES,
    scorable,
    token_advantages,
)
from raylearner.learner.objective.importance import CorrectionInputs, log_ratios
from raylearner.learner.objective.kl import kl_in_reward
from raylearner.learner.objective.rejection import M2po, m2po_bound
from raylearner.learner.objective.returns import CriticAdvantage
from raylearner.learner.objective.token_baselines import OtbAdvantage

ScorePolicy = Callable[[MicroBatch], Scores]
ScoreTokens = Callable[[MicroBatch], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMicroBatch:
    """One micro-batch with all values that updates of the step do not change."""

    micro: MicroBatch
    source: Sequence[TokenRow]
    base_mask: Tensor  # [T] bool, trained tokens of scored episodes: corrections decide on these
    mask: Tensor  # [T] bool, trained tokens; fewer than those if rejected ones leave the counts
    start_logprobs: Tensor | None = None  # [T] the learner's at the start of the step
    reference_logprobs: Tensor | None = None  # [T]
    values: Tensor | None = None  # [T] the critic's at the start of the step
    targets: Tensor | None = None  # [T] of those values
    is_target: Tensor | None = None  # [T] bool
    advantages: Tensor  # [T]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMiniBatch:
    """One mini-batch: this rank's micro-batches, and counts over all ranks."""

    micro_batches: Sequence[PreparedMicroBatch]
    num_tokens: float
    num_episodes: float
    num_targets: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A batch that is ready for its updates."""

    table: EpisodeTable
    mini_batches: list[PreparedMiniBatch]
    batch_values: tuple[float | None, ...]
    """By correction: the batch mean that its weights are divided by, or its second moment's bound."""
    measured: Sequence[Metrics]


def needs_start_logprobs(config: LearnerSection) -> bool:
    """Whether the learner must score the batch before the first update.

    With a single update the proximal policy is the current one and needs no forward. Later
    mini-batches are scored before the first update for every proximal policy, since metrics
    describe the policy at the start of the step.
    """
    kl, num_updates = config.kl, config.num_epochs * config.num_mini_batches
    return (
        (config.proximal == "recomputed" and num_updates > 1)
        or config.num_mini_batches > 1
        or config.advantage.needs_start_logprobs
        or config.loss.selects_tokens
        or (config.critic is not None and config.critic.trunk == "shared")
        or (kl is not None and kl.place == "reward" and kl.coefficient > 0)
        or any(map(needs_whole_batch, config.corrections))
        or (not config.count_rejected and bool(config.corrections))
    )


def prepare(
    config: LearnerSection,
    parts: Sequence[Sequence[tuple[MicroBatch, Sequence[TokenRow]]]],
    *,
    table: EpisodeTable,
    layout: BatchLayout,
    kl_coefficient: float,
    seed: int,
    score: ScorePolicy,
    score_reference: ScoreTokens | None,
    state_values: ScoreTokens | None,
    dtype: torch.dtype,
) -> PreparedBatch:
    """Prepare all mini-batches. `state_values` is that of a separate critic; those of a shared
    trunk come with `score`.
    """
    is_scored = scorable(config.advantage, table)
    pairs = [pair for part in parts for pair in part]
    masks = [m.train_mask & m.rows.spread(is_scored[m.episodes]) for m, _ in pairs]
    flat = [
        PreparedMicroBatch(
            micro=m, source=rows, base_mask=mask, mask=mask, advantages=m.behavior_logprobs
        )
        for (m, rows), mask in zip(pairs, masks, strict=True)
    ]
    scores = [score(p.micro) if needs_start_logprobs(config) else None for p in flat]
    references = [None if score_reference is None else score_reference(p.micro) for p in flat]
    states = [None if state_values is None else state_values(p.micro) for p in flat]
    if config.critic is not None and config.critic.trunk == "shared":
        states = [s.state_values if s is not None else None for s in scores]
    flat = [
        replace(
            p,
            start_logprobs=None if s is None else s.logprobs,
            reference_logprobs=reference,
            values=None if state is None else prefix_values(state).to(dtype),
        )
        for p, s, reference, state in zip(flat, scores, references, states, strict=True)
    ]
    measured: list[Metrics] = []
    values = _weight_means(config, flat, layout)
    weights = [_loss_weights(config, p, table, values) for p in flat]
    flat = _with_advantages(
        config, flat, scores, states, weights, table, layout, kl_coefficient, measured, dtype
    )
    measured.extend(
        diagnostics.gradient_power(p.advantages, s.logprobs, s.squared_probs, p.mask, p.micro.rows)
        for p, s in zip(flat, scores, strict=True)
        if s is not None and s.squared_probs is not None
    )
    if config.resampling is not None:
        table = replace(table, copies=resample(table, config.resampling, seed=seed))
    values = _with_second_moments(config, flat, layout, values)
    if not config.count_rejected and config.corrections:
        flat = [_without_rejected(config, p, values) for p in flat]
    return _counted(flat, [len(part) for part in parts], table, layout, values, measured)


def _with_advantages(
    config: LearnerSection,
    flat: Sequence[PreparedMicroBatch],
    scores: Sequence[Scores | None],
    states: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    table: EpisodeTable,
    layout: BatchLayout,
    kl_coefficient: float,
    measured: list[Metrics],
    dtype: torch.dtype,
) -> list[PreparedMicroBatch]:
    advantage, penalty = config.advantage, torch.zeros_like(table.rewards)
    if flat and (advantage.is_per_token or _has_kl_in_reward(config, kl_coefficient)):
        columns: list[dict[str, Tensor]] = []
        for p, s, w in zip(flat, scores, weights, strict=True):
            column, metrics = _columns(config, p, s, kl_coefficient)
            columns.append(column if w is None else column | {"weights": w})
            measured.append(metrics)
        ends = [_row_columns(config, p, state) for p, state in zip(flat, states, strict=True)]
        whole = WholeBatch.gather(
            [p.micro for p in flat], of_tokens=columns, of_rows=ends, group=layout.data
        )
        by_token = whole.of_tokens["penalty"]
        if advantage.is_per_token:
            found = token_advantages(advantage, table, whole, by_token)
            return [
                replace(p, advantages=a.to(dtype), targets=t.to(dtype), is_target=i)
                for p, a, t, i in zip(
                    flat,
                    whole.scatter(found.advantages),
                    whole.scatter(found.targets),
                    whole.scatter(found.is_target),
                    strict=True,
                )
            ]
        penalty = penalty.index_add(0, whole.episodes, whole.rows.sum(by_token, whole.mask))
    penalized = replace(table, rewards=table.rewards - penalty)
    by_episode = EPISODE_ADVANTAGES[advantage.kind](penalized, advantage).to(dtype)
    return [replace(p, advantages=p.micro.rows.spread(by_episode[p.micro.episodes])) for p in flat]


def _has_kl_in_reward(config: LearnerSection, kl_coefficient: float) -> bool:
    return config.kl is not None and config.kl.place == "reward" and kl_coefficient > 0


def _columns(
    config: LearnerSection, p: PreparedMicroBatch, scores: Scores | None, kl_coefficient: float
) -> tuple[dict[str, Tensor], Metrics]:
    """Return the inputs of a token advantage by micro-batch: `[T]` each."""
    micro, advantage = p.micro, config.advantage
    penalty, metrics = torch.zeros_like(micro.behavior_logprobs), {}
    if config.kl is not None and _has_kl_in_reward(config, kl_coefficient):
        assert p.start_logprobs is not None
        assert p.reference_logprobs is not None
        kl, metrics = kl_in_reward(
            p.start_logprobs, p.reference_logprobs, p.mask, micro.rows, config.kl
        )
        penalty = kl_coefficient * kl
    columns = {"turns": micro.turns, "anchors": micro.anchors, "penalty": penalty}
    if p.values is not None:
        columns["values"] = p.values
    if advantage.kind == "vtrace":
        columns["log_ratio"] = _start_ratio(p)
    if scores is not None and scores.squared_probs is not None:
        columns |= {"logprobs": scores.logprobs, "squared_probs": scores.squared_probs}
    return columns, metrics


def _row_columns(
    config: LearnerSection, p: PreparedMicroBatch, state_values: Tensor | None
) -> dict[str, Tensor]:
    advantage = config.advantage
    if not isinstance(advantage, CriticAdvantage) or not advantage.bootstrap:
        return {}
    assert state_values is not None
    return {"bootstrap": end_values(state_values, p.micro)}


def _weight_means(
    config: LearnerSection, flat: Sequence[PreparedMicroBatch], layout: BatchLayout
) -> tuple[float | None, ...]:
    """Return by correction the mean over the whole batch that normalized weights are divided by."""
    if not flat or not any(map(is_normalized, config.corrections)):
        return (None,) * len(config.corrections)
    found = metric.combine(weight_means(config.corrections, _correction_inputs(p)) for p in flat)
    values = metric.values(layout.combine(found, device=flat[0].mask.device))
    return tuple(values.get(str(index)) for index in range(len(config.corrections)))


def _loss_weights(
    config: LearnerSection,
    p: PreparedMicroBatch,
    table: EpisodeTable,
    batch_values: tuple[float | None, ...],
) -> Tensor | None:  # [T]
    """Return the weights of each token's gradient in the loss, where the advantage needs them.

    From the loss itself and from all corrections that do not depend on advantages.
    """
    if not isinstance(config.advantage, OtbAdvantage):
        return None
    known = [
        (section, value)
        for section, value in zip(config.corrections, batch_values, strict=True)
        if not section.uses_advantages
    ]
    inputs = _correction_inputs(p)
    found = correct([section for section, _ in known], inputs, [value for _, value in known])
    weights = None if found is None else found.weights
    if not isinstance(config.loss, DecoupledPpo | Reinforce | Topr):
        return weights
    rewards = table.rewards[p.micro.episodes]
    own = behavior_weights(config.loss, inputs.log_ratio, inputs.mask, inputs.rows, rewards)
    return own.weights if weights is None else own.weights * weights


def _with_second_moments(
    config: LearnerSection,
    flat: Sequence[PreparedMicroBatch],
    layout: BatchLayout,
    batch_values: tuple[float | None, ...],
) -> tuple[float | None, ...]:
    """Add the bounds of second moments, alike on every rank."""
    moments = {i: c for i, c in enumerate(config.corrections) if isinstance(c, M2po)}
    if not moments or not flat:
        return batch_values
    whole = WholeBatch.gather(
        [p.micro for p in flat],
        of_tokens=[
            {"log_ratio": _start_ratio(p), "mask": p.base_mask, "advantages": p.advantages}
            for p in flat
        ],
        of_rows=[{} for _ in flat],
        group=layout.data,
    )
    inputs = CorrectionInputs(
        log_ratio=whole.of_tokens["log_ratio"],
        mask=whole.of_tokens["mask"] > 0,
        rows=whole.rows,
        advantages=whole.of_tokens["advantages"],
    )
    bounds = {index: m2po_bound(inputs, section) for index, section in moments.items()}
    return tuple(bounds.get(index, value) for index, value in enumerate(batch_values))


def _without_rejected(
    config: LearnerSection, p: PreparedMicroBatch, batch_values: tuple[float | None, ...]
) -> PreparedMicroBatch:
    """Reject among all trained tokens; the remaining ones train and are counted."""
    found = correct(config.corrections, _correction_inputs(p), batch_values)
    assert found is not None
    return replace(p, mask=found.keep)


def _start_ratio(p: PreparedMicroBatch) -> Tensor:
    assert p.start_logprobs is not None
    return log_ratios(p.start_logprobs, p.micro.behavior_logprobs, p.base_mask)


def _correction_inputs(p: PreparedMicroBatch) -> CorrectionInputs:
    return CorrectionInputs(
        log_ratio=_start_ratio(p), mask=p.base_mask, rows=p.micro.rows, advantages=p.advantages
    )


def _counted(
    flat: Sequence[PreparedMicroBatch],
    sizes: Sequence[int],
    table: EpisodeTable,
    layout: BatchLayout,
    batch_values: tuple[float | None, ...],
    measured: Sequence[Metrics],
) -> PreparedBatch:
    """Count tokens and episodes over all ranks, by mini-batch and in the table, after rejection."""
    num_episodes = len(table.rewards)
    counts = torch.zeros((len(sizes), 3, num_episodes), dtype=torch.float64)
    counts = counts.to(table.rewards.device)  # tokens, rows, value targets
    remaining = iter(flat)
    parts: list[list[PreparedMicroBatch]] = []
    for of_part, size in zip(counts, sizes, strict=True):
        parts.append([next(remaining) for _ in range(size)])
        for p in parts[-1]:
            tokens = p.micro.rows.count(p.mask)
            targets = tokens * 0 if p.is_target is None else p.micro.rows.count(p.is_target)
            of_rows = torch.stack([tokens, (tokens > 0).long(), targets]).double()
            of_part.index_add_(1, p.micro.episodes, of_rows)
    layout.sum(counts)
    copies = torch.ones_like(table.rewards) if table.copies is None else table.copies.double()
    tokens, rows, targets = counts.unbind(1)  # [parts, E] each
    return PreparedBatch(
        table=replace(table, num_tokens=tokens.sum(0).long(), num_rows=rows.sum(0).long()),
        mini_batches=[
            PreparedMiniBatch(micro_batches=micros, num_tokens=n, num_episodes=e, num_targets=t)
            for micros, n, e, t in zip(
                parts,
                _numbers((tokens * copies).sum(1)),
                _numbers(((tokens > 0) * copies).sum(1)),
                _numbers((targets * copies).sum(1)),
                strict=True,
            )
        ],
        batch_values=batch_values,
        measured=measured,
    )


def _numbers(values: Tensor) -> list[float]:
    return cast("list[float]", values.tolist())  # pyright: ignore[reportUnknownMemberType]
