"""Token-level returns and advantages: reward-to-go, GAE, V-trace, turn-level and bi-level GAE.

Legend: `T` packed tokens, `R` rows. A row's trained tokens are the steps of its MDP: observation
tokens between them cost no discount and no trace, and hold 0 in every result unless said otherwise.
A reward off the mask is lost, so put outcomes on the last sampled token (`rows.terminal_rewards`).
All arithmetic is float64; results have the dtype of the rewards.
"""

from typing import Literal

import torch
from torch import Tensor

from raylearner.learner.batch.rows import Rows, clamp_log_ratio, dense_ids, select
from raylearner.learner.objective.advantages import grpo
from raylearner.learner.objective.masked import whiten


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
    """1.0 where the next entry belongs to the same row, else 0.0: `[N] -> [N]`."""
    same = index.new_zeros(index.shape, dtype=torch.float64)
    same[:-1] = (index[1:] == index[:-1]).double()
    return same


def _next(values: Tensor, continues: Tensor, last: Tensor) -> Tensor:
    """Each entry's successor in its row; `last` where it has none: `[N] -> [N]`."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    return torch.where(continues > 0, following, last)


def _scatter(compact: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    out = like.new_zeros(like.shape)
    out[mask] = compact.to(like.dtype)
    return out


def rewards_to_go(rewards: Tensor, mask: Tensor, rows: Rows, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the trained tokens: `[T] -> [T]`.

    A token off the mask holds the return of what follows it in its row.
    """
    factors = _continues(rows.index)
    factors = torch.where(mask, gamma * factors, factors)
    return reverse_scan(select(rewards, mask).double(), factors).to(rewards.dtype)


def reinforce_plus_plus(
    rewards: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Discounted returns whitened over all trained tokens of the batch (2501.03262).

    Returns `(advantages [T], returns [T])`, both 0 off the mask.
    """
    returns = rewards_to_go(rewards, mask, rows, gamma=gamma)
    return select(whiten(returns, mask), mask), select(returns, mask)


def remax(
    rewards: Tensor,  # [T]
    baselines: Tensor,  # [R]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    off_mask: Literal["zero", "return"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Return minus the reward of a greedy rollout of the same prompt (2310.10505).

    Returns `(advantages [T], returns [T])`. Off the mask a return is that of what follows in the
    row, and an advantage is 0 or, with `off_mask="return"` as in verl, the same.
    """
    returns = rewards_to_go(rewards, mask, rows)
    elsewhere = returns if off_mask == "return" else torch.zeros_like(returns)
    return torch.where(mask, returns - rows.spread(baselines), elsewhere), returns


def gae(
    rewards: Tensor,  # [T]
    values: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,  # [R]
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the trained tokens of each row (1506.02438, eq. 16).

    `bootstrap` is the value after a row's last token: give the critic's estimate for rows that were
    cut off and 0 for rows that ended; without it all count as ended. `normalize` whitens the
    advantages over the batch passed in. Returns `(advantages [T], value targets [T])`.
    """
    index = rows.index[mask]
    continues = _continues(index)
    reward, value = rewards[mask].double(), values[mask].detach().double()
    last = torch.zeros_like(value) if bootstrap is None else bootstrap.double()[index]
    delta = reward + gamma * _next(value, continues, last) - value
    advantage = reverse_scan(delta, gamma * lam * continues)
    returns = _scatter(advantage + value, mask, rewards)
    if normalize:
        advantage = whiten(advantage, torch.ones_like(advantage, dtype=torch.bool))
    return _scatter(advantage, mask, rewards), returns


def vtrace(
    log_ratios: Tensor,  # [T] current - behavior
    rewards: Tensor,  # [T]
    values: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    bootstrap: Tensor | None = None,  # [R]
) -> tuple[Tensor, Tensor]:
    """Off-policy value targets and advantages (IMPALA 1802.01561, eq. 1 and section 4.2).

    v_t = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1}), delta_t = rho_t (r_t + gamma V_{t+1} - V_t),
    A_t = rho_t (r_t + gamma v_{t+1} - V_t), with rho and c the ratio capped at `rho_bar` and
    (times `lam`) at `c_bar`. rho is in A already: do not weigh the loss by a ratio again.
    `bootstrap` as in `gae`. Returns `(advantages [T], value targets [T])`.
    """
    if rho_bar < c_bar:
        raise ValueError(f"rho_bar: want >= c_bar, got {rho_bar!r} < {c_bar!r}")
    index = rows.index[mask]
    continues = _continues(index)
    ratio = clamp_log_ratio(log_ratios[mask].detach().double()).exp()
    rho, trace = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    reward, value = rewards[mask].double(), values[mask].detach().double()
    last = torch.zeros_like(value) if bootstrap is None else bootstrap.double()[index]
    delta = rho * (reward + gamma * _next(value, continues, last) - value)
    target = value + reverse_scan(delta, gamma * trace * continues)
    advantage = rho * (reward + gamma * _next(target, continues, last) - value)
    return _scatter(advantage, mask, rewards), _scatter(target, mask, rewards)


def turn_starts(mask: Tensor, rows: Rows, turns: Tensor) -> Tensor:
    """True on the first trained token of each turn; `turns [T]` numbers them: `[T] bool`."""
    place, changes = _turn_changes(mask, rows, turns)
    is_start = torch.ones_like(place, dtype=torch.bool)
    is_start[1:] = changes
    out = torch.zeros_like(mask)
    out[place[is_start]] = True
    return out


def turn_ends(mask: Tensor, rows: Rows, turns: Tensor) -> Tensor:
    """True on the last trained token of each turn; `turns [T]` numbers them: `[T] bool`."""
    place, changes = _turn_changes(mask, rows, turns)
    is_end = torch.ones_like(place, dtype=torch.bool)
    is_end[:-1] = changes
    out = torch.zeros_like(mask)
    out[place[is_end]] = True
    return out


def _turn_changes(mask: Tensor, rows: Rows, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Places `[N]` of the trained tokens, and between which neighbors a turn ends: `[N - 1] bool`."""
    place = torch.nonzero(mask).squeeze(1)
    index, turn = rows.index[place], turns[place]
    return place, (index[1:] != index[:-1]) | (turn[1:] != turn[:-1])


