"""vLLM's memory profiles, which later starts of the same engine reuse, under keys of all they depend on.

vLLM's own key is that of the compiled graph: it leaves out the engine's share of the GPU, the precision of
logits, sleep, and the images of a request.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from vllm.v1.worker import startup_plan


def plan_key(others: Callable[..., str], config: Any, *arguments: Any, **named: Any) -> str:
    """Return a key of a profile from vLLM's own, by `others`, and what that leaves out of its `VllmConfig`."""
    model = config.model_config
    images = model.multimodal_config
    parts = (
        others(config, *arguments, **named),
        config.cache_config.gpu_memory_utilization,
        str(model.head_dtype),
        model.enable_sleep_mode,
        None if images is None else repr(images.limit_per_prompt),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def install() -> None:
    """Let this process's worker name its profile by that key, once."""
    own: Any = startup_plan.compute_plan_fingerprint
    if not isinstance(own, functools.partial):
        replaced: Any = startup_plan
        replaced.compute_plan_fingerprint = functools.partial(plan_key, own)
