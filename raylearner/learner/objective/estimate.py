"""The advantages by kind, and how a step computes those of its whole batch.

Legend: `E` episodes, `R` rows and `T` tokens of the whole batch (see `whole_batch`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from raylearner.errors import LearnerError
from raylearner.learner.batch.rows import Rows, dense_ids, select, terminal_rewards
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.advantages import (
    Advantage,
    DrGrpoAdvantage,
    GdpoAdvantage,
    GpgAdvantage,
    GrpoAdvantage,
    OpoAdvantage,
    PassAtKAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RlooAdvantage,
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_plus_plus_baseline,
    rloo,
)
from raylearner.learner.objective.custom import CustomFunction
from raylearner.learner.objective.episodes import EpisodeTable
from raylearner.learner.objective.returns import (
    CriticAdvantage,
    GaeAdvantage,
    ReinforcePlusPlusAdvantage,
    RemaxAdvantage,
    TokenInputs,
    TokenResult,
    VtraceAdvantage,
    gae,
    reinforce_plus_plus,
    remax,
    vtrace,
)
from raylearner.learner.objective.statistics import whiten
from raylearner.learner.objective.token_baselines import OtbAdvantage, otb
from raylearner.learner.objective.turn_advantages import (
    BilevelGaeAdvantage,
    GigpoAdvantage,
    TurnGaeAdvantage,
    bilevel_gae,
    gigpo,
    turn_gae,
    turn_starts,
)

if TYPE_CHECKING:
    from raylearner.learner.batch.whole_batch import WholeBatch


class CustomAdvantage(Advantage, CustomFunction):
    """A user-defined advantage: a function of the inputs and the options that returns a tensor."""

    kind: Literal["custom"]
    level: Literal["episode", "token"] = "episode"
    """`episode`: of `EpisodeTable`, returns `[E]`. `token`: of `TokenInputs`, returns `[T]`, or with a critic that and the targets of its values."""

    @property
    def is_per_token(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.level == "token"


def custom_of_episodes(episodes: EpisodeTable, config: CustomAdvantage) -> Tensor:
    """Call the function and check the shape of its advantages."""
    found = _checked(config.call(episodes), tuple(episodes.rewards.shape), config)
    return torch.where(episodes.rewards.isnan(), 0.0, found.to(episodes.rewards))


def custom_of_tokens(inputs: TokenInputs, config: CustomAdvantage) -> TokenResult:
    """Call the function and check the shapes of its advantages, and of its targets if any."""
    found = config.call(inputs)
    shape = tuple(inputs.rewards.shape)
    if inputs.values is None:
        advantages = _checked(found, shape, config).to(inputs.rewards)
        return advantages, torch.zeros_like(advantages)
    pair = cast(tuple[Any, ...], found if isinstance(found, tuple) else (found,))
    if len(pair) != 2:
        raise LearnerError(
            f"learner.advantage.function {config.function!r} must return advantages and value "
            f"targets where learner.critic is set, got {len(pair)} results"
        )
    first, second = pair
    advantages, targets = _checked(first, shape, config), _checked(second, shape, config)
    return advantages.to(inputs.rewards), targets.to(inputs.rewards)


def _checked(tensor: Any, wanted: tuple[int, ...], config: CustomAdvantage) -> Tensor:
    is_tensor = isinstance(tensor, torch.Tensor)
    if not is_tensor or tuple(tensor.shape) != wanted:
        found = tuple(tensor.shape) if is_tensor else type(tensor).__name__
        raise LearnerError(
            f"learner.advantage.function {config.function!r} must return a tensor of shape "
            f"{wanted} at level {config.level!r}, got {found}"
        )
    return tensor.detach()


AdvantageSection = Annotated[
    GrpoAdvantage
    | DrGrpoAdvantage
    | RlooAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | RemaxAdvantage
    | OpoAdvantage
    | GpgAdvantage
    | GdpoAdvantage
    | PassAtKAdvantage
    | OtbAdvantage
    | GaeAdvantage
    | VtraceAdvantage
    | TurnGaeAdvantage
    | BilevelGaeAdvantage
    | GigpoAdvantage
    | CustomAdvantage,
    Field(discriminator="kind"),
]

EPISODE_ADVANTAGES: dict[str, Callable[[EpisodeTable, Any], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "gdpo": gdpo,
    "pass_at_k": pass_at_k,
    "custom": custom_of_episodes,
}
TOKEN_ADVANTAGES: dict[str, Callable[[TokenInputs, Any], TokenResult]] = {
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "otb": otb,
    "tir_otb": otb,
    "gae": gae,
    "vtrace": vtrace,
    "turn_gae": turn_gae,
    "bilevel_gae": bilevel_gae,
    "gigpo": gigpo,
    "custom": custom_of_tokens,
}
"""Each takes the section of its kind."""


def token_result(config: AdvantageSection, inputs: TokenInputs) -> TokenResult:
    """Return advantages and returns of the configured kind, whitened where that is configured."""
    advantages, returns = TOKEN_ADVANTAGES[config.kind](inputs, config)
    if isinstance(config, CriticAdvantage) and config.normalize:
        advantages = whiten(advantages, inputs.mask)
    return select(advantages, inputs.mask), returns


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages and value targets of each token of the whole batch."""

    advantages: Tensor  # [T] 0 where nothing trains or no reward applies
    targets: Tensor  # [T] the critic's targets
    is_target: Tensor  # [T] bool, where it has one


