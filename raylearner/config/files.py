"""Files that a configuration names, as far as they are on this machine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast


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
