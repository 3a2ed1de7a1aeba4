"""What a model must be to be trained and played: the shape of a tiny one, the files of one that is here."""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.files import is_missing_directory, model_faults, scoring_faults
from raylearner.config.finding import Finding
from raylearner.config.schema import PretrainedModel, RunConfig, TinyModel

MIN_HEAD_WIDTH = 32
"""Narrower attention heads are refused by vLLM's CPU kernels at run time."""
TEXT_STEP, VISION_STEP = 32, 4
"""What the width of a head is a multiple of: those kernels take each 32nd, and rotary positions of patches
come as pairs of rows and pairs of columns."""


def check_model(config: RunConfig) -> Iterator[Finding]:
    """A hub id is looked at when it is loaded."""
    if isinstance(config.model, PretrainedModel):
        path = config.model.path
        folder = Path(path).expanduser()
        if is_missing_directory(path):
            fault = f"no such directory {path!r}; name a checkpoint directory or a hub id"
            yield Finding("model.path", fault)
        elif folder.is_dir():
            for fault in (*model_faults(folder), *scoring_faults(folder)):
                yield Finding("model.path", fault)
    else:
        yield from head_faults(config.model)


def head_faults(model: TinyModel) -> Iterator[Finding]:
    """Sizes of which no attention heads can be made."""
    yield from _heads("model", model.hidden_size, model.num_heads, step=TEXT_STEP)
    if (vision := model.vision) is not None:
        yield from _heads("model.vision", vision.hidden_size, vision.num_heads, step=VISION_STEP)


def _heads(section: str, hidden_size: int, num_heads: int, *, step: int) -> Iterator[Finding]:
    width, rest = divmod(hidden_size, num_heads)
    if width < MIN_HEAD_WIDTH:
        fitting = [
            n for n in range(1, hidden_size // MIN_HEAD_WIDTH + 1) if hidden_size % (step * n) == 0
        ]
        change = f"set it to {fitting[-1]}, or" if fitting else "set"
        yield Finding(
            f"{section}.num_heads",
            f"gives heads {hidden_size / num_heads:.4g} wide ({hidden_size} / {num_heads}), and they"
            f" must be >= {MIN_HEAD_WIDTH}; {change} {section}.hidden_size to"
            f" {MIN_HEAD_WIDTH * num_heads}",
        )
    elif rest or width % step:
        unit = step * num_heads
        yield Finding(
            f"{section}.hidden_size",
            f"must be a multiple of {step} * {section}.num_heads = {unit}, got {hidden_size};"
            f" set it to {-(-hidden_size // unit) * unit}",
        )
