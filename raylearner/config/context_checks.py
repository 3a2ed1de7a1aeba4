"""What context parallelism asks of the number of ranks and of the model."""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.files import read_json
from raylearner.config.finding import Finding
from raylearner.config.schema import PretrainedModel, RunConfig

KEY = "learner.context_parallel_size"

SEES_IMAGES = "must be 1 for a model that sees images: its image features are not cut into slices; set it to 1"

LAYERS = ("full_attention", "sliding_attention")
"""What layers may be: others look past a slice of tokens without the attention that is exchanged."""


def check_context(config: RunConfig) -> Iterator[Finding]:
    """Clashes with the ranks, and with the model as far as files on this machine tell."""
    size, num_ranks = config.learner.context_parallel_size, config.learner.num_ranks
    if size == 1:
        return
    if num_ranks % size:
        yield Finding(
            KEY,
            f"must divide learner.num_ranks = {num_ranks}, got {size}: ranks share micro-batches in"
            f" groups of that size; set it to one of {_listed(_divisors(num_ranks))}",
        )
    if (fault := _fault(config)) is not None:
        yield Finding(KEY, fault)


def heads_fault(size: int, *, num_heads: int, num_kv_heads: int) -> str | None:
    """Why so many ranks cannot deal out a model's attention heads, if they cannot."""
    if _fits(size, num_heads, num_kv_heads):
        return None
    fitting = [n for n in range(1, num_heads + 1) if _fits(n, num_heads, num_kv_heads)]
    return (
        f"must divide the model's {num_heads} attention heads, and divide its {num_kv_heads}"
        f" key-value heads or be a multiple of them, got {size}; set it to one of {_listed(fitting)}"
    )


def _fits(size: int, num_heads: int, num_kv_heads: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _fault(config: RunConfig) -> str | None:
    model, size = config.model, config.learner.context_parallel_size
    if not isinstance(model, PretrainedModel):
        if model.vision is not None:
            return SEES_IMAGES
        return heads_fault(size, num_heads=model.num_heads, num_kv_heads=model.num_heads)
    found = read_json(Path(model.path).expanduser() / "config.json")
    if "vision_config" in found:
        return SEES_IMAGES
    num_heads = found.get("num_attention_heads")
    if not isinstance(num_heads, int):
        return None
    num_kv_heads = found.get("num_key_value_heads") or num_heads
    return heads_fault(size, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