def _turn_rows(rows: Rows, turns: Tensor) -> Rows:
    """The same tokens with one row per turn."""
    changes = torch.zeros_like(rows.index)
    changes[1:] = ((rows.index[1:] != rows.index[:-1]) | (turns[1:] != turns[:-1])).long()
    index = changes.cumsum(0)
    return Rows(index=index, num_rows=int(index[-1]) + 1 if len(index) else 0)


def turn_gae(
    rewards: Tensor,  # [T]
    values: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    turns: Tensor,  # [T] int64
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,  # [R]
) -> tuple[Tensor, Tensor]:
    """GAE whose steps are turns: every trained token of a turn gets the turn's advantage.

    A turn is one action: its reward is the sum over its trained tokens, and its value is that of
    the state before it, the critic's before its first trained token. (A value further on has read
    part of the action, and a baseline that knows the action takes its credit away.)
    Returns `(advantages [T], value targets [T])`; targets are 0 except at turn starts.
    """
    starts = turn_starts(mask, rows, turns)
    by_turn = _turn_rows(rows, turns)
    turn_rewards = select(by_turn.spread(by_turn.sum(rewards, mask)), starts)
    advantages, returns = gae(
        turn_rewards, values, starts, rows, gamma=gamma, lam=lam, bootstrap=bootstrap
    )
    return select(by_turn.spread(by_turn.sum(advantages)), mask), returns


def bilevel_gae(
    rewards: Tensor,  # [T]
    values: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    turns: Tensor,  # [T] int64
    *,
    gamma_turn: float = 0.95,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,  # [R]
) -> tuple[Tensor, Tensor]:
    """Bi-level GAE of VAGEN (2510.16907): first over turns, then inside each.

    The turn pass gives A_k at each turn end; the token pass is GAE inside each turn with
    A_k + V(e_k) as the reward of its last token and nothing carried over from the next turn. Turns
    are told by `turns`, not by where rewards are, so a turn without reward is a turn.
    Returns `(advantages [T], value targets [T])`.
    """
    ends = turn_ends(mask, rows, turns)
    by_turn = _turn_rows(rows, turns)
    turn_rewards = select(by_turn.spread(by_turn.sum(rewards, mask)), ends)
    _, turn_returns = gae(
        turn_rewards, values, ends, rows, gamma=gamma_turn, lam=lam, bootstrap=bootstrap
    )
    return gae(turn_returns, values, mask, by_turn, gamma=gamma, lam=lam)


