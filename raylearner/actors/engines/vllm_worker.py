"""Code inside vLLM's workers: the engine's calls during a push, and a watch on the owner process.

A worker imports this module because the engine arguments name `WorkerExtension`. Importing it
registers the backends and, where the environment names an owner, starts watching it: a core and its
workers must not outlive the process that created them, even when that one is killed.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import threading
from functools import partial
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from raylearner import leftovers
from raylearner.actors.engines import vllm_compilation, vllm_plans, vllm_sampler
from raylearner.actors.engines.vllm_process import OWNER_VARIABLE
from raylearner.actors.engines.vllm_transfer import Background, VerifiedTransfer
from raylearner.leftovers import start_time
from raylearner.weights.transports import TRANSPORTS
from raylearner.weights.transports.adapter import adapter_report


class WorkerExtension:
    """Mixed into vLLM's worker: its methods can be called from the engine's side."""

    weight_transfer_engine: Any
    model_runner: Any
    device: torch.device
    vllm_config: Any
    _weight_task: Background | None = None

    def begin_weight_task(self, name: str, *arguments: Any) -> None:
        """Start a task of a push in a thread, beside the engine's steps: `stage`, `report` or
        `adapter_report`.
        """
        transfer = self.weight_transfer_engine
        tasks = {
            "stage": transfer.stage,
            "report": self._report,
            "adapter_report": self._adapter_report,
        }
        self._background().begin(partial(tasks[name], *arguments))

    def poll_weight_task(self) -> tuple[bool, Any]:
        """Return whether the task has ended, and its result. Raises its error."""
        if self._weight_task is None:
            raise RuntimeError("no task of a weight push was started")
        return self._weight_task.poll()

    def apply_weights(self) -> None:
        """Bring the staged push into the parameters of a paused engine."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.apply()
        self.model_runner.reset_lora_state()

    def receive_weights(self, update_info: dict[str, Any], has_slept: bool) -> None:
        """Receive a push that was not staged, while the engine is paused."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.receive(update_info, has_slept=has_slept)
        self.model_runner.reset_lora_state()

    def free_weight_bytes(self) -> int | None:
        """Return memory that a push can take beside the weights; None for no limit."""
        return self._background().free_bytes()

    def _background(self) -> Background:
        self._weight_task = self._weight_task or Background(self.device)
        return self._weight_task

    def _report(self) -> dict[str, Any]:
        """Report the parameters at the end of a push, whose memory is then free for others on the GPU."""
        report = self.weight_transfer_engine.report()
        # A cache of fixed size marks an engine that shares its GPU.
        shares_gpu = self.vllm_config.cache_config.kv_cache_memory_bytes is not None
        if shares_gpu and self.device.type == "cuda":
            torch.cuda.empty_cache()
        return report

    def _adapter_report(self, path: str) -> dict[str, Any]:
        """Compare this rank's adapter slots with the adapter in `path`, and report the result."""
        return adapter_report(self.model_runner.lora_manager._adapter_manager, path)


def watch_owner() -> None:
    """End this worker and its core as soon as the owner process named by the environment is gone."""
    value = os.environ.get(OWNER_VARIABLE)
    if value is None:
        return
    pid, born = (int(part) for part in value.split(":"))
    if pid != os.getpid():
        threading.Thread(
            target=_end_with_owner, args=(pid, born), name="owner-watch", daemon=True
        ).start()


def _end_with_owner(pid: int, born: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        if start_time(pid) == born:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
    # The core is this worker's parent, unless the owner itself is: then this process is the core.
    parent = multiprocessing.parent_process()
    is_core = parent is not None and parent.pid not in (None, pid) and parent.pid == os.getppid()
    leftovers.remove_segments([os.getpid(), os.getppid()] if is_core else [os.getpid()])
    if is_core:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def register_engines() -> None:
    """Register each transport's engine, with verification, under its backend's name."""
    for name, kind in TRANSPORTS.items():
        receiver = kind.make_receiver("")
        if receiver.backend not in WeightTransferEngineFactory._registry:
            engine = type(f"Verified_{name}", (VerifiedTransfer, receiver.vllm_engine()), {})
            WeightTransferEngineFactory.register_engine(receiver.backend, engine)


def install_parts() -> None:
    """Replace parts of vLLM in a worker; the owner of an engine imports this module for the backends alone."""
    if multiprocessing.parent_process() is None:
        return
    vllm_sampler.install()
    if current_platform.is_cuda_alike():
        vllm_compilation.install()
        vllm_plans.install()


register_engines()
install_parts()
watch_owner()
