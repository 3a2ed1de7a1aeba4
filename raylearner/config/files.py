"""Files that a configuration names, as far as they are on this machine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

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
