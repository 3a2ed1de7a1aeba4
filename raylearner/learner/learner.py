"""One rank of the learner: takes a batch, steps the policy, and says what it did.

Consumes `LearnerBatch`; produces `StepOutput`, full weights and checkpoints. Waits for the other
ranks in every collective; all ranks call the same methods in the same order.

Legend: `T` packed tokens of a micro-batch.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from raylearner.config.loss import SELECTS_TOKENS
from raylearner.config.schema import LearnerSection
from raylearner.errors import CheckpointError, LearnerError
from raylearner.learner import optimizer
from raylearner.learner.batch import metric
from raylearner.learner.batch.layout import LearnerBatch, StepOutput
from raylearner.learner.batch.metric import Metrics
from raylearner.learner.batch.micro_batch import MicroBatch
from raylearner.learner.checkpoint import checkpoint
from raylearner.learner.checkpoint.learner_state import Progress, restore_state, save_state
from raylearner.learner.checkpoint.writes import Writer, Writes
from raylearner.learner.model import lora, mesh
from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.mesh import BatchLayout
from raylearner.learner.model.models import Models
from raylearner.learner.model.policy import DTYPES
from raylearner.learner.model.reference import kl_controller
from raylearner.learner.objective import preparation
from raylearner.learner.objective.estimator import EpisodeTable
from raylearner.learner.objective.kl import AdaptiveController
from raylearner.learner.objective.objective import (
    choose_tokens,
    critic_share,
    loss_share,
    off_policy_metrics,
)
from raylearner.learner.objective.preparation import Part, Take
from raylearner.learner.probing import probe_logprobs
from raylearner.learner.update import (
    Update,
    by_trajectory,
    dump,
    offenders,
    row_advantages,
    step_metrics,
)
from raylearner.observability.spans import Tracer
from raylearner.types import PolicyVersion, TrajectoryKey
from raylearner.weights.checksums import Checksum

log = logging.getLogger(__name__)


class Learner:
    """Owns the sharded policy, its optimizer and the policy version.

    Ranks of a context group are given the same batches. A committed step makes the next version. A
    step is skipped, and the version kept, when none of its optimizer updates had a finite loss and
    gradient; every rank decides alike.
    """

    def __init__(
        self,
        config: LearnerSection,
        *,
        model_path: str,
        num_steps: int,
        seed: int = 0,
        temperature: float = 1.0,
        reward_weights: Mapping[str, float] | None = None,
        dump_folder: Path | None = None,
        device: str = "cpu",
        device_mesh: DeviceMesh | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`num_steps` is the length of the run, for the schedule; without a mesh the rank is alone.

        `reward_weights` are those of the reward functions, by name. What made steps fail goes to
        `dump_folder`. Spans of a GPU tell when its host queued the work, not when it ran.
        """
        if temperature <= 0:
            raise ValueError(f"temperature: a policy to train samples at > 0, got {temperature!r}")
        self._config = config
        self._temperature = temperature
        self._device = device
        device_mesh = device_mesh or mesh.connect(device=device)
        torch.manual_seed(seed + dist.get_rank())
        self._dtype = torch.float64 if config.compute_dtype == "float64" else torch.float32
        self._layout = BatchLayout.of(device, context_size=config.context_parallel_size)
        self._models = models = Models.load(
            config,
            model_path,
            mesh.of_shards(device_mesh, config.shard_size),
            seed=seed,
            context=self._layout.context,
        )
        self._model, self._optimizer = models.policy, models.optimizer
        self._critic, self._reference = models.critic, models.reference
        self._kl_controller = kl_controller(config.kl)
        self._seed = seed
        self._reward_weights = reward_weights or {}
        self._dump_folder = dump_folder
        self._tracer = tracer or Tracer("learner", is_enabled=False)
        # Updates of the policy: while the critic warms up there are none.
        critic_steps = 0 if config.critic is None else config.critic.warmup_steps
        self._rate_at = partial(
            optimizer.learning_rate_at,
            schedule=config.schedule,
            warmup=config.warmup_steps,
            num_updates=(num_steps - critic_steps) * config.num_epochs * config.num_mini_batches,
        )
        self._progress = Progress()
        self._writer = Writer()
        self._writes: Writes | None = None
        self._start_logprobs: dict[TrajectoryKey, NDArray[np.float32]] = {}

    @property
    def model_folder(self) -> Path:
        """The directory that the policy came from."""
        return self._models.folder

    @property
    def policy_version(self) -> PolicyVersion:
        return self._progress.policy_version

    @property
    def num_steps(self) -> int:
        """Steps taken, skipped ones included."""
        return self._progress.num_steps

    def step(self, batch: LearnerBatch) -> StepOutput:
        """One take: every epoch and mini-batch of it, then the next policy version.

        While the critic warms up it alone is trained, and the version stays.
        """
        if batch.policy_version != self.policy_version:
            raise ValueError(
                f"batch packed for policy version {batch.policy_version}, held: {self.policy_version}"
            )
        started = time.monotonic()
        self._start_logprobs = {}
        with self._tracer.span("prepare"):
            take = self._prepare(batch)
        updates: list[Update] = []
        for number, part in enumerate(take.parts * self._config.num_epochs):
            if self._is_warming_up:
                update = self._train_critic(take, part)
            else:
                update = self._train(take, part, number=number)
            updates.append(update)
            if update.is_too_far:
                break
        is_skipped, reader = self._commit(updates), self._models.reader
        metrics = step_metrics(
            batch,
            take,
            updates,
            layout=self._layout,
            step_s=time.monotonic() - started,
            pixel_wait_s=None if reader is None else reader.drain_waited_s(),
            device=self._device,
        )
        metrics["learner/skipped_steps"] = float(self._progress.num_skipped)
        if self._config.kl is not None:
            metrics["learner/kl_coefficient"] = self._kl_controller.coefficient
        self._follow(metrics, num_rows=batch.num_rows, is_skipped=is_skipped)
        return StepOutput(
            policy_version=self.policy_version,
            is_skipped=is_skipped,
            metrics=metrics,
            advantages=row_advantages(take),
            logprobs=self._start_logprobs,
        )

    @property
    def image_reader(self) -> ImageReader | None:
        """None of a model that reads text alone."""
        return self._models.reader

    def probe_logprobs(
        self, token_ids: Sequence[Sequence[int]], images: Sequence[Sequence[bytes]] = ()
    ) -> list[list[float]]:
        """As `probing.probe_logprobs`; the same on every rank."""
        return probe_logprobs(
            self._model, token_ids, images, reader=self._models.reader, device=self._device
        )

    def named_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by their transformers names, one by one; every rank must iterate to the end."""
        return self._model.named_weights(DTYPES[dtype])

    @property
    def causal_lm(self) -> nn.Module:
        """The transformers model, sharded: its shapes say what a step costs."""
        return self._model.causal_lm

    def weight_checksums(self, dtype: str) -> dict[str, Checksum]:
        """Of what `named_weights` yields; every rank must call it."""
        return self._model.weight_checksums(DTYPES[dtype])

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of what `named_weights` yields, in its order."""
        return self._model.weight_shapes()

    def adapter_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of the adapters by peft's names; every rank must iterate to the end."""
        return lora.adapter_weights(self._model.causal_lm, DTYPES[dtype])

    def adapter_config(self) -> dict[str, Any]:
        """What peft writes beside them."""
        return lora.adapter_config(self._model.causal_lm, base=str(self.model_folder))

    def save(self, folder: Path, *, should_defer: bool = False) -> None:
        """Shards, progress and RNG under `learner/`, a `from_pretrained` directory under `model/`.

        Also `critic/`, `reference/` if it changes, and `adapter/` in peft's form. With
        `should_defer` this only copies to host memory, and `finish_save` writes.
        """
        assert self._writes is None, "finish_save comes first"
        writes = self._writer.begin(should_defer=should_defer)
        controller = self._kl_controller
        if isinstance(controller, AdaptiveController):
            self._progress = replace(self._progress, kl_coefficient=controller.coefficient)
        self._models.save(folder, self._progress, writes)
        save_state(folder / "learner", self._progress, writes)
        if should_defer:
            self._writes = writes
        else:
            dist.barrier()

    def finish_save(self) -> None:
        """Writes what `save` deferred; from another thread while training goes on."""
        writes, self._writes = self._writes, None
        assert writes is not None, "a deferred save comes first"
        writes.finish()

    def restore(self, folder: Path) -> None:
        """Exactly what `save` wrote; the number of ranks may differ. Raises `CheckpointError`."""
        try:
            self._progress = restore_state(folder / "learner")
            self._models.restore(folder, self._progress)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {checkpoint.advice(folder)}") from error
        controller, coefficient = self._kl_controller, self._progress.kl_coefficient
        if isinstance(controller, AdaptiveController) and coefficient is not None:
            controller.coefficient = coefficient

    @property
    def _is_warming_up(self) -> bool:
        warmup_steps = 0 if self._config.critic is None else self._config.critic.warmup_steps
        return self.num_steps < warmup_steps

    @property
    def _step_seed(self) -> int:
        """For draws that every rank makes alike, and a resumed run again."""
        return self._seed * 1_000_003 + self.num_steps

    def _prepare(self, batch: LearnerBatch) -> Take:
        reference, critic = self._reference, self._critic
        needs_squared_probs = self._config.advantage.kind in ("otb", "tir_otb")
        micro_batch = partial(
            MicroBatch.of,
            policy_version=self.policy_version,
            dtype=self._dtype,
            reader=self._models.reader,
            device=self._device,
        )
        parts = [[(micro_batch(r), r) for r in m.micro_batches] for m in batch.mini_batches]
        if self._models.reader is not None:
            shown = [micro.tokens.images for part in parts for micro, _ in part]
            self._models.reader.expect(images for images in shown if images is not None)
        return preparation.prepare(
            self._config,
            parts,
            table=EpisodeTable.of(
                batch,
                self._config.reward,
                reward_weights=self._reward_weights,
                device=self._device,
            ),
            layout=self._layout,
            kl_coefficient=self._kl_controller.coefficient,
            seed=self._step_seed,
            score=lambda micro: self._model.score(
                micro.tokens, self._temperature, needs_squared_probs=needs_squared_probs
            ),
            score_reference=None
            if reference is None
            else lambda micro: reference.score(micro.tokens, temperature=self._temperature),
            state_values=None if critic is None else lambda micro: critic.score(micro.tokens),
            dtype=self._dtype,
        )

    def _train(self, take: Take, part: Part, *, number: int) -> Update:
        """Gradients of a mini-batch and the update from them, unless the policy went too far."""
        shares: list[Tensor] = []
        measured: list[Metrics] = []
        chosen = self._choose(take, part, number=number)
        for prepared, tokens in zip(part.micros, chosen, strict=True):
            with self._tracer.span("forward", tokens=len(prepared.micro.tokens.input_ids)):
                scores = self._model(prepared.micro.tokens, self._temperature)
                share, metrics = loss_share(
                    self._config,
                    prepared,
                    scores,
                    take=take,
                    part=part,
                    policy_version=self.policy_version,
                    kl_coefficient=self._kl_controller.coefficient,
                    chosen=tokens,
                )
            with self._tracer.span("backward"):
                share.backward()
            shares.append(share.detach())
            measured.append(metrics)
            if number < len(take.parts):
                start = prepared.start_logprobs
                start = scores.logprobs if start is None else start
                self._start_logprobs |= by_trajectory(prepared, start)
                measured.append(
                    off_policy_metrics(
                        self._config, prepared, start, policy_version=self.policy_version
                    )
                )
        if number > 0 and self._went_too_far(measured):
            self._optimizer.zero_grad(set_to_none=True)
            return Update(is_too_far=True)
        value_shares = self._critic_gradients(take, part, measured)
        with self._tracer.span("update"):
            return self._update(part, shares, value_shares, measured)

    def _train_critic(self, take: Take, part: Part) -> Update:
        measured: list[Metrics] = []
        return self._update(part, None, self._critic_gradients(take, part, measured), measured)

    def _critic_gradients(
        self, take: Take, part: Part, measured: list[Metrics]
    ) -> list[Tensor] | None:
        if self._critic is None:
            return None
        shares: list[Tensor] = []
        for prepared in part.micros:
            state_values = self._critic.state_values(prepared.micro.tokens)
            share, metrics = critic_share(
                self._config, prepared, state_values, take=take, part=part
            )
            share.backward()
            shares.append(share.detach())
            measured.append(metrics)
        return shares

    def _choose(self, take: Take, part: Part, *, number: int) -> Sequence[Tensor | None]:
        """For losses that single tokens out: which ones, seen from the current policy."""
        if self._config.loss.kind not in SELECTS_TOKENS:
            return [None] * len(part.micros)
        logprobs = [
            p.start_logprobs
            if number == 0 and p.start_logprobs is not None
            else self._model.score(p.micro.tokens, self._temperature).logprobs
            for p in part.micros
        ]
        return choose_tokens(
            self._config,
            part,
            logprobs,
            take=take,
            layout=self._layout,
            policy_version=self.policy_version,
            seed=self._step_seed * 1_009 + number,
        )

    def _went_too_far(self, measured: Sequence[Metrics]) -> bool:
        if self._config.max_kl is None:
            return False
        kl = metric.combine({"kl": m["approx_kl_k3"]} for m in measured if "approx_kl_k3" in m)
        return self._layout.combined(kl, device=self._device)["kl"].value() > self._config.max_kl

    def _update(
        self,
        part: Part,
        shares: Sequence[Tensor] | None,
        value_shares: Sequence[Tensor] | None,
        measured: Sequence[Metrics],
    ) -> Update:
        """Clip and step, unless a loss or a gradient over all ranks is not finite."""
        parameters, critic = list(self._model.parameters()), self._critic
        loss = grad_norm = learning_rate = value_loss = critic_grad_norm = None
        rate_of = partial(self._rate_at, self._progress.num_updates)
        vision_peak, vision_learning_rate = self._config.vision_learning_rate, None
        if shares is not None:
            loss = self._total(shares)
            grad_norm = optimizer.global_grad_norm(parameters)
            learning_rate = rate_of(peak=self._config.learning_rate)
            vision_learning_rate = None if vision_peak is None else rate_of(peak=vision_peak)
        if critic is not None and value_shares is not None:
            value_loss, critic_grad_norm = self._total(value_shares), critic.grad_norm()
        numbers = [n for n in (loss, grad_norm, value_loss, critic_grad_norm) if n is not None]
        is_made = all(map(math.isfinite, numbers))
        if is_made and grad_norm is not None and learning_rate is not None:
            optimizer.scale_grads(parameters, norm=grad_norm, max_norm=self._config.max_grad_norm)
            optimizer.set_learning_rates(self._optimizer, rate_of)
            self._optimizer.step()
            self._progress = replace(self._progress, num_updates=self._progress.num_updates + 1)
        if is_made and critic is not None and critic_grad_norm is not None:
            critic.step(norm=critic_grad_norm)
            num_updates = self._progress.num_critic_updates + 1
            self._progress = replace(self._progress, num_critic_updates=num_updates)
        self._optimizer.zero_grad(set_to_none=True)
        if critic is not None:
            critic.zero_grad()
        return Update(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            vision_learning_rate=vision_learning_rate,
            value_loss=value_loss,
            critic_grad_norm=critic_grad_norm,
            is_made=is_made,
            metrics=measured,
            offenders=() if is_made else offenders(part, shares, value_shares),
        )

    def _total(self, shares: Sequence[Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for share in shares:
            total += share
        return self._layout.sum(total).item()

    def _commit(self, updates: Sequence[Update]) -> bool:
        """Count the step, advance the version if any update was made; returns whether it was not."""
        is_skipped = not any(update.is_made for update in updates)
        num_skipped = self._progress.num_skipped_in_a_row + 1 if is_skipped else 0
        makes_version = not is_skipped and not self._is_warming_up
        self._progress = replace(
            self._progress,
            policy_version=self.policy_version + makes_version,
            num_steps=self.num_steps + 1,
            num_skipped_in_a_row=num_skipped,
            num_skipped=self._progress.num_skipped + is_skipped,
        )
        if is_skipped:
            reason = "; ".join(map(str, updates)) or "no trajectory had a token to train on"
            log.warning("step %d skipped: %s", self.num_steps, reason)
            if num_skipped >= self._config.max_skipped_steps:
                raise LearnerError(
                    f"{num_skipped} steps in a row were skipped at policy version "
                    f"{self.policy_version}, the last because: {reason}"
                    f"{dump(updates, self._dump_folder, step=self.num_steps)}"
                )
        return is_skipped

    def _follow(self, metrics: Mapping[str, float], *, num_rows: int, is_skipped: bool) -> None:
        """What moves with the policy, once it moved: the KL's coefficient and reference."""
        if is_skipped or self._config.kl is None or "learner/loss" not in metrics:
            return
        key = "learner/kl" if self._config.kl.place == "loss" else "learner/reward_kl"
        if key in metrics:
            self._kl_controller.update(metrics[key], num_rows)
        if self._reference is not None:
            self._reference.follow(self._model, policy_version=self.policy_version)
