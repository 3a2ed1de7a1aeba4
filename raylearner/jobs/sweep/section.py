"""The section of a sweep file: axes, seeds, the metric and early stopping."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from raylearner.config.section import Name, NaturalInt, PositiveInt, Section, Seed

_Items = TypeVar("_Items", bound=tuple[Any, ...])


def _not_empty(items: _Items) -> _Items:
    if not items:
        raise ValueError("must have at least 1")
    return items


NOT_EMPTY = AfterValidator(_not_empty)
"""For lists; unlike a minimum length it adds no error to a list whose items are wrong."""


class Uniform(Section):
    """Uniform between two bounds."""

    kind: Literal["uniform"]
    low: float
    """Lower bound."""
    high: float
    """Upper bound."""


class LogUniform(Section):
    """Uniform in the logarithm, for rates and coefficients."""

    kind: Literal["log_uniform"]
    low: Annotated[float, Field(gt=0)]
    """Lower bound."""
    high: Annotated[float, Field(gt=0)]
    """Upper bound."""


class IntUniform(Section):
    """Uniform integers, including both bounds."""

    kind: Literal["int_uniform"]
    low: int
    """Lower bound."""
    high: int
    """Upper bound."""


class Choice(Section):
    """One of several values."""

    kind: Literal["choice"]
    values: Annotated[tuple[Any, ...], NOT_EMPTY]
    """Values to draw from; one or more."""


Draw = Annotated[Uniform | LogUniform | IntUniform | Choice, Field(discriminator="kind")]


class AxisSection(Section):
    """One key with its `values` for a grid, or a `sample` distribution."""

    key: str
    """Dotted key of a run's configuration, such as `learner.learning_rate`."""
    values: tuple[Any, ...] | None = None
    """Values, crossed with the other axes; a value may be a section."""
    sample: Draw | None = None
    """Distribution from which each of the `num_samples` trials at a grid point draws."""
    when: dict[str, tuple[Any, ...]] = Field(default_factory=dict[str, tuple[Any, ...]])
    """The axis applies only if these earlier axes have one of these values, drawn or not."""


class SweepMetric(Section):
    """The metric by which trials are compared."""

    key: str = "rollout/reward/mean"
    """Key of metrics.jsonl, or `evaluation/` and a key of eval.jsonl, whose last row counts."""
    goal: Literal["max", "min"] = "max"
    """Whether larger or smaller values are better."""
    last_steps: PositiveInt = 5
    """Number of last steps over which the metric is averaged."""


class AshaSection(Section):
    """Ray Tune's asynchronous successive halving: the worse trials of a rung are stopped."""

    kind: Literal["asha"]
    grace_steps: PositiveInt = 10
    """Minimum number of steps before a trial may be stopped."""
    reduction_factor: Annotated[float, Field(gt=1)] = 3.0
    """One in this many trials continues beyond each rung; rungs are at grace_steps times its powers."""


class SweepSection(Section):
    """A sweep file."""

    name: Name
    """Name of the sweep's folder, `runs/sweeps/<name>`, its jobs and its runs."""
    base: Annotated[tuple[str, ...], NOT_EMPTY]
    """Configuration files, one or more, merged left to right, as on the command line."""
    overrides: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Dotted keys and values that all trials share."""
    axes: Annotated[tuple[AxisSection, ...], NOT_EMPTY]
    """Keys that vary between trials; one or more."""
    exclude: tuple[dict[str, Any], ...] = ()
    """Combinations to leave out: trials with all values of one of these, drawn or not."""
    seeds: Annotated[tuple[Seed, ...], NOT_EMPTY] = (0,)
    """`run.seed` of each repetition of a combination, one or more."""
    num_samples: PositiveInt = 1
    """Number of trials at each grid point if an axis is sampled; fewer if draws are equal or excluded."""
    sample_seed: NaturalInt = 0
    """Seed of the draws."""
    metric: SweepMetric = SweepMetric()
    """The metric by which trials are compared."""
    early_stopping: AshaSection | None = None
    """If set, trials that fall behind are stopped."""
    max_concurrent: PositiveInt | None = None
    """Maximum number of trials at once; by default as many as the cluster's CPUs and GPUs allow."""
