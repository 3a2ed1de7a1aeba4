"""Check images against the model, from a tiny model's section or the files of a local checkpoint.

Models of the hub are checked when a run starts.
"""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.actors import ImagesSection
from raylearner.config.data import FileData, HubData
from raylearner.config.environment import PageFetchTool, PageSearchTool
from raylearner.config.model import TINY_MAX_PIXELS, TINY_MIN_PIXELS, TINY_TOKEN_PIXELS
from raylearner.config.model_files import (
    folder_pixel_range,
    is_hub_id,
    processor_values,
    read_json,
    vision_errors,
)
from raylearner.config.problems import Finding
from raylearner.config.schema import OpenAiProxy, RunConfig, TinyModel, ToolUse
from raylearner.errors import ConfigError
from raylearner.learner.objective.kl import FrozenReference

TEXT_ONLY = "is text-only, but the policy is a vision-language model; name a model of its family"
NUM_MARKS = 2
"""Number of tokens of an image besides those of its pixels: its start and its end."""


def check_images(config: RunConfig) -> list[Finding]:
    """Return keys about images that a text-only model cannot use, and sizes that no image can have."""
    return [
        *(_text_only_findings(config) if _is_text_only(config) else ()),
        *_text_programs(config),
        *(_vision_findings(config) if has_vision(config) else ()),
        *_tokens(config),
        *_rate(config),
    ]


