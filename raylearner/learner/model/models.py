"""The models of one learner rank: the policy with its optimizer, and a critic and reference where asked for."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raylearner.config.image_checks import BLIND_BESIDE
from raylearner.config.schema import LearnerSection
from raylearner.errors import ConfigError
from raylearner.learner import optimizer
from raylearner.learner.checkpoint.state import Progress, Save, restore_tensors, save_tensors
from raylearner.learner.model import lora
from raylearner.learner.model.critic import Critic
from raylearner.learner.model.export import export_adapter, export_model
from raylearner.learner.model.images import ImageReader, vision_tower
from raylearner.learner.model.loading import load_sharded, model_directory
from raylearner.learner.model.memory_check import refuse_without_room
from raylearner.learner.model.mesh import ContextGroup
from raylearner.learner.model.policy import DTYPES, ModelOptions, PackedModel
from raylearner.learner.model.reference import Reference, reference_path
from raylearner.learner.objective.kl import AdapterOffReference

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Saves and restores all of them together; every rank calls the same, in the same order."""

    folder: Path
    """The directory that the policy came from."""
    export_dtype: torch.dtype
    policy: PackedModel
    optimizer: torch.optim.AdamW
    critic: Critic | None
    reference: Reference | None
    reader: ImageReader | None
    """Of a policy that sees images."""

    @classmethod
    def load(
        cls,
        config: LearnerSection,
        model_path: str,
        mesh: DeviceMesh,
        *,
        seed: int,
        context: ContextGroup | None = None,
    ) -> "Models":
        """Sharded over the mesh; ranks of a context group score the same tokens together.

        Raises `ConfigError` naming the key of a path that does not load, or has no room.
        """
        folder = model_directory(model_path)
        refuse_without_room(config, folder, device_type=mesh.device_type)
        load = partial(
            load_sharded,
            mesh=mesh,
            dtype=torch.float64 if config.compute_dtype == "float64" else torch.float32,
            compute_dtype=DTYPES[config.compute_dtype],
            options=ModelOptions(
                chunk_tokens=config.logprob_chunk_tokens,
                attention=config.attention,
                is_head_exact=config.head_dtype == "float32",
                activation_checkpointing=config.activation_checkpointing,
                should_compile=config.compile,
                should_reshard=config.reshard,
                should_offload=config.offload,
                is_tower_frozen=config.vision_tower == "frozen",
                context=context,
            ),
        )
        trunk = None if config.critic is None else config.critic.trunk
        policy = load(
            str(folder),
            has_value_head=trunk == "shared",
            adapters=config.lora,
            adapter_seed=seed,
        )
        critic = reference = None
        if config.critic is not None and trunk == "own":
            path = config.critic.path or str(folder)
            of_critic = load(path, has_value_head=True, banned_token_ids=policy.banned_token_ids)
            if config.critic.path is None and config.lora is not None:
                lora.add_initial(of_critic.causal_lm, config.lora)
            _refuse_blind(of_critic, policy, key="learner.critic.path", path=path)
            critic = Critic(config.critic, of_critic)
        if config.kl is not None and config.kl.coefficient > 0:
            if isinstance(config.kl.reference, AdapterOffReference):
                reference = Reference(config.kl.reference, policy)
            else:
                own_path = reference_path(config.kl.reference)
                path = own_path or str(folder)
                # Beside its base, as in the policy, and not merged: the same numbers to the last bit.
                starts_adapted = own_path is None and config.lora and config.lora.path
                frozen = load(
                    path,
                    adapters=config.lora if starts_adapted else None,
                    banned_token_ids=policy.banned_token_ids,
                )
                _refuse_blind(frozen, policy, key="learner.kl.reference.path", path=path)
                reference = Reference(config.kl.reference, frozen)
        return cls(
            folder=folder,
            export_dtype=_export_dtype(config),
            policy=policy,
            optimizer=optimizer.make_optimizer(
                policy.parameters(),
                learning_rate=config.learning_rate,
                betas=config.betas,
                weight_decay=config.weight_decay,
                own_rates=_vision_rates(config, policy, folder),
            ),
            critic=critic,
            reference=reference,
            reader=ImageReader.from_pretrained(str(folder)),
        )

    def save(self, folder: Path, progress: Progress, save: Save) -> None:
        """Shards under `learner/`, `critic/` and, if it changes, `reference/`; what others load under
        `model/` (`from_pretrained`) and `adapter/` (peft). What all ranks write together is first."""
        save_tensors(folder / "learner", self.policy.own_parameters(), self.optimizer, save)
        if self.critic is not None:
            self.critic.save(folder / "critic", save)
        if self.reference is not None:
            self.reference.save(folder / "reference", save)
        if self.policy.has_adapters:
            export_adapter(folder / "adapter", self.policy, save, source=self.folder)
        export_model(
            folder / "model",
            self.policy,
            save,
            source=self.folder,
            dtype=self.export_dtype,
            policy_version=progress.policy_version,
        )

    def restore(self, folder: Path, progress: Progress) -> None:
        """Exactly what `save` wrote; the number of ranks may differ."""
        restore_tensors(
            folder / "learner",
            self.policy.own_parameters(),
            self.optimizer,
            num_updates=progress.num_updates,
        )
        if self.critic is not None:
            self.critic.restore(folder / "critic", num_updates=progress.num_critic_updates)
        if self.reference is not None:
            self.reference.restore(folder / "reference")


def _export_dtype(config: LearnerSection) -> torch.dtype:
    """Of `model/`. Merged adapters need float32, whatever their base is kept in."""
    if config.compute_dtype != "bfloat16":
        return torch.float32
    if config.lora is None:
        return torch.bfloat16
    log.info(
        "checkpoints: model/ has the adapters merged, in float32: bfloat16 would round most of a small"
        " update away; adapter/ has them alone"
    )
    return torch.float32


def _refuse_blind(model: PackedModel, policy: PackedModel, *, key: str, path: str) -> None:
    """What is given the policy's images must see them."""
    if vision_tower(model.causal_lm) is None and vision_tower(policy.causal_lm) is not None:
        raise ConfigError(f"{key}: {path!r} {BLIND_BESIDE}")


def _vision_rates(
    config: LearnerSection, policy: PackedModel, folder: Path
) -> dict[nn.Parameter, float]:
    rate, tower = config.vision_learning_rate, vision_tower(policy.causal_lm)
    if rate is None:
        return {}
    if tower is None:
        raise ConfigError(
            f"learner.vision_learning_rate: {folder} reads text alone and has no vision tower; "
            "remove it"
        )
    return dict.fromkeys(tower.parameters(), rate)
