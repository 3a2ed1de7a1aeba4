"""What is recorded."""

from raylearner.config.section import NaturalInt, Section


class ObservabilitySection(Section):
    """What is recorded."""

    tensorboard: bool = True
    """Writes `tensorboard/`."""
    trajectories_every_steps: NaturalInt = 1
    """Writes `trajectories/step_NNNNNN.jsonl` every k steps; 0 never."""
    trace: bool = True
    """Writes `trace.json` (Chrome trace)."""
