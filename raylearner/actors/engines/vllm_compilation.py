"""Engines of a host that start together compile a model once: the first compiles, the others wait for its
result in vLLM's cache. Consumes a key of the model and its options; waits for at most `MAX_WAIT_S`.
"""

import contextlib
import fcntl
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from vllm import __version__, envs
from vllm.config.compilation import CompilationMode

from raylearner.errors import CompilationError

MAX_WAIT_S = 300.0
"""Maximum wait for another engine's compilation; then an engine compiles for itself."""
POLL_S = 0.2
COMPILER_ERRORS = (TorchDynamoException, torch.AcceleratorError)
"""Errors while a model runs for the first time, of the compiler and of kernels that it made."""

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def turn(folder: Path, key: str, *, max_wait_s: float = MAX_WAIT_S) -> Iterator[None]:
    """Hold the turn to compile `key` on this host, unless that was done before: then nobody waits."""
    done = folder / f"{key}.done"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # no place for a cache, which vLLM then lacks as well
        yield
        return
    try:
        _wait(descriptor, done, time.monotonic() + max_wait_s)
        yield
        with contextlib.suppress(OSError):
            done.touch()
    finally:
        with contextlib.suppress(OSError):
            # Closing alone would leave the turn to processes that were forked meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _wait(descriptor: int, done: Path, deadline: float) -> None:
    """Wait for the turn, or for the end of a compilation."""
    while not done.exists():
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                logger.warning(
                    "another engine of this host compiles for long; this one does as well"
                )
                return
            time.sleep(POLL_S)


@contextlib.contextmanager
def naming_failures(*kinds: type[Exception]) -> Iterator[None]:
    """Raise `CompilationError` from errors of these types."""
    try:
        yield
    except kinds as error:
        raise CompilationError(f"{type(error).__name__}: {error}") from error


def install() -> None:
    """Let this process's worker, on a GPU of its own, profile and compile its model in turn, and name
    failures that an eager engine would not have.
    """
    from vllm.v1.worker.gpu_worker import Worker

    cls: Any = Worker
    profile: Callable[[Any], int] = cls.determine_available_memory
    capture: Callable[[Any], Any] = cls.compile_or_warm_up_model

    @functools.wraps(capture)
    def capture_or_name_failure(worker: Any) -> Any:
        # Also a lack of memory, which graphs add to.
        with nullcontext() if worker.model_config.enforce_eager else naming_failures(Exception):
            return capture(worker)

    cls.compile_or_warm_up_model = capture_or_name_failure

    @functools.wraps(profile)
    def profile_in_turn(worker: Any) -> int:
        config = worker.vllm_config
        is_compiled = config.compilation_config.mode == CompilationMode.VLLM_COMPILE
        # Ranks of one engine wait for each other while they profile, so they must not wait for turns.
        if (
            not is_compiled
            or config.parallel_config.world_size > 1
            or envs.VLLM_DISABLE_COMPILE_CACHE
        ):
            with naming_failures(*COMPILER_ERRORS):
                return profile(worker)
        key = f"{__version__}-{config.compute_hash()}"
        with (
            turn(Path(envs.VLLM_CACHE_ROOT) / "raylearner", key),
            naming_failures(*COMPILER_ERRORS),
        ):
            return profile(worker)

    cls.determine_available_memory = profile_in_turn
