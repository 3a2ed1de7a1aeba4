"""Overrides of a command line, `key=value`, as Hydra and OmegaConf read them."""

import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from raylearner.config.problems import Where
from raylearner.convert.settings import Setting

OVERRIDE = re.compile(r"^(\+{0,2}|~)([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)(=|$)", re.ASCII)
_QUOTES = ("'", '"')


def is_override(word: str) -> bool:
    """Return whether a word of a command is `key=value` with optional plus signs."""
    found = OVERRIDE.match(word)
    return found is not None and found[3] == "="


def read_override(word: str, where: Where, unset: tuple[str, ...] = ()) -> Setting:
    """Return the setting of one override. Raises `ValueError` with the reason where it has no value."""
    found = OVERRIDE.match(word)
    if found is None or found[3] != "=":
        raise ValueError("must have the form key=value")
    return Setting(found[2], read_value(word[found.end() :]), where, unset)


def read_value(text: str) -> Any:
    """Return a value as Hydra reads it: null, truth values, numbers, quoted text, lists, mappings."""
    text = text.strip()
    if len(text) > 1 and text[0] in _QUOTES and text[-1] == text[0]:
        return text[1:-1]
    if text[:1] in ("[", "{") and not text.startswith("${"):
        try:
            return YAML(typ="safe", pure=True).load(_spaced(text))
        except (YAMLError, ValueError):
            return text
    return read_scalar(text)


def read_scalar(text: str) -> Any:
    """Return null, a truth value or a number, or else the text."""
    match text.lower():
        case "null" | "none" | "":
            return None
        case "true":
            return True
        case "false":
            return False
        case _:
            pass
    if not re.fullmatch(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][+-]?\d+)?", text):
        return text
    plain = text.replace("_", "")
    try:
        return int(plain)
    except ValueError:
        return float(plain)


def _spaced(text: str) -> str:
    """Put a space behind the colons of a mapping, which Hydra does without, outside of quotes."""
    if not text.startswith("{"):
        return text
    return re.sub(r"(?<=\w):(?=[^\s/])", ": ", text)
