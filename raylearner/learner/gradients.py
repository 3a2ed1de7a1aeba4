"""Passes over the micro-batches of an update besides the policy's own: of a critic, and to select tokens.

Waits for: the other ranks, in every forward and backward.
"""

from collections.abc import Sequence

from torch import Tensor

from raylearner.config.schema import LearnerSection
from raylearner.learner.batch.metric import Metrics
from raylearner.learner.model.critic import Critic
from raylearner.learner.model.mesh import BatchLayout
from raylearner.learner.model.policy import PackedModel
from raylearner.learner.objective.objective import critic_share, select_update_tokens
from raylearner.learner.objective.prepare import PreparedBatch, PreparedMiniBatch
from raylearner.learner.spec import LearnerSpec
from raylearner.types import PolicyVersion


def critic_gradients(
    config: LearnerSection, critic: Critic, batch: PreparedBatch, mini_batch: PreparedMiniBatch
) -> tuple[list[Tensor], list[Metrics]]:
    """Run a separate critic's forward and backward; return its shares of the loss, and its metrics."""
    shares: list[Tensor] = []
    measured: list[Metrics] = []
    for prepared in mini_batch.micro_batches:
        state_values = critic.state_values(prepared.micro.tokens)
        share, metrics = critic_share(
            config, prepared, state_values, batch=batch, mini_batch=mini_batch
        )
        critic.backward(share, is_last=prepared is mini_batch.micro_batches[-1])
        shares.append(share.detach())
        measured.append(metrics)
    return shares, measured


def choose_tokens(
    spec: LearnerSpec,
    policy: PackedModel,
    batch: PreparedBatch,
    mini_batch: PreparedMiniBatch,
    *,
    layout: BatchLayout,
    policy_version: PolicyVersion,
    is_first: bool,
    seed: int,
) -> Sequence[Tensor | None]:
    """Return the tokens that a covariance loss selects under the current policy: `[T]` bool each.

    Before the first update of a step that is the policy at its start.
    """
    if not spec.learner.loss.selects_tokens:
        return [None] * len(mini_batch.micro_batches)
    with policy.scoring():
        logprobs = [
            p.start_logprobs
            if is_first and p.start_logprobs is not None
            else policy.score(p.micro.tokens, spec.temperature).logprobs
            for p in mini_batch.micro_batches
        ]
    return select_update_tokens(
        spec.learner,
        mini_batch,
        logprobs,
        batch=batch,
        layout=layout,
        policy_version=policy_version,
        seed=seed,
    )
