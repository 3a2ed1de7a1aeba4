"""Learning-rate schedules that a run is too short for."""

from collections.abc import Iterator

from raylearner.config.finding import Finding
from raylearner.config.schema import RunConfig


def num_policy_updates(config: RunConfig) -> int:
    """Optimizer updates of the policy in a whole run."""
    learner = config.learner
    critic_only = 0 if learner.critic is None else learner.critic.warmup_steps
    steps = max(0, config.run.num_steps - critic_only)
    return steps * learner.num_epochs * learner.num_mini_batches


def check_schedule(config: RunConfig) -> Iterator[Finding]:
    """A warm-up that never reaches its peak."""
    learner, updates = config.learner, num_policy_updates(config)
    if learner.learning_rate > 0 and learner.warmup_steps > updates > 0:
        reached = learner.learning_rate * updates / learner.warmup_steps
        yield Finding(
            "learner.warmup_steps",
            f"must be <= {updates}, the run's optimizer updates ({_terms(config)}), got"
            f" {learner.warmup_steps}: the learning rate would end at {reached:g}, before its peak"
            f" {learner.learning_rate:g}; shorten the warm-up, or raise run.num_steps",
        )


def schedule_notes(config: RunConfig) -> Iterator[str]:
    """A warm-up that is the whole run."""
    learner, updates = config.learner, num_policy_updates(config)
    if learner.learning_rate > 0 and learner.warmup_steps == updates > 0:
        decay = (
            ""
            if learner.schedule == "constant"
            else f", and the {learner.schedule} decay never begins"
        )
        yield (
            f"learner.warmup_steps: the warm-up of {learner.warmup_steps} is the whole run"
            f" ({_terms(config)} = {updates} updates): the last update alone has the peak rate"
            f" {learner.learning_rate:g}{decay}"
        )


def _terms(config: RunConfig) -> str:
    learner = config.learner
    steps = "run.num_steps"
    if learner.critic is not None and learner.critic.warmup_steps:
        steps = "(run.num_steps - learner.critic.warmup_steps)"
    return f"{steps} * learner.num_epochs * learner.num_mini_batches"
