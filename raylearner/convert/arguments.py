"""Commands of TRL: `trl grpo --config FILE --key value`, and scripts with the same arguments."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from raylearner.config.problems import Problem, Where
from raylearner.convert.files import is_file, read_yaml
from raylearner.convert.overrides import read_value
from raylearner.convert.settings import Reading, Setting
from raylearner.convert.shell_words import Command, Word

METHODS = ("grpo", "rloo")
_MARKS = ("--num_generations", "--max_completion_length", "--reward_funcs", "--model_name_or_path")
_CONFIG = "--config"


def is_training(texts: list[str]) -> bool:
    """Return whether a command runs `trl grpo`, `trl rloo` or a script with arguments of TRL."""
    for first, second in pairwise(texts):
        if first.rpartition("/")[2] == "trl" and second in METHODS:
            return True
    names = [text.partition("=")[0] for text in texts]
    is_script = any(text.endswith(".py") for text in texts)
    return is_script and (sum(name in _MARKS for name in names) >= 1 or _recipe(texts) is not None)


def _recipe(texts: list[str]) -> str | None:
    """Return the recipe of `script.py --config recipe.yaml` where the script is of GRPO or RLOO."""
    script = next((text for text in texts if text.endswith(".py")), "")
    is_known = any(method in script.rpartition("/")[2] for method in METHODS)
    return script if is_known and any(text.split("=")[0] == _CONFIG for text in texts) else None


def read(command: Command, label: str, folders: list[Path]) -> Reading:
    """Return the arguments of a command, over the file that `--config` names."""
    texts = [word.text for word in command.words]
    start = next((i for i, text in enumerate(texts) if text in METHODS or text.endswith(".py")), 0)
    launcher, own = _options(command.words[:start]), _options(command.words[start + 1 :])
    reading = Reading()
    launcher |= {key: own.pop(key) for key in ("num_processes",) if key in own}
    if "config" in own:
        reading = _file(own.pop("config"), label, folders)
    reading.facts["project"] = "trl"
    reading.facts["method"] = (
        "rloo" if any("rloo" in text for text in texts[: start + 1]) else "grpo"
    )
    _processes(reading, launcher, own, folders)
    for name, (value, word) in own.items():
        reading.add(Setting(name, value, Where(0, word.line, label), word.unset))
    return reading


def _options(words: list[Word]) -> dict[str, tuple[Any, Word]]:
    """Return `--key value ...` and `--key=value`; several values are a list, none is true."""
    found: dict[str, tuple[Any, Word]] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.text.startswith("--") or len(word.text) == 2:
            continue
        name, equals, value = word.text[2:].partition("=")
        values = [read_value(value)] if equals else []
        while not equals and position < len(words) and not words[position].text.startswith("--"):
            following = words[position]
            values.append(read_value(following.text))
            word = Word(word.text, word.line, (*word.unset, *following.unset))
            position += 1
        found[name.replace("-", "_")] = (values[0] if len(values) == 1 else values or True, word)
    return found


def _file(option: tuple[Any, Word], label: str, folders: list[Path]) -> Reading:
    name, word = option
    for folder in folders:
        file = folder / str(name)
        if is_file(file):
            return read_yaml(file, str(name))
    text = f"{name} is neither in this folder nor in one above {label}; copy it there"
    return Reading(problems=[Problem(Where(0, word.line, label), "", text)])


def _processes(
    reading: Reading,
    launcher: dict[str, tuple[Any, Word]],
    own: dict[str, tuple[Any, Word]],
    folders: list[Path],
) -> None:
    """Keep the number of processes, of the launcher or of its file."""
    named = launcher.get("config_file") or own.pop("accelerate_config", None)
    for key in ("num_processes", "nproc_per_node"):
        if key in launcher and isinstance(launcher[key][0], int):
            reading.facts["num_processes"] = launcher[key][0]
            return
    if named is None:
        return
    for folder in folders:
        file = folder / str(named[0])
        if not is_file(file):
            continue
        try:
            content = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, YAMLError):
            return
        if isinstance(content, dict) and isinstance(content.get("num_processes"), int):
            reading.facts["num_processes"] = content["num_processes"]
        return
