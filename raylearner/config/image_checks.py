"""Whether what shows images and what sees them fit together, as far as a tiny model's section or the files
of a checkpoint on this machine tell; others are looked at when a run starts.
"""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.actors import ImagesSection
from raylearner.config.data import FileData, HubData
from raylearner.config.environment import PageFetchTool, PageSearchTool
from raylearner.config.model import TINY_MAX_PIXELS, TINY_MIN_PIXELS, TINY_TOKEN_PIXELS
from raylearner.config.model_files import (
    folder_faults,
    folder_pixel_range,
    processor_values,
    read_json,
)
from raylearner.config.problems import Finding
from raylearner.config.schema import OpenAiProxy, RunConfig, TinyModel, ToolUse
from raylearner.errors import ConfigError
from raylearner.learner.objective.kl import FrozenReference

BLIND_BESIDE = "reads text alone, and the policy sees images; name a model of the policy's family"
NUM_MARKS = 2
"""Tokens of one image besides those of its pixels: its start and its end."""


def check_images(config: RunConfig) -> list[Finding]:
    """Images, or a rate of the tower, for what reads text alone; sizes that no image can have."""
    return [
        *(_blind_findings(config) if _is_blind(config) else ()),
        *_text_programs(config),
        *(_seeing_findings(config) if _sees(config) else ()),
        *_tokens(config),
        *_rate(config),
    ]


def image_notes(config: RunConfig) -> Iterator[str]:
    """Images that the policy could be sent and would not be shown."""
    pixels, room = config.renderer.images.max_pixels, config.renderer.max_response_tokens
    per_token = _token_pixels(config)
    if per_token is None or not any(_pages(config)):
        return
    most = pixels // per_token + NUM_MARKS
    if most > room:
        yield (
            f"renderer.images.max_pixels: pages of {pixels:,} pixels are {most:,} tokens, and "
            f"renderer.max_response_tokens is {room:,}: such pages are left out and end episodes"
        )


def refuse_blindness(config: RunConfig) -> None:
    """For a model that turned out to read text alone. Raises `ConfigError` with each key that shows
    images."""
    _refuse(_blind_findings(config))


def refuse_lost_adapters(config: RunConfig) -> None:
    """For a model that turned out to see. Raises `ConfigError` where engines would miss adapters."""
    _refuse(_lost_adapters(config))


def _refuse(findings: Iterator[Finding]) -> None:
    if text := "\n".join(f"{finding.key}: {finding.text}" for finding in findings):
        raise ConfigError(text)


def _blind_findings(config: RunConfig) -> Iterator[Finding]:
    if isinstance(config.model, TinyModel):
        needs = "a model that sees; add `model.vision: {}`"
    else:
        needs = f"a model that sees, and model.path {config.model.path!r} reads text alone; name another"
    for key in _columns(config):
        yield Finding(key, f"needs {needs}, or leave this out")
    for key in _pages(config):
        yield Finding(key, f"'image' needs {needs}, or set this to 'text'")
    if config.learner.vision_learning_rate is not None:
        yield Finding("learner.vision_learning_rate", f"needs {needs}, or remove it")


def _is_blind(config: RunConfig) -> bool:
    if isinstance(config.model, TinyModel):
        return config.model.vision is None
    return _reads_text_alone(config.model.path)


def _reads_text_alone(path: str) -> bool:
    """False too for a hub id, of which nothing is known yet."""
    found = read_json(Path(path).expanduser() / "config.json")
    return bool(found) and "vision_config" not in found


def _columns(config: RunConfig) -> Iterator[str]:
    for part, sources in (("train", config.data.train), ("evaluation", config.data.evaluation)):
        for index, source in enumerate(sources or ()):
            if isinstance(source, FileData | HubData) and source.image_column:
                yield f"data.{part}.{index}.image_column"


def _pages(config: RunConfig) -> Iterator[str]:
    if not isinstance(config.environment, ToolUse):
        return
    for index, tool in enumerate(config.environment.tools):
        if isinstance(tool, PageSearchTool | PageFetchTool) and tool.contents == "image":
            yield f"environment.tools.{index}.contents"


def _text_programs(config: RunConfig) -> Iterator[Finding]:
    if isinstance(config.environment, OpenAiProxy):
        for key in _columns(config):
            yield Finding(
                key, "environment.kind 'openai_proxy' hands programs text alone; leave it out"
            )


