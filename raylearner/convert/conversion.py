"""Conversion of one file: settings in, a draft and what it could not carry out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raylearner.config.problems import Problem, Where, did_you_mean, shown
from raylearner.convert import easyr1, search_r1, trl, verl
from raylearner.convert.draft import Draft
from raylearner.convert.read import read
from raylearner.convert.settings import ConversionProblems, Setting, Settings
from raylearner.convert.table import NAMES, load_table

MAX_LINES = 100
"""Maximum number of lines of one part of the report."""
CONVERTERS: dict[str, Callable[[Settings], Draft]] = {
    "verl": verl.convert,
    "easyr1": easyr1.convert,
    "trl": trl.convert,
    "search-r1": search_r1.convert,
}


@dataclass(slots=True)
class Conversion:
    """A converted file."""

    title: str
    """Name of the project."""
    label: str
    draft: Draft
    lost: list[str] = field(default_factory=list[str])
    """Settings without a counterpart, with the reason."""
    unknown: list[str] = field(default_factory=list[str])
    """Settings that the project does not have."""
    automatic: list[str] = field(default_factory=list[str])
    """Settings that the program decides."""
    notes: list[str] = field(default_factory=list[str])
    num_carried: int = 0
    num_lost: int = 0

    def yaml(self) -> str:
        """Return the configuration as YAML."""
        heading = (
            f"Converted from {Path(self.label).name} of {self.title} by `python -m raylearner convert`."
            " A comment behind a value names the keys that it comes from; DECIDE marks values that need"
            " a decision."
        )
        return self.draft.yaml(heading)

    def report(self) -> str:
        """Return what was carried, what was not and why, and what needs a decision."""
        counts = [
            f"{self.num_carried} carried",
            f"{len(self.automatic)} decided by the program",
            f"{self.num_lost} without a counterpart",
        ]
        counts += [f"{len(self.unknown)} unknown"] * bool(self.unknown)
        lines = [f"{self.label}: settings of {self.title}: {', '.join(counts)}"]
        decisions = [f"{key}: {text}" for key, text in self.draft.decisions]
        missing = [f"{key}: {path}" for key, path in self.draft.missing_paths()]
        for title, found in (
            ("to decide, marked DECIDE in the file", decisions),
            ("not carried", self.lost),
            ("not keys of the project, left out", self.unknown),
            ("also", self.notes),
            ("paths that do not exist on this machine", missing),
        ):
            if found:
                rest = len(found) - MAX_LINES
                shown_lines = [*found[:MAX_LINES], *([f"and {rest} more"] if rest > 0 else [])]
                lines += [f"{title}:", *(f"  {line}" for line in shown_lines)]
        return "\n".join(lines)


def convert(path: str, *, project: str | None = None, overrides: Sequence[str] = ()) -> Conversion:
    """Convert a file. Raises `ConversionProblems` with everything that cannot be read."""
    if project is not None and project not in NAMES:
        where = Where(0, 0, "command line")
        text = f"--from {project}: must be one of {', '.join(NAMES)}{did_you_mean(project, NAMES)}"
        raise ConversionProblems([Problem(where, "", text)])
    name, reading = read(Path(path), path, overrides, project)
    if name is None or any(not problem.key for problem in reading.problems):
        raise ConversionProblems(reading.problems)
    settings = Settings(load_table(name), reading)
    draft = CONVERTERS[name](settings)
    _copy(settings, draft)
    _note_truncation(draft)
    if settings.problems:
        raise ConversionProblems(settings.problems)
    conversion = Conversion(
        settings.table.title, path, draft, [*draft.lost], notes=[*reading.notes]
    )
    _sort(settings, conversion)
    return conversion


def _copy(settings: Settings, draft: Draft) -> None:
    """Copy the settings that need no rule."""
    for key in settings.given:
        row = settings.table.find(key)
        if row is None or row.fate != "copy" or not settings.has(key):
            continue
        value = settings.as_default(key)
        if row.text not in draft.entries and key not in settings.unset:
            draft.set(row.text, value, key)


def _note_truncation(draft: Draft) -> None:
    """Mark truncated sampling where the objective compares probabilities of learner and engine."""
    by = (
        "learner.corrections"
        if draft.get("learner.corrections")
        else "learner.proximal"
        if draft.get("learner.proximal", "recomputed") != "recomputed"
        else "learner.loss.kind"
        if draft.get("learner.loss.kind") == "reinforce"
        else ""
    )
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "regex"):
        key = f"sampling.{name}"
        if by and key in draft.entries:
            draft.decide(key, f"{by} needs probabilities without it: remove one of the two.")


def _sort(settings: Settings, conversion: Conversion) -> None:
    """Sort the settings of a file by what became of them."""
    unknown = {problem.key: problem for problem in settings.unknown()}
    groups: dict[str, list[Setting]] = {}
    for key, setting in settings.given.items():
        place = _place(setting)
        if key in unknown:
            conversion.unknown.append(f"{place}{key}: {unknown[key].text}")
            continue
        row = settings.table.find(key)
        if setting.unset and setting.value is not None:
            names = ", ".join(setting.unset)
            conversion.notes.append(
                f"{place}{key}: {names} is set outside of the script; check the value"
            )
        if row is None or row.fate == "auto":
            conversion.automatic.append(key)
        elif row.fate == "no":
            is_off = bool(row.when) and settings.row(row.when).is_neutral(settings.value(row.when))
            if is_off or row.is_neutral(setting.value):
                conversion.automatic.append(key)
            else:
                groups.setdefault(row.key, []).append(setting)
        elif key in settings.used:
            conversion.num_carried += 1
        else:
            conversion.automatic.append(key)
    conversion.num_lost = sum(map(len, groups.values())) + len(conversion.lost)
    for name, found in groups.items():
        text = settings.table.rows[name].text
        first = found[0]
        if len(found) > 1:
            conversion.lost.append(f"{_place(first)}{name} ({len(found)} settings): {text}")
        else:
            value = shown(first.value, limit=60)
            conversion.lost.append(f"{_place(first)}{first.key} = {value}: {text}")


def _place(setting: Setting) -> str:
    return f"{setting.where}  " if setting.where.line or setting.where.override else ""
