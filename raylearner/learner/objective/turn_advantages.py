"""Advantages whose steps are turns: turn-level GAE, bi-level GAE and GiGPO.

Legend: `T` packed tokens, `R` rows, `S` turns.
"""

from typing import ClassVar, Literal

from raylearner.config.section import Fraction, NonNegativeFloat
from raylearner.learner.batch.rows import Rows, dense_ids, select
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.advantages import Advantage, group_score
from raylearner.learner.objective.returns import (
    CriticAdvantage,
    TokenInputs,
    TokenResult,
    critic_values,
    gae_of_steps,
    rewards_to_go,
)


class TurnGaeAdvantage(CriticAdvantage):
    """GAE whose steps are turns, each with the critic's value before it as its baseline (2510.16907)."""

    kind: Literal["turn_gae"]


def turn_gae(inputs: TokenInputs, config: TurnGaeAdvantage) -> TokenResult:
    """GAE over turns: every trained token of a turn gets the turn's advantage.

    A turn is one action: its reward is the sum over its trained tokens, and its value is that of
    the state before it, the critic's before its first trained token. (A later value depends on part
    of the action, and a baseline that depends on the action removes its credit.) Targets are 0
    except at turn starts.
    """
    mask, rows, turns = inputs.mask, inputs.rows, inputs.turns
    starts = turn_starts(mask, rows, turns)
    by_turn = _turn_rows(rows, turns)
    turn_rewards = select(by_turn.spread(by_turn.sum(inputs.rewards, mask)), starts)
    advantages, returns = gae_of_steps(
        turn_rewards,
        critic_values(inputs),
        starts,
        rows,
        gamma=config.gamma,
        lam=config.lam,
        bootstrap=inputs.bootstrap,
    )
    return select(by_turn.spread(by_turn.sum(advantages)), mask), returns


class BilevelGaeAdvantage(CriticAdvantage):
    """GAE over turns, then inside each turn (2510.16907)."""

    kind: Literal["bilevel_gae"]
    gamma_turn: Fraction = 0.95
    """Discount per turn; `gamma` is the one per token."""


def bilevel_gae(inputs: TokenInputs, config: BilevelGaeAdvantage) -> TokenResult:
    """Bi-level GAE of VAGEN: first over turns, then inside each.

    The turn pass gives A_k at each turn end; the token pass is GAE inside each turn with
    A_k + V(e_k) as the reward of its last token and nothing carried over from the next turn. A turn
    without reward is a turn.
    """
    mask, rows, values = inputs.mask, inputs.rows, critic_values(inputs)
    ends = turn_ends(mask, rows, inputs.turns)
    by_turn = _turn_rows(rows, inputs.turns)
    turn_rewards = select(by_turn.spread(by_turn.sum(inputs.rewards, mask)), ends)
    _, turn_returns = gae_of_steps(
        turn_rewards,
        values,
        ends,
        rows,
        gamma=config.gamma_turn,
        lam=config.lam,
        bootstrap=inputs.bootstrap,
    )
    return gae_of_steps(
        turn_returns, values, mask, by_turn, gamma=config.gamma, lam=config.lam, bootstrap=None
    )


class GigpoAdvantage(Advantage):
    """Episode advantage plus that of a turn among all turns from the same state (2505.10978).

    Two turns of a group start from the same state where the replies before them are equal.
    """

    kind: Literal["gigpo"]
    is_per_token: ClassVar[bool] = True
    compares_in_group: ClassVar[bool] = True
    gamma: Fraction = 0.95
    """Discount per turn."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the turn's part."""
    normalize: Literal["group", "none"] = "none"
    """Divide by the standard deviation, or not at all."""


def gigpo(inputs: TokenInputs, config: GigpoAdvantage) -> TokenResult:
    """A_episode + step_weight * A_step for each turn, on all its tokens.

    A turn's reward is that of its tokens.
    """
    mask, rewards = inputs.mask, inputs.rewards
    ends = torch.nonzero(turn_ends(mask, inputs.rows, inputs.turns)).squeeze(1)
    # Each trained token belongs to the next turn end at or after it.
    place = torch.arange(len(mask), device=mask.device)
    step = torch.searchsorted(ends, place).clamp(max=max(len(ends) - 1, 0))
    step_rewards = rewards.new_zeros(len(ends)).index_add(0, step[mask], rewards[mask])
    by_step = gigpo_of_steps(
        inputs.episodes.rewards,
        inputs.episodes.groups,
        step_rewards,
        Rows(
            index=inputs.row_episodes[inputs.rows.index[ends]],
            num_rows=len(inputs.episodes.rewards),
        ),
        inputs.anchors[ends],
        config,
    )
    spread = by_step[step] if len(ends) else torch.zeros_like(rewards)
    return select(spread, mask), torch.zeros_like(rewards)


def gigpo_of_steps(
    rewards: Tensor,  # [E]
    groups: Tensor,  # [E] int64
    step_rewards: Tensor,  # [S]
    steps: Rows,  # which episode each of the S steps belongs to
    anchors: Tensor,  # [S] int64
    config: GigpoAdvantage,
) -> Tensor:
    """Return A_episode + step_weight * A_step for each step: `[S]`.

    A_episode is GRPO over the episodes of a prompt. A_step is GRPO over all steps of that prompt
    taken from the same anchor state, each with its discounted return from there on. `normalize` none
    is the paper's mean normalization. A step whose state no other episode reached has A_step 0.
    """
    everywhere = torch.ones_like(step_rewards, dtype=torch.bool)
    step_returns = rewards_to_go(step_rewards, everywhere, steps, gamma=config.gamma)
    anchor, num_anchors = dense_ids(anchors)
    step_groups = steps.spread(dense_ids(groups)[0]) * num_anchors + anchor

    def score(values: Tensor, ids: Tensor) -> Tensor:
        return group_score(
            values, ids, normalize=config.normalize, epsilon=1e-6, group_of_one="zero"
        )

    by_episode, by_step = score(rewards, groups), score(step_returns, step_groups)
    return steps.spread(by_episode) + config.step_weight * by_step


def turn_starts(mask: Tensor, rows: Rows, turns: Tensor) -> Tensor:
    """Return True on the first trained token of each turn; `turns [T]` numbers them: `[T] bool`."""
    place, changes = _turn_changes(mask, rows, turns)
    is_start = torch.ones_like(place, dtype=torch.bool)
    is_start[1:] = changes
    out = torch.zeros_like(mask)
    out[place[is_start]] = True
    return out


def turn_ends(mask: Tensor, rows: Rows, turns: Tensor) -> Tensor:
    """Return True on the last trained token of each turn; `turns [T]` numbers them: `[T] bool`."""
    place, changes = _turn_changes(mask, rows, turns)
    is_end = torch.ones_like(place, dtype=torch.bool)
    is_end[:-1] = changes
    out = torch.zeros_like(mask)
    out[place[is_end]] = True
    return out


def _turn_changes(mask: Tensor, rows: Rows, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Return places `[N]` of the trained tokens, and after which of them a turn ends `[N - 1]`."""
    place = torch.nonzero(mask).squeeze(1)
    index, turn = rows.index[place], turns[place]
    return place, (index[1:] != index[:-1]) | (turn[1:] != turn[:-1])


def _turn_rows(rows: Rows, turns: Tensor) -> Rows:
    """Return the same tokens with one row per turn."""
    changes = torch.zeros_like(rows.index)
    changes[1:] = ((rows.index[1:] != rows.index[:-1]) | (turns[1:] != turns[:-1])).long()
    index = changes.cumsum(0)
    return Rows(index=index, num_rows=int(index[-1]) + 1 if len(index) else 0)
