"""The learner's side of weights that engines read from its own GPU memory.

A copy in the engines' precision exists on the GPU from the push until it is discarded.
"""

import base64
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from raylearner.weights.checksums import Checksums


class IpcShare:
    """Owns the buffer of the last push."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def share(
        self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, members: Sequence[str]
    ) -> dict[str, Any]:
        """The payload: one export for each member, since each may be opened and closed once."""
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
