"""Measurements of a rank's steps: profiles, tokens per second, and model FLOPs utilization.

Floating-point operations are the model's, not those executed: per computed token (a shared prefix counts
once in a micro-batch) 6 for each weight in a matrix
product (2 forward, 4 backward, or 2 backward where it is frozen), none for embedding look-ups; the head
counts at scored tokens only; causal attention takes 6 x layers x heads x head width x length for a
token of a sequence of that length. Recomputation and scoring passes are not counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from raylearner.config.schema import ProfileSection
from raylearner.learner.batch.pack import LearnerBatch
from raylearner.learner.batch.prefixes import saved_prefixes

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 peak by a part of the device's name."""


class StepProfiler:
    """Writes `step_NNNNNN_rank_R.json.gz`, a Chrome trace of every kernel, for each chosen step.

    Other steps cost nothing.
    """

    def __init__(self, config: ProfileSection | None, folder: Path, *, rank: int) -> None:
        self._config = config
        self._folder = folder
        self._rank = rank

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the block if `step` is a chosen one."""
        if self._config is None or step not in self._config.steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(
            activities=activities,
            profile_memory=self._config.record_memory,
            with_stack=self._config.record_stacks,
            record_shapes=True,
        ) as profiler:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step_{step:06d}_rank_{self._rank}.json.gz"
        profiler.export_chrome_trace(str(self._folder / name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Weights of a model, counted by what they cost in training."""

    num_body_weights: int
    num_head_weights: int
    num_frozen_weights: int
    """Frozen weights of the body."""
    num_frozen_head_weights: int
    attention_width: int
    """Layers times query heads times head width."""

    @classmethod
    def of(cls, causal_lm: nn.Module) -> "ModelCost":
        """Count the weights of a transformers causal language model, sharded or not."""
        config: Any = causal_lm.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        embedding = causal_lm.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        head = causal_lm.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        outside = {id(embedding.weight), id(head.weight)}
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return cls(
            num_body_weights=sum(
                p.numel() for p in causal_lm.parameters() if p.ndim > 1 and id(p) not in outside
            ),
            num_head_weights=head.weight.numel(),
            num_frozen_weights=sum(
                p.numel()
                for p in causal_lm.parameters()
                if p.ndim > 1 and id(p) not in outside and not p.requires_grad
            ),
            num_frozen_head_weights=0 if head.weight.requires_grad else head.weight.numel(),
            attention_width=config.num_hidden_layers * config.num_attention_heads * width,
        )

    def flops(self, lengths: Sequence[int], *, num_scored: int) -> float:
        """Return the operations of one forward and backward over sequences of these lengths."""
        body = (6.0 * self.num_body_weights - 2.0 * self.num_frozen_weights) * sum(lengths)
        head = (6.0 * self.num_head_weights - 2.0 * self.num_frozen_head_weights) * num_scored
        attention = 6.0 * self.attention_width * sum(length * length for length in lengths)
        return body + head + attention


class Meter:
    """Measures one rank's use of its device, step by step."""

    def __init__(
        self, causal_lm: nn.Module, *, device: str, num_ranks: int, context_size: int = 1
    ) -> None:
        """`context_size` ranks share the work on each batch."""
        self._cost = ModelCost.of(causal_lm)
        self._device = device
        self._num_ranks = num_ranks
        self._context_size = context_size
        self._peak = peak_flops(device)

    def measure(self, batch: LearnerBatch, *, step_s: float) -> dict[str, float]:
        """Return metrics of the last step, counting one epoch over the batch and no scoring passes."""
        micro_batches = [rows for mini in batch.mini_batches for rows in mini.micro_batches]
        trajectories = [row.trajectory for rows in micro_batches for row in rows]
        num_tokens = batch.num_computed_tokens
        metrics = {
            "learner/tokens_per_s_per_rank": num_tokens / self._num_ranks / max(step_s, 1e-9)
        }
        if self._peak is not None:
            saved = [n for rows in micro_batches for n in saved_prefixes([r.prefix for r in rows])]
            flops = self._cost.flops(
                [t.num_tokens for t in trajectories],
                num_scored=sum(int(t.loss_mask.sum()) for t in trajectories),
            ) - self._cost.flops(saved, num_scored=0)
            metrics["learner/mfu"] = flops / self._context_size / max(step_s, 1e-9) / self._peak
        if self._device == "cuda":
            metrics["learner/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return metrics


def peak_flops(device: str) -> float | None:
    """Return the bfloat16 peak of this process's GPU; None on CPUs and unknown GPUs."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
