"""How rewards become advantages: one section per estimator."""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    Section,
)

GroupOfOne = Literal["zero", "raw"]


class _GroupBaseline(Section):
    group_of_one: GroupOfOne = "zero"
    """Advantage of an episode that nothing can be compared with: none, or its raw reward."""


class GrpoAdvantage(_GroupBaseline):
    """Group-relative advantage (arXiv 2402.03300)."""

    kind: Literal["grpo"]
    normalize: Literal["group", "batch", "none"] = "group"
    """Divide by the group's or the batch's standard deviation, or not at all."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class DrGrpoAdvantage(_GroupBaseline):
    """Reward minus the group's mean (2503.20783); goes with sequence_mean_of_sums_scaled."""

    kind: Literal["dr_grpo"]


class RlooAdvantage(_GroupBaseline):
    """Leave-one-out baseline (2402.14740)."""

    kind: Literal["rloo"]
    normalize: bool = False
    """Whiten the advantages over the episodes of the batch."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""


class ReinforcePlusPlusAdvantage(Section):
    """Discounted returns, whitened over the trained tokens of the batch (2501.03262)."""

    kind: Literal["reinforce_plus_plus"]
    gamma: Fraction = 1.0
    """Discount per trained token."""


class ReinforcePlusPlusBaselineAdvantage(_GroupBaseline):
    """Reward minus the group's mean, whitened over the trained tokens of the batch (2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"]
    epsilon: PositiveFloat = 1e-8
    """Added to the variance."""


class RemaxAdvantage(Section):
    """Return minus the reward of a greedy episode of the prompt (2310.10505)."""

    kind: Literal["remax"]


class OpoAdvantage(_GroupBaseline):
    """Reward minus the group's mean weighed by length (2505.23585)."""

    kind: Literal["opo"]


class GpgAdvantage(_GroupBaseline):
    """Centered rewards times episodes over episodes with a nonzero reward (2504.02546)."""

    kind: Literal["gpg"]
    divisor: PositiveFloat = 1.0
    """Divides the advantage."""


class GdpoAdvantage(_GroupBaseline):
    """Each reward function normalized by its own group, summed by weight, then by the batch (2601.05242)."""

    kind: Literal["gdpo"]
    normalize: Literal["group", "none"] = "group"
    """Divide each function by the group's standard deviation, or center it only."""
    statistics: Literal["tokens", "episodes"] = "tokens"
    """What the batch normalization counts: trained tokens (verl) or episodes (TRL)."""
    epsilon: PositiveFloat = 1e-6
    """Added to the group's standard deviation."""


class PassAtKAdvantage(Section):
    """The single best episode of a group gets its lead over the second (2503.19595)."""

    kind: Literal["pass_at_k"]
    normalize: Literal["group", "none"] = "group"
    """Divide by the group's standard deviation, or not at all."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class OtbAdvantage(_GroupBaseline):
    """Optimal token baseline, tokens of a group met by position (verl's optimal_token_baseline)."""

    kind: Literal["otb"]
    zero_tail: bool = True
    """No baseline where the group's longest row is alone."""
    epsilon: PositiveFloat = 1e-8
    """Added to the weights' sum."""


class TirOtbAdvantage(OtbAdvantage):
    """The same, tokens met by rank among the trained ones: for rows with tool replies."""

    kind: Literal["tir_otb"]  # pyright: ignore[reportIncompatibleVariableOverride]


class CriticAdvantage(Section):
    """What estimators with a critic share."""

    gamma: Fraction = 1.0
    """Discount per step."""
    lam: Fraction = 1.0
    """Decay of the trace per step."""
    bootstrap: bool = False
    """Episodes that ran out of tokens end with the critic's value, as if they went on, and not with 0."""
    normalize: bool = True
    """Whiten the advantages over the trained tokens of the batch."""


class GaeAdvantage(CriticAdvantage):
    """Generalized advantage estimation over trained tokens (1506.02438)."""

    kind: Literal["gae"]


class VtraceAdvantage(CriticAdvantage):
    """V-trace over trained tokens, ratios of the learner at the start of the step (1802.01561)."""

    kind: Literal["vtrace"]
    rho_bar: PositiveFloat = 1.0
    """Cap of the ratio in the temporal difference; it is in the advantage, too."""
    c_bar: PositiveFloat = 1.0
    """Cap of the ratio in the trace; at most rho_bar."""
    normalize: bool = False
    """Whiten the advantages over the trained tokens of the batch."""


class TurnGaeAdvantage(CriticAdvantage):
    """GAE whose steps are turns, each with the critic's value before it as its baseline (2510.16907)."""

    kind: Literal["turn_gae"]


class BilevelGaeAdvantage(CriticAdvantage):
    """GAE over turns, then inside each turn (2510.16907)."""

    kind: Literal["bilevel_gae"]
    gamma_turn: Fraction = 0.95
    """Discount per turn; `gamma` is the one per token."""


class GigpoAdvantage(Section):
    """Episode advantage plus that of a turn among all turns from the same state (2505.10978).

    Two turns of a group start from the same state where the replies before them are equal.
    """

    kind: Literal["gigpo"]
    gamma: Fraction = 0.95
    """Discount per turn."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the turn's part."""
    normalize: Literal["group", "none"] = "none"
    """Divide by the standard deviation, or not at all."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


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
    | TirOtbAdvantage
    | GaeAdvantage
    | VtraceAdvantage
    | TurnGaeAdvantage
    | BilevelGaeAdvantage
    | GigpoAdvantage,
    Field(discriminator="kind"),
]

GROUP_BASELINES = frozenset(
    {
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "gdpo",
        "pass_at_k",
        "otb",
        "tir_otb",
        "gigpo",
    }
)
"""Kinds whose baseline is made of the group's other episodes."""

CRITIC_ESTIMATORS = frozenset({"gae", "vtrace", "turn_gae", "bilevel_gae"})
"""Kinds that need values."""

TOKEN_ESTIMATORS = CRITIC_ESTIMATORS | {"reinforce_plus_plus", "remax", "otb", "tir_otb", "gigpo"}
"""Kinds whose advantage differs between the tokens of an episode."""


class ResamplingSection(Section):
    """Policy filtration (PF-PPO, 2409.06957): episodes of a batch redrawn by their reward."""

    kind: Literal["power", "max_min", "max_random"] = "power"
    """|reward|^power; the best and the worst only; or the best four times as often as others."""
    power: PositiveFloat = 2.0
    """Exponent of `power`."""


class RewardShaping(Section):
    """What is done to an episode's reward before any baseline; with `gdpo`, to the reward of each function. Metrics show it unshaped."""

    clip_low: float | None = None
    """Smaller rewards become this; None for no bound."""
    clip_high: float | None = None
    """Larger rewards become this; None for no bound."""
    normalize: bool = False
    """Subtract the batch's mean and divide by its standard deviation, after clipping."""
