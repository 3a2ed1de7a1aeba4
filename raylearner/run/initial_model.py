"""The directory that a run's model is first loaded from; a tiny one is made there."""

import logging
from pathlib import Path
from typing import Any

import ray

from raylearner.config.schema import RunConfig, TinyModel
from raylearner.types import Prompt

logger = logging.getLogger(__name__)


@ray.remote(num_cpus=1)
def _make_tiny_model(*arguments: Any) -> float | None:
    """In a process of its own, so that the driver never loads torch."""
    from raylearner.tiny.demonstrations import prepare_tiny_model

    return prepare_tiny_model(*arguments)


async def prepare_model(config: RunConfig, folder: Path, training: list[Prompt]) -> str:
    """A directory or hub id; `folder` is the run's, and `training` what a warm start imitates on."""
    model = config.model
    if not isinstance(model, TinyModel):
        return model.path
    path = folder / "model"
    if not path.exists():
        make: Any = _make_tiny_model
        loss = await make.remote(
            model, config.renderer, config.environment, training, str(path), config.run.seed
        )
        if loss is not None:
            logger.info("warm start ended with a loss of %.3f", loss)
    return str(path)
