"""What runs inside vLLM's workers: the `shared_files` transfer engine, and the watch on the owner.

A worker imports this module because the engine arguments name `WorkerExtension`. Importing it
registers the backend and, where the environment names an owner, starts to watch it: a core and its
workers must not outlive the process that made them, not even when that one is killed.
"""

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import threading
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from raylearner.weights.owner import OWNER_VARIABLE, start_time
from raylearner.weights.shared_files import BACKEND


@dataclass
class SharedFilesInit(WeightTransferInitInfo):
    pass


@dataclass
class SharedFilesUpdate(WeightTransferUpdateInfo):
    path: str
    num_tensors: int
    num_bytes: int
    is_partial: bool = False
    """Whether tensors may be missing; they then keep their old values."""


class SharedFilesEngine(WeightTransferEngine[SharedFilesInit, SharedFilesUpdate]):
    """Loads a safetensors file into a running model, all of it or not at all.

    An exception leaves the model without usable weights: the engine must then be replaced.
    """

    init_info_cls = SharedFilesInit
    update_info_cls = SharedFilesUpdate

    def init_transfer_engine(self, init_info: SharedFilesInit) -> None:
        # It warns of a tied head that was not loaded by itself; `receive_weights` checks for real.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(
            logging.ERROR
        )

    def start_weight_update(self) -> None:
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._embedding_names = tied_names(self.model)
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedFilesUpdate) -> None:
        tensors = load_file(update_info.path)
        if len(tensors) != update_info.num_tensors:
            raise ValueError(
                f"{update_info.path} holds {len(tensors)} tensors, {update_info.num_tensors} were written"
            )
        with torch.device(self.device):
            loaded = self._load(tensors)
        if not update_info.is_partial:
            self._refuse_gaps(loaded)

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        # On CPUs a tied head was repacked when the checkpoint was loaded and is no part of the
        # reload: without this it would keep the old weights under the new version.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass

    def _load(self, tensors: dict[str, torch.Tensor]) -> set[str]:
        load: Any = self.model.load_weights
        try:
            return set(load(iter(tensors.items())) or ())
        except (KeyError, ValueError) as error:
            raise ValueError(f"weights refused: the model has no such tensor: {error}") from error

    def _refuse_gaps(self, loaded: set[str]) -> None:
        missing = self._expected - loaded
        missing -= {name for name, other in self._embedding_names.items() if other in loaded}
        # A fused layer counts as loaded when one of its parts came.
        incomplete = []
        for name, module in self.model.named_modules():
            if isinstance(module, LinearBase):
                info = get_layerwise_info(module)
                if info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0):
                    incomplete.append(f"{name} ({info.load_numel} of {info.load_numel_total})")
        if missing or incomplete:
            raise ValueError(
                "weights refused: "
                + "; ".join(
                    part
                    for part in (
                        f"never came: {_some(sorted(missing))}" if missing else "",
                        f"came in part: {_some(incomplete)}" if incomplete else "",
                    )
                    if part
                )
            )


class WorkerExtension:
    """Carries nothing: naming it makes the worker import this module."""


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Parameter names that share a tensor, both ways: either one stands for both."""
    first: dict[int, str] = {}
    pairs: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            pairs[name], pairs[other] = other, name
    return pairs


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def watch_owner() -> None:
    """End this worker and its core as soon as the process named by the environment is gone."""
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
    if parent is not None and parent.pid not in (None, pid) and parent.pid == os.getppid():
        os.kill(parent.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedFilesEngine)
watch_owner()
