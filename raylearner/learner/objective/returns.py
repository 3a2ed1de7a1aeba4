"""Advantages per token: reward-to-go, ReMax, GAE and V-trace.

Legend: `T` packed tokens, `R` rows. A row's trained tokens are the steps of its MDP: observation
tokens between them are not discounted and have no trace, and are 0 in every result unless noted
otherwise. A reward off the mask is lost: outcomes are on the last sampled token
(`rows.terminal_rewards`). All arithmetic is float64; results have the dtype of the rewards.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from raylearner.config.section import Fraction, PositiveFloat
from raylearner.learner.batch.rows import Rows, clamp_log_ratio, select
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.advantages import Advantage
from raylearner.learner.objective.episodes import EpisodeTable
from raylearner.learner.objective.statistics import whiten


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """Inputs of an advantage per token: the tokens of a step's whole batch, without gradients."""

    rewards: Tensor  # [T] outcomes on last trained tokens, less a penalty on each token
    mask: Tensor  # [T] bool, trained tokens of episodes with a reward
    rows: Rows
    episodes: EpisodeTable
    row_episodes: Tensor  # [R] int64, index into the episodes
    turns: Tensor  # [T] int64, number of the token's turn
    anchors: Tensor  # [T] int64, equal for turns that start from the same state
    values: Tensor | None = None  # [T] the critic's, of the state before each token
    bootstrap: Tensor | None = None  # [R] the critic's after rows that were cut off, else 0
    log_ratio: Tensor | None = None  # [T] proximal - behavior
    logprobs: Tensor | None = None  # [T] of the learner at the start of the step
    squared_probs: Tensor | None = None  # [T] their sum of squares over the vocabulary
    weights: Tensor | None = None  # [T] by which the loss multiplies tokens


TokenResult = tuple[Tensor, Tensor]
"""Advantages `[T]` and returns, the critic's targets where it has any: `[T]`."""


class ReinforcePlusPlusAdvantage(Advantage):
    """Discounted returns, whitened over the trained tokens of the batch (2501.03262)."""

    kind: Literal["reinforce_plus_plus"]
    is_per_token: ClassVar[bool] = True
    gamma: Fraction = 1.0
    """Discount per trained token."""


def reinforce_plus_plus(inputs: TokenInputs, config: ReinforcePlusPlusAdvantage) -> TokenResult:
    """G_t = r_t + gamma G_{t+1}, whitened over all trained tokens of the batch."""
    mask = inputs.mask
    returns = rewards_to_go(inputs.rewards, mask, inputs.rows, gamma=config.gamma)
    return select(whiten(returns, mask), mask), select(returns, mask)


class RemaxAdvantage(Advantage):
    """Return minus the reward of a greedy episode of the prompt (2310.10505)."""

    kind: Literal["remax"]
    is_per_token: ClassVar[bool] = True


def remax(inputs: TokenInputs, config: RemaxAdvantage) -> TokenResult:
    """G_t - the greedy reward. Off the mask a return is that of what follows in the row."""
    returns = rewards_to_go(inputs.rewards, inputs.mask, inputs.rows, gamma=1.0)
    baselines = inputs.episodes.greedy_rewards[inputs.row_episodes]
    return select(returns - inputs.rows.spread(baselines), inputs.mask), returns


class CriticAdvantage(Advantage):
    """Fields that advantages with a critic share."""

    is_per_token: ClassVar[bool] = True
    needs_values: ClassVar[bool] = True
    gamma: Fraction = 1.0
    """Discount per step."""
    lam: Fraction = 1.0
    """Decay of the trace per step."""
    bootstrap: bool = False
    """Episodes that ran out of tokens end with the critic's value instead of 0.
    """
    normalize: bool = True
    """Whiten the advantages over the trained tokens of the batch."""


class GaeAdvantage(CriticAdvantage):
    """Generalized advantage estimation over trained tokens (1506.02438)."""

    kind: Literal["gae"]


