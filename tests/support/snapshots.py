"""Messages kept in files: a better sentence changes a snapshot, not a test.

`UPDATE_SNAPSHOTS=1` writes the files anew.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "snapshots"


def assert_snapshot(name: str, text: str) -> None:
    """Compare `text` with the file of this name."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "set UPDATE_SNAPSHOTS=1 to accept the change"
