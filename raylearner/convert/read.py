"""The settings of a file: which project it is of, and where a launch script's values come from."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from raylearner.config.problems import Problem, Where
from raylearner.convert import arguments, verl
from raylearner.convert.files import is_file, read_text, read_yaml
from raylearner.convert.interpolation import resolve
from raylearner.convert.overrides import is_override, read_override
from raylearner.convert.script import read_python
from raylearner.convert.settings import Reading
from raylearner.convert.shell import read_script
from raylearner.convert.shell_words import Command, Word
from raylearner.convert.table import load_table

SHELL_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch")
YAML_ENDINGS = (".yaml", ".yml", ".json")
_SFT = re.compile(r"^[\w.]*sft_trainer\w*$")
EASYR1 = "verl.trainer.main"
_PPO = re.compile(r"(^|[./])main_\w+(\.py)?$|fully_async_main$|^verl\.trainer\.main$")
MIN_OVERRIDES = 3
PARENTS = 4
"""Number of folders above a script in which its files are searched."""
SEARCH_KEYS = ("retriever.url", "retriever.topk", "max_turns", "do_search", "data.max_start_length")


def read(
    path: Path, label: str, overrides: Sequence[str], project: str | None
) -> tuple[str | None, Reading]:
    """Return the project of a file and its settings, with overrides over them."""
    reading = _read(path, label, project)
    for word in overrides:
        _override(reading, Word(word, 0), Where(1, 0, "override", word))
    name = project or reading.facts.get("project") or detect(reading)
    name = name or reading.facts.get("fallback")
    if name is not None and not any(not problem.key for problem in reading.problems):
        resolve(reading, load_table(name))
    if name is None and not reading.problems:
        reading.problems.append(
            Problem(
                Where(0, 0, label),
                "",
                "has no settings of verl, EasyR1, TRL or Search-R1; name their project with --from",
            )
        )
    return name, reading


def detect(reading: Reading) -> str | None:
    """Return the project whose keys a file has."""
    keys = reading.settings.keys()
    first = {key.split(".")[0] for key in keys}
    if "actor_rollout_ref" in first or "async_training" in first or {"data", "algorithm"} <= first:
        if "worker" in first:
            return "easyr1"
        return "search-r1" if any(key in keys for key in SEARCH_KEYS) else "verl"
    if "worker" in first:
        return "easyr1"
    table = load_table("trl")
    known = [key for key in keys if table.find(key) is not None]
    return "trl" if len(known) >= MIN_OVERRIDES else None


def _read(path: Path, label: str, project: str | None) -> Reading:
    where = Where(0, 0, label)
    text = read_text(path, where)
    if isinstance(text, Problem):
        return Reading(problems=[text])
    if path.suffix == ".py":
        return read_python(text, label)
    is_shell = path.suffix in SHELL_ENDINGS or text.startswith("#!")
    if is_shell:
        return _read_shell(text, path, label)
    if path.suffix in YAML_ENDINGS or path.suffix == "":
        return _with_folders(read_yaml(path, label, known=verl.COMPOSED), path)
    found = Problem(where, "", "must be a .yaml configuration, a .sh launch script or a .py script")
    return Reading(problems=[found])


def _with_folders(reading: Reading, path: Path) -> Reading:
    reading.facts["folders"] = _folders(path)
    return reading


def _folders(path: Path) -> list[Path]:
    return [Path("."), *list(path.resolve().parents)[: PARENTS + 1]]


def _is_training(command: Command) -> bool:
    texts = [word.text for word in command.words]
    if any(_SFT.search(text) for text in texts):
        return False
    if any(_PPO.search(text) for text in texts) and any(is_override(text) for text in texts):
        return True
    if arguments.is_training(texts):
        return True
    return sum(is_override(text) and "." in text for text in texts) >= MIN_OVERRIDES


def _read_shell(text: str, path: Path, label: str) -> Reading:
    script = read_script(text, _is_training)
    where = Where(0, 0, label)
    if not script.commands:
        return Reading(
            problems=[
                Problem(
                    where,
                    "",
                    "has no command that trains with verl, EasyR1, TRL or Search-R1, such as"
                    " `python3 -m verl.trainer.main_ppo key=value`",
                )
            ]
        )
    command = script.commands[0]
    texts = [word.text for word in command.words]
    if arguments.is_training(texts):
        reading = arguments.read(command, label, _folders(path))
    else:
        reading = _read_hydra(command, path, label)
    if len(script.commands) > 1:
        lines = ", ".join(str(found.line) for found in script.commands[1:])
        reading.notes.append(
            f"{label}: has {len(script.commands)} training commands; the first, on line {command.line},"
            f" is converted, those on lines {lines} are not"
        )
    for word in script.lost:
        reading.notes.append(
            f"{label}:{word.line}: {word.text}: follows the end of the command (a comment or a missing"
            " backslash), so the shell does not pass it on"
        )
    reading.facts["folders"] = _folders(path)
    return reading


def _read_hydra(command: Command, path: Path, label: str) -> Reading:
    """Read overrides, over the configuration file that the command names."""
    texts = [word.text for word in command.words]
    is_easyr1 = EASYR1 in texts
    reading = _base(command, path, label, is_easyr1)
    start = next((i for i, text in enumerate(texts) if _PPO.search(text)), 0)
    for position, word in enumerate(command.words):
        if position < start:  # variables of `env NAME=value` and of a launcher
            continue
        is_option = (
            position and texts[position - 1].startswith("--") and "=" not in texts[position - 1]
        )
        if word.text.startswith("~"):
            reading.notes.append(
                f"{label}:{word.line}: {word.text}: removes a key, which is not followed"
            )
        elif is_override(word.text) and "@" in word.text.partition("=")[0]:
            reading.notes.append(
                f"{label}:{word.line}: {word.text}: chooses a file of Hydra, which is not followed"
            )
        elif _is_setting(word.text) and not is_option:
            _override(reading, word, Where(0, word.line, label))
    if is_easyr1:
        reading.facts["project"] = "easyr1"
    elif any(text.startswith("verl.") for text in texts):
        reading.facts["fallback"] = "verl"
    return reading


def _is_setting(text: str) -> bool:
    name = text.partition("=")[0]
    return is_override(text) and "/" not in name and "@" not in name and name != "config"


def _base(command: Command, path: Path, label: str, is_easyr1: bool) -> Reading:
    """Read the file of `config=FILE` (EasyR1) or of `--config-path` and `--config-name` (Hydra)."""
    named, folder, line = "", "", command.line
    texts = [word.text for word in command.words]
    for position, text in enumerate(texts):
        following = texts[position + 1] if position + 1 < len(texts) else ""
        option, equals, value = text.partition("=")
        value = value if equals else following
        if (is_easyr1 and option == "config") or option in ("--config-name", "-cn"):
            named, line = value, command.words[position].line
        elif option in ("--config-path", "-cp", "--config-dir", "-cd"):
            folder = value
    stem = Path(named).stem
    if not named or (not is_easyr1 and stem in verl.COMPOSED and not folder):
        return Reading()
    relative = Path(folder) / (named if is_easyr1 else f"{stem}.yaml")
    for file in _candidates(relative, texts, path):
        if is_file(file):
            return read_yaml(file, str(file), known=verl.COMPOSED)
    if not is_easyr1 and stem in verl.COMPOSED:
        return Reading()
    if is_easyr1:
        text = f"{relative} is neither in this folder nor in one above {label}; copy it there"
        return Reading(problems=[Problem(Where(0, line, label), "", text)])
    text = f"{label}:{line}: {relative}: not found, so its values are missing; copy it beside the script"
    return Reading(notes=[text])


def _candidates(relative: Path, texts: Sequence[str], path: Path) -> Iterator[Path]:
    """Yield the places of a configuration: from folders above the script, or the module's folder."""
    parts = relative.parts
    known = [i for i, part in enumerate(parts) if "$" in part]
    suffix = Path(*parts[known[-1] + 1 :]) if known else relative
    module = texts[texts.index("-m") + 1] if "-m" in texts[:-1] else ""
    beside = Path(*module.split(".")[:-1]) / suffix
    for folder in _folders(path):
        yield folder / suffix
        yield folder / beside


def _override(reading: Reading, word: Word, where: Where) -> None:
    try:
        reading.add(read_override(word.text, where, word.unset))
    except ValueError as error:
        reading.problems.append(Problem(where, "", str(error)))
