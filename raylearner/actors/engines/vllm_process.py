"""vLLM's processes: the environment they read, the errors they log, and their end."""

import asyncio
import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from raylearner import leftovers
from raylearner.config.schema import VllmEngine
from raylearner.errors import EngineError, WeightTransferError
from raylearner.leftovers import start_time

log = logging.getLogger(__name__)

OWNER_VARIABLE = "RAYLEARNER_ENGINE_OWNER"
"""Names the process that vLLM's workers must not outlive, by its id and start time."""
END_TIMEOUT_S = 5.0
"""Maximum time vLLM's processes may take to end before they are killed."""
PROCESS_MARKS = ("VLLM::", "multiprocessing.spawn", "multiprocessing-fork")
"""Parts of a core's command line: its process title, and before that the command that started it.
"""
EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b.*")

MAX_BANS = 1024
"""Maximum number of biases of one request under vLLM's second model runner, its default on GPUs;
more would crash its core."""
CAPTURING = "capturing CUDA graphs"
PHASES = {
    "Starting to load model": "loading weights",
    "Loading model from scratch": "loading weights",
    "Model loading took": "profiling memory",
    "Starting torch.compile": "compiling",
    "Using cache directory": "compiling",
    "Dynamo bytecode transform": "compiling",
    "Compiling a graph": "compiling",
    "profiling/warmup run took": "profiling memory",
    "Available KV cache memory": CAPTURING,
    "memory for KV Cache as specified": CAPTURING,
    "KV cache size": CAPTURING,
    "Graph capturing finished": "warming up",
}
"""Parts of lines that vLLM logs, and the phase of its start that follows each."""
PROGRESS_POLL_S = 0.5
"""Interval at which the progress of a start is read."""
SYMPTOM = "EngineDeadError"
"""vLLM's error for requests of a core that is gone: never the cause."""
POINTS_TO_LOG = re.compile(r"root cause|stack trace", re.IGNORECASE)


