"""Verified weight transfer inside vLLM's workers, most of it beside generation.

Timeline of a push, of which only the third line pauses the engine:

1. `stage`, in a thread with its own stream: tensors arrive in memory of their own beside the weights (`nccl`,
   `shared_files`) or are mapped from the learner's (`ipc`), and the copies into parameters are prepared.
2. The engine stops at the end of its current step.
3. `apply`: the copies, one call. The engine gets the new version, drops stale caches, and resumes.
4. `report`, in a thread with its own stream: checksums of what the parameters hold. Probe prompts run as
   requests meanwhile. A mismatch fails the engine after it has resumed.

The first push goes through vLLM's loaders, which `Trace` observes. Later ones copy directly where loaders did
nothing else; where a kernel repacks weights, as on CPUs, where a layer derives values from them, and after a
sleep, vLLM's loaders run in the pause. Without memory for staging the tensors also arrive in the pause.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.attention import (
    Attention,
    MMEncoderAttention,
    is_deferred_attention_layer,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from raylearner.weights.trace import Copies, Trace


class Staged(NamedTuple):
    """Tensors of a push that have arrived, and what brings them into the parameters."""

    tensors: dict[str, Tensor]
    copies: Copies | None
    """None where vLLM's loaders must do it."""
    is_partial: bool


