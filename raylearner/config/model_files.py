"""Read and check the files of a model as far as they are on this machine."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from raylearner.config.problems import Finding
from raylearner.config.schema import PretrainedModel, RunConfig, TinyModel

LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "dim_model_base",
)
"""Config keys of models whose logits are more than hidden states times the head, where they are set and
not neutral: 1, or the hidden size for `dim_model_base`, which divides it. Families have others, and defaults of their own: a learner measures its model when it loads it."""

CHUNK_BYTES = 1 << 24
"""Of files that are compared, read at a time."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings that change with the longest position that they see."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty for a file that is missing or wrong, of which its reader has more to say."""
    try:
        values: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], values) if isinstance(values, dict) else {}


def is_missing_directory(path: str) -> bool:
    """Whether a path can only mean a directory, and there is none: hub ids are `name` or `owner/name`."""
    owner, separator, _ = path.partition("/")
    is_below_folder = bool(separator) and Path(owner).is_dir()
    is_local = path.startswith((".", "~", os.sep)) or path.count("/") > 1 or is_below_folder
    return is_local and not Path(path).expanduser().is_dir()


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """That of the language model, which a vision model's config.json has inside."""
    inner = config.get("text_config")
    return config | cast(dict[str, Any], inner) if isinstance(inner, dict) else config


def rope_types(config: dict[str, Any]) -> set[str]:
    """Of the rotary embeddings of a config.json; some families name one for each kind of layer."""
    found: set[str] = set()
    for key in ("rope_parameters", "rope_scaling"):
        values = text_config(config).get(key)
        if isinstance(values, dict):
            told = cast(dict[str, Any], values)
            for one in (told, *told.values()):
                if isinstance(one, dict):
                    inner = cast(dict[str, Any], one)
                    found |= {str(inner[k]) for k in ("rope_type", "type") if k in inner}
    return found


def model_faults(folder: Path, *, needs_weights: bool = True) -> Iterator[str]:
    """What keeps a model's directory, which is there, from being trained."""
    if not (folder / "config.json").is_file():
        yield f"{str(folder)!r} has no config.json; name a directory that `save_pretrained` wrote"
        return
    if needs_weights and not any(folder.glob("*.safetensors")):
        yield f"{str(folder)!r} has no *.safetensors file; save the model in that form"
    quantization = read_json(folder / "config.json").get("quantization_config")
    if quantization:
        told = cast(dict[str, Any], quantization) if isinstance(quantization, dict) else {}
        yield (
            f"{str(folder)!r} is quantised ({told.get('quant_method', 'unknown')}), and a learner"
            " trains weights as they are, with learner.lora too; name the model that it was made from"
        )
    if needs_weights:
        yield from _head_faults(folder)


def scoring_faults(folder: Path) -> Iterator[str]:
    """Why a learner's log-probabilities would not be the model's, as far as config.json tells; the learner
    measures it when it loads the model."""
    config = read_json(folder / "config.json")
    family, text = config.get("model_type"), text_config(config)
    neutral = dict.fromkeys(LOGIT_CHANGES, 1) | {"dim_model_base": text.get("hidden_size")}
    for key in LOGIT_CHANGES:
        if text.get(key) not in (None, neutral[key]):
            yield (
                f"{str(folder)!r} ({family}) changes its logits behind the head ({key}:"
                f" {text[key]}), which the learner's log-probabilities do not follow; use a model of"
                " another family"
            )
    for kind in sorted(rope_types(config) & {*LENGTH_DEPENDENT}):
        yield (
            f"{str(folder)!r} ({family}) has rotary embeddings of type {kind}, which change with the"
            " longest row that is packed beside another; set rope_type to 'default' or 'yarn' in its"
            " config.json where its files allow it, or use another model"
        )


def _head_faults(folder: Path) -> Iterator[str]:
    """Where config.json and the files disagree on whether the head is the input embedding."""
    config = read_json(folder / "config.json")
    is_tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    places = tensor_places(folder)
    heads = [name for name in places if name.endswith("lm_head.weight")]
    tables = [name for name in places if name.endswith("embed_tokens.weight")]
    if len(tables) != 1:
        return
    if is_tied is False and not any("head" in name or "output" in name for name in places):
        yield (
            f"{str(folder)!r}: config.json says tie_word_embeddings: false, and no file has an"
            " lm_head.weight; set it to true, or add the tensor"
        )
    if is_tied and len(heads) == 1 and not _is_same(places[heads[0]], places[tables[0]]):
        yield (
            f"{str(folder)!r}: config.json says tie_word_embeddings: true, and {heads[0]} differs from"
            f" {tables[0]} in its files; set tie_word_embeddings to false to train with that head, or"
            " remove the tensor"
        )


Place = tuple[Path, int, int]
"""A file, and where in it a tensor's bytes begin and end."""


def tensor_places(folder: Path) -> dict[str, Place]:
    """Of the tensors in a directory's safetensors files, by the names they have there."""
    found: dict[str, Place] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    continue
                header: dict[str, Any] = json.loads(file.read(size))
        except (OSError, ValueError):
            continue  # whoever loads it says what is wrong with it
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = (path, 8 + size + start, 8 + size + end)
    return found


def _is_same(left: Place, right: Place) -> bool:
    """Whether two tensors have the same bytes."""
    (one, start, end), (other, begin, stop) = left, right
    if end - start != stop - begin:
        return False
    with one.open("rb") as a, other.open("rb") as b:
        a.seek(start)
        b.seek(begin)
        steps = range(0, end - start, CHUNK_BYTES)
        sizes = (min(CHUNK_BYTES, end - start - at) for at in steps)
        return all(a.read(size) == b.read(size) for size in sizes)


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How the files of one family's models name tokens and count pixels."""

    token_mark: str = "vision"
    """Part of the names of the tokens at an image's start and end."""
    counts_frames: bool = False
    """Whether sizes count the pixels of all the frames that one patch spans; an image is repeated as
    each."""

    @property
    def token_keys(self) -> tuple[str, str, str, str]:
        """Keys of config.json: ids of images' and videos' placeholders, of an image's start and end."""
        mark = self.token_mark
        return "image_token_id", "video_token_id", f"{mark}_start_token_id", f"{mark}_end_token_id"


FAMILIES = {
    "qwen2_5_vl": VisionFamily(),
    "qwen3_vl": VisionFamily(),
    "glm4v": VisionFamily(token_mark="image", counts_frames=True),
}
"""Vision families by `model_type`; the tokens' order and the positions are the same in all."""
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


def config_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """What keeps the config.json of a model that sees from being used."""
    family = config.get("model_type")
    if family not in FAMILIES:
        yield (
            f"config.json: model_type must be one of {', '.join(FAMILIES)} for a model that sees, "
            f"{_told(config, 'model_type')}; images of others are not supported"
        )
        return
    for key in FAMILIES[family].token_keys:
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
    num_counted = processor["temporal_patch_size"] if FAMILIES[family].counts_frames else 1
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
