"""Step time of groups with long prompts: shared prompts against whole rows, and whether both agree.

Random weights of 1.5 B (on the CPU a small model), prompts of 4,096 tokens, answers of 512, groups of 8
and 16 in micro-batches of at most 16,384 tokens; forward, backward, clip and update are timed. First the
kernel alone is compared with attention in float32, in values and gradients: a wrong alignment of queries
and keys would show there.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.common import Result, model_folder, parser
from raylearner.learner.batch.micro_batch import MicroBatch, PackedTokens
from raylearner.learner.batch.pack import LearnerBatch, pack
from raylearner.learner.batch.prefixes import Layout, SharedPrefix
from raylearner.learner.batch.sharing import Sharing
from raylearner.learner.model import mesh
from raylearner.learner.model.loading import load_sharded
from raylearner.learner.model.policy import ModelOptions
from raylearner.learner.model.shared_attention import attend_sdpa, attend_varlen
from raylearner.learner.optimizer import ClippedAdamW
from raylearner.types import Trajectory, TrajectoryGroup

GROUP_SIZES = (8, 16)
PROMPT, ANSWER, BUDGET = 4096, 512, 16_384
KERNEL_GAP = 0.02
"""Maximum mean |difference| of the kernel's values and gradients, relative to their size: bfloat16."""
NORM_GAP = 0.02
"""Maximum relative difference of gradient norms, in bfloat16; 1e-4 in float32."""
LOGPROB_GAP = 0.05
"""Maximum mean |difference| of log-probabilities, in nats, in bfloat16; 1e-4 in float32."""