def set_environment(*, kv_cache_gib: int, shares_memory: bool = False, num_banned: int = 0) -> None:
    """Set the variables that vLLM reads, before its first import here and in children.

    Every request bans `num_banned` tokens.
    """
    import torch

    environment = os.environ
    environment[OWNER_VARIABLE] = f"{os.getpid()}:{start_time(os.getpid())}"
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("DO_NOT_TRACK", "1")
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if shares_memory:
        # Handles of the learner's GPU memory are pickled; only the learner sends them.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if num_banned > MAX_BANS:
        log.warning(
            "%d ids of the vocabulary have no token and are banned: vLLM runs with its first model"
            " runner, which takes more than %d and is slower, the more requests come and go",
            num_banned,
            MAX_BANS,
        )
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if torch.cuda.is_available():
        environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        # Later starts of the same engine on as much free memory skip profiling.
        environment.setdefault("VLLM_ENABLE_STARTUP_PLAN", "1")
        return
    environment["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib)
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # A CPU worker has nothing to release, and takes seconds to exit.
    environment.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    # The learner and other engines share the cores; idle threads must not spin on them.
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // 2)))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def load_libraries(section: VllmEngine, *, shares_memory: bool) -> None:
    """Import vLLM, which takes longer than loading a small model."""
    set_environment(kv_cache_gib=section.kv_cache_gib, shares_memory=shares_memory)
    import_module("vllm.v1.engine.async_llm")
    import_module("raylearner.actors.engines.vllm_worker")


SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Folder of vLLM's sockets."""
SOCKET_NAME_BYTES = 36
MAX_SOCKET_FOLDER_BYTES = leftovers.MAX_SOCKET_PATH_BYTES - len("/") - SOCKET_NAME_BYTES


class ErrorLog:
    """A folder with vLLM's logging configuration, the errors that its processes logged, and its sockets.

    Where the temporary folder's path is too long for sockets, it is in shared memory.
    """

    def __init__(self) -> None:
        prefix = leftovers.prefix("vllm")
        self._folder = Path(tempfile.mkdtemp(prefix=prefix))
        if len(os.fsencode(self._folder)) > MAX_SOCKET_FOLDER_BYTES:
            self._folder.rmdir()
            self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=leftovers.SHARED_MEMORY))
        self._errors = self._folder / "errors.log"
        self._progress = self._folder / "progress.log"
        self._num_read = 0

    def hold_sockets(self) -> None:
        """Let vLLM, which leaves its sockets behind, create them here, unless the user names a folder."""
        given = os.environ.get(SOCKETS_VARIABLE)
        if given is None or leftovers.is_owned(Path(given)):
            os.environ[SOCKETS_VARIABLE] = str(self._folder)

    def configuration(self) -> str:
        """Return the path of a logging configuration: the console as usual; errors, and the progress of the
        start, to files too.
        """
        level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper()
        path = self._folder / "logging.json"
        path.write_text(
            json.dumps(
                {
                    "version": 1,
                    "disable_existing_loggers": False,
                    "formatters": {
                        "line": {"format": "%(levelname)s %(name)s: %(message)s"},
                        "plain": {"format": "%(message)s"},
                    },
                    "handlers": {
                        "console": {
                            "class": "logging.StreamHandler",
                            "formatter": "line",
                            "level": level,
                        },
                        "errors": {
                            "class": "logging.FileHandler",
                            "filename": str(self._errors),
                            "formatter": "plain",
                            "level": "ERROR",
                            "delay": True,
                        },
                        "progress": {
                            "class": "logging.FileHandler",
                            "filename": str(self._progress),
                            "formatter": "plain",
                            "level": "INFO",
                            "delay": True,
                        },
                    },
                    "loggers": {
                        "vllm": {
                            "handlers": ["console", "errors", "progress"],
                            "level": "DEBUG" if level == "DEBUG" else "INFO",
                            "propagate": False,
                        }
                    },
                }
            )
        )
        return str(path)

    async def follow_start(self, report: Callable[[str], None], *, captures_graphs: bool) -> None:
        """Report the phases of the start as vLLM logs them, until cancelled."""
        while True:
            await asyncio.sleep(PROGRESS_POLL_S)
            with contextlib.suppress(OSError):
                text = await asyncio.to_thread(self._progress.read_text, errors="replace")
                if phase := find_phase(text):
                    is_capturing = phase == CAPTURING and not captures_graphs
                    report("warming up" if is_capturing else phase)

    def cause(self, error: BaseException) -> str:
        """Return the error itself, or the logged one that vLLM's message only points to.

        Errors logged before the last call are never a cause.
        """
        logged = self._first_exception()
        if logged is not None and POINTS_TO_LOG.search(str(error)):
            return logged
        if type(error).__name__ == SYMPTOM:
            return "its core process ended and logged no error: it was killed, or it crashed"
        if isinstance(error, EngineError | WeightTransferError):
            return str(error)
        if not str(error) and error.__cause__ is not None:
            error = error.__cause__  # such as errors that vLLM wraps without a message
        return f"{type(error).__name__}: {error}".strip()

    def has_logged(self, kind: type[Exception]) -> bool:
        """Return whether vLLM's processes have logged the traceback of an error of this type."""
        name = f"{kind.__module__}.{kind.__qualname__}:"
        return any(line.startswith(name) for line in self._text().splitlines())

    def _text(self) -> str:
        try:
            return self._errors.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _first_exception(self) -> str | None:
        text = self._text()
        new, self._num_read = text[self._num_read :], len(text)
        place = ""
        for line in new.splitlines():
            if line.lstrip().startswith('File "'):
                place = line.strip()
            elif EXCEPTION_LINE.match(line) and SYMPTOM not in line:
                # An assertion without a message is identified by its place alone.
                return f"{line} at {place}" if place and ":" not in line else line
        return None

    def list_segments(self, processes: Iterable[psutil.Process]) -> None:
        """Record the shared memory of the engine's processes, which outlives them if they are killed."""
        leftovers.list_segments(self._folder, [os.getpid(), *(p.pid for p in processes)])

    def remove(self) -> None:
        """Remove the folder, and shared memory that killed processes left."""
        leftovers.remove(self._folder)


def find_phase(log: str) -> str | None:
    """Return the phase after the last line of vLLM's log that begins one."""
    for line in reversed(log.splitlines()):
        for part, phase in PHASES.items():
            if part in line:
                return phase
    return None


def children() -> list[psutil.Process]:
    """Return vLLM's processes below this one, and none of those that others started here."""
    found: list[psutil.Process] = []
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if child.pid != tracker and any(mark in command for mark in PROCESS_MARKS):
                found += [child, *child.children(recursive=True)]
    return found


def end(processes: list[psutil.Process]) -> None:
    """Wait for processes that were signalled to end, then kill the rest."""
    _, left = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=END_TIMEOUT_S)
