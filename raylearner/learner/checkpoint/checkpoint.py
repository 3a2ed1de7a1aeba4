"""Checkpoint directories: written aside, sealed by a manifest, renamed into place, found again whole.

What lies inside is the business of whoever writes there; a directory named `step_NNNNNN` is whole
unless bytes changed since, and `latest` proves that before it names one.
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
    """A whole one, and what was newer but not whole, each with the reason."""

    folder: Path
    step: int
    skipped: tuple[str, ...] = ()


@asynccontextmanager
async def writing(checkpoints: Path, *, step: int) -> AsyncIterator[Path]:
    """Yields an empty directory to fill; on a clean exit it becomes `step_NNNNNN`, at once.

    A crash at any moment leaves earlier checkpoints as they were and at most a `.partial` behind.
    """
    folder = checkpoints / f"step_{step:06d}"
    partial = folder.with_name(folder.name + PARTIAL)
    await asyncio.to_thread(_start, partial)
    yield partial
    await asyncio.to_thread(_finish, partial, folder, step)


def latest(checkpoints: Path) -> Checkpoint | None:
    """The newest whole checkpoint; logs what it had to skip, and returns None where none is whole."""
    skipped: list[str] = []
    for folder in _newest_first(checkpoints):
        fault = find_fault(folder)
        if fault is None:
            return Checkpoint(folder=folder, step=_order(folder)[0], skipped=tuple(skipped))
        log.warning("checkpoint skipped: %s", fault)
        skipped.append(fault)
    return None


def newest(checkpoints: Path) -> Checkpoint | None:
    """The newest by name that was finished; its bytes are not looked at."""
    for folder in _newest_first(checkpoints):
        if folder.suffix != PARTIAL:
            return Checkpoint(folder=folder, step=_order(folder)[0])
    return None


def faults(checkpoints: Path) -> list[str]:
    """Of every checkpoint that is not whole, why; the newest first."""
    found = (find_fault(folder) for folder in _newest_first(checkpoints))
    return [fault for fault in found if fault is not None]


def advice(folder: Path) -> str:
    """Where to go on from instead of a checkpoint that cannot be restored."""
    others = [
        other
        for other in _newest_first(folder.parent)
        if other != folder and find_fault(other) is None
    ]
    if not others:
        return f"no other checkpoint in {folder.parent} is whole"
    return f"the last other whole checkpoint is {others[0]}"


def find_fault(folder: Path) -> str | None:
    """Why a checkpoint is not whole, in words; None when every byte is what was written."""
    if folder.suffix == PARTIAL:
        return f"{folder.name}: half-written"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"{folder.name}: no {MANIFEST}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{folder.name}: {MANIFEST} is not readable: {error}"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{folder.name}: {name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{folder.name}: {name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if _sha256(path) != entry["sha256"]:
            return f"{folder.name}: {name} is corrupt"
    return None


def prune(checkpoints: Path, *, step: int, keep_last: int) -> list[Path]:
    """Remove all but the newest `keep_last`, and what crashes left; returns what went.

    `step` is that of the checkpoint just written, the newest of the run. Whatever stands at a later
    step was not whole when the run went back behind it, and is of a future given up since. It goes
    as the records of its steps went then: it displaces none that is whole, and no resume finds it.
    """
    folders = _newest_first(checkpoints)
    given_up = [folder for folder in folders if _order(folder)[0] > step]
    past = folders[len(given_up) :]
    whole = [folder for folder in past if folder.suffix != PARTIAL]
    leftovers = [folder for folder in past if folder.suffix == PARTIAL]
    for folder in given_up:
        log.warning("%s is removed: the run went back and is at step %d now", folder, step)
    removed = given_up + whole[keep_last:] + leftovers
    for folder in removed:
        shutil.rmtree(folder)
    return removed


def _newest_first(checkpoints: Path) -> list[Path]:
    """Those that are named as here: what users put aside beside them is left alone."""
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
