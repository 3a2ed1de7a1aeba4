"""AdamW, learning-rate schedules and gradient clipping, independent of the number of ranks."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW over the masters (float32, or float64 in tests); vectors are not decayed."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=betas,
        fused=True,
    )
    # As the first step would: a checkpoint then has the same tensors before it and after.
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
    """The rate of optimizer update `update` (from 0): linear warm-up, then decay to 0 at the end."""
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min((update - warmup) / max(num_updates - warmup, 1), 1.0)
    if schedule == "linear":
        return peak * (1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The norm over all ranks' shards; the same number on every rank, NaN or inf included."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local(grad) for grad in grads]
    norms = [torch.linalg.vector_norm(s, dtype=torch.float64) for s in shards if s.numel()]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
    mesh = next((grad.device_mesh for grad in grads if isinstance(grad, DTensor)), None)
    if mesh is not None:
        # Shards of an offloaded model are in host memory, where GPUs' ranks cannot meet.
        total = total.to(mesh.device_type)
    dist.all_reduce(total)
    if mesh is not None and mesh.ndim == 2:
        total /= mesh.size(0)  # every shard was counted by each of its copies
    return math.sqrt(total.item()) if total.item() >= 0 else math.nan


def scale_grads(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Clip by global norm: every gradient times max_norm / norm where that is below 1."""
    if norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(max_norm / norm)
