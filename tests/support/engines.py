"""Engines for tests."""

from pathlib import Path

from raylearner.actors.engines.vllm import VllmEngine
from raylearner.config.schema import VllmEngine as VllmEngineSection


async def start_vllm(
    model: Path,
    *,
    weight_transport: str = "shared_files",
    actor_id: str = "",
    lora_rank: int | None = None,
    **section: object,
) -> VllmEngine:
    """A started vLLM in float32; `section` holds other keys of its configuration."""
    values = {"kind": "vllm", "dtype": "float32", "max_model_tokens": 512, "max_sequences": 32}
    return await VllmEngine.start(
        VllmEngineSection.model_validate(values | section),
        model_path=str(model),
        seed=0,
        weight_transport=weight_transport,
        actor_id=actor_id,
        lora_rank=lora_rank,
    )