def make_group(size: int, *, prompt: int, answer: int, vocab: int) -> TrajectoryGroup:
    """Answers of `answer` tokens, give or take a half, after one prompt."""
    rng = np.random.default_rng(size)
    start = rng.integers(3, vocab, prompt)
    trajectories: list[Trajectory] = []
    for index in range(size):
        length = int(rng.integers(answer // 2, answer * 3 // 2 + 1))
        ids = np.concatenate([start, rng.integers(3, vocab, length)]).astype(np.int32)
        mask = np.arange(len(ids)) >= prompt
        trajectories.append(
            Trajectory(
                group_id=0,
                sample_index=index,
                attempt=0,
                segment=0,
                prompt_id="0",
                token_ids=ids,
                loss_mask=mask,
                train_mask=mask,
                behavior_logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                claim_policy_version=0,
                reward=float(index % 2),
            )
        )
    return TrajectoryGroup(
        group_id=0, prompt_id="0", policy_version=0, trajectories=tuple(trajectories)
    )


def compare_kernels(device: str, *, window: int | None) -> dict[str, float]:
    """Return mean |differences| of the varlen kernel and float32, relative to the mean magnitude."""
    torch.manual_seed(0)
    lengths = (600, 700, 330, 520)
    prefixes = [SharedPrefix(family=0, num_tokens=300)] * 3 + [None]
    layout = Layout.of(lengths, prefixes)
    assert layout is not None
    sharing = Sharing.of(layout, device=device)
    sizes = [end - start for _, start, end in layout.pieces]
    cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).int().to(device)
    inputs = [
        torch.randn(heads, sum(sizes), 64, device=device, dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    ]
    weight = torch.randn(sum(sizes), 8, 64, device=device)
    found: list[list[Tensor]] = []
    for attend, dtype in ((attend_varlen, torch.bfloat16), (attend_sdpa, torch.float32)):
        parts = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*parts, cu_seqlens, max(sizes), None, window, sharing.keys)
        grads = torch.autograd.grad((out.float() * weight).sum(), parts)
        found.append([x.detach().float() for x in (out, *grads)])
    return {
        name: float((a - b).abs().mean() / b.abs().mean())
        for name, a, b in zip(("out", "query", "key", "value"), *found, strict=True)
    }


class Trainer:
    """A model and its optimizer, which make steps on packed batches."""

    def __init__(self, arguments: Any, device: str) -> None:
        self._device = device
        folder = model_folder(
            arguments.out, "small" if arguments.cpu else "1.5B", tokenizer=arguments.model
        )
        self.dtype = torch.float32 if arguments.cpu else torch.bfloat16
        self.model = load_sharded(
            str(folder),
            mesh.connect(device=device),
            dtype=torch.float32,
            compute_dtype=self.dtype,
            options=ModelOptions(
                chunk_tokens=2048,
                should_compile=arguments.compile,
                activation_checkpointing=arguments.checkpointing,
                may_share_prefixes=True,
            ),
            random_seed=0,
        )
        self._adamw = ClippedAdamW(
            list(self.model.parameters()),
            learning_rate=1e-6,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            max_grad_norm=1.0,
        )

    def tokens(self, batch: LearnerBatch) -> list[PackedTokens]:
        (mini,) = batch.mini_batches
        return [
            MicroBatch.of(rows, policy_version=0, dtype=torch.float32, device=self._device).tokens
            for rows in mini.micro_batches
        ]

    def step(self, micros: Sequence[PackedTokens], *, updates: bool = True) -> float:
        """Return the gradient norm."""
        num_scored = sum(len(tokens.scored) for tokens in micros)
        for tokens in micros:
            logprobs = self.model(tokens).logprobs[tokens.scored]
            # By token, so that the loss does not depend on the order of rows.
            sign = tokens.input_ids[tokens.places(tokens.scored)] % 3 - 1.0
            (-(logprobs * sign).sum() / num_scored).backward()
        norm = self._adamw.grad_norm()
        if updates:
            self._adamw.clip_and_step(norm)
        self._adamw.zero_grad()
        return float(norm)

    def logprobs(self, batch: LearnerBatch) -> dict[Any, Tensor]:
        """Return those of the sampled tokens of each trajectory."""
        found: dict[Any, Tensor] = {}
        (mini,) = batch.mini_batches
        for rows, tokens in zip(mini.micro_batches, self.tokens(batch), strict=True):
            scores = self.model.score(tokens).logprobs.cpu()
            parts = scores.split([row.trajectory.num_tokens for row in rows])
            for row, part in zip(rows, parts, strict=True):
                mask = torch.from_numpy(row.trajectory.loss_mask)
                found[row.trajectory.key] = part[mask]
        return found

    def wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def measure(trainer: Trainer, batch: LearnerBatch, *, num_steps: int) -> dict[str, Any]:
    micros = trainer.tokens(batch)
    is_gpu = micros[0].input_ids.is_cuda
    clock = time.monotonic if is_gpu else time.process_time  # other processes may share the CPU
    for _ in range(2):
        trainer.step(micros)
    trainer.wait()
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(num_steps):
        started = clock()
        trainer.step(micros)
        trainer.wait()
        times.append(clock() - started)
    return {
        "step_s": sorted(times)[len(times) // 2],
        "step_s_min": min(times),
        "num_tokens": batch.num_tokens,
        "num_computed_tokens": batch.num_computed_tokens,
        "num_micro_batches": len(micros),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None,
    }


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--compile", action="store_true")
    args.add_argument("--checkpointing", default="none")
    args.add_argument("--name", default="prefix")
    arguments = args.parse_args()
    result = Result(arguments.out, arguments.name)
    device = "cpu" if arguments.cpu else "cuda"
    prompt, answer, budget = (PROMPT, ANSWER, BUDGET)
    if arguments.cpu:
        prompt, answer, budget = (size // 8 for size in (prompt, answer, budget))
    else:
        kernels = {str(window): compare_kernels(device, window=window) for window in (None, 128)}
        result.add(kernels=kernels)
        worst = max(gap for gaps in kernels.values() for gap in gaps.values())
        if not worst <= KERNEL_GAP:
            raise SystemExit(
                f"the kernel differs by {worst:.3g} of float32, more than {KERNEL_GAP}"
            )
    trainer = Trainer(arguments, device)
    result.add(
        shares_prefixes=trainer.model.shares_prefixes,
        attention=trainer.model.causal_lm.config._attn_implementation,
        prompt=prompt,
        answer=answer,
        budget=budget,
    )
    if not trainer.model.shares_prefixes:
        raise SystemExit("the model does not share prefixes; its log says why")
    vocab = min(trainer.model.causal_lm.config.vocab_size, 49_000)
    for size in GROUP_SIZES:
        group = make_group(size, prompt=prompt, answer=answer, vocab=vocab)
        whole, shared = (
            pack(
                [group],
                policy_version=0,
                num_ranks=1,
                max_tokens_per_micro_batch=budget,
                shares_prefixes=shares,
            )[0]
            for shares in (False, True)
        )
        theirs, ours = trainer.logprobs(whole), trainer.logprobs(shared)
        gap = max(float((ours[key] - theirs[key]).abs().mean()) for key in theirs)
        result.add(**{f"logprob_gap_{size}": gap})
        norms = [trainer.step(trainer.tokens(b), updates=False) for b in (whole, shared)]
        result.add(**{f"grad_norms_{size}": norms})
        allowed = (1e-4, 1e-4) if trainer.dtype == torch.float32 else (LOGPROB_GAP, NORM_GAP)
        if not (gap <= allowed[0] and abs(norms[1] / norms[0] - 1) <= allowed[1]):
            raise SystemExit(f"scores or gradients differ by more than {allowed}")
        numbers = {
            name: measure(trainer, batch, num_steps=3 if arguments.cpu else 8)
            for name, batch in (("whole", whole), ("shared", shared))
        }
        speed_up = numbers["whole"]["step_s"] / numbers["shared"]["step_s"]
        result.add(**{f"group_{size}": numbers | {"speed_up": speed_up}})
    result.done()


if __name__ == "__main__":
    main()
