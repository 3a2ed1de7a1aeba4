"""Weights in shared GPU memory, for engines on the GPU of a learner rank.

A copy in the engines' precision stays on the GPU from the push until it is discarded.
"""

import base64
import pickle
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from raylearner.types import PolicyVersion
from raylearner.weights.checksums import Checksums
from raylearner.weights.transports import WeightGroup, transport


class Sender(transport.Sender):
    """Every rank shares with the engines on its own GPU."""

    _share: "IpcShare | None" = None

    def write(
        self, policy_version: PolicyVersion, members: Sequence[str], group: WeightGroup | None
    ) -> dict[str, Any] | None:
        tensors = self._weights.tensors()
        if not members and self._rank != 0:
            deque(tensors, maxlen=0)
            return None
        self._share = self._share or IpcShare()
        return self._share.share(tensors, self._weights.dtype, members=members)

    def release(self) -> None:
        if self._share is not None:
            self._share.release()


class Receiver(transport.Receiver):
    """Reads the memory by the handle that is made for this engine."""

    name = "ipc"
    initial_arguments = {"packed": True}  # noqa: RUF012

    @staticmethod
    def vllm_engine() -> type[Any]:
        return _make_memory_reader()

    def _update_arguments(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super()._update_arguments(payload)
        arguments["ipc_handles_pickled"] = arguments.pop("handles")[self._actor_id]
        return arguments


def _make_memory_reader() -> type[Any]:
    """Return the transfer engine that maps shared memory, made here because its base class imports vLLM."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferEngine,
        IPCWeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    class MemoryReader(IPCWeightTransferEngine):
        """Passes on views of the learner's buffer, where vLLM's own engine would copy it.

        The buffer stays the same until the push is over. The handle is given back with the last view.
        """

        def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
            handles: Any = update_info.ipc_handles
            index = self.device.index
            card = str(torch.cuda.get_device_properties(index).uuid)
            if card not in handles:
                raise ValueError(f"the weights are on GPU {', '.join(handles)}, not on {card}")
            arguments = list(handles[card])
            arguments[6] = index  # of the device, which may have another number in this process
            sizes = update_info.tensor_sizes or []
            buffer = rebuild_cuda_tensor(*arguments)[: sum(sizes)]
            dtypes = [getattr(torch, name) for name in update_info.dtype_names]
            views = unpack_tensor(buffer, update_info.names, update_info.shapes, dtypes, sizes)
            load: Any = self.model.load_weights
            load(views)
            torch.cuda.current_stream().synchronize()  # before the memory is given back

    return MemoryReader


class IpcShare:
    """Owns the buffer of the last push, in which engines on the same GPU read it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def share(
        self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, members: Sequence[str]
    ) -> dict[str, Any]:
        """Return the payload with a handle for each member, since a handle can be opened only once."""
        self.release()
        names: list[str] = []
        shapes: list[list[int]] = []
        parts: list[Tensor] = []
        sums = Checksums()
        for name, tensor in weights:
            names.append(name)
            shapes.append(list(tensor.shape))
            cast = tensor.detach().to(dtype).contiguous()
            sums.add(name, cast)
            parts.append(cast.reshape(-1).view(torch.uint8))
        self._buffer = buffer = torch.cat(parts)
        sizes = [part.numel() for part in parts]
        del parts
        device = str(torch.cuda.get_device_properties(buffer.device).uuid)
        torch.cuda.synchronize()
        handles: dict[str, str] = {}
        for member in members:
            _, arguments = reduce_tensor(buffer)
            handles[member] = base64.b64encode(pickle.dumps({device: arguments})).decode()
        return {
            "names": names,
            "dtype_names": [str(dtype).removeprefix("torch.")] * len(names),
            "shapes": shapes,
            "tensor_sizes": sizes,
            "handles": handles,
            "checksums": sums.result(),
        }

    def release(self) -> None:
        if self._buffer is not None:
            self._buffer = None
            torch.cuda.ipc_collect()
