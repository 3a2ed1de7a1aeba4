"""One rank of the learner: takes a batch, steps the policy, and reports metrics.

Consumes `LearnerBatch`; produces `StepOutput`, full weights and checkpoints. Waits for the other
ranks in every collective; all ranks call the same methods in the same order.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from raylearner.errors import CheckpointError, LearnerError
from raylearner.learner.batch import metric
from raylearner.learner.batch.metric import Metrics
from raylearner.learner.batch.micro_batch import MicroBatch
from raylearner.learner.batch.pack import LearnerBatch
from raylearner.learner.checkpoint.directory import suggest_other
from raylearner.learner.checkpoint.state import (
    AsyncSaver,
    Progress,
    restore_progress,
    save_hashes,
    save_progress,
)
from raylearner.learner.gradients import choose_tokens, critic_gradients
from raylearner.learner.model import mesh
from raylearner.learner.model.mesh import BatchLayout
from raylearner.learner.model.models import Models
from raylearner.learner.objective.episodes import EpisodeTable
from raylearner.learner.objective.kl import KlController
from raylearner.learner.objective.objective import loss_share, off_policy_metrics
from raylearner.learner.objective.prepare import (
    PreparedBatch,
    PreparedMicroBatch,
    PreparedMiniBatch,
    prepare,
)
from raylearner.learner.optimizer import learning_rate_at
from raylearner.learner.spec import LearnerSpec, StepOutput
from raylearner.learner.update import (
    Update,
    find_non_finite_rows,
    mean_advantages,
    split_by_trajectory,
    step_metrics,
    write_rows,
)
from raylearner.observability.spans import Tracer
from raylearner.types import PolicyVersion

log = logging.getLogger(__name__)


class Learner:
    """Owns the sharded policy, its optimizer and the policy version.

    Ranks of a context group receive the same batches. A step is skipped, and the version kept, when
    none of its updates had a finite loss and gradient; every rank decides alike.
    """

    def __init__(
        self,
        spec: LearnerSpec,
        *,
        device_mesh: DeviceMesh | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Load the models. Without a mesh the rank is alone.

        GPU spans show when the host queued the work, not when the GPU ran it.
        """
        self._spec, self._config = spec, spec.learner
        self._device = device = spec.device
        device_mesh = device_mesh or mesh.connect(device=device)
        torch.manual_seed(spec.run.seed + dist.get_rank())
        config = spec.learner
        self._dtype = torch.float64 if config.compute_dtype == "float64" else torch.float32
        self._layout = BatchLayout.of(device, context_size=config.context_parallel_size)
        self.models = Models.load(
            config,
            spec.model_path,
            mesh.make_shard_mesh(device_mesh, config.shard_size),
            seed=spec.run.seed,
            context=self._layout.context,
        )
        self._kl_controller = KlController(config.kl)
        self._tracer = tracer or Tracer("learner", is_enabled=False)
        # The policy makes no updates while the critic warms up.
        self._warmup_steps = 0 if config.critic is None else config.critic.warmup_steps
        num_policy_steps = spec.run.num_steps - self._warmup_steps
        self._rate_at = partial(
            learning_rate_at,
            schedule=config.schedule,
            warmup=config.warmup_steps,
            num_updates=num_policy_steps * config.num_epochs * config.num_mini_batches,
        )
        self._progress = Progress()
        self._saver = AsyncSaver()
        self._start_logprobs: list[tuple[PreparedMicroBatch, Tensor]] = []

    @property
    def policy_version(self) -> PolicyVersion:
        return self._progress.policy_version

    @property
    def num_steps(self) -> int:
        """Number of steps taken, skipped ones included."""
        return self._progress.num_steps

    def step(self, batch: LearnerBatch) -> StepOutput:
        """Train on every epoch and mini-batch of the batch, then advance the policy version.

        While the critic warms up only the critic is trained, and the version stays.
        """
        if batch.policy_version != self.policy_version:
            raise ValueError(
                f"the batch is packed for policy version {batch.policy_version}, but the learner "
                f"is at {self.policy_version}"
            )
        started = time.monotonic()
        self._start_logprobs = []
        with self._tracer.span("prepare"):
            prepared_batch = self._prepare(batch)
        updates: list[Update] = []
        for number, mini_batch in enumerate(prepared_batch.mini_batches * self._config.num_epochs):
            if self.num_steps < self._warmup_steps:
                updates.append(self._update(prepared_batch, mini_batch, None, []))
            else:
                updates.append(self._train(prepared_batch, mini_batch, number=number))
            if updates[-1].exceeds_max_kl:
                break
        is_skipped, reader = self._commit(updates), self.models.reader
        metrics = step_metrics(
            batch,
            prepared_batch,
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
            advantages=mean_advantages(prepared_batch),
            logprobs=split_by_trajectory(self._start_logprobs),
        )

    def save(self, folder: Path, *, should_defer: bool = False) -> None:
        """Write a checkpoint: shards, progress and RNG under `learner/`, a `from_pretrained` directory
        under `model/`, and `critic/`, `reference/` and `adapter/` (peft's format) where they exist.

        With `should_defer` this only copies to host memory, and `finish_save` writes.
        """
        controller = self._kl_controller
        if controller.is_adaptive:
            self._progress = replace(self._progress, kl_coefficient=controller.coefficient)
        with self._saver.begin(should_defer=should_defer) as save:
            self.models.save(folder, self._progress, save)
            save_progress(folder / "learner", self._progress, save)
            save_hashes(folder, save)

    def finish_save(self) -> None:
        """Write the copies of the last deferred `save`; may run in another thread during training."""
        self._saver.finish()

    def restore(self, folder: Path) -> None:
        """Restore exactly what `save` wrote, on any number of ranks. Raises `CheckpointError`."""
        try:
            self.models.discard_gradients()
            self._progress = restore_progress(folder / "learner")
            self.models.restore(folder, self._progress)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {suggest_other(folder)}") from error
        controller, coefficient = self._kl_controller, self._progress.kl_coefficient
        if controller.is_adaptive and coefficient is not None:
            controller.coefficient = coefficient

    @property
    def _step_seed(self) -> int:
        """Seed of draws that are the same on every rank, and again in a resumed run."""
        return self._spec.run.seed * 1_000_003 + self.num_steps

    def _prepare(self, batch: LearnerBatch) -> PreparedBatch:
        policy, critic, reference = self.models.policy, self.models.critic, self.models.reference
        needs_squared_probs = self._config.advantage.needs_squared_probs
        micro_batch = partial(
            MicroBatch.of,
            policy_version=self.policy_version,
            dtype=self._dtype,
            reader=self.models.reader,
            device=self._device,
        )
        mini_batches = [[(micro_batch(r), r) for r in m.micro_batches] for m in batch.mini_batches]
        if self.models.reader is not None:
            shown = [micro.tokens.images for mini_batch in mini_batches for micro, _ in mini_batch]
            self.models.reader.expect(images for images in shown if images is not None)
        table = EpisodeTable.of(
            batch,
            self._config.reward,
            reward_weights=self._spec.reward_weights,
            device=self._device,
        )
        with self.models.scoring():
            return prepare(
                self._config,
                mini_batches,
                table=table,
                layout=self._layout,
                kl_coefficient=self._kl_controller.coefficient,
                seed=self._step_seed,
                score=lambda micro: policy.score(
                    micro.tokens, self._spec.temperature, needs_squared_probs=needs_squared_probs
                ),
                score_reference=None
                if reference is None
                else lambda micro: reference.score(
                    micro.tokens, temperature=self._spec.temperature
                ),
                state_values=None if critic is None else lambda micro: critic.score(micro.tokens),
                dtype=self._dtype,
            )

    def _train(self, batch: PreparedBatch, mini_batch: PreparedMiniBatch, *, number: int) -> Update:
        """Update the policy from a mini-batch, unless it has moved further than `max_kl`."""
        shares: list[Tensor] = []
        measured: list[Metrics] = []
        starts: list[tuple[PreparedMicroBatch, Tensor]] = []
        chosen = choose_tokens(
            self._spec,
            self.models.policy,
            batch,
            mini_batch,
            layout=self._layout,
            policy_version=self.policy_version,
            is_first=number == 0,
            seed=self._step_seed * 1_009 + number,
        )
        last = mini_batch.micro_batches[-1]
        for prepared, tokens in zip(mini_batch.micro_batches, chosen, strict=True):
            with self._tracer.span("forward", tokens=len(prepared.micro.tokens.input_ids)):
                scores = self.models.policy(prepared.micro.tokens, self._spec.temperature)
                share, metrics = loss_share(
                    self._config,
                    prepared,
                    scores,
                    batch=batch,
                    mini_batch=mini_batch,
                    policy_version=self.policy_version,
                    kl_coefficient=self._kl_controller.coefficient,
                    selected=tokens,
                )
            with self._tracer.span("backward"):
                self.models.policy.backward(share, is_last=prepared is last)
            shares.append(share.detach())
            measured.append(metrics)
            if number < len(batch.mini_batches):
                start = prepared.start_logprobs
                start = scores.logprobs if start is None else start
                starts.append((prepared, start.detach()))
        if starts:
            self._start_logprobs += starts
            measured.append(
                off_policy_metrics(self._config, starts, policy_version=self.policy_version)
            )
        if number > 0 and self._exceeds_max_kl(measured):
            self.models.optimizer.zero_grad()
            return Update(exceeds_max_kl=True)
        return self._update(batch, mini_batch, shares, measured)

    def _exceeds_max_kl(self, measured: Sequence[Metrics]) -> bool:
        if self._config.max_kl is None:
            return False
        kl = metric.combine({"kl": m["approx_kl_k3"]} for m in measured if "approx_kl_k3" in m)
        return self._layout.combine(kl, device=self._device)["kl"].value() > self._config.max_kl

    def _update(
        self,
        batch: PreparedBatch,
        mini_batch: PreparedMiniBatch,
        shares: Sequence[Tensor] | None,
        measured: list[Metrics],
    ) -> Update:
        """Step critic and policy, unless a loss or gradient over all ranks is not finite.

        The policy's gradients are complete; without its `shares` only the critic is trained.
        """
        value_shares = None
        if self.models.critic is not None:
            value_shares, found = critic_gradients(
                self._config, self.models.critic, batch, mini_batch
            )
            measured.extend(found)
        started_s = time.time()
        policy_optimizer, critic = self.models.optimizer, self.models.critic
        loss = grad_norm = learning_rate = value_loss = critic_grad_norm = None
        rate_of = partial(self._rate_at, self._progress.num_updates)
        vision_peak, vision_learning_rate = self._config.vision_learning_rate, None
        if shares is not None:
            loss = self._layout.total(shares, device=self._device)
            grad_norm = policy_optimizer.grad_norm()
            learning_rate = rate_of(peak=self._config.learning_rate)
            vision_learning_rate = None if vision_peak is None else rate_of(peak=vision_peak)
        if critic is not None and value_shares is not None:
            value_loss = self._layout.total(value_shares, device=self._device)
            critic_grad_norm = critic.optimizer.grad_norm()
        numbers = [n for n in (loss, grad_norm, value_loss, critic_grad_norm) if n is not None]
        is_made = all(map(math.isfinite, numbers))
        if is_made and grad_norm is not None and learning_rate is not None:
            policy_optimizer.clip_and_step(grad_norm, rate_of=rate_of)
            self._progress = replace(self._progress, num_updates=self._progress.num_updates + 1)
        if is_made and critic is not None and critic_grad_norm is not None:
            critic.optimizer.clip_and_step(critic_grad_norm)
            num_updates = self._progress.num_critic_updates + 1
            self._progress = replace(self._progress, num_critic_updates=num_updates)
        policy_optimizer.zero_grad()
        if critic is not None:
            critic.optimizer.zero_grad()
        self._tracer.since("update", started_s)
        return Update(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            vision_learning_rate=vision_learning_rate,
            value_loss=value_loss,
            critic_grad_norm=critic_grad_norm,
            is_made=is_made,
            metrics=measured,
            non_finite_rows=()
            if is_made
            else find_non_finite_rows(mini_batch, shares, value_shares),
        )

    def _commit(self, updates: Sequence[Update]) -> bool:
        """Count the step and advance the version if any update was made; return whether none was."""
        is_skipped = not any(update.is_made for update in updates)
        num_skipped = self._progress.num_skipped_in_a_row + 1 if is_skipped else 0
        makes_version = not is_skipped and self.num_steps >= self._warmup_steps
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
                folder = self._spec.run_dir
                files = folder and write_rows(updates, folder / "skipped", step=self.num_steps)
                raise LearnerError(
                    f"{num_skipped} steps in a row were skipped at policy version "
                    f"{self.policy_version}, the last because: {reason}"
                    + (f"; the trajectories are in {files}" if files else "")
                )
        return is_skipped

    def _follow(self, metrics: Mapping[str, float], *, num_rows: int, is_skipped: bool) -> None:
        """Update the KL coefficient and reference after the policy has changed."""
        if is_skipped or self._config.kl is None or "learner/loss" not in metrics:
            return
        key = "learner/kl" if self._config.kl.place == "loss" else "learner/reward_kl"
        if key in metrics:
            self._kl_controller.update(metrics[key], num_rows)
        if self.models.reference is not None:
            self.models.reference.follow(self.models.policy, policy_version=self.policy_version)
