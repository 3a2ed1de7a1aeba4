"""Which class reads a model's tokenizer: the one that transformers picks, without torch where it can be."""

from pathlib import Path
from typing import Any

from raylearner.config.model_files import read_json

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
    ends: int | list[int] | None = _read(path, "generation_config.json").get("eos_token_id")
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


def unknown_token_ids(path: str) -> tuple[int, ...]:
    """Ids for which the model has logits and its tokenizer no token: padding of the vocabulary, and gaps.

    Empty for a directory without a tokenizer. Raises `OSError` and `ValueError`.
    """
    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab.*")):
        return ()
    config = _read(path, "config.json")
    size: int = {**config, **config.get("text_config", {})}.get("vocab_size", 0)
    vocabulary: dict[str, int] = load_tokenizer(path).get_vocab()
    known = set(vocabulary.values())
    return tuple(token for token in range(size) if token not in known)


def _read(path: str, name: str) -> dict[str, Any]:
    """A JSON file of a model, empty where it has none."""
    folder = Path(path)
    if folder.is_dir():
        return read_json(folder / name)
    from transformers.utils import hub

    files: Any = hub
    found = files.cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return {} if found is None else read_json(Path(found))


def _is_qwen(folder: Path) -> bool:
    model, tokenizer = map(read_json, (folder / "config.json", folder / "tokenizer_config.json"))
    return (
        model.get("model_type") in QWEN_TYPES
        and tokenizer.get("tokenizer_class") in QWEN_CLASSES
        and "auto_map" not in tokenizer
    )
