"""Read and check the files of a model that are on this machine."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from raylearner.config.problems import Finding
from raylearner.config.schema import PretrainedModel, RunConfig, TinyModel
from raylearner.errors import ConfigError

LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "dim_model_base",
)
"""Config keys that change logits after the head, unless neutral: 1, or the hidden size for
`dim_model_base`, which divides it. Families have other such keys and defaults, so a learner also
tests its model when it loads it.
"""

HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Files to download from a hub repository."""

CHUNK_BYTES = 1 << 24
"""Number of bytes of compared files that are read at a time."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest position."""


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty for a file that is missing or invalid, which its reader reports."""
    try:
        values: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], values) if isinstance(values, dict) else {}


def is_missing_directory(path: str) -> bool:
    """Return whether a path is a directory that does not exist, rather than a hub id (`owner/name`)."""
    owner, separator, _ = path.partition("/")
    is_below_folder = bool(separator) and Path(owner).is_dir()
    is_local = path.startswith((".", "~", os.sep)) or path.count("/") > 1 or is_below_folder
    return is_local and not Path(path).expanduser().is_dir()


def is_hub_id(path: str) -> bool:
    """Return whether a path that is not a directory has the form of a hub id."""
    folder = Path(path).expanduser()
    looks_local = folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    return not looks_local and not folder.exists()


def local_directory(path: str) -> Path:
    """Return the directory of a model given by path or hub id, from which it is downloaded.

    Of several processes that download at once, one downloads a file, and the others wait for its lock.
    Raises `ConfigError` if there is no such directory or repository.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(path):
        raise ConfigError(f"model.path: no such directory: {path!r}")
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        return Path(snapshot_download(path, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        raise ConfigError(
            f"model.path: {path!r} is not a directory, and as a hub id it cannot be downloaded: "
            f"{error}"
        ) from error


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, which config.json of a vision-language model nests."""
    inner = config.get("text_config")
    return config | cast(dict[str, Any], inner) if isinstance(inner, dict) else config


def rope_types(config: dict[str, Any]) -> set[str]:
    """Return the types of rotary embeddings; some families have one per type of layer."""
    found: set[str] = set()
    for key in ("rope_parameters", "rope_scaling"):
        values = text_config(config).get(key)
        if isinstance(values, dict):
            section = cast(dict[str, Any], values)
            for one in (section, *section.values()):
                if isinstance(one, dict):
                    inner = cast(dict[str, Any], one)
                    found |= {str(inner[k]) for k in ("rope_type", "type") if k in inner}
    return found


def model_errors(folder: Path, *, needs_weights: bool = True) -> Iterator[str]:
    """Yield errors that prevent training the model in an existing directory."""
    if not (folder / "config.json").is_file():
        yield f"{str(folder)!r} has no config.json; name a directory written by `save_pretrained`"
        return
    if needs_weights and not any(folder.glob("*.safetensors")):
        yield f"{str(folder)!r} has no *.safetensors file; save the model as safetensors"
    quantization = read_json(folder / "config.json").get("quantization_config")
    if quantization:
        section = cast(dict[str, Any], quantization) if isinstance(quantization, dict) else {}
        yield (
            f"{str(folder)!r} is quantized ({section.get('quant_method', 'unknown')}), which the learner"
            " cannot train, not even with learner.lora; name the original model"
        )
    if needs_weights:
        yield from _tied_head_errors(folder)


def scoring_errors(folder: Path) -> Iterator[str]:
    """Yield reasons in config.json why the learner's log-probabilities would differ from the model's.

    The learner also tests its model when it loads it.
    """
    config = read_json(folder / "config.json")
    family, text = config.get("model_type"), text_config(config)
    neutral = dict.fromkeys(LOGIT_CHANGES, 1) | {"dim_model_base": text.get("hidden_size")}
    for key in LOGIT_CHANGES:
        if text.get(key) not in (None, neutral[key]):
            yield (
                f"{str(folder)!r} ({family}) changes its logits after the head ({key}: {text[key]}), which"
                " the learner does not support; use a model of another family"
            )
    for kind in sorted(rope_types(config) & {*LENGTH_DEPENDENT}):
        yield (
            f"{str(folder)!r} ({family}) has rotary embeddings of type {kind}, which depend on the longest"
            " sequence in a packed batch; set rope_type to 'default' or 'yarn' in its config.json if the"
            " model allows it, or use another model"
        )


def _tied_head_errors(folder: Path) -> Iterator[str]:
    """Yield an error if config.json and the files disagree on whether the head is the input embedding."""
    config = read_json(folder / "config.json")
    is_tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    places = tensor_places(folder)
    heads = [name for name in places if name.endswith("lm_head.weight")]
    tables = [name for name in places if name.endswith("embed_tokens.weight")]
    if len(tables) != 1:
        return
    if is_tied is False and not any("head" in name or "output" in name for name in places):
        yield (
            f"{str(folder)!r}: config.json has tie_word_embeddings: false, but no file has an"
            " lm_head.weight; set it to true, or add the tensor"
        )
    if is_tied and len(heads) == 1 and not _is_same(places[heads[0]], places[tables[0]]):
        yield (
            f"{str(folder)!r}: config.json has tie_word_embeddings: true, but {heads[0]} differs from"
            f" {tables[0]}; set tie_word_embeddings to false to train that head, or remove the tensor"
        )


Place = tuple[Path, int, int]
"""A file, and where in it the bytes of a tensor begin and end."""


def tensor_places(folder: Path) -> dict[str, Place]:
    """Return the places of the tensors in the safetensors files of a directory, by name."""
    found: dict[str, Place] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    continue
                header: dict[str, Any] = json.loads(file.read(size))
        except (OSError, ValueError):
            continue  # reported when the model is loaded
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = (path, 8 + size + start, 8 + size + end)
    return found


def _is_same(left: Place, right: Place) -> bool:
    """Return whether two tensors have the same bytes."""
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
    """Conventions of one model family's files: names of tokens, and the counting of pixels."""

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
"""Keys of an image processor's `size`: the minimum and maximum number of pixels."""
PROCESSOR_FILE, NESTED_FILE = "preprocessor_config.json", "processor_config.json"
ADVICE = "use the original file of the model"


def vision_config_errors(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors in the config.json of a vision-language model."""
    family = config.get("model_type")
    if family not in FAMILIES:
        yield (
            f"config.json: model_type must be one of {', '.join(FAMILIES)} for a vision-language"
            f" model, {_got(config, 'model_type')}; other families are not supported"
        )
        return
    for key in FAMILIES[family].token_keys:
        if not _is_whole(config.get(key), minimum=0):
            yield f"config.json: {key} must be a token id, {_got(config, key)}; {ADVICE}"
    if not isinstance(config["vision_config"], dict):
        yield f"config.json: vision_config must be an object, {_got(config, 'vision_config')}; {ADVICE}"


def processor_errors(
    config: Mapping[str, Any], processor: Mapping[str, Any], *, file: str
) -> Iterator[str]:
    """Yield errors of the image processor in `file`, beside a valid config.json.

    Only keys in `processor` are checked: a file may leave out the defaults of its class.
    """
    vision: dict[str, Any] = config["vision_config"]
    for key, name in SIZES.items():
        size = processor.get(key, 1)
        if not _is_whole(size, minimum=1):
            yield f"{file}: {key} must be a whole number >= 1, {_got(processor, key)}; {ADVICE}"
        elif key in processor and vision.get(name, size) != size:
            yield (
                f"{file}: {key} is {size}, but vision_config.{name} in config.json is {vision[name]}; use"
                " both files of one model"
            )
    if "size" not in processor:
        return
    size: object = processor["size"]
    edges = cast(dict[str, Any], size) if isinstance(size, dict) else {}
    counts: list[Any] = [edges.get(edge) for edge in EDGES]
    if not all(_is_whole(count, minimum=1) for count in counts) or counts != sorted(counts):
        yield (
            f"{file}: size must have {' <= '.join(EDGES)}, the minimum and maximum pixels of an image,"
            f" {_got(processor, 'size')}; {ADVICE}"
        )


def pixel_range(family: str, processor: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of pixels between which a valid processor does not resize whole patches."""
    minimum, maximum = (processor["size"][edge] for edge in EDGES)
    num_counted = processor["temporal_patch_size"] if FAMILIES[family].counts_frames else 1
    return -(-minimum // num_counted), maximum // num_counted


def folder_pixel_range(folder: Path) -> tuple[int, int] | None:
    """Return the pixel range of the processor in a valid directory; None if its files do not have it."""
    values = processor_values(folder)
    if not {"size", "temporal_patch_size"} <= values.keys():
        return None
    return pixel_range(read_json(folder / "config.json")["model_type"], values)


def vision_errors(folder: Path) -> Iterator[str]:
    """Yield errors in the files of a vision-language model, without loading them."""
    config = read_json(folder / "config.json")
    errors = list(vision_config_errors(config))
    file = processor_file(folder)
    if not (folder / file).is_file():
        errors.append(f"has no {PROCESSOR_FILE}, which sets the size of images; {ADVICE}")
    elif not (values := processor_values(folder)):
        errors.append(f"{file} is not a JSON object; {ADVICE}")
    elif not errors:
        errors += processor_errors(config, values, file=file)
    yield from errors


def processor_file(folder: Path) -> str:
    """Return the file of a directory's image processor; the usual one for a hub id."""
    return NESTED_FILE if _nested(folder) else PROCESSOR_FILE


def processor_values(folder: Path) -> dict[str, Any]:
    """Return the values in that file, with old keys moved into `size`; empty without a JSON object."""
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


def _is_whole(value: object, *, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _got(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "but is missing" if value is None else f"got {value!r}"


MIN_HEAD_WIDTH = 32
"""Minimum width of attention heads in vLLM's CPU kernels."""
TEXT_STEP, VISION_STEP = 32, 4
"""Units of the width of a head: that of those kernels, and that of rotary positions of patches, which are
pairs of rows and pairs of columns."""


def check_model(config: RunConfig) -> Iterator[Finding]:
    """Yield errors of a tiny model's sizes or of local files; a hub id is checked when it is loaded."""
    if isinstance(config.model, PretrainedModel):
        path = config.model.path
        folder = Path(path).expanduser()
        if is_missing_directory(path):
            error = f"no such directory {path!r}; name a checkpoint directory or a hub id"
            yield Finding("model.path", error)
        elif folder.is_dir():
            for error in (*model_errors(folder), *scoring_errors(folder)):
                yield Finding("model.path", error)
    else:
        yield from head_errors(config.model)


def head_errors(model: TinyModel) -> Iterator[Finding]:
    """Yield errors of sizes that do not divide into attention heads."""
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
            f"gives heads of width {hidden_size / num_heads:.4g} ({hidden_size} / {num_heads}), which"
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