def gae(inputs: TokenInputs, config: GaeAdvantage) -> TokenResult:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (1506.02438, eq. 16)."""
    return gae_of_steps(
        inputs.rewards,
        critic_values(inputs),
        inputs.mask,
        inputs.rows,
        gamma=config.gamma,
        lam=config.lam,
        bootstrap=inputs.bootstrap,
    )


def gae_of_steps(
    rewards: Tensor,  # [T]
    values: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None,  # [R]
) -> TokenResult:
    """GAE whose steps are the tokens of the mask; `bootstrap` is the value after a row's last one."""
    index = rows.index[mask]
    continues = _continues(index)
    reward, value = rewards[mask].double(), values[mask].detach().double()
    last = torch.zeros_like(value) if bootstrap is None else bootstrap.double()[index]
    delta = reward + gamma * _next(value, continues, last) - value
    advantage = reverse_scan(delta, gamma * lam * continues)
    return _scatter(advantage, mask, rewards), _scatter(advantage + value, mask, rewards)


class VtraceAdvantage(CriticAdvantage):
    """V-trace over trained tokens, ratios of the learner at the start of the step (1802.01561)."""

    kind: Literal["vtrace"]
    needs_start_logprobs: ClassVar[bool] = True
    rho_bar: PositiveFloat = 1.0
    """Cap of the ratio in the temporal difference and in the advantage."""
    c_bar: PositiveFloat = 1.0
    """Cap of the ratio in the trace; at most rho_bar."""
    normalize: bool = False
    """Whiten the advantages over the trained tokens of the batch."""


def vtrace(inputs: TokenInputs, config: VtraceAdvantage) -> TokenResult:
    """Off-policy value targets and advantages (IMPALA 1802.01561, eq. 1 and section 4.2).

    v_t = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1}), delta_t = rho_t (r_t + gamma V_{t+1} - V_t),
    A_t = rho_t (r_t + gamma v_{t+1} - V_t), with rho and c the ratio capped at `rho_bar` and
    (times `lam`) at `c_bar`. rho is in A already: the loss must not weigh by a ratio again.
    """
    assert inputs.log_ratio is not None
    mask, gamma = inputs.mask, config.gamma
    index = inputs.rows.index[mask]
    continues = _continues(index)
    ratio = clamp_log_ratio(inputs.log_ratio[mask].detach().double()).exp()
    rho, trace = ratio.clamp(max=config.rho_bar), config.lam * ratio.clamp(max=config.c_bar)
    reward, value = inputs.rewards[mask].double(), critic_values(inputs)[mask].detach().double()
    bootstrap = inputs.bootstrap
    last = torch.zeros_like(value) if bootstrap is None else bootstrap.double()[index]
    delta = rho * (reward + gamma * _next(value, continues, last) - value)
    target = value + reverse_scan(delta, gamma * trace * continues)
    advantage = rho * (reward + gamma * _next(target, continues, last) - value)
    return _scatter(advantage, mask, inputs.rewards), _scatter(target, mask, inputs.rewards)


def critic_values(inputs: TokenInputs) -> Tensor:
    """Return the critic's values; `check` has made sure that there is one."""
    assert inputs.values is not None, "this advantage needs a critic"
    return inputs.values


def rewards_to_go(rewards: Tensor, mask: Tensor, rows: Rows, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the trained tokens: `[T] -> [T]`.

    A token off the mask holds the return of what follows it in its row.
    """
    factors = _continues(rows.index)
    factors = torch.where(mask, gamma * factors, factors)
    return reverse_scan(select(rewards, mask).double(), factors).to(rewards.dtype)


def reverse_scan(addends: Tensor, factors: Tensor) -> Tensor:
    """y_t = addends_t + factors_t * y_{t+1}, y beyond the end 0: `[N] -> [N]`.

    A factor of 0 ends a row. Computed by doubling, in log2(N) vector steps.
    """
    total, factor = addends.clone(), factors.clone()
    step = 1
    while step < len(total):
        ahead = torch.cat([total[step:], total.new_zeros(step)])
        ahead_factor = torch.cat([factor[step:], factor.new_zeros(step)])
        total = total + factor * ahead
        factor = factor * ahead_factor
        step *= 2
    return total


def _continues(index: Tensor) -> Tensor:
    """Return 1.0 where the next entry belongs to the same row, else 0.0: `[N] -> [N]`."""
    same = index.new_zeros(index.shape, dtype=torch.float64)
    same[:-1] = (index[1:] == index[:-1]).double()
    return same


def _next(values: Tensor, continues: Tensor, last: Tensor) -> Tensor:
    """Return each entry's successor in its row; `last` where it has none: `[N] -> [N]`."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    return torch.where(continues > 0, following, last)


def _scatter(compact: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    out = like.new_zeros(like.shape)
    out[mask] = compact.to(like.dtype)
    return out
