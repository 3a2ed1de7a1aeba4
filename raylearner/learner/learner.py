"""One rank of the learner: takes a batch, steps the policy, and says what it did.

Consumes `LearnerBatch`; produces `StepOutput`, full weights and checkpoints. Waits for the other
ranks in every collective; all ranks call the same methods in the same order.

Legend: `T` packed tokens of a micro-batch.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from raylearner.config.schema import LearnerSection
from raylearner.errors import LearnerError
from raylearner.learner import mesh, metric, optimizer
from raylearner.learner.learner_state import Progress, export_model, restore_state, save_state
from raylearner.learner.metric import Metrics
from raylearner.learner.micro_batch import MicroBatch, PackedTokens
from raylearner.learner.model import DTYPES, load_model, model_directory, shard
from raylearner.learner.objective import EpisodeTable, loss_share, off_policy_metrics
from raylearner.types import LearnerBatch, PolicyVersion, StepOutput, TokenRow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Update:
    """One optimizer update, the same numbers on every rank."""

    loss: float
    grad_norm: float
    learning_rate: float
    is_made: bool


class Learner:
    """Owns the sharded policy, its optimizer and the policy version.

    A committed step makes the next version. A step is skipped, and the version kept, when none of
    its optimizer updates had a finite loss and gradient; every rank decides alike.
    """

    def __init__(
        self,
        config: LearnerSection,
        *,
        model_path: str,
        num_steps: int,
        seed: int = 0,
        temperature: float = 1.0,
        device: str = "cpu",
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """`num_steps` is the length of the run, for the schedule; without a mesh the rank is alone."""
        if temperature <= 0:
            raise ValueError(f"temperature: a policy to train samples at > 0, got {temperature!r}")
        self._config = config
        self._temperature = temperature
        self._device = device
        self.model_folder = model_directory(model_path)
        device_mesh = device_mesh or mesh.connect(device=device)
        torch.manual_seed(seed + dist.get_rank())
        self._dtype = torch.float64 if config.compute_dtype == "float64" else torch.float32
        self._model = shard(
            load_model(
                str(self.model_folder), dtype=self._dtype, chunk_tokens=config.logprob_chunk_tokens
            ),
            device_mesh,
            compute_dtype=DTYPES[config.compute_dtype],
        )
        self._optimizer = optimizer.make_optimizer(
            self._model.parameters(),
            learning_rate=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self._num_updates_of_run = num_steps * config.num_epochs * config.num_mini_batches
        self._progress = Progress()

    @property
    def policy_version(self) -> PolicyVersion:
        return self._progress.policy_version

    @property
    def num_steps(self) -> int:
        """Steps taken, skipped ones included."""
        return self._progress.num_steps

    def step(self, batch: LearnerBatch) -> StepOutput:
        """One take: every epoch and mini-batch of it, then the next policy version."""
        if batch.policy_version != self.policy_version:
            raise ValueError(
                f"batch packed for policy version {batch.policy_version}, held: {self.policy_version}"
            )
        started = time.monotonic()
        table = EpisodeTable.of(
            batch, self._config.advantage, dtype=self._dtype, device=self._device
        )
        work = [(mini, self._micro_batches(mini.micro_batches)) for mini in batch.mini_batches]
        # With a single update the proximal policy is the current one: no forward of its own.
        is_single = len(work) * self._config.num_epochs == 1
        proximal = [[None if is_single else self._score(m) for m in micros] for _, micros in work]
        updates: list[_Update] = []
        measured: list[Metrics] = []
        for epoch in range(self._config.num_epochs):
            for (mini, micros), known in zip(work, proximal, strict=True):
                loss = torch.zeros((), dtype=torch.float64, device=self._device)
                for micro, start in zip(micros, known, strict=True):
                    logprobs, entropy = self._forward(micro.tokens, self._temperature)
                    start = logprobs.detach() if start is None else start
                    share, metrics = loss_share(
                        self._config,
                        micro,
                        logprobs=logprobs,
                        entropy=entropy,
                        proximal_logprobs=start,
                        table=table,
                        mini=mini,
                    )
                    share.backward()
                    loss += share.detach()
                    measured.append(metrics)
                    if epoch == 0:
                        measured.append(off_policy_metrics(self._config, micro, start))
                updates.append(self._update(loss))
        is_skipped = self._commit(updates)
        metrics = self._metrics(batch, updates, measured, time.monotonic() - started)
        return StepOutput(
            policy_version=self.policy_version, is_skipped=is_skipped, metrics=metrics
        )

    def probe_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """At temperature 1, the log-probability of each token but the first; same on every rank."""
        sequences = [np.asarray(ids, np.int64) for ids in token_ids]
        scored = [np.arange(len(ids)) > 0 for ids in sequences]
        tokens = PackedTokens.of(sequences, scored, device=self._device)
        rows = self._forward_only(tokens, temperature=1.0).split([len(s) for s in sequences])
        return [row[1:].tolist() for row in rows]

    def named_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by their transformers names, one by one; every rank must iterate to the end."""
        return self._model.named_weights(DTYPES[dtype])

    def save(self, folder: Path) -> None:
        """Shards, progress and RNG under `learner/`, a `from_pretrained` directory under `model/`."""
        save_state(folder / "learner", self._model, self._optimizer, self._progress)
        export_model(
            folder / "model",
            self._model,
            source=self.model_folder,
            dtype=DTYPES["bfloat16" if self._config.compute_dtype == "bfloat16" else "float32"],
            policy_version=self.policy_version,
        )

    def restore(self, folder: Path) -> None:
        """Exactly what `save` wrote; the number of ranks may differ."""
        self._progress = restore_state(folder / "learner", self._model, self._optimizer)

    def _micro_batches(self, micro_batches: Sequence[Sequence[TokenRow]]) -> list[MicroBatch]:
        return [
            MicroBatch.of(
                rows, policy_version=self.policy_version, dtype=self._dtype, device=self._device
            )
            for rows in micro_batches
        ]

    def _score(self, micro: MicroBatch) -> Tensor:  # [T]
        return self._forward_only(micro.tokens, temperature=self._temperature)

    @torch.no_grad()
    def _forward_only(self, tokens: PackedTokens, *, temperature: float) -> Tensor:  # [T]
        logprobs, _ = self._forward(tokens, temperature)
        self._model.reshard()
        return logprobs

    def _forward(self, tokens: PackedTokens, temperature: float) -> tuple[Tensor, Tensor]:
        return self._model(
            tokens.input_ids,
            tokens.position_ids,
            tokens.cu_seqlens,
            tokens.max_length,
            tokens.scored,
            temperature,
        )

    def _update(self, loss: Tensor) -> _Update:
        """Clip and step, unless the loss or the gradient over all ranks is not finite."""
        dist.all_reduce(loss)
        parameters = list(self._model.parameters())
        norm = optimizer.global_grad_norm(parameters)
        learning_rate = optimizer.learning_rate_at(
            self._progress.num_updates,
            peak=self._config.learning_rate,
            schedule=self._config.schedule,
            warmup=self._config.warmup_steps,
            num_updates=self._num_updates_of_run,
        )
        is_finite = math.isfinite(loss.item()) and math.isfinite(norm)
        if is_finite:
            optimizer.scale_grads(parameters, norm=norm, max_norm=self._config.max_grad_norm)
            optimizer.set_learning_rate(self._optimizer, learning_rate)
            self._optimizer.step()
            self._progress = replace(self._progress, num_updates=self._progress.num_updates + 1)
        self._optimizer.zero_grad(set_to_none=True)
        return _Update(loss.item(), norm, learning_rate, is_finite)

    def _commit(self, updates: Sequence[_Update]) -> bool:
        """Count the step, advance the version if any update was made; returns whether it was not."""
        is_skipped = not any(update.is_made for update in updates)
        num_skipped = self._progress.num_skipped_in_a_row + 1 if is_skipped else 0
        self._progress = replace(
            self._progress,
            policy_version=self.policy_version + (not is_skipped),
            num_steps=self.num_steps + 1,
            num_skipped_in_a_row=num_skipped,
            num_skipped=self._progress.num_skipped + is_skipped,
        )
        if is_skipped:
            why = [f"loss {u.loss}, gradient norm {u.grad_norm}" for u in updates]
            reason = "; ".join(why) or "no trajectory had a token to train on"
            log.warning("step %d skipped: %s", self.num_steps, reason)
            if num_skipped >= self._config.max_skipped_steps:
                raise LearnerError(
                    f"{num_skipped} steps in a row were skipped at policy version "
                    f"{self.policy_version}, the last because: {reason}"
                )
        return is_skipped

    def _metrics(
        self,
        batch: LearnerBatch,
        updates: Sequence[_Update],
        measured: Sequence[Metrics],
        step_s: float,
    ) -> dict[str, float]:
        """Combined over micro-batches and ranks; what nothing was counted for is left out."""
        combined = metric.combine(measured)
        rank_tokens = [
            sum(row.trajectory.num_tokens for row in rows)
            for mini in batch.mini_batches
            for rows in mini.micro_batches
        ]
        mine = torch.tensor(float(sum(rank_tokens)), dtype=torch.float64, device=self._device)
        num_dummies = torch.tensor(
            float(rank_tokens.count(0)), dtype=torch.float64, device=self._device
        )
        combined["rank_tokens/max"] = metric.Max.of(mine)
        combined["rank_tokens/mean"] = metric.Mean.of(mine)
        combined["padding_fraction"] = metric.Mean(num_dummies, num_dummies + mine)
        sums, maxima = metric.flatten(combined)
        sums, maxima = sums.to(self._device), maxima.to(self._device)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        values = metric.values(metric.unflatten(combined, sums.cpu(), maxima.cpu()))
        made = [update for update in updates if update.is_made] or list(updates)
        if made:
            values["loss"] = sum(update.loss for update in made) / len(made)
            values["grad_norm"] = sum(update.grad_norm for update in made) / len(made)
            values["learning_rate"] = made[-1].learning_rate
        values |= {
            "tokens": batch.num_tokens,
            "trained_tokens": batch.num_trained_tokens,
            "tokens_per_s": batch.num_tokens / max(step_s, 1e-9),
            "step_s": step_s,
            "num_updates": sum(update.is_made for update in updates),
            "skipped_updates": sum(not update.is_made for update in updates),
            "skipped_steps": self._progress.num_skipped,
        }
        return {f"learner/{key}": float(v) for key, v in values.items() if not math.isnan(v)}
