"""Arguments of vLLM's AsyncLLM, from the section of the engine and the files of its model."""

import importlib
import math
from pathlib import Path
from typing import Any, get_args

from raylearner.config import speed
from raylearner.config.engine_count import BESIDE_CACHE_BYTES, LOADING
from raylearner.config.memory import shapes
from raylearner.config.schema import VllmEngine as VllmEngineSection
from raylearner.errors import EngineError
from raylearner.tokenization.vision import Vision
from raylearner.weights.probe import NUM_PROBE_SEQUENCES
from raylearner.weights.transports.transport import STAGING_MARGIN_BYTES

EXTENSION = "raylearner.actors.engines.vllm_worker.WorkerExtension"
SCHEDULERS = "raylearner.actors.engines.vllm_scheduler"
SIZES = frozenset(["compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"])
"""Arguments with which a user chooses the sizes of CUDA graphs."""
MIXED_TOKENS = 512
"""Minimum size of the largest CUDA graph: steps with prompts have more tokens than sequences."""
SHARED_BELOW = 0.5
"""Minimum share of a GPU's memory of an engine that has the GPU to itself."""
BESIDE_STAGING_BYTES = STAGING_MARGIN_BYTES + 512 * 1024**2
"""Memory that stays free beside the tensors of a push: for its margin and CUDA's context."""
MAX_STAGING_SHARE = 0.15
"""Maximum share of a GPU that an engine leaves to the tensors of a push."""
MIN_CACHE_BYTES = 256 * 1024**2


def engine_arguments(
    config: VllmEngineSection,
    *,
    model_path: str,
    seed: int,
    weight_backend: str,
    receives_beside_weights: bool,
    lora_rank: int | None,
    max_images: int,
) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`, all but where to log."""
    from vllm.config import WeightTransferConfig

    import raylearner.actors.engines.vllm_worker  # noqa: F401 - registers the backend in this process as well

    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_tokens,
        # Probes need extra slots while all others are taken, and go first.
        "max_num_seqs": config.max_sequences + NUM_PROBE_SEQUENCES,
        "scheduling_policy": "priority",
        "gpu_memory_utilization": _memory_fraction(
            config, model_path, has_staging=receives_beside_weights
        ),
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.eager is not False,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=weight_backend),
        "worker_extension_cls": EXTENSION,
        **vision_arguments(model_path, max_images=max_images),
    }
    if lora_rank is not None:
        arguments |= _lora_arguments(lora_rank)
    if config.tensor_parallel_size > 1:
        # vLLM would otherwise request GPUs from Ray, which this actor already has.
        arguments["distributed_executor_backend"] = "mp"
    if config.sleep:
        arguments |= _sleep_arguments()
    if config.memory_fraction < SHARED_BELOW or config.sleep:
        arguments |= _cache_arguments(model_path, memory_fraction=config.memory_fraction)
    if config.head_dtype == "float32" and config.dtype != "float32":
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if config.eager is False and not SIZES.intersection(config.extra_arguments):
        arguments["cudagraph_capture_sizes"] = capture_sizes(arguments["max_num_seqs"])
    return arguments | config.extra_arguments | _scheduling_arguments(config)


def capture_sizes(max_sequences: int) -> list[int]:
    """Return the numbers of tokens of a step for which CUDA graphs are captured, up to all sequences.

    A step is padded to the next size: by at most a quarter from 32 on, where padding begins to cost time.
    vLLM's own sizes are twice as many and take twice as long to capture.
    """
    largest = max(max_sequences, MIXED_TOKENS)
    sizes = {1, 2, 4, 8, 16, 24, max_sequences, largest}
    octave = 32
    while octave < largest:
        sizes |= {octave + i * octave // 4 for i in range(4)}
        octave *= 2
    return sorted(size for size in sizes if size <= largest)


def _scheduling_arguments(config: VllmEngineSection) -> dict[str, Any]:
    """Choose the scheduler, ours where nothing else is asked for."""
    from vllm.platforms import current_platform

    ahead = speed.schedules_ahead(config, is_on_gpu=not current_platform.is_cpu())
    return {
        "async_scheduling": ahead,
        "scheduler_cls": f"{SCHEDULERS}.{'AsyncPartScheduler' if ahead else 'PartScheduler'}",
    }


def vision_arguments(model_path: str, *, max_images: int) -> dict[str, Any]:
    """Return the limits on images of one request and forbid videos, which vLLM would reserve memory for.

    Empty for a text-only model. Raises `EngineError` where torchvision, which vLLM's processors use,
    does not import: vLLM's own error would not mention it.
    """
    if Vision.from_pretrained(model_path) is None:
        return {}
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a build for another torch raises errors of any type
        raise EngineError(
            "vision-language models under vLLM need torchvision, which cannot be imported "
            f"({error}); `bash launch/setup.sh` installs one that can; on GPU machines run `pip "
            "install torchvision` for the build of this torch, or set actors.engine.kind to "
            "'transformers', which needs none"
        ) from error
    return {"limit_mm_per_prompt": {"image": max_images, "video": 0}}


def _lora_arguments(rank: int) -> dict[str, Any]:
    """Reserve one adapter of the smallest rank that vLLM has kernels for and that `rank` fits in."""
    from vllm.config.lora import MaxLoRARanks

    ranks = [supported for supported in get_args(MaxLoRARanks) if supported >= rank]
    if not ranks:
        raise EngineError(f"vLLM supports adapters up to rank {max(get_args(MaxLoRARanks))}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks)}


def _sleep_arguments() -> dict[str, bool]:
    """Let an engine free its GPU while it sleeps; on CPUs it only pauses."""
    from vllm.platforms import current_platform

    return {"enable_sleep_mode": True} if current_platform.is_sleep_mode_available() else {}


def _memory_fraction(config: VllmEngineSection, model_path: str, *, has_staging: bool) -> float:
    """Return the share of its GPU that vLLM plans with, less what tensors of a push take beside it.

    They arrive there while the engine generates. Where that would cost more than `MAX_STAGING_SHARE`, the
    key-value cache is worth more, and they arrive in a pause.
    """
    import torch

    fraction, folder = config.memory_fraction, Path(model_path)
    if not has_staging or not torch.cuda.is_available() or not folder.is_dir():
        return fraction
    elements = sum(math.prod(shape) for shape in shapes(folder).values())
    needed = elements * (4 if config.dtype == "float32" else 2) + BESIDE_STAGING_BYTES
    lowered = 1 - needed / torch.cuda.get_device_properties(0).total_memory
    return lowered if 0 < fraction - lowered <= MAX_STAGING_SHARE else fraction


def _cache_arguments(model_path: str, *, memory_fraction: float) -> dict[str, int]:
    """Fix the size of the key-value cache of an engine that shares its GPU.

    vLLM would measure free memory, and count what others allocate meanwhile as its own use.
    """
    import torch
    from vllm.platforms import current_platform

    folder = Path(model_path)
    if not torch.cuda.is_available() or not folder.is_dir():
        return {}
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    share = memory_fraction * current_platform.get_device_total_memory(0)
    size = int(share - LOADING * weights) - BESIDE_CACHE_BYTES
    return {"kv_cache_memory_bytes": size} if size >= MIN_CACHE_BYTES else {}
