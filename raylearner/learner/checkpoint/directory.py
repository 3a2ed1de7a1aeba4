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
HASHES = "hashes_"
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

    A crash at any moment leaves earlier checkpoints as they were and at most a `.partial` behind. After a
    cancellation nothing changes any more: it is complete, or will never be.
    """
    folder = checkpoints / f"step_{step:06d}"
    partial = folder.with_name(folder.name + PARTIAL)
    await asyncio.to_thread(_start, partial)
    yield partial
    finishing = asyncio.ensure_future(asyncio.to_thread(_finish, partial, folder, step))
    try:
        await asyncio.shield(finishing)
    except asyncio.CancelledError:
        await asyncio.wait([finishing])
        raise


def find_latest(checkpoints: Path, *, should_hash: bool = True) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None; log those skipped.

    Without `should_hash` only names and sizes of files are compared.
    """
    skipped: list[str] = []
    for folder in _newest_first(checkpoints):
        damage = find_damage(folder, should_hash=should_hash)
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
        if other != folder and find_damage(other, should_hash=False) is None
    ]
    if not others:
        return f"{folder.parent} has no other complete checkpoint"
    return f"the latest other complete checkpoint is {others[0]}"


def find_damage(folder: Path, *, should_hash: bool = True) -> str | None:
    """Return why a checkpoint is incomplete; None if every byte, or every size, is as written."""
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
        if should_hash and _sha256(path) != entry["sha256"]:
            return f"{folder.name}: {name} is corrupt"
    return None


def write_hashes(folder: Path, *, rank: int) -> None:
    """Hash the tensors that a rank wrote into a checkpoint that is being written, for its manifest.

    Rank 0 also wrote the files that are not sharded.
    """
    shard = f"shard-{rank + 1:05d}-"  # as torch.distributed.checkpoint names it
    own = [
        path
        for path in folder.rglob("*.safetensors")
        if path.name.startswith(shard) or (rank == 0 and not path.name.startswith("shard-"))
    ]
    entries = {str(path.relative_to(folder)): _entry(path) for path in own}
    (folder / f"{HASHES}{rank:05d}.json").write_text(json.dumps(entries))


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
    entries = _pop_hashes(partial)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in files:
        name = str(path.relative_to(partial))
        if entries.get(name, {}).get("bytes") != path.stat().st_size:
            entries[name] = _entry(path)
    manifest = partial / MANIFEST
    manifest.write_text(
        json.dumps({"step": step, "files": dict(sorted(entries.items()))}, indent=2) + "\n"
    )
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


def _pop_hashes(partial: Path) -> dict[str, dict[str, int | str]]:
    """Remove and return what the ranks hashed."""
    entries: dict[str, dict[str, int | str]] = {}
    for path in sorted(partial.glob(f"{HASHES}*.json")):
        entries |= json.loads(path.read_text())
        path.unlink()
    return entries


def _entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
