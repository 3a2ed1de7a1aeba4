"""Requests to a running job for another number of rollout actors, as files in its run directory.

`request` writes one and waits for the answer; the run checks for it about once a second.
"""

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from raylearner.errors import ConfigError, RaylearnerError
from raylearner.observability import run_directory

logger = logging.getLogger(__name__)

REQUEST_FILE, ANSWER_FILE = "scale.json", "scale.answer.json"
POLL_S = 1.0
"""Interval at which a run checks for a request."""
ANSWER_TIMEOUT_S = 15.0
"""Maximum wait for the answer of a run."""
RUNS = Path("runs")


async def follow(folder: Path, resize: Callable[[int], str]) -> None:
    """Carry out requests in the run directory `folder`, until cancelled."""
    while True:
        try:
            request = await asyncio.to_thread(_take, folder)
            if request is not None:
                answer = _carry_out(request, resize)
                await asyncio.to_thread(_write, folder / ANSWER_FILE, answer)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("a scale request in %s could not be read or answered: %r", folder, error)
        await asyncio.sleep(POLL_S)


def request(run: str, assignment: str) -> str:
    """Ask the run for another number of actors; return its answer.

    `run` is a run directory or a name in `runs/`, `assignment` reads `actors=N`. Raises `ConfigError` where
    there is no such run or it is not running, and where it refuses; `RaylearnerError` without an answer.
    """
    num_actors = _parse(assignment)
    folder = _find(run)
    if not run_directory.is_in_use(folder):
        raise ConfigError(
            f"{str(folder)!r}: the run is not running; start or resume it with actors.num_actors=N"
        )
    key = uuid.uuid4().hex
    (folder / ANSWER_FILE).unlink(missing_ok=True)
    _write(folder / REQUEST_FILE, {"id": key, "actors": num_actors, "at_s": time.time()})
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        answer = _read(folder / ANSWER_FILE)
        if answer is not None and answer.get("id") == key:
            (folder / ANSWER_FILE).unlink(missing_ok=True)
            if answer["is_refused"]:
                raise ConfigError(answer["text"])
            return answer["text"]
        time.sleep(POLL_S / 5)
    (folder / REQUEST_FILE).unlink(missing_ok=True)
    raise RaylearnerError(
        f"{str(folder)!r}: no response within {ANSWER_TIMEOUT_S:g} s, so the request was withdrawn; a run"
        " responds once it trains: check its log.txt and try again"
    )


def _parse(assignment: str) -> int:
    key, _, value = assignment.partition("=")
    if key != "actors" or not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{assignment!r}: must be actors=N, where N is a whole number >= 1")
    return int(value)


def _find(run: str) -> Path:
    """Return the directory at the path `run`, or the newest of that name in `runs/`."""
    if Path(run).is_dir():
        return Path(run)
    folders = [path for path in (RUNS / run, *RUNS.glob(f"{run}-*")) if path.is_dir()]
    running = [path for path in folders if run_directory.is_in_use(path)]
    found = max(running or folders, key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        raise ConfigError(
            f"{run!r}: no such run; give a run directory or the name of a run in {str(RUNS)!r}"
        )
    return found


def _carry_out(request: dict[str, Any], resize: Callable[[int], str]) -> dict[str, Any]:
    try:
        text, is_refused = resize(int(request["actors"])), False
    except ConfigError as error:
        text, is_refused = str(error), True
    logger.info("scale actors=%d: %s", request["actors"], text)
    return {"id": request["id"], "text": text, "is_refused": is_refused}


def _take(folder: Path) -> dict[str, Any] | None:
    """Return a request once; None without one, or if it has expired."""
    try:
        request = _read(folder / REQUEST_FILE)
    except ValueError:  # not written by `request`
        (folder / REQUEST_FILE).unlink(missing_ok=True)
        raise
    if request is None:
        return None
    (folder / REQUEST_FILE).unlink(missing_ok=True)
    return request if time.time() - request["at_s"] < ANSWER_TIMEOUT_S else None


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a file that was written whole; None if there is none."""
    try:
        return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)