def token_advantages(
    config: AdvantageSection,
    table: EpisodeTable,
    whole: "WholeBatch",
    penalty: Tensor,  # [T]
) -> TokenAdvantages:
    """Return advantages and value targets of every token, 0 where the episode has no reward.

    `penalty` is taken from the reward of each token. `whole` holds `values` and `bootstrap` for
    critics, `log_ratio` for V-trace, `logprobs` and `squared_probs` for OTB, with `weights` if the
    loss weighs tokens by a ratio.
    """
    # Episodes that cannot be scored are in no statistic.
    mask = whole.mask & whole.rows.spread(scorable(config, table)[whole.episodes])
    tokens = whole.of_tokens
    inputs = TokenInputs(
        rewards=select(_outcomes(config, table, whole, mask) - penalty, mask),
        mask=mask,
        rows=whole.rows,
        episodes=table,
        row_episodes=whole.episodes,
        turns=tokens["turns"].long(),
        anchors=tokens["anchors"].long(),
        values=tokens.get("values"),
        bootstrap=_bootstrap(whole),
        log_ratio=tokens.get("log_ratio"),
        logprobs=tokens.get("logprobs"),
        squared_probs=tokens.get("squared_probs"),
        weights=tokens.get("weights"),
    )
    advantages, targets = token_result(config, inputs)
    is_target = mask
    if isinstance(config, TurnGaeAdvantage):
        is_target = turn_starts(mask, whole.rows, inputs.turns)
    return TokenAdvantages(advantages, select(targets, is_target), is_target)


def scorable(config: AdvantageSection, table: EpisodeTable) -> Tensor:
    """Return which episodes have every reward that their advantage needs; others do not train: `[E]`."""
    has_reward = ~table.rewards.isnan()
    if isinstance(config, RemaxAdvantage):
        return has_reward & ~table.greedy_rewards.isnan()
    return has_reward


def _outcomes(
    config: AdvantageSection, table: EpisodeTable, whole: "WholeBatch", mask: Tensor
) -> Tensor:
    """Put each outcome on a last trained token, 0 elsewhere: `[T]`.

    GiGPO's steps are those of an episode over its segments, so the outcome is paid once. For all
    others each segment is a separate sequence that ends with the outcome.
    """
    if isinstance(config, GigpoAdvantage):
        by_episode = Rows(index=whole.episodes[whole.rows.index], num_rows=len(table.rewards))
        return terminal_rewards(table.rewards, mask, by_episode)
    return terminal_rewards(table.rewards[whole.episodes], mask, whole.rows)


def _bootstrap(whole: "WholeBatch") -> Tensor | None:  # [R]
    """Return the value where an episode was cut off, the same for all its segments.

    Each of them ends with the episode's outcome, so the value still to come is that after the last.
    """
    ends = whole.of_rows.get("bootstrap")
    if ends is None:
        return None
    episode, num_episodes = dense_ids(whole.episodes)
    last = Rows(index=episode, num_rows=num_episodes).last(whole.rows.count(whole.mask) > 0)
    return ends[last[episode]]
