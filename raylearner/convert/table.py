"""The table of a project: each of its keys, and what becomes of it here.

The tables are data, from which the documentation is generated too, so that both say the same.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

from ruamel.yaml import YAML

Fate = Literal["copy", "to", "auto", "no"]
FATES: tuple[Fate, ...] = ("copy", "to", "auto", "no")
NEUTRAL: tuple[Any, ...] = (None, False, 0, -1, "", [], {})
"""Values with which a key asks for nothing."""
MISSPELLED = 0.88
"""Similarity from which a name is taken for a misspelling."""


@dataclass(frozen=True, slots=True)
class Row:
    """A key, or all keys below one (`a.b.*`)."""

    key: str
    fate: Fate
    """Whether the value is copied, enters other keys, is decided by the program or is lost."""
    text: str
    """Our key, or the reason why there is none."""
    note: str = ""
    """How the value is converted."""
    default: Any = None
    """The project's own default."""
    when: str = ""
    """Key without which this one has no effect."""

    def is_neutral(self, value: Any) -> bool:
        """Return whether nothing is lost with this value."""
        is_listed = isinstance(self.default, list) and value in self.default
        return value in NEUTRAL or value == self.default or is_listed


@dataclass(frozen=True)
class Table:
    """All rows of a project."""

    name: str
    title: str
    rows: dict[str, Row]
    own_rows: tuple[str, ...]
    """Keys of the rows that are not inherited from another project."""

    def find(self, key: str) -> Row | None:
        """Return the row of a key: its own, or the one of the nearest parent."""
        if key in self.rows:
            return self.rows[key]
        for row in self._beginnings:
            if key.startswith(row.key[:-1]):
                return row
        parts = key.split(".")
        for count in range(len(parts) - 1, 0, -1):
            row = self.rows.get(".".join(parts[:count]) + ".*")
            if row is not None:
                return row
        return None

    def likely_key(self, key: str) -> str | None:
        """Return the key that a name below a row `a.b.*` is probably a misspelling of."""
        parent, _, name = key.rpartition(".")
        siblings = self._names.get(parent, {})
        near = (
            get_close_matches(name, siblings, n=1, cutoff=MISSPELLED)
            if name not in siblings
            else []
        )
        return siblings[near[0]] if near else None

    def is_section(self, key: str) -> bool:
        """Return whether some row is below a key."""
        return key in self._names

    @cached_property
    def _beginnings(self) -> list[Row]:
        """Rows of all keys that begin alike, `name_*`."""
        return [row for row in self.rows.values() if row.key.endswith("_*")]

    @cached_property
    def _names(self) -> dict[str, dict[str, str]]:
        """Keys by section and last name; sections without keys of their own are included."""
        found: dict[str, dict[str, str]] = {"": {}}
        for key in self.rows:
            parent, _, name = key.rpartition(".")
            found.setdefault(parent, {})[name] = key
            while parent:
                parent = parent.rpartition(".")[0]
                found.setdefault(parent, {})
        return found

    def markdown(self) -> str:
        """Return the rows as a table of the documentation."""
        lines = ["| theirs | here | |", "|---|---|---|"]
        for key in self.own_rows:
            row = self.rows[key]
            here = f"`{row.text}`" if row.fate in ("copy", "to") else _WORDS[row.fate]
            note = row.note if row.fate in ("copy", "to") else row.text
            lines.append(f"| `{key}` | {here} | {note} |")
        return "\n".join(lines) + "\n"


_WORDS = {"auto": "decided by the program", "no": "no counterpart"}
NAMES = ("verl", "easyr1", "trl", "search-r1")
"""Projects whose configurations are converted."""


@cache
def load_table(name: str) -> Table:
    """Return the table of a project."""
    file = resources.files("raylearner.convert") / "tables" / f"{name.replace('-', '_')}.yaml"
    content = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
    inherited = load_table(content["extends"]).rows if "extends" in content else {}
    own = {key: _row(key, fields) for key, fields in content["rows"].items()}
    return Table(name, content["title"], inherited | own, tuple(own))


def _row(key: str, fields: dict[str, Any]) -> Row:
    fate: Fate = next(fate for fate in FATES if fate in fields)
    unknown = fields.keys() - {fate, "note", "default", "when"}
    assert not unknown, f"{key}: {unknown}"
    note, when = fields.get("note", ""), fields.get("when", "")
    return Row(key, fate, fields[fate], note, fields.get("default"), when)
