"""Reference policy of a KL penalty: a frozen or slowly updated copy, or the policy's own base.

Waits for: the other ranks, in every forward.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from raylearner.errors import ConfigError
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.checkpoint.state import Save, restore_tensors, save_tensors
from raylearner.learner.model import lora
from raylearner.learner.model.policy import PackedModel
from raylearner.learner.objective.kl import (
    AdapterOffReference,
    FrozenReference,
    ReferenceSection,
    RefreshedReference,
)
from raylearner.learner.optimizer import local


class Reference:
    """Owns a sharded model without gradients. A frozen one is not checkpointed."""

    def __init__(self, config: ReferenceSection | None, model: PackedModel) -> None:
        """`model` has the weights of `reference_path`, or else of the initial policy.

        With `adapter_off` it is the policy itself. Raises `ConfigError` if that has no adapter.
        """
        if isinstance(config, AdapterOffReference) and not model.has_adapters:
            raise ConfigError(
                "learner.kl.reference: 'adapter_off' is the policy without its LoRA adapter, but "
                "the policy has none; use {kind: frozen}, or add `learner.lora: {}`"
            )
        self._config = config
        self.model = model

    def score(self, tokens: PackedTokens, *, temperature: float) -> Tensor:  # [T]
        """Return log-probabilities at the policy's temperature."""
        is_policy = isinstance(self._config, AdapterOffReference)
        with lora.disable_adapters(self.model.causal_lm) if is_policy else nullcontext():
            return self.model.score(tokens, temperature).logprobs

    def scoring(self) -> AbstractContextManager[None]:
        """Free gathered parameters after this context, and not after every `score` in it."""
        is_policy = isinstance(self._config, AdapterOffReference)
        return nullcontext() if is_policy else self.model.scoring()

    @torch.no_grad()
    def follow(self, policy: PackedModel, *, policy_version: int) -> None:
        """Average the policy in, if that is due at this version."""
        config = self._config
        if isinstance(config, RefreshedReference) and policy_version % config.every_steps == 0:
            current = policy.own_parameters()
            for name, parameter in self.model.own_parameters().items():
                local(parameter.detach()).lerp_(local(current[name].detach()), config.mix)

    def save(self, folder: Path, save: Save) -> None:
        if isinstance(self._config, RefreshedReference):
            save_tensors(folder, self.model.own_parameters(), None, save)

    def restore(self, folder: Path) -> None:
        if isinstance(self._config, RefreshedReference):
            restore_tensors(folder, self.model.own_parameters(), None)


def reference_path(config: ReferenceSection | None) -> str | None:
    """Return the path of its first weights, None for the initial policy.

    Raises `ConfigError` if no reference is configured.
    """
    if isinstance(config, FrozenReference):
        return config.path
    if isinstance(config, RefreshedReference):
        return None
    raise ConfigError(
        "learner.kl.reference is missing, and a coefficient above 0 needs it; use {kind: frozen}"
    )
