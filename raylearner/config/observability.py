"""What is recorded."""

from typing import Literal

from raylearner.config.section import NaturalInt, PositiveInt, Section


class CompletionsSection(Section):
    """A table of a few completions: prompt, completion, rewards, advantage, logged numbers."""

    every_steps: NaturalInt = 1
    """Every so many steps; 0 never."""
    num_completions: PositiveInt = 4
    """Rows, spread from the worst reward to the best."""
    unique_prompts: bool = False
    """At most one row a prompt."""
    max_characters: PositiveInt = 400
    """Longer prompts and completions are cut in the middle."""
    log: bool = False
    """Also writes the table to the log; TensorBoard has it anyway."""


class ProfileSection(Section):
    """Profiles of chosen learner steps by torch's profiler, one file a rank."""

    steps: tuple[PositiveInt, ...]
    """Learner steps to profile; the first step after a start is slower than the rest."""
    record_memory: bool = False
    """Also records allocations."""
    record_stacks: bool = False
    """Also records Python stacks; larger files and a slower step."""


class WandbSection(Section):
    """Weights & Biases; the package is installed by whoever wants it."""

    project: str = "raylearner"
    """Project there."""
    entity: str | None = None
    """Team or user; empty is the account's default."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files to upload later."""


class ObservabilitySection(Section):
    """What is recorded."""

    tensorboard: bool = True
    """Writes `tensorboard/`."""
    ray_metrics: bool = True
    """Exports every number through Ray's metrics, for Prometheus and Grafana."""
    wandb: WandbSection | None = None
    """Present: numbers also go to Weights & Biases."""
    trajectories_every_steps: NaturalInt = 1
    """Writes `trajectories/step_NNNNNN.jsonl` every k steps; 0 never."""
    completions: CompletionsSection = CompletionsSection()
    """Completions as text."""
    trace: bool = True
    """Writes `trace.json` (Chrome trace)."""
    profile: ProfileSection | None = None
    """Present: chosen learner steps are profiled into `profile/`."""
