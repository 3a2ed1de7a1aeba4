"""A map of where the tensors of a push end up in a running model, made by observing vLLM's loaders.

vLLM's loaders fuse, shard and pad as each layer needs, independently of this module. It records the copies
they make: each takes a part of a named tensor to a place in a parameter. The map is made at the first push
and kept, since the same names with the same shapes go to the same places. After every push the parameters
are read at those places. Parameters that a kernel repacks no longer have the loader's layout; they are read
before the repacking.

Where loaders did nothing but copy, later pushes make the same copies without them (`Trace.copies`), and are
verified in the same way.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from raylearner.weights.checksums import Checksum, Checksums, Region, plain

DEFERRED = "online_process_loader"
"""vLLM's name for loaders that keep tensors until their layer is complete."""
_MARK = "_is_traced_by_raylearner"


class Write(NamedTuple):
    """A part of a named tensor, and its place in a parameter."""

    name: str
    part: Region
    place: Region
    dtype: torch.dtype
    """Of the named tensor; the parameter's may be wider."""


class _Source(NamedTuple):
    """A named tensor that arrived, and the addresses of its elements."""

    start: int
    end: int
    name: str
    dtype: torch.dtype
    storage: StorageWeakRef

    @property
    def is_there(self) -> bool:
        """False once its memory is free again, where a loader may put computed values."""
        return not self.storage.expired()


class Copies(NamedTuple):
    """Plain copies that bring the tensors of a push to their places, ready to run."""

    places: list[Tensor]
    parts: list[Tensor]

    def run(self) -> None:
        """Make all copies, on GPUs in few kernels and without waiting for them."""
        for places, parts in self.batches():
            torch.ops.aten._foreach_copy_(places, parts)

    def batches(self) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        """Return the copies in batches that one kernel can make: of one type on either side, and dense or not.

        Some releases of PyTorch would write all tensors of a call on a GPU in the type of the first, and a
        single tensor that is not dense makes a call copy each alone.
        """
        found: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for place, part in zip(self.places, self.parts, strict=True):
            is_dense = place.is_contiguous() and part.is_contiguous()
            places, parts = found.setdefault((place.dtype, part.dtype, is_dense), ([], []))
            places.append(place)
            parts.append(part)
        return found.values()


@dataclass(slots=True)
class _Target:
    """The writes observed for one parameter."""

    writes: list[Write] = field(default_factory=list[Write])
    layout: tuple[Any, ...] = ()
    """Layout of the parameter that its loader wrote into."""
    is_repacked: bool | None = None
    """Unknown until the first push is over."""


