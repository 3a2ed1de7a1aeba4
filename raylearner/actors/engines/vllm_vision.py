"""What vLLM needs beside itself for models that see."""

import importlib
from typing import Any

from raylearner.errors import EngineError
from raylearner.tokenization.vision import Vision


def vision_arguments(model_path: str, *, max_images: int) -> dict[str, Any]:
    """Of `AsyncEngineArgs`: so many images a request, and no videos, which vLLM would make room for.

    Empty for a model that does not see. Raises `EngineError` where torchvision, which vLLM's
    processors use, does not import: vLLM's own error would speak of something else.
    """
    if Vision.from_pretrained(model_path) is None:
        return {}
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # of another build it raises whatever it likes
        raise EngineError(
            f"it shows images with torchvision, which does not import ({error}); `bash launch/setup.sh`"
            " installs one that does, on GPU machines `pip install torchvision` the build for this"
            " torch, and actors.engine.kind 'transformers' needs none"
        ) from error
    return {"limit_mm_per_prompt": {"image": max_images, "video": 0}}
