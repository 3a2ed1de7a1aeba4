"""A sweep: which trials over which keys, what is compared, when a trial is given up."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from raylearner.config.section import Name, NaturalInt, PositiveInt, Section, Seed

_Items = TypeVar("_Items", bound=tuple[Any, ...])


def _not_empty(items: _Items) -> _Items:
    if not items:
        raise ValueError("must have at least 1")
    return items


NOT_EMPTY = AfterValidator(_not_empty)
"""Of a list; unlike a least length it says nothing more of a list whose items are wrong."""


class Uniform(Section):
    """Evenly between two bounds."""

    kind: Literal["uniform"]
    low: float
    """Lower bound."""
    high: float
    """Upper bound."""


class LogUniform(Section):
    """Evenly in the logarithm, for rates and coefficients."""

    kind: Literal["log_uniform"]
    low: Annotated[float, Field(gt=0)]
    """Lower bound."""
    high: Annotated[float, Field(gt=0)]
    """Upper bound."""


class IntUniform(Section):
    """Whole numbers, both bounds included."""

    kind: Literal["int_uniform"]
    low: int
    """Lower bound."""
    high: int
    """Upper bound."""


class Choice(Section):
    """One of several values."""

    kind: Literal["choice"]
    values: Annotated[tuple[Any, ...], NOT_EMPTY]
    """What is drawn from; one or more."""


Draw = Annotated[Uniform | LogUniform | IntUniform | Choice, Field(discriminator="kind")]


class AxisSection(Section):
    """One key and what it takes: `values` on a grid, or `sample` at random."""

    key: str
    """Dotted key of a run's configuration, such as `learner.learning_rate`."""
    values: tuple[Any, ...] | None = None
    """Every one of them, crossed with the other axes; a section may be a value."""
    sample: Draw | None = None
    """Drawn anew for each of the `num_samples` trials at a grid point."""
    when: dict[str, tuple[Any, ...]] = Field(default_factory=dict[str, tuple[Any, ...]])
    """The axis counts only where the earlier axes named here have one of these values, drawn or not."""


class SweepMetric(Section):
    """What trials are compared by."""

    key: str = "rollout/reward/mean"
    """A key of metrics.jsonl, or `evaluation/` and one of eval.jsonl, of which the last row counts."""
    goal: Literal["max", "min"] = "max"
    """Whether more or less is better."""
    last_steps: PositiveInt = 5
    """The mean over so many last steps."""


class AshaSection(Section):
    """Ray Tune's asynchronous successive halving: the worse trials of a rung are stopped."""

    kind: Literal["asha"]
    grace_steps: PositiveInt = 10
    """No trial is stopped before."""
    reduction_factor: Annotated[float, Field(gt=1)] = 3.0
    """One of so many goes on beyond each rung; rungs lie at grace_steps times its powers."""


class SweepSection(Section):
    """A whole sweep."""

    name: Name
    """Names the sweep's folder, `runs/sweeps/<name>`, its jobs and its runs."""
    base: Annotated[tuple[str, ...], NOT_EMPTY]
    """Configuration files, one or more, merged left to right, as on the command line."""
    overrides: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Dotted keys and values that are the same in every trial."""
    axes: Annotated[tuple[AxisSection, ...], NOT_EMPTY]
    """What varies; one axis or more."""
    exclude: tuple[dict[str, Any], ...] = ()
    """Combinations that are left out: a trial with all values of one of these, drawn or not."""
    seeds: Annotated[tuple[Seed, ...], NOT_EMPTY] = (0,)
    """`run.seed` of the repetitions of each combination, one or more."""
    num_samples: PositiveInt = 1
    """Trials at each grid point, where an axis is sampled; fewer where draws are alike or excluded."""
    sample_seed: NaturalInt = 0
    """Seed of what is drawn."""
    metric: SweepMetric = SweepMetric()
    """What is compared."""
    early_stopping: AshaSection | None = None
    """Present: trials that fall behind are stopped."""
    max_concurrent: PositiveInt | None = None
    """Most trials at once. Default: as many as the cluster has CPUs and GPUs for."""
