"""Optimal token baselines: the return of a token minus its group's, weighted by gradient energy.

Legend: `T` packed tokens, `R` rows, `G` groups.
"""

from typing import ClassVar, Literal

from raylearner.learner.batch.rows import Rows, dense_ids, select
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.advantages import GroupBaseline
from raylearner.learner.objective.returns import TokenInputs, TokenResult, rewards_to_go


class OtbAdvantage(GroupBaseline):
    """Optimal token baseline (verl's optimal_token_baseline). Tokens of a group are aligned by
    position, or with `tir_otb` by rank among the trained ones: for rows with tool replies.
    """

    kind: Literal["otb", "tir_otb"]
    is_per_token: ClassVar[bool] = True
    needs_start_logprobs: ClassVar[bool] = True
    needs_squared_probs: ClassVar[bool] = True


def otb(inputs: TokenInputs, config: OtbAdvantage) -> TokenResult:
    """A_t = G_t - B_t, B_t the mean of G at t over the group, weighed by W.

    W_t sums (1 - 2 p + sum_v p_v^2) rho^2 over the row's trained tokens up to t, the gradient's
    energy so far, rho the weights of the loss. There is no baseline where the group's longest row is
    alone, beyond as many slots as the second longest has trained tokens. Segments of an episode share
    one vote, and an episode that is alone in its group has no baseline.
    """
    assert inputs.logprobs is not None
    assert inputs.squared_probs is not None
    mask, rows = inputs.mask, inputs.rows
    returns = rewards_to_go(inputs.rewards, mask, rows, gamma=1.0).double()
    energy = 1 - 2 * inputs.logprobs.detach().double().exp() + inputs.squared_probs.double()
    if inputs.weights is not None:
        energy = energy * inputs.weights.double() ** 2
    energy = _row_cumsum(select(energy, mask), rows)
    counted = mask if config.kind == "tir_otb" else torch.ones_like(mask)
    slot = (_row_cumsum(counted.double(), rows) - 1).long().clamp(min=0)
    lengths = rows.count(mask)  # [R]
    group, num_groups = dense_ids(inputs.episodes.groups[inputs.row_episodes])
    present = lengths > 0
    votes = _votes(inputs.row_episodes, present).to(energy.dtype)
    num_slots = int(slot.max()) + 1 if len(slot) else 0
    cell = rows.spread(group) * num_slots + slot
    cells = returns.new_zeros(num_groups * num_slots)
    shared = energy * rows.spread(votes)
    numerator = cells.index_add(0, cell, select(returns * shared, mask))
    denominator = cells.index_add(0, cell, select(shared, mask)) + 1e-8
    baselines = (numerator / denominator)[cell]

    size = votes.new_zeros(num_groups).index_add(0, group, votes).round()
    longest, second = _two_longest(lengths, group, present, num_groups)
    is_alone = rows.spread((lengths == longest[group]) & (longest > second)[group])
    baselines = torch.where(is_alone & (slot >= rows.spread(second[group])), 0.0, baselines)
    is_single = rows.spread(size[group] == 1)
    single = returns if config.group_of_one == "zero" else 0.0
    baselines = torch.where(is_single, single, baselines)
    dtype = inputs.rewards.dtype
    return select(returns - baselines, mask).to(dtype), returns.to(dtype)


def _votes(episodes: Tensor, present: Tensor) -> Tensor:
    """Return the vote of each row, so that the present rows of an episode count 1 together: `[R]`."""
    episode, num_episodes = dense_ids(episodes)
    sizes = present.new_zeros(num_episodes, dtype=torch.float64)
    sizes = sizes.index_add(0, episode, present.double())
    return present.double() / sizes[episode].clamp(min=1)


def _row_cumsum(values: Tensor, rows: Rows) -> Tensor:
    """Return the inclusive running sum inside each row: `[T] -> [T]`."""
    running = values.cumsum(0)
    before = torch.cat([running.new_zeros(1), running])
    starts = torch.searchsorted(rows.index, torch.arange(rows.num_rows, device=rows.index.device))
    return running - rows.spread(before[starts])


def _two_longest(
    lengths: Tensor, group: Tensor, present: Tensor, num_groups: int
) -> tuple[Tensor, Tensor]:
    """Return length of each group's longest row and of the next one, equal when shared: `[G], [G]`."""
    known = torch.where(present, lengths, 0)
    longest = known.new_zeros(num_groups).scatter_reduce(0, group, known, "amax")
    at_top = known.new_zeros(num_groups).index_add(0, group, (known == longest[group]).long())
    rest = torch.where(known == longest[group], 0, known)
    second = known.new_zeros(num_groups).scatter_reduce(0, group, rest, "amax")
    return longest, torch.where(at_top > 1, longest, second)