class Trace:
    """Owns the map of one model; one push at a time between `start` and `report`."""

    def __init__(self, model: nn.Module, *, may_repack: Callable[[nn.Module], bool]) -> None:
        """`may_repack` returns whether a kernel may repack a layer's weights."""
        self._model = model
        self._may_repack = may_repack
        self._targets: dict[str, _Target] = {}
        self._sources: dict[int, list[_Source]] = {}
        self._names: list[str] = []
        self._written: dict[str, Checksums] = {}
        self._arrived = Checksums()
        self._computed: set[str] = set()
        self._tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        """Shape and type of every tensor of the last push that loaders took."""
        self._is_known = False
        """Whether a push was loaded completely; before that the map is incomplete."""

    def start(self) -> None:
        """Begin a push, once the model's parameters have the loaders that will write them."""
        self._sources, self._names, self._tensors = {}, [], {}
        self._written, self._arrived = {}, Checksums()
        for module_name, module in self._model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._trace(module, name, f"{module_name}.{name}".strip("."))

    def track(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors on their way into the model, and record their addresses."""
        for name, tensor in weights:
            tensor = tensor.contiguous()
            self._names.append(name)
            self._tensors[name] = tuple(tensor.shape), tensor.dtype
            first = tensor.data_ptr()
            end = first + tensor.numel() * tensor.element_size()
            storage = tensor.untyped_storage()
            # Memory that is used again belongs to the last tensor that arrived.
            others = [
                source
                for source in self._sources.get(storage.data_ptr(), ())
                if source.is_there and (source.end <= first or source.start >= end)
            ]
            came = _Source(first, end, name, tensor.dtype, StorageWeakRef(storage))
            self._sources[storage.data_ptr()] = [*others, came]
            if not self._is_known or self._computed:
                self._arrived.add(name, tensor)
            yield name, tensor

    @property
    def is_direct(self) -> bool:
        """Whether loaders were observed to do nothing but copy, in a push that was loaded completely."""
        return (
            self._is_known
            and not self._computed
            and bool(self._targets)
            and all(target.is_repacked is False for target in self._targets.values())
        )

    def expects(self, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> bool:
        """Whether these are the tensors of the last push, by name, shape and type."""
        return {n: (tuple(shape), dtype) for n, (shape, dtype) in tensors.items()} == self._tensors

    def copies(self, tensors: Mapping[str, Tensor]) -> Copies:
        """Return the copies that loaders would make of these tensors, which `expects` has accepted."""
        copies = Copies([], [])
        for parameter_name, target in self._targets.items():
            writes = [write for write in target.writes if write.name in tensors]
            if not writes:
                continue
            parameter = self._find(parameter_name)
            if _layout(parameter) != target.layout:
                raise ValueError(f"{parameter_name} has another layout than at the first push")
            for write in writes:
                copies.places.append(write.place.view(parameter.data))
                copies.parts.append(write.part.view(tensors[write.name].contiguous()))
            _let_others_run()
        return copies

    def start_copies(self, names: Iterable[str]) -> None:
        """Begin a push of these tensors that is made by `copies`."""
        self._sources, self._names = {}, list(names)
        self._written, self._arrived = {}, Checksums()

    def report(self) -> dict[str, Any]:
        """Return a report on this rank's parameters, in plain types, for
        `verification.verify_weights`.

        It may run in a thread while the model computes, but not during a push.
        """
        held = Checksums()
        for parameter_name, target in self._targets.items():
            _let_others_run()
            parameter = self._find(parameter_name)
            if target.is_repacked is not True and _layout(parameter) == target.layout:
                for write in target.writes:
                    values = write.place.view(parameter.data).to(write.dtype)
                    held.add(_key(parameter_name, write), values, write.part)
        found = held.result()
        written = {k: s for sums in self._written.values() for k, s in sums.result().items()}
        self._is_known = True
        parts: list[list[Any]] = []
        for parameter_name, target in self._targets.items():
            if target.is_repacked is None:
                target.is_repacked = self._was_repacked(parameter_name, target, found, written)
            for write in target.writes:
                key = _key(parameter_name, write)
                sums = (written if target.is_repacked else found).get(key)
                if sums is not None:
                    parts.append([write.name, parameter_name, str(write.part), *plain(sums)])
        return {
            "names": self._names,
            "parts": parts,
            "repacked": sorted(n for n, target in self._targets.items() if target.is_repacked),
            "computed": sorted(self._computed),
            "arrived": {name: plain(sums) for name, sums in self._arrived.result().items()},
        }

    def _find(self, parameter_name: str) -> Tensor:
        module_name, _, name = parameter_name.rpartition(".")
        return getattr(self._model.get_submodule(module_name), name)

    def _was_repacked(
        self,
        parameter_name: str,
        target: _Target,
        found: Mapping[str, Checksum],
        written: Mapping[str, Checksum],
    ) -> bool:
        if _layout(self._find(parameter_name)) != target.layout:
            return True
        module = self._model.get_submodule(parameter_name.rpartition(".")[0])
        keys = [_key(parameter_name, write) for write in target.writes]
        return self._may_repack(module) and any(found.get(k) != written.get(k) for k in keys)

    def _trace(self, module: nn.Module, name: str, parameter_name: str) -> None:
        """Wrap the loader that vLLM's deferred loaders finally call."""
        outer: Any = getattr(getattr(module, name), "weight_loader", None)
        while getattr(getattr(outer, "__wrapped__", None), "__name__", "") == DEFERRED:
            outer = outer.__wrapped__
        if getattr(outer, "__name__", "") != DEFERRED or hasattr(outer.__wrapped__, _MARK):
            return
        inner = outer.__wrapped__

        @wraps(inner)
        def traced(*args: Any, **kwargs: Any) -> Any:
            parameter = getattr(module, name)
            if parameter.is_meta:
                return inner(*args, **kwargs)
            with self._watch(parameter_name, parameter):
                return inner(*args, **kwargs)

        setattr(traced, _MARK, True)
        outer.__wrapped__ = traced

    @contextmanager
    def _watch(self, parameter_name: str, parameter: Tensor) -> Iterator[None]:
        target = self._targets.setdefault(parameter_name, _Target())
        if target.is_repacked is False:
            yield
            return
        target.layout = _layout(parameter)
        with _Copies() as copies:
            yield
        storage = parameter.untyped_storage().data_ptr()
        seen = [c for c in copies.seen if c[0].untyped_storage().data_ptr() == storage]
        if not seen:
            self._computed.add(parameter_name)
        written: dict[Region, Write] = {}
        for values, source in seen:
            inside = int(values.storage_offset() - parameter.storage_offset())
            place = Region.of(inside, values.shape, values.stride())
            write = self._write(place, values, source)
            if write is not None:
                written[place] = write
            else:
                written.pop(place, None)
                self._computed.add(parameter_name)
        for place, write in written.items():
            if write not in target.writes:
                target.writes.append(write)
            key = _key(parameter_name, write)
            self._written[key] = Checksums()
            self._written[key].add(key, place.view(parameter.data).to(write.dtype), write.part)

    def _write(self, place: Region, values: Tensor, source: Tensor) -> Write | None:
        """Return None where the source is not a part of a tensor that arrived, such as a computed value."""
        first = source.data_ptr()
        if source.shape != values.shape:
            return None
        for came in self._sources.get(source.untyped_storage().data_ptr(), ()):
            is_inside = came.is_there and came.start <= first < came.end
            if is_inside and source.dtype == came.dtype:
                offset = (first - came.start) // source.element_size()
                part = Region.of(offset, source.shape, source.stride())
                return Write(came.name, part, place, came.dtype)
        return None


class _Copies(TorchDispatchMode):
    """Records the source and target of every copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.seen.append((args[0], args[1]))
        return result


def _let_others_run() -> None:
    """Release the interpreter's lock to a thread that waits for it, such as that of the engine's steps."""
    time.sleep(0)


def _layout(parameter: Tensor) -> tuple[Any, ...]:
    return tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype


def _key(parameter_name: str, write: Write) -> str:
    return f"{parameter_name} {write}"