def otb(
    rewards: Tensor,  # [T]
    logprobs: Tensor,  # [T]
    squared_probs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    groups: Tensor,  # [R] int64
    *,
    episodes: Tensor | None = None,  # [R] int64
    weights: Tensor | None = None,  # [T]
    align: Literal["token", "position"] = "position",
    zero_tail: bool = True,
    epsilon: float = 1e-8,
    group_of_one: Literal["zero", "raw"] = "zero",
    count_empty_rows: bool = False,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline: A_t = G_t - B_t, B_t the mean of G at t over the group, weighed by W.

    W_t sums (1 - 2 p + sum_v p_v^2) rho^2 over the row's trained tokens up to t, the gradient's
    energy so far (as in verl's optimal_token_baseline). `logprobs` are the proximal policy's,
    `squared_probs` its sum of squared probabilities over the vocabulary, `weights` (rho) the
    correction weights if the loss uses any. Tokens of different rows meet by `position` in the row
    or, for tool-integrated rows with observations in between (`tir_otb`), by rank among the trained
    tokens. `zero_tail` uses no baseline where the group's longest row is alone, beyond as many slots
    as the second longest has trained tokens. `episodes` says which episode a row is a segment of (by
    default each row is its own): segments of an episode share one vote, and an episode that is alone
    in its group has no baseline. Returns `(advantages [T], returns [T])`.
    """
    returns = rewards_to_go(rewards, mask, rows).double()
    energy = 1 - 2 * logprobs.detach().double().exp() + squared_probs.double()
    if weights is not None:
        energy = energy * weights.double() ** 2
    energy = _row_cumsum(select(energy, mask), rows)
    counted = mask if align == "token" else torch.ones_like(mask)
    slot = (_row_cumsum(counted.double(), rows) - 1).long().clamp(min=0)
    lengths = rows.count(mask)  # [R]
    group, num_groups = dense_ids(groups)
    present = (lengths > 0) | count_empty_rows
    votes = _votes(episodes, present).to(energy.dtype)
    num_slots = int(slot.max()) + 1 if len(slot) else 0
    cell = rows.spread(group) * num_slots + slot
    cells = returns.new_zeros(num_groups * num_slots)
    shared = energy * rows.spread(votes)
    numerator = cells.index_add(0, cell, select(returns * shared, mask))
    denominator = cells.index_add(0, cell, select(shared, mask)) + epsilon
    baselines = (numerator / denominator)[cell]

    size = votes.new_zeros(num_groups).index_add(0, group, votes).round()
    if zero_tail:
        longest, second = _two_longest(lengths, group, present, num_groups)
        alone = rows.spread((lengths == longest[group]) & (longest > second)[group])
        baselines = torch.where(alone & (slot >= rows.spread(second[group])), 0.0, baselines)
    is_single = rows.spread(size[group] == 1)
    baselines = torch.where(is_single, returns if group_of_one == "zero" else 0.0, baselines)
    advantages = select(returns - baselines, mask)
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)


def _votes(episodes: Tensor | None, present: Tensor) -> Tensor:
    """What each row counts, so that the present rows of an episode count 1 together: `[R]`."""
    if episodes is None:
        return present.double()
    episode, num_episodes = dense_ids(episodes)
    sizes = present.new_zeros(num_episodes, dtype=torch.float64)
    sizes = sizes.index_add(0, episode, present.double())
    return present.double() / sizes[episode].clamp(min=1)


def tir_otb(
    rewards: Tensor,  # [T]
    logprobs: Tensor,  # [T]
    squared_probs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    groups: Tensor,  # [R] int64
    *,
    episodes: Tensor | None = None,  # [R] int64
    weights: Tensor | None = None,  # [T]
    zero_tail: bool = True,
    epsilon: float = 1e-8,
    group_of_one: Literal["zero", "raw"] = "zero",
) -> tuple[Tensor, Tensor]:
    """`otb` with tokens meeting by rank among the trained ones: right for rows with tool replies."""
    return otb(
        rewards,
        logprobs,
        squared_probs,
        mask,
        rows,
        groups,
        episodes=episodes,
        weights=weights,
        align="token",
        zero_tail=zero_tail,
        epsilon=epsilon,
        group_of_one=group_of_one,
    )


def _row_cumsum(values: Tensor, rows: Rows) -> Tensor:
    """Inclusive running sum inside each row: `[T] -> [T]`."""
    running = values.cumsum(0)
    before = torch.cat([running.new_zeros(1), running])
    starts = torch.searchsorted(rows.index, torch.arange(rows.num_rows, device=rows.index.device))
    return running - rows.spread(before[starts])


def _two_longest(
    lengths: Tensor, group: Tensor, present: Tensor, num_groups: int
) -> tuple[Tensor, Tensor]:
    """Length of each group's longest row and of the next one, equal when shared: `[G], [G]`."""
    known = torch.where(present, lengths, 0)
    longest = known.new_zeros(num_groups).scatter_reduce(0, group, known, "amax")
    at_top = known.new_zeros(num_groups).index_add(0, group, (known == longest[group]).long())
    rest = torch.where(known == longest[group], 0, known)
    second = known.new_zeros(num_groups).scatter_reduce(0, group, rest, "amax")
    return longest, torch.where(at_top > 1, longest, second)


def gigpo(
    rewards: Tensor,  # [E]
    groups: Tensor,  # [E] int64
    step_rewards: Tensor,  # [S]
    steps: Rows,  # which episode each of the S steps belongs to
    anchors: Tensor,  # [S] int64
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    scale: Literal["group", "none"] = "none",
    epsilon: float = 1e-6,
) -> Tensor:
    """A_episode + step_weight * A_step for each step: `[S]` (GiGPO 2505.10978).

    A_episode is GRPO over the episodes of a prompt. A_step is GRPO over all steps of that prompt
    taken from the same anchor state (`anchors` numbers equal states alike), each with its discounted
    return from there on. scale "none" is the paper's mean normalization, "group" divides by the
    standard deviation. A step whose state nobody else met has A_step 0.
    """
    everywhere = torch.ones_like(step_rewards, dtype=torch.bool)
    step_returns = rewards_to_go(step_rewards, everywhere, steps, gamma=gamma)
    anchor, num_anchors = dense_ids(anchors)
    step_groups = steps.spread(dense_ids(groups)[0]) * num_anchors + anchor
    of_steps = grpo(step_returns, step_groups, scale=scale, epsilon=epsilon)
    of_episodes = grpo(rewards, groups, scale=scale, epsilon=epsilon)
    return steps.spread(of_episodes) + step_weight * of_steps
