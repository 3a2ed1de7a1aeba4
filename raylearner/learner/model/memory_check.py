"""Whether a model has room on this rank's device, told before anything is loaded."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from raylearner.config.learner import LearnerSection
from raylearner.config.memory import estimate_of
from raylearner.errors import ConfigError

log = logging.getLogger(__name__)

MEMORY = Path("/proc/meminfo")


def refuse_without_room(config: LearnerSection, folder: Path, *, device_type: str) -> None:
    """Logs the estimate. Raises `ConfigError` where not even a micro-batch of nothing would fit.

    Engines on the same GPU count as far as they have started.
    """
    found = estimate_of(config, folder)
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


def _free_on_host() -> int:
    """What Linux would give away without swapping; plenty where it does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**62
