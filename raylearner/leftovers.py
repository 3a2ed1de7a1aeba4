"""Temporary files and folders whose names carry their owner, so that those of dead processes can be removed.

A name is `raylearner-KIND-PLACE-PID-START-RANDOM`: `PLACE` identifies the host and its namespace of
processes, `PID` and `START` (clock ticks after boot) the process there. Names of other places are never
judged: their owners cannot be looked up from here.
"""

import hashlib
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MAX_SOCKET_PATH_BYTES = 107
"""Maximum length of a Unix socket's path on Linux (`sun_path` without the final zero)."""
SEGMENTS = "segments.txt"
"""File in an owned folder that lists shared memory segments of the same owner, by name."""
_NAME = re.compile(r"raylearner-.+-([0-9a-f]{8})-(\d+)-(\d+)-\w+")
_SEGMENT = re.compile(r"(psm_|vllm_|sem\.mp-)[\w.:\[\]-]+")
"""Names under which vLLM and multiprocessing create segments; nothing else is ever removed by name."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or folder whose owner is dead."""

    path: Path
    num_bytes: int
    """Size with that of its listed segments."""


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after boot, which distinguishes reused ids."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def prefix(kind: str) -> str:
    """Return the beginning of an owned name; a random suffix of letters and digits completes it."""
    pid = os.getpid()
    return f"raylearner-{kind}-{_place()}-{pid}-{start_time(pid) or 0}-"


def is_owned(path: Path) -> bool:
    """Return whether the name is one that carries its owner."""
    return _NAME.fullmatch(path.name) is not None


def list_segments(folder: Path, pids: Iterable[int]) -> None:
    """Record in an owned folder the segments that these processes have mapped, for the time after them."""
    names = sorted({name for pid in pids for name in _mapped_segments(pid)})
    (folder / SEGMENTS).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def remove_segments(pids: Iterable[int]) -> None:
    """Remove the names of segments that these processes, which are about to end, have mapped. Never raises."""
    for name in {name for pid in pids for name in _mapped_segments(pid)}:
        with suppress(OSError):
            (SHARED_MEMORY / name).unlink()


def remove(folder: Path) -> None:
    """Remove an owned file or folder and its listed segments. Never raises."""
    for segment in _segments(folder):
        with suppress(OSError):
            segment.unlink()
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with suppress(OSError):
            folder.unlink()


def find(*folders: Path | str) -> Iterator[Leftover]:
    """Yield what dead processes of this user left in shared memory, the temporary folder and `folders`."""
    places = dict.fromkeys(
        map(Path, (SHARED_MEMORY, tempfile.gettempdir(), *folders)),
    )
    for place in places:
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if _is_orphan(entry):
                    path = Path(entry.path)
                    yield Leftover(path, _size(path) + sum(map(_size, _segments(path))))


def sweep(*folders: Path | str) -> None:
    """Remove what `find` yields, and log the bytes that this frees. Never raises."""
    found = list(find(*folders))
    for leftover in found:
        remove(leftover.path)
    if found:
        logger.info(
            "removed %d temporary files and folders of killed runs, %.1f MiB: %s",
            *(len(found), sum(each.num_bytes for each in found) / 2**20),
            ", ".join(str(each.path) for each in found[:3]) + ", .." * (len(found) > 3),
        )


def _place() -> str:
    """Return a hash of the host's name and its namespace of processes."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return hashlib.sha256(f"{socket.gethostname()}/{namespace}".encode()).hexdigest()[:8]


def _is_orphan(entry: "os.DirEntry[str]") -> bool:
    match = _NAME.fullmatch(entry.name)
    if match is None or match[1] != _place():
        return False
    try:
        is_own = entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:
        return False
    return is_own and start_time(int(match[2])) != int(match[3])


def _segments(folder: Path) -> list[Path]:
    try:
        names = (folder / SEGMENTS).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []
    return [SHARED_MEMORY / name for name in names if _SEGMENT.fullmatch(name)]


def _mapped_segments(pid: int) -> set[str]:
    """Return the names of the segments that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    folder = f"{SHARED_MEMORY}/"
    names = {
        path.removeprefix(folder).removesuffix(" (deleted)")
        for path in paths
        if path.startswith(folder)
    }
    return {name for name in names if _SEGMENT.fullmatch(name)}


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(_size(inside) for inside in path.iterdir())
        return path.lstat().st_size
    except OSError:
        return 0
