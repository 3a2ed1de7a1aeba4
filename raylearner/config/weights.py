"""How weights reach the engines."""

from typing import Literal

from raylearner.config.section import PositiveFloat, PositiveInt, Section


class WeightsSection(Section):
    """How weights reach the engines."""

    every_steps: PositiveInt = 1
    """Every k-th policy version is published."""
    transport: Literal["shared_files"] = "shared_files"
    """`shared_files` writes safetensors to memory-backed storage on one machine."""
    folder: str = "/dev/shm"
    """Where shared files live; a folder of the run's own is made inside and removed at the end."""
    should_clear_caches: bool = True
    """Running requests are recomputed under the new weights; off keeps stale key-values."""
    deadline_s: PositiveFloat = 120.0
    """An engine that has not acknowledged by then is condemned and replaced."""
    proof_tolerance: PositiveFloat = 1e-3
    """Largest |learner - engine| log-probability on the probe prompts."""
    num_probe_tokens: PositiveInt = 32
    """Length of a probe prompt."""
