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


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    own_rates: Mapping[nn.Parameter, float] | None = None,
) -> torch.optim.AdamW:
    """Return AdamW over the masters (float32, or float64 in tests), without decay of vectors.

    `own_rates` has the peaks of parameters that differ from `learning_rate`.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        peak = (own_rates or {}).get(parameter, learning_rate)
        decay = weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((peak, decay), []).append(parameter)
    adamw = torch.optim.AdamW(
        [
            {"params": members, "lr": peak, PEAK: peak, "weight_decay": decay}
            for (peak, decay), members in groups.items()
        ],
        betas=betas,
        fused=True,
    )
    # As in the first step, so that a checkpoint before it has the same tensors as one after it.
    for parameter in parameters:
        adamw.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter.detach()),
            "exp_avg_sq": torch.zeros_like(parameter.detach()),
        }
    return adamw


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


def set_learning_rates(optimizer: torch.optim.Optimizer, rate_of: Callable[..., float]) -> None:
    """Set each group's rate to `rate_of(peak=...)`."""
    for group in optimizer.param_groups:
        group["lr"] = rate_of(peak=group[PEAK])


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the norm over all ranks' shards; the same on every rank, NaN or inf included."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local(grad) for grad in grads]
    norms = [torch.linalg.vector_norm(s, dtype=torch.float64) for s in shards if s.numel()]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
    mesh = next((grad.device_mesh for grad in grads if isinstance(grad, DTensor)), None)
    if mesh is not None:
        # An offloaded model's shards are in host memory, and NCCL reduces only GPU memory.
        total = total.to(mesh.device_type)
    dist.all_reduce(total)
    if mesh is not None and mesh.ndim == 2:
        total /= mesh.size(0)  # each copy of a shard was counted
    return math.sqrt(total.item()) if total.item() >= 0 else math.nan


def scale_grads(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Clip by global norm: multiply every gradient by max_norm / norm if that is below 1."""
    if norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(max_norm / norm)
