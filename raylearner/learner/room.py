"""Whether a model has room on this rank's device, told before anything is loaded."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from raylearner.config.kl import AdapterOffReference
from raylearner.config.learner import LearnerSection
from raylearner.config.memory import MemoryEstimate, ModelSize, estimate
from raylearner.errors import ConfigError
from raylearner.learner.reference import reference_path

log = logging.getLogger(__name__)

MEMORY = Path("/proc/meminfo")


def refuse_without_room(config: LearnerSection, folder: Path, *, device_type: str) -> None:
    """Logs the estimate. Raises `ConfigError` where not even a micro-batch of nothing would fit.

    Engines on the same GPU count as far as they have started.
    """
    found = _estimate(config, folder)
    if found is None:
        return
    on_host = _free_on_host()
    free = torch.cuda.mem_get_info()[0] if device_type == "cuda" else on_host
    refusal = found.refusal(free, free_on_host=on_host)
    if refusal is not None:
        raise ConfigError(f"model.path: {folder}: {refusal}")
    if dist.get_rank() == 0:
        log.info("learner memory: %s", found)
        advice = found.advice(free)
        if advice is not None:
            log.warning("learner memory: %s", advice)


def _estimate(config: LearnerSection, folder: Path) -> MemoryEstimate | None:
    size = ModelSize.of(folder)
    if size is None:
        return None
    critic = reference = None
    if config.critic is not None and config.critic.trunk == "own":
        critic = size if config.critic.path is None else ModelSize.of(Path(config.critic.path))
    kl = config.kl
    if kl is not None and kl.coefficient > 0 and not isinstance(kl.reference, AdapterOffReference):
        path = reference_path(kl.reference)
        reference = size if path is None else ModelSize.of(Path(path))
    return estimate(config, size, critic=critic, reference=reference)


def _free_on_host() -> int:
    """What Linux would give away without swapping; plenty where it does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**62
