"""How weights reach the engines."""

from typing import Literal

from raylearner.config.section import PositiveFloat, PositiveInt, Section


class WeightsSection(Section):
    """How weights reach the engines."""

    every_steps: PositiveInt = 1
    """Every k-th policy version is published."""
    transport: Literal["auto", "shared_files", "nccl", "ipc", "adapter"] = "auto"
    """`nccl` broadcasts between separate GPUs, `ipc` shares memory on GPUs where every learner rank lives beside engines, `shared_files` writes safetensors to memory-backed storage on one machine, `adapter` writes LoRA adapters there and nothing else; the others carry them merged, to engines in float32; auto chooses by where actors are."""
    folder: str = "/dev/shm"
    """Where shared files live; a folder of the run's own is made inside and removed at the end."""
    clear_caches: bool = True
    """Running requests are recomputed under the new weights; off keeps stale key-values."""
    deadline_s: PositiveFloat = 120.0
    """Maximum time for an engine to acknowledge a push; an engine that takes longer has failed and is replaced."""
    verify_tolerance: PositiveFloat | Literal["auto"] = "auto"
    """Maximum |learner - engine| log-probability on the probe prompts, in nats, for a weight update to count as verified; auto depends on precision: 1e-3 in float32 on CPUs, 0.05 on GPUs, 0.25 in half precision."""
    verify_statistic: Literal["auto", "max", "mean"] = "auto"
    """Statistic of that difference over the probe's tokens; auto is the mean in half precision, where single tokens differ by more than a nat, and the maximum in float32."""
    num_probe_tokens: PositiveInt = 32
    """Length of a probe prompt."""