def _seeing_findings(config: RunConfig) -> Iterator[Finding]:
    images, model = config.renderer.images, config.model
    if isinstance(model, TinyModel):
        yield from _sizes(images, (TINY_MIN_PIXELS, TINY_MAX_PIXELS), of="a tiny model")
    else:
        folder = Path(model.path).expanduser()
        faults = list(folder_faults(folder))
        for fault in faults:
            yield Finding("model.path", f"{model.path!r}: {fault}")
        if not faults and (found := folder_pixel_range(folder)) is not None:
            yield from _sizes(images, found, of=f"the image processor of {model.path!r}")
    yield from _beside(config)
    yield from _lost_adapters(config)


def _sizes(images: ImagesSection, found: tuple[int, int], *, of: str) -> Iterator[Finding]:
    least, most = found
    if images.min_pixels < least:
        text = f"must be >= {least} for {of}, got {images.min_pixels}"
        yield Finding("renderer.images.min_pixels", text)
    if images.max_pixels > most:
        text = f"must be <= {most} for {of}, got {images.max_pixels}"
        yield Finding("renderer.images.max_pixels", text)


def _token_pixels(config: RunConfig) -> int | None:
    """Pixels of one token, where they are known."""
    if isinstance(config.model, TinyModel):
        return None if config.model.vision is None else TINY_TOKEN_PIXELS
    found = processor_values(Path(config.model.path).expanduser())
    patch, merge = found.get("patch_size"), found.get("merge_size")
    return (patch * merge) ** 2 or None if type(patch) is int and type(merge) is int else None


def _tokens(config: RunConfig) -> Iterator[Finding]:
    per_token, renderer = _token_pixels(config), config.renderer
    if per_token is None:
        return
    least, most = renderer.images.min_pixels, renderer.images.max_pixels
    smallest = -(-least // per_token)
    if smallest * per_token > most:
        yield Finding(
            "renderer.images.max_pixels",
            f"must be >= {smallest * per_token}, got {most}: images are whole tokens of {per_token} "
            f"pixels, and none are between {least} and {most}",
        )
        return
    rooms = (
        ("max_prompt_tokens", renderer.max_prompt_tokens, any(_columns(config))),
        ("max_response_tokens", renderer.max_response_tokens, any(_pages(config))),
    )
    for key, room, has_images in rooms:
        if has_images and smallest + NUM_MARKS > room:
            yield Finding(
                f"renderer.{key}",
                f"must be >= {smallest + NUM_MARKS}, got {room}: so many tokens are the smallest "
                f"image of renderer.images.min_pixels = {least}; raise it or lower that",
            )


def _rate(config: RunConfig) -> Iterator[Finding]:
    learner = config.learner
    if learner.vision_learning_rate is not None and learner.vision_tower == "frozen":
        yield Finding(
            "learner.vision_learning_rate",
            "means nothing with learner.vision_tower 'frozen'; remove it, or set that to 'trained'",
        )


def _beside(config: RunConfig) -> Iterator[Finding]:
    """Models that are given the images of a policy that sees."""
    critic, kl = config.learner.critic, config.learner.kl
    reference = (
        None if kl is None or not isinstance(kl.reference, FrozenReference) else kl.reference
    )
    for key, section in (("learner.critic.path", critic), ("learner.kl.reference.path", reference)):
        path = None if section is None else section.path
        if path is not None and _reads_text_alone(path):
            yield Finding(key, f"{path!r} {BLIND_BESIDE}")


def _lost_adapters(config: RunConfig) -> Iterator[Finding]:
    """vLLM leaves out what an adapter has for a vision tower, without an error."""
    learner = config.learner
    is_alone = learner.lora is not None and config.weights.transport == "adapter"
    if is_alone and learner.vision_tower == "trained":
        yield Finding(
            "weights.transport",
            "'adapter' reaches what reads text alone, and adapters are trained in the vision tower "
            "too; set learner.vision_tower to 'frozen', or use 'auto' with actors.engine.dtype "
            "'float32', which carries them merged",
        )


def _sees(config: RunConfig) -> bool:
    if isinstance(config.model, TinyModel):
        return config.model.vision is not None
    return "vision_config" in read_json(Path(config.model.path).expanduser() / "config.json")
