"""Whether what shows images and what sees them fit together. Only a tiny model is known before it is
loaded; others are looked at when a run starts.
"""

from collections.abc import Iterator

from raylearner.config.data import HubData, JsonlData, ParquetData
from raylearner.config.finding import Finding
from raylearner.config.model import TINY_MAX_PIXELS, TINY_MIN_PIXELS
from raylearner.config.schema import OpenAiProxy, RunConfig, TinyModel, ToolUse
from raylearner.config.tools import PageFetchTool, PageSearchTool

NEEDS_EYES = "a model that sees; add `model.vision: {}`"


def check_images(config: RunConfig) -> list[Finding]:
    """Images, or a rate of the tower, for what reads text alone; sizes that a tiny model refuses."""
    return [*_columns(config), *_tools(config), *_sizes(config), *_rate(config)]


def _is_blind(config: RunConfig) -> bool:
    return isinstance(config.model, TinyModel) and config.model.vision is None


def _columns(config: RunConfig) -> Iterator[Finding]:
    for part, sources in (("train", config.data.train), ("evaluation", config.data.evaluation)):
        for index, source in enumerate(sources or ()):
            if not isinstance(source, JsonlData | ParquetData | HubData) or not source.image_column:
                continue
            key = f"data.{part}.{index}.image_column"
            if _is_blind(config):
                yield Finding(key, f"needs {NEEDS_EYES}, or leave this out")
            if isinstance(config.environment, OpenAiProxy):
                yield Finding(
                    key, "environment.kind 'openai_proxy' hands programs text alone; leave it out"
                )


def _tools(config: RunConfig) -> Iterator[Finding]:
    if not isinstance(config.environment, ToolUse) or not _is_blind(config):
        return
    for index, tool in enumerate(config.environment.tools):
        if isinstance(tool, PageSearchTool | PageFetchTool) and tool.contents == "image":
            yield Finding(
                f"environment.tools.{index}.contents",
                f"'image' needs {NEEDS_EYES}, or set this to 'text'",
            )


def _sizes(config: RunConfig) -> Iterator[Finding]:
    images = config.renderer.images
    if not isinstance(config.model, TinyModel) or config.model.vision is None:
        return
    if images.min_pixels < TINY_MIN_PIXELS:
        yield Finding(
            "renderer.images.min_pixels",
            f"must be >= {TINY_MIN_PIXELS} for a tiny model, got {images.min_pixels}",
        )
    if images.max_pixels > TINY_MAX_PIXELS:
        yield Finding(
            "renderer.images.max_pixels",
            f"must be <= {TINY_MAX_PIXELS} for a tiny model, got {images.max_pixels}",
        )


def _rate(config: RunConfig) -> Iterator[Finding]:
    if config.learner.vision_learning_rate is None:
        return
    key = "learner.vision_learning_rate"
    if _is_blind(config):
        yield Finding(key, f"needs {NEEDS_EYES}, or remove it")
    elif config.learner.vision_tower == "frozen":
        yield Finding(
            key,
            "means nothing with learner.vision_tower 'frozen'; remove it, or set that to 'trained'",
        )
