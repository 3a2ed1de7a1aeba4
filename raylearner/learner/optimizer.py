"""AdamW, learning-rate schedules and gradient clipping, independent of the number of ranks."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PEAK = "peak_lr"
"""Key of a parameter group's peak learning rate."""


class ClippedAdamW(torch.optim.AdamW):
    """AdamW over the masters (float32, or float64 in tests), clipped by the norm over all ranks.

    Vectors are not decayed.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        own_rates: Mapping[nn.Parameter, float] | None = None,
    ) -> None:
        """`own_rates` has the peaks of parameters that differ from `learning_rate`."""
        self._max_grad_norm = max_grad_norm
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for parameter in self._trained:
            peak = (own_rates or {}).get(parameter, learning_rate)
            decay = weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((peak, decay), []).append(parameter)
        super().__init__(
            [
                {"params": members, "lr": peak, PEAK: peak, "weight_decay": decay}
                for (peak, decay), members in groups.items()
            ],
            betas=betas,
            fused=True,
        )
        # As in the first step, so that a checkpoint before it has the same tensors as one after it.
        for parameter in self._trained:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }

    def grad_norm(self) -> float:
        """Return the norm over all ranks' shards; the same on every rank, NaN or inf included."""
        grads = [p.grad for p in self._trained if p.grad is not None]
        shards = [shard for grad in grads if (shard := local(grad)).numel()]
        norms = torch._foreach_norm(shards, 2, dtype=torch.float64) if shards else []  # pyright: ignore[reportPrivateImportUsage]
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
        mesh = next((grad.device_mesh for grad in grads if isinstance(grad, DTensor)), None)
        if mesh is not None:
            # An offloaded model's shards are in host memory, and NCCL reduces only GPU memory.
            total = total.to(mesh.device_type)
        dist.all_reduce(total)
        if mesh is not None and mesh.ndim == 2:
            total /= mesh.size(0)  # each copy of a shard was counted
        squared = total.item()
        return math.sqrt(squared) if squared >= 0 else math.nan

    def clip_and_step(self, norm: float, *, rate_of: Callable[..., float] | None = None) -> None:
        """Scale gradients of this global `norm` down to the maximum, and make the update.

        `rate_of(peak=...)` is the present rate of each group.
        """
        if norm > self._max_grad_norm:
            grads = [local(p.grad) for p in self._trained if p.grad is not None]
            torch._foreach_mul_(grads, self._max_grad_norm / norm)  # pyright: ignore[reportPrivateImportUsage]
        if rate_of is not None:
            for group in self.param_groups:
                group["lr"] = rate_of(peak=group[PEAK])
        self.step()


def learning_rate_at(
    update: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup: int,
    num_updates: int,
) -> float:
    """Return the rate of update `update` (from 0): linear warm-up, then decay to 0 at the end."""
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min((update - warmup) / max(num_updates - warmup, 1), 1.0)
    if schedule == "linear":
        return peak * (1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
