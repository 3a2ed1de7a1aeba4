"""Which class reads a model's tokenizer: the one that transformers picks, without torch where it can be."""

from pathlib import Path
from typing import Any

from raylearner.config.files import read_json

QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
QWEN_TYPES = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl")
"""Model types for which `AutoTokenizer` takes `Qwen2Tokenizer` where the tokenizer's files name it."""


def load_tokenizer(path: str) -> Any:
    """What `AutoTokenizer` loads from `path` (directory or hub id). Raises `OSError` and `ValueError`.

    Importing that takes seconds in the driver and in every rollout actor, since it imports torch;
    for directories of Qwen models it is left out.
    """
    classes: Any
    if _is_qwen(Path(path)):
        from transformers import Qwen2Tokenizer as classes
    else:
        from transformers import AutoTokenizer as classes
    return classes.from_pretrained(path)


def end_token_ids(path: str) -> tuple[int, ...]:
    """The tokens at which engines end a turn by the model's generation_config.json, if it has one.

    Families differ: GLM's turns end with the token that begins the next one.
    """
    folder = Path(path)
    if folder.is_dir():
        config = read_json(folder / "generation_config.json")
    else:
        from transformers.utils import hub

        files: Any = hub
        found = files.cached_file(
            path, "generation_config.json", _raise_exceptions_for_missing_entries=False
        )
        config = {} if found is None else read_json(Path(found))
    ends: int | list[int] | None = config.get("eos_token_id")
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


def _is_qwen(folder: Path) -> bool:
    model, tokenizer = map(read_json, (folder / "config.json", folder / "tokenizer_config.json"))
    return (
        model.get("model_type") in QWEN_TYPES
        and tokenizer.get("tokenizer_class") in QWEN_CLASSES
        and "auto_map" not in tokenizer
    )
