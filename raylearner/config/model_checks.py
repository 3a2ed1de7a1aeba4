"""What a model must be to be trained and played: the shape of a tiny one, the files of one that is here."""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.files import is_missing_directory, model_faults
from raylearner.config.finding import Finding
from raylearner.config.schema import PretrainedModel, RunConfig, TinyModel, VllmEngine

MIN_VLLM_HEAD_WIDTH = 32
"""Narrower attention heads are refused by vLLM's CPU kernels at run time."""


def check_model(config: RunConfig) -> Iterator[Finding]:
    """A hub id is looked at when it is loaded."""
    if isinstance(config.model, PretrainedModel):
        path = config.model.path
        folder = Path(path).expanduser()
        if is_missing_directory(path):
            fault = f"no such directory {path!r}; name a checkpoint directory or a hub id"
            yield Finding("model.path", fault)
        elif folder.is_dir():
            for fault in model_faults(folder):
                yield Finding("model.path", fault)
    else:
        yield from _tiny(config.model, is_for_vllm=isinstance(config.actors.engine, VllmEngine))


def _tiny(model: TinyModel, *, is_for_vllm: bool) -> Iterator[Finding]:
    width, rest = divmod(model.hidden_size, model.num_heads)
    if rest:
        yield Finding(
            "model.hidden_size",
            f"must be a multiple of model.num_heads = {model.num_heads}, got {model.hidden_size}; "
            f"set it to {(width + 1) * model.num_heads}",
        )
    elif width < MIN_VLLM_HEAD_WIDTH and is_for_vllm:
        num_heads = max(1, model.hidden_size // MIN_VLLM_HEAD_WIDTH)
        yield Finding(
            "model.num_heads",
            f"gives heads {width} wide ({model.hidden_size} / {model.num_heads}), and vLLM wants "
            f">= {MIN_VLLM_HEAD_WIDTH}; set it to {num_heads}, or model.hidden_size to "
            f"{MIN_VLLM_HEAD_WIDTH * model.num_heads}",
        )
