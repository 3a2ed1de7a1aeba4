"""Memory profiles of earlier starts are used only where they hold."""

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from raylearner.actors.engines import vllm_plans


def key(
    *,
    graph: str = "graph",
    share: float = 0.85,
    head: torch.dtype = torch.float32,
    sleeps: bool = False,
    images: int | None = None,
) -> str:
    """The key of a profile for vLLM's own key `graph`."""
    limit: Any = None if images is None else SimpleNamespace(limit_per_prompt={"image": images})
    model = SimpleNamespace(head_dtype=head, enable_sleep_mode=sleeps, multimodal_config=limit)
    cache = SimpleNamespace(gpu_memory_utilization=share)
    config = SimpleNamespace(model_config=model, cache_config=cache)
    return vllm_plans.plan_key(lambda *_: graph, config, 0, 1)


def test_another_share_of_the_gpu_and_other_memory_are_profiled_again() -> None:
    keys = [
        key(),
        key(graph="other"),
        key(share=0.6),
        key(head=torch.bfloat16),
        key(sleeps=True),
        key(images=1),
        key(images=8),
    ]
    assert all(one != other for one, other in itertools.combinations(keys, 2))
    assert key() == keys[0]


def test_vllm_names_its_profiles_by_that_key() -> None:
    from vllm.v1.worker import startup_plan

    vllm_plans.install()
    first: Any = startup_plan.compute_plan_fingerprint
    vllm_plans.install()
    assert startup_plan.compute_plan_fingerprint is first
    assert first.func is vllm_plans.plan_key