def image_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a warning if pages are too large for a response."""
    pixels, room = config.renderer.images.max_pixels, config.renderer.max_response_tokens
    per_token = _token_pixels(config)
    if per_token is None or not any(_pages(config)):
        return
    most = pixels // per_token + NUM_MARKS
    if most > room:
        yield (
            f"renderer.images.max_pixels: pages of {pixels:,} pixels take {most:,} tokens, more "
            f"than renderer.max_response_tokens = {room:,}: such pages are left out and end "
            "episodes"
        )


def check_vision_support(config: RunConfig) -> None:
    """Raise `ConfigError` with each key that needs a vision-language model, for a text-only one."""
    _refuse(_text_only_findings(config))


def check_adapter_transport(config: RunConfig) -> None:
    """Raise `ConfigError` if engines would miss adapters of a vision-language model."""
    _refuse(_lost_adapters(config))


def _refuse(findings: Iterator[Finding]) -> None:
    if text := "\n".join(f"{finding.key}: {finding.text}" for finding in findings):
        raise ConfigError(text)


def _text_only_findings(config: RunConfig) -> Iterator[Finding]:
    if isinstance(config.model, TinyModel):
        needs = "a vision-language model; add `model.vision: {}`"
    else:
        needs = f"a vision-language model, but model.path {config.model.path!r} is text-only; name another"
    for key in _columns(config):
        yield Finding(key, f"needs {needs}, or remove this key")
    for key in _pages(config):
        yield Finding(key, f"'image' needs {needs}, or set this to 'text'")
    if config.learner.vision_learning_rate is not None:
        yield Finding("learner.vision_learning_rate", f"needs {needs}, or remove this key")


def _is_text_only(config: RunConfig) -> bool:
    if isinstance(config.model, TinyModel):
        return config.model.vision is None
    return _is_text_only_checkpoint(config.model.folder)


def _is_text_only_checkpoint(folder: Path) -> bool:
    """Return False for a hub id, whose files are not known yet."""
    found = read_json(folder / "config.json")
    return bool(found) and "vision_config" not in found


def _columns(config: RunConfig) -> Iterator[str]:
    for part, sources in config.sources.items():
        for index, source in enumerate(sources):
            if isinstance(source, FileData | HubData) and source.image_column:
                yield f"{part}.{index}.image_column"


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
                key, "environment.kind 'openai_proxy' passes only text to programs; remove this key"
            )


def _vision_findings(config: RunConfig) -> Iterator[Finding]:
    images, model = config.renderer.images, config.model
    if isinstance(model, TinyModel):
        yield from _sizes(images, (TINY_MIN_PIXELS, TINY_MAX_PIXELS), of="a tiny model")
    else:
        errors = list(vision_errors(model.folder))
        for error in errors:
            yield Finding("model.path", f"{model.path!r}: {error}")
        if not errors and (found := folder_pixel_range(model.folder)) is not None:
            yield from _sizes(images, found, of=f"the image processor of {model.path!r}")
    yield from _beside(config)
    yield from _lost_adapters(config)
    yield from _stale_images(config)


def _sizes(images: ImagesSection, found: tuple[int, int], *, of: str) -> Iterator[Finding]:
    minimum, maximum = found
    if images.min_pixels < minimum:
        text = f"must be >= {minimum} for {of}, got {images.min_pixels}"
        yield Finding("renderer.images.min_pixels", text)
    if images.max_pixels > maximum:
        text = f"must be <= {maximum} for {of}, got {images.max_pixels}"
        yield Finding("renderer.images.max_pixels", text)


def _token_pixels(config: RunConfig) -> int | None:
    """Return the number of pixels per token, if it is known."""
    if isinstance(config.model, TinyModel):
        return None if config.model.vision is None else TINY_TOKEN_PIXELS
    found = processor_values(config.model.folder)
    patch, merge = found.get("patch_size"), found.get("merge_size")
    return (patch * merge) ** 2 or None if type(patch) is int and type(merge) is int else None


def _tokens(config: RunConfig) -> Iterator[Finding]:
    per_token, renderer = _token_pixels(config), config.renderer
    if per_token is None:
        return
    minimum, maximum = renderer.images.min_pixels, renderer.images.max_pixels
    smallest = -(-minimum // per_token)
    if smallest * per_token > maximum:
        yield Finding(
            "renderer.images.max_pixels",
            f"must be >= {smallest * per_token}, got {maximum}: images consist of whole tokens of"
            f" {per_token} pixels, and no such size is between {minimum} and {maximum}",
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
                f"must be >= {smallest + NUM_MARKS}, got {room}: this is the size of the smallest "
                f"image with renderer.images.min_pixels = {minimum}; raise this or lower that",
            )


def _rate(config: RunConfig) -> Iterator[Finding]:
    learner = config.learner
    if learner.vision_learning_rate is not None and learner.vision_tower == "frozen":
        yield Finding(
            "learner.vision_learning_rate",
            "has no effect with learner.vision_tower 'frozen'; remove it, or set that to 'trained'",
        )


def _beside(config: RunConfig) -> Iterator[Finding]:
    """Yield text-only models that would receive the images of a vision-language policy."""
    critic, kl = config.learner.critic, config.learner.kl
    reference = (
        None if kl is None or not isinstance(kl.reference, FrozenReference) else kl.reference
    )
    for key, section in (("learner.critic.path", critic), ("learner.kl.reference.path", reference)):
        path = None if section is None else section.path
        if path is not None and _is_text_only_checkpoint(Path(path).expanduser()):
            yield Finding(key, f"{path!r} {TEXT_ONLY}")


def _lost_adapters(config: RunConfig) -> Iterator[Finding]:
    """vLLM silently ignores the part of an adapter that is for a vision tower."""
    learner = config.learner
    is_alone = learner.lora is not None and config.weights.transport == "adapter"
    if is_alone and learner.vision_tower == "trained":
        yield Finding(
            "weights.transport",
            "'adapter' reaches the language model only, but adapters of the vision tower are trained too;"
            " set learner.vision_tower to 'frozen', or use 'auto' with actors.engine.dtype 'float32',"
            " which carries them merged",
        )


def _stale_images(config: RunConfig) -> Iterator[Finding]:
    """Engines keep the encoded images of running requests, and give them to new ones."""
    if config.weights.cache == "keep" and config.learner.vision_tower != "frozen":
        yield Finding(
            "weights.cache",
            "'keep' would keep encoded images of earlier weights for new requests; use 'recompute', or set"
            " learner.vision_tower to 'frozen'",
        )


def can_keep_caches(config: RunConfig) -> bool:
    """Whether requests of a later version may share encoded images with earlier ones, if there are any."""
    return config.learner.vision_tower == "frozen" or not _may_have_vision(config)


def _may_have_vision(config: RunConfig) -> bool:
    """Whether the policy is a vision-language model, or one of the hub that was not downloaded yet."""
    model = config.model
    if isinstance(model, TinyModel) or not is_hub_id(model.path):
        return has_vision(config)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.path, "config.json")
    return not isinstance(found, str) or "vision_config" in read_json(Path(found))


def has_vision(config: RunConfig) -> bool:
    """Return whether the policy is a vision-language model, as far as its section or local files tell."""
    if isinstance(config.model, TinyModel):
        return config.model.vision is not None
    return "vision_config" in read_json(config.model.folder / "config.json")
