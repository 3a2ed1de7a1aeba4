"""Balance of a run's ledger: every group that was admitted is accounted for, and trained at most once."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Groups by the last checkpoint's ledger and by the trajectories on record."""

    num_steps: int
    are_steps_complete: bool
    """Whether metrics.jsonl has every step once, in order."""
    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    open: int = 0
    samples_trained_twice: int = 0

    @property
    def lost(self) -> int:
        """Groups admitted that are neither open nor trained nor dropped."""
        return self.admitted - self.trained - self.dropped - self.open

    @property
    def is_balanced(self) -> bool:
        return self.are_steps_complete and self.lost == 0 and self.samples_trained_twice == 0


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file, which may be missing or being written."""
    try:
        text = path.read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_balance(folder: Path) -> Balance:
    """Compare the last checkpoint's ledger with the trajectories of a run that has ended."""
    steps = [row["step"] for row in rows(folder / "metrics.jsonl")]
    trained = Counter(
        (row["group_id"], row["sample_index"])
        for path in sorted((folder / "trajectories").glob("step_*.jsonl"))
        for row in rows(path)
        if row.get("segment", 0) == 0
    )
    seen = Balance(
        num_steps=len(steps),
        are_steps_complete=steps == list(range(1, len(steps) + 1)),
        samples_trained_twice=sum(count > 1 for count in trained.values()),
    )
    checkpoints = sorted((folder / "checkpoints").glob("step_??????"))
    if not checkpoints:
        return seen
    ledger = json.loads((checkpoints[-1] / "replay" / "ledger.json").read_text())["ledger"]
    counts = ledger["counts"]
    return Balance(
        num_steps=seen.num_steps,
        are_steps_complete=seen.are_steps_complete,
        samples_trained_twice=seen.samples_trained_twice,
        admitted=max(counts["admitted"], ledger["next_group_id"]),
        trained=counts["trained"],
        dropped=sum(counts["dropped"].values()),
        open=len(ledger["running"]) + len(ledger["held"]) + len(ledger["leased"]),
    )
