"""What the files of a model that sees must say, so that images become its tokens: ids and sizes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from raylearner.config.files import read_json

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "glm4v")
"""Model types whose placeholders and positions are known."""
SIZES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Sizes of an image processor, each with the same size's name in `vision_config`."""
EDGES = ("shortest_edge", "longest_edge")
"""Keys of an image processor's `size`: the fewest and the most pixels of an image."""
PROCESSOR_FILE, NESTED_FILE = "preprocessor_config.json", "processor_config.json"
CURE = "take the file that the model came with"


def token_keys(family: str) -> tuple[str, str, str, str]:
    """Keys of config.json: ids of images' and videos' placeholders, of an image's start and end."""
    mark = "image" if family == "glm4v" else "vision"
    return "image_token_id", "video_token_id", f"{mark}_start_token_id", f"{mark}_end_token_id"


def config_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """What keeps the config.json of a model that sees from being used."""
    family = config.get("model_type")
    if family not in FAMILIES:
        yield (
            f"config.json: model_type must be one of {', '.join(FAMILIES)} for a model that sees, "
            f"{_told(config, 'model_type')}; images of others are not supported"
        )
        return
    for key in token_keys(family):
        if not _is_whole(config.get(key), least=0):
            yield f"config.json: {key} must be the id of a token, {_told(config, key)}; {CURE}"
    if not isinstance(config["vision_config"], dict):
        yield f"config.json: vision_config must be an object, {_told(config, 'vision_config')}; {CURE}"


def processor_faults(
    config: Mapping[str, Any], processor: Mapping[str, Any], *, file: str
) -> Iterator[str]:
    """What keeps the image processor in `file` from being used beside a config.json without faults.

    Only what `processor` holds is looked at: a file may leave out what its class knows.
    """
    vision: dict[str, Any] = config["vision_config"]
    for key, name in SIZES.items():
        size = processor.get(key, 1)
        if not _is_whole(size, least=1):
            yield f"{file}: {key} must be a whole number >= 1, {_told(processor, key)}; {CURE}"
        elif key in processor and vision.get(name, size) != size:
            yield (
                f"{file}: {key} is {size}, and vision_config.{name} of config.json is "
                f"{vision[name]}; take both files from one model"
            )
    if "size" not in processor:
        return
    size: object = processor["size"]
    edges = cast(dict[str, Any], size) if isinstance(size, dict) else {}
    counts: list[Any] = [edges.get(edge) for edge in EDGES]
    if not all(_is_whole(count, least=1) for count in counts) or counts != sorted(counts):
        yield (
            f"{file}: size must hold {' <= '.join(EDGES)}, the fewest and the most pixels of an "
            f"image, {_told(processor, 'size')}; {CURE}"
        )


def pixel_range(family: str, processor: Mapping[str, Any]) -> tuple[int, int]:
    """Pixels between which a whole processor without faults leaves an image of whole patches as it is."""
    least, most = (processor["size"][edge] for edge in EDGES)
    # GLM counts the pixels of all the frames that one patch spans; an image is repeated as each.
    num_counted = processor["temporal_patch_size"] if family == "glm4v" else 1
    return -(-least // num_counted), most // num_counted


def folder_pixel_range(folder: Path) -> tuple[int, int] | None:
    """Of the processor of a directory without faults; None where its files do not tell."""
    values = processor_values(folder)
    if not {"size", "temporal_patch_size"} <= values.keys():
        return None
    return pixel_range(read_json(folder / "config.json")["model_type"], values)


def folder_faults(folder: Path) -> Iterator[str]:
    """As far as the files of a model that sees tell without being loaded."""
    config = read_json(folder / "config.json")
    faults = list(config_faults(config))
    file = processor_file(folder)
    if not (folder / file).is_file():
        faults.append(f"has no {PROCESSOR_FILE}, by which images are sized; {CURE}")
    elif not (values := processor_values(folder)):
        faults.append(f"{file} holds no JSON object; {CURE}")
    elif not faults:
        faults += processor_faults(config, values, file=file)
    yield from faults


def processor_file(folder: Path) -> str:
    """Where a directory's image processor is; the usual name for a hub id."""
    return NESTED_FILE if _nested(folder) else PROCESSOR_FILE


def processor_values(folder: Path) -> dict[str, Any]:
    """What that file says, older names of the edges put into `size`; empty where there is no object."""
    values = _nested(folder) or read_json(folder / PROCESSOR_FILE)
    size: object = values.get("size")
    if not isinstance(size, dict):
        return values
    older = (values.get("min_pixels"), values.get("max_pixels"))
    edges = {edge: number for edge, number in zip(EDGES, older, strict=True) if number is not None}
    return {**values, "size": {**cast(dict[str, Any], size), **edges}}


def _nested(folder: Path) -> dict[str, Any]:
    nested: object = read_json(folder / NESTED_FILE).get("image_processor")
    return cast(dict[str, Any], nested) if isinstance(nested, dict) else {}


def _is_whole(value: object, *, least: int) -> bool:
    return type(value) is int and value >= least


def _told(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "and is missing" if value is None else f"got {value!r}"
