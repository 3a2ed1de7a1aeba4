"""Admission, staleness and groups."""

from typing import Literal

from raylearner.config.section import Fraction, NaturalInt, PositiveFloat, PositiveInt, Section


class ReplaySection(Section):
    """Admission, staleness and groups."""

    groups_per_step: PositiveInt = 16
    """Groups in one take."""
    group_size: PositiveInt = 8
    """Episodes of one prompt."""
    extra: NaturalInt = 0
    """Episodes started beyond `group_size`; the first `group_size` done make the group."""
    play_greedy: bool = False
    """One more episode of each prompt, sampled greedily. It never trains; its reward is the baseline of remax."""
    max_staleness: NaturalInt = 2
    """Most versions between sampling a token and training on it; 0 is synchronous."""
    on_stale: Literal["mask", "drop", "wait", "train"] = "mask"
    """What happens to what is too old at `take`; see docs/architecture.md."""
    max_concurrent_groups: PositiveInt | None = None
    """Groups running at once. Default: bounded by staleness alone."""
    group_time_limit_s: PositiveFloat = 600.0
    """A group still incomplete after so long is closed by the partial-group rule."""
    partial_groups: Literal["train", "drop"] = "train"
    """At the time limit: train on what is done (at least two episodes), or drop the group."""
    drop_zero_variance: bool = False
    """Groups whose rewards are all equal are dropped and refilled."""
    max_filtered_groups: PositiveInt = 1000
    """So many filtered groups in a row end the run with the reason."""
    max_attempts: PositiveInt = 3
    """Times one sample is started, when its actor dies, before it counts as failed."""
    max_error_fraction: Fraction = 0.5
    """The run ends when more of the last `error_window` episodes failed."""
    max_tool_failure_fraction: Fraction = 0.9
    """The run ends when a tool failed more of its calls in the last `error_window` episodes that called it. Counts failures that are shown to the policy; 1 never ends a run."""
    error_window: PositiveInt = 64
    """Episodes over which failures are counted."""
