"""Checkpoint directories: written under a temporary name, completed by a manifest, then renamed.

Their contents are up to the caller. A directory named `step_NNNNNN` is complete unless bytes changed
since, which `find_latest` verifies.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PARTIAL = ".partial"
_NAME = re.compile(r"step_(\d{6,})((\.replaced)?\.partial)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint, and why each newer one was skipped."""

    folder: Path
    step: int
    skipped: tuple[str, ...] = ()


@asynccontextmanager
async def create_checkpoint(checkpoints: Path, *, step: int) -> AsyncIterator[Path]:
    """Yield an empty directory to fill; on a clean exit it atomically becomes `step_NNNNNN`.

    A crash at any moment leaves earlier checkpoints as they were and at most a `.partial` behind.
    """
    folder = checkpoints / f"step_{step:06d}"
    partial = folder.with_name(folder.name + PARTIAL)
    await asyncio.to_thread(_start, partial)
    yield partial
    await asyncio.to_thread(_finish, partial, folder, step)


def find_latest(checkpoints: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None; log those skipped."""
    skipped: list[str] = []
    for folder in _newest_first(checkpoints):
        damage = find_damage(folder)
        if damage is None:
            return Checkpoint(folder=folder, step=_order(folder)[0], skipped=tuple(skipped))
        log.warning("checkpoint skipped: %s", damage)
        skipped.append(damage)
    return None


def find_newest(checkpoints: Path) -> Checkpoint | None:
    """Return the newest finished checkpoint by name, without reading its files."""
    for folder in _newest_first(checkpoints):
        if folder.suffix != PARTIAL:
            return Checkpoint(folder=folder, step=_order(folder)[0])
    return None


def list_damage(checkpoints: Path) -> list[str]:
    """Return incomplete checkpoints with the reasons, newest first."""
    found = (find_damage(folder) for folder in _newest_first(checkpoints))
    return [damage for damage in found if damage is not None]


def suggest_other(folder: Path) -> str:
    """Name the checkpoint to resume from instead of one that cannot be restored."""
    others = [
        other
        for other in _newest_first(folder.parent)
        if other != folder and find_damage(other) is None
    ]
    if not others:
        return f"{folder.parent} has no other complete checkpoint"
    return f"the latest other complete checkpoint is {others[0]}"


def find_damage(folder: Path) -> str | None:
    """Return why a checkpoint is incomplete; None if every byte is as written."""
    if folder.suffix == PARTIAL:
        return f"{folder.name}: half-written"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"{folder.name}: no {MANIFEST}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{folder.name}: {MANIFEST} is unreadable: {error}"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{folder.name}: {name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return (
                f"{folder.name}: {name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            )
        if _sha256(path) != entry["sha256"]:
            return f"{folder.name}: {name} is corrupt"
    return None


def prune_checkpoints(checkpoints: Path, *, step: int, keep_last: int) -> list[Path]:
    """Remove all but the newest `keep_last` and leftovers of crashes; return the removed directories.

    `step` is that of the checkpoint just written. Directories of later steps were incomplete when the
    run rolled back before them; they are removed, and do not count as checkpoints to keep.
    """
    folders = _newest_first(checkpoints)
    abandoned = [folder for folder in folders if _order(folder)[0] > step]
    past = folders[len(abandoned) :]
    whole = [folder for folder in past if folder.suffix != PARTIAL]
    leftovers = [folder for folder in past if folder.suffix == PARTIAL]
    for folder in abandoned:
        log.warning("%s is removed: the run was rolled back and is now at step %d", folder, step)
    removed = abandoned + whole[keep_last:] + leftovers
    for folder in removed:
        shutil.rmtree(folder)
    return removed


def _newest_first(checkpoints: Path) -> list[Path]:
    """Return directories with checkpoint names; other directories of the user are left alone."""
    folders = (folder for folder in checkpoints.glob("step_*") if _NAME.fullmatch(folder.name))
    return sorted(folders, key=_order, reverse=True)


def _order(folder: Path) -> tuple[int, bool]:
    match = _NAME.fullmatch(folder.name)
    assert match is not None, folder
    return (int(match[1]), folder.suffix != PARTIAL)


def _start(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _finish(partial: Path, folder: Path, step: int) -> None:
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    entries = {
        str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": entries}, indent=2) + "\n")
    folders = [path for path in partial.rglob("*") if path.is_dir()]
    for path in (*files, manifest, *folders, partial):
        _fsync(path)
    if folder.exists():
        replaced = folder.with_name(folder.name + ".replaced" + PARTIAL)
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced)
    else:
        partial.rename(folder)
    _fsync(folder.parent)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