class VerifiedTransfer(WeightTransferEngine[Any, Any]):
    """Shared by all transports: a push loads the whole model or fails, and the parameters are reported.

    An exception leaves the model without usable weights: the engine must then be replaced.
    """

    model: nn.Module
    _trace: Trace | None = None
    _derives: bool | None = None
    _staged: Staged | None = None
    _loaded: set[str]

    def stage(self, update_info: dict[str, Any]) -> bool:
        """Let the tensors of a push arrive beside the weights. Runs in a thread while the model computes.

        False for files that do not fit after all, such as beside another engine's.
        """
        info = self.parse_update_info(update_info)
        tensors: dict[str, Tensor] = {}

        def keep(weights: Iterable[tuple[str, Tensor]]) -> None:
            try:
                tensors.update((name, tensor.to(self.device)) for name, tensor in weights)
            except torch.OutOfMemoryError as error:
                raise _DoesNotFit from error

        try:
            self._receive_into(keep, info)
        except _DoesNotFit:
            return False
        copies = None
        if self._can_copy({name: (t.shape, t.dtype) for name, t in tensors.items()}):
            copies = self._traced().copies(tensors)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._staged = Staged(tensors, copies, _is_partial(info))
        return True

    def apply(self) -> None:
        """Bring the staged push into the parameters."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise RuntimeError("no push was staged")
        if staged.copies is not None:
            self._traced().start_copies(staged.tensors)
            staged.copies.run()
        else:
            self.start_weight_update()
            self._tracked_load()(staged.tensors.items())
            self._finish(is_partial=staged.is_partial)
        self._synchronize()  # before the tensors are freed

    def receive(self, update_info: dict[str, Any], *, has_slept: bool) -> None:
        """Receive a push that was not staged, straight into the parameters."""
        self._staged = None
        info = self.parse_update_info(update_info)
        # A sleep also loses values that no push brings, which loaders set.
        if not has_slept and self._can_copy(_announced(info)):
            self._traced().start_copies(info.names)
            self._receive_into(self._copy, info)
        else:
            self.start_weight_update()
            self._receive_into(self._tracked_load(), info)
            self._finish(is_partial=_is_partial(info))
        self._synchronize()

    def start_weight_update(self) -> None:
        # It warns of a tied head that was not loaded separately; `_refuse_gaps` is the real check.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(
            logging.ERROR
        )
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._embedding_names = tied_names(self.model)
        self._loaded = set()
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
        self._traced().start()

    def _finish(self, *, is_partial: bool) -> None:
        if not is_partial:
            self._refuse_gaps(self._loaded)
        self.finish_weight_update()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()  # pyright: ignore[reportAbstractUsage] - a transport's
        # On CPUs a tied head was repacked when the checkpoint was loaded and is not part of the
        # reload: without this it would keep the old weights under the new version.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def report(self) -> dict[str, Any]:
        """Return a report on the current parameters, which are read again at every call.

        Runs in a thread while the model computes.
        """
        if self._trace is None:
            raise ValueError("no weights have been loaded that could be verified")
        return self._trace.report()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _traced(self) -> Trace:
        self._trace = self._trace or Trace(self.model, may_repack=_may_repack)
        return self._trace

    def _can_copy(self, tensors: Mapping[str, tuple[Any, torch.dtype]]) -> bool:
        """Whether plain copies of these tensors do all that vLLM's loaders would."""
        trace = self._traced()
        if not trace.is_direct or not trace.expects(tensors):
            return False
        if self._derives is None:
            self._derives = any(map(_derives_values, self.model.modules()))
        return not self._derives

    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._traced().copies(dict(weights)).run()

    def _receive_into(self, load: Callable[..., Any], info: Any) -> None:
        """Receive as the transport does, with `load` in place of the model's own `load_weights`."""
        self.set_weight_update_target(_Target(load), self.model_config)  # pyright: ignore[reportArgumentType]
        try:
            self.receive_weights(info)
        finally:
            self.reset_weight_update_target()

    def _tracked_load(self) -> Callable[[Iterable[tuple[str, Tensor]]], set[str]]:
        load: Any = self.model.load_weights
        trace = self._traced()

        def load_tracked(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            try:
                with torch.device(self.device):
                    loaded: set[str] = set(load(trace.track(weights)) or ())
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


class _DoesNotFit(Exception):
    """A tensor of a push does not fit beside the weights."""


class Background:
    """One task at a time in a thread, on a GPU with a stream of its own, kept for its cached memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: Exception | None = None

    def begin(self, task: Callable[[], Any]) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("another task of a weight push is running")
        self._result = self._error = None
        # A broadcast whose sender died never returns: the thread must not keep the process.
        self._thread = threading.Thread(
            target=self._run, args=(task,), name="weight-push", daemon=True
        )
        self._thread.start()

    def free_bytes(self) -> int | None:
        """Return memory of the GPU that tensors of a push can take beside the weights; None on CPUs."""
        if self._stream is None:
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        # What an earlier push took is kept for the next one. Other streams' cached memory stays theirs.
        kept = (
            segment["total_size"] - segment["active_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["stream"] == self._stream.cuda_stream
        )
        return free + sum(kept)

    def poll(self) -> tuple[bool, Any]:
        """Return whether the task has ended, and its result. Raises its error."""
        if self._thread is None:
            raise RuntimeError("no task of a weight push was started")
        if self._thread.is_alive():
            return False, None
        if self._error is not None:
            raise self._error
        return True, self._result

    def _run(self, task: Callable[[], Any]) -> None:
        try:
            with torch.no_grad():
                if self._stream is None:
                    self._result = task()
                    return
                torch.cuda.set_device(self._device)
                with torch.cuda.stream(self._stream):
                    self._result = task()
                    self._stream.synchronize()
        except Exception as error:
            self._error = error


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map parameter names that share a tensor to each other: loading one loads both."""
    first: dict[int, str] = {}
    pairs: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            pairs[name], pairs[other] = other, name
    return pairs


class _Target:
    """Stands in for the model while a transport receives."""

    def __init__(self, load_weights: Callable[..., Any]) -> None:
        self.load_weights = load_weights


def _may_repack(layer: nn.Module) -> bool:
    """Whether a kernel may repack the layer's weights."""
    method = getattr(layer, "quant_method", None)
    is_plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    return method is not None and (current_platform.is_cpu() or not is_plain)


def _derives_values(layer: nn.Module) -> bool:
    """Whether loading may compute values from the layer's weights, which copies would leave stale."""
    if _may_repack(layer):
        return True
    if is_deferred_attention_layer(layer):
        # Others, such as multi-head latent attention, and attention with sinks keep copies of weights.
        is_known = type(layer) in (Attention, MMEncoderAttention)
        implementation = getattr(layer, "impl", None)
        return not is_known or getattr(implementation, "sinks", None) is not None
    return callable(getattr(layer, "process_weights_after_loading", None))


def _announced(info: Any) -> dict[str, tuple[Any, torch.dtype]]:
    """Return shape and type of each tensor of a push by name, where its transport lists them."""
    if not hasattr(info, "names"):
        return {}
    described = zip(info.names, info.shapes, info.dtype_names, strict=True)
    return {name: (shape, getattr(torch, dtype)) for name, shape, dtype in described}


def _is_partial(info: Any) -> bool:
    return getattr(info, "is_partial", False)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
