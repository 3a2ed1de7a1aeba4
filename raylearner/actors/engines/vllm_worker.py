"""Code inside vLLM's workers: verified transfer engines, and a watch on the owner process.

A worker imports this module because the engine arguments name `WorkerExtension`. Importing it
registers the backends and, where the environment names an owner, starts watching it: a core and its
workers must not outlive the process that created them, even when that one is killed.
"""

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from raylearner import leftovers
from raylearner.actors.engines import vllm_compilation, vllm_sampler
from raylearner.actors.engines.vllm_process import OWNER_VARIABLE
from raylearner.leftovers import start_time
from raylearner.weights.trace import Trace
from raylearner.weights.transports import TRANSPORTS
from raylearner.weights.transports.adapter import adapter_report


class _Verified(WeightTransferEngine[Any, Any]):
    """Shared by all transports: a push loads the whole model or fails, and the parameters are reported.

    An exception leaves the model without usable weights: the engine must then be replaced.
    """

    model: torch.nn.Module
    _trace: Trace | None = None
    _loaded: set[str]

    def start_weight_update(self) -> None:
        # It warns of a tied head that was not loaded separately; `_refuse_gaps` is the real check.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(
            logging.ERROR
        )
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._embedding_names = tied_names(self.model)
        self._loaded = set()
        self._trace = self._trace or Trace(self.model, may_repack=_may_repack)
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
        self._trace.start()

    def receive_weights(self, update_info: Any) -> None:
        load: Any = self.model.load_weights
        # Transports call the model's own `load_weights`; for their time it is this one.
        self.model.load_weights = self._load(load)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            super().receive_weights(update_info)
        finally:
            del self.model.load_weights
        if not getattr(update_info, "is_partial", False):
            self._refuse_gaps(self._loaded)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        # On CPUs a tied head was repacked when the checkpoint was loaded and is not part of the
        # reload: without this it would keep the old weights under the new version.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def report(self) -> dict[str, Any]:
        """Return a report on the current parameters, which are read again at every call."""
        if self._trace is None:
            raise ValueError("no weights have been loaded that could be verified")
        return self._trace.report()

    def _load(self, load: Any) -> Any:
        trace = self._trace
        assert trace is not None

        def load_tracked(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            try:
                loaded = set(load(trace.track(weights)) or ())
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"weights refused: the model has no such tensor: {error}"
                ) from error
            self._loaded |= loaded
            return loaded

        return load_tracked

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
                        f"missing: {_some(sorted(missing))}" if missing else "",
                        f"incomplete: {_some(incomplete)}" if incomplete else "",
                    )
                    if part
                )
            )


class WorkerExtension:
    """Mixed into vLLM's worker: its methods can be called from the engine's side."""

    weight_transfer_engine: Any
    model_runner: Any

    def weight_report(self) -> dict[str, Any]:
        """Report this rank's parameters after the last push, for `verification`."""
        return self.weight_transfer_engine.report()

    def adapter_report(self, path: str) -> dict[str, Any]:
        """Compare this rank's adapter slots with the adapter in `path`, and report the result."""
        return adapter_report(self.model_runner.lora_manager._adapter_manager, path)


def _may_repack(layer: torch.nn.Module) -> bool:
    """Whether a kernel may repack the layer's weights."""
    method = getattr(layer, "quant_method", None)
    is_plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    return method is not None and (current_platform.is_cpu() or not is_plain)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Map parameter names that share a tensor to each other: loading one loads both."""
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
            engine = type(f"Verified_{name}", (_Verified, receiver.vllm_engine()), {})
            WeightTransferEngineFactory.register_engine(receiver.backend, engine)


register_engines()
vllm_sampler.install()
if current_platform.is_cuda_alike():
    vllm_compilation.install()
watch_owner()
