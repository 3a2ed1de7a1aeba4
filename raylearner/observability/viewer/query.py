"""Filters of trajectories, and the SQL that they mean."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Query

COLUMNS = {
    "step": "step",
    "reward": "reward",
    "advantage": "advantage",
    "turns": "turns",
    "tokens": "sampled",
    "staleness": "staleness",
    "gap": "gap",
}
"""Columns of the index by which trajectories are sorted and ranges given."""

Sort = Literal["step", "reward", "advantage", "turns", "tokens", "staleness", "gap", "spread"]
Kind = Literal["training", "evaluation"]
MAX_INTEGER = 2**53
Step = Annotated[int, Query(ge=0, le=MAX_INTEGER)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What trajectories must have to be shown. Bounds are inclusive."""

    kind: Kind = "training"
    step: Step | None = None
    group: str | None = None
    text: Annotated[str, Query(max_length=1000)] = ""
    """Text anywhere in the prompt, the turns, the replies or the error, in either case."""
    stop: str = ""
    source: str = ""
    tool: str = ""
    error: str = ""
    """Kind of error; `any` for all failed episodes, `none` for the others."""
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: float | None = None
    tokens_max: float | None = None
    turns_min: float | None = None
    turns_max: float | None = None
    staleness_min: float | None = None
    staleness_max: float | None = None

    def condition(self) -> tuple[str, list[object]]:
        """Return an SQL condition with its values."""
        found: list[tuple[str, list[object]]] = [("kind = ?", [self.kind])]
        if self.step is not None:
            found.append(("step = ?", [self.step]))
        if self.group is not None:
            found.append(("group_key = ?", [self.group]))
        for column, value in (("stop", self.stop), ("source", self.source), ("tools", self.tool)):
            if value:
                found.append((f"{column} = ?", [value]))
        if self.error in ("any", "none"):
            found.append((f"error IS {'NOT ' if self.error == 'any' else ''}NULL", []))
        elif self.error:
            found.append(("error_kind = ?", [self.error]))
        for word in self.text.split():
            escaped = word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            found.append(("text LIKE ? ESCAPE '\\'", [f"%{escaped}%"]))
        for name in ("reward", "tokens", "turns", "staleness"):
            for end, sign in (("min", ">="), ("max", "<=")):
                bound = getattr(self, f"{name}_{end}")
                if bound is not None:
                    found.append((f"{COLUMNS[name]} {sign} ?", [bound]))
        return " AND ".join(part for part, _ in found), [v for _, values in found for v in values]
