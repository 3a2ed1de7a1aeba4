"""The models of one learner rank: the policy with its optimizer, and a critic and reference if configured."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raylearner.config.image_checks import TEXT_ONLY
from raylearner.config.memory import Kept, choose_chunk, choose_kept, estimate_of
from raylearner.config.schema import LearnerSection
from raylearner.errors import ConfigError
from raylearner.learner.checkpoint.state import Progress, Save, restore_tensors, save_tensors
from raylearner.learner.model import lora
from raylearner.learner.model.critic import Critic
from raylearner.learner.model.export import export_adapter, export_model
from raylearner.learner.model.images import ImageReader, vision_tower
from raylearner.learner.model.loading import load_sharded, model_directory
from raylearner.learner.model.mesh import ContextGroup
from raylearner.learner.model.policy import DTYPES, ModelOptions, PackedModel
from raylearner.learner.model.reference import Reference, reference_path
from raylearner.learner.objective.kl import AdapterOffReference
from raylearner.learner.optimizer import ClippedAdamW

log = logging.getLogger(__name__)

MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models, saved and restored together; every rank makes the same calls in the same order."""

    folder: Path
    """Directory that the policy was loaded from."""
    export_dtype: torch.dtype
    policy: PackedModel
    optimizer: ClippedAdamW
    critic: Critic | None
    reference: Reference | None
    reader: ImageReader | None
    """Image reader of a vision-language policy."""

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
        """Load the models sharded over the mesh; ranks of a context group score the same tokens together.

        Raises `ConfigError` naming the key of a path that does not load or does not fit into memory.
        """
        folder = model_directory(model_path)
        chunk_tokens, kept = _plan_memory(config, folder, device_type=mesh.device_type)
        load = partial(
            load_sharded,
            mesh=mesh,
            dtype=torch.float64 if config.compute_dtype == "float64" else torch.float32,
            compute_dtype=DTYPES[config.compute_dtype],
            options=ModelOptions(
                chunk_tokens=chunk_tokens,
                attention=config.attention,
                is_head_exact=config.head_dtype == "float32",
                activation_checkpointing=config.activation_checkpointing,
                should_compile=config.compile is True,
                kept=kept,
                should_offload=config.offload,
                is_tower_frozen=config.vision_tower == "frozen",
                context=context,
                may_share_prefixes=config.share_prefixes,
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
            critic_model = load(path, has_value_head=True, banned_token_ids=policy.banned_token_ids)
            if config.critic.path is None and config.lora is not None:
                lora.add_initial(critic_model.causal_lm, config.lora)
            _refuse_text_only(critic_model, policy, key="learner.critic.path", path=path)
            critic = Critic(config.critic, critic_model)
        if config.kl is not None and config.kl.coefficient > 0:
            if isinstance(config.kl.reference, AdapterOffReference):
                reference = Reference(config.kl.reference, policy)
            else:
                own_path = reference_path(config.kl.reference)
                path = own_path or str(folder)
                # Not merged into its base, as in the policy, so that numbers are bit-identical.
                starts_adapted = own_path is None and config.lora and config.lora.path
                frozen = load(
                    path,
                    adapters=config.lora if starts_adapted else None,
                    banned_token_ids=policy.banned_token_ids,
                )
                _refuse_text_only(frozen, policy, key="learner.kl.reference.path", path=path)
                reference = Reference(config.kl.reference, frozen)
        return cls(
            folder=folder,
            export_dtype=_export_dtype(config),
            policy=policy,
            optimizer=ClippedAdamW(
                policy.parameters(),
                learning_rate=config.learning_rate,
                betas=config.betas,
                weight_decay=config.weight_decay,
                max_grad_norm=config.max_grad_norm,
                own_rates=_vision_rates(config, policy, folder),
            ),
            critic=critic,
            reference=reference,
            reader=ImageReader.from_pretrained(str(folder)),
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows of a micro-batch may share prefixes: every model must allow it."""
        others = (self.critic, self.reference)
        models = [self.policy, *(other.model for other in others if other is not None)]
        return all(model.shares_prefixes for model in models)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Keep the gathered weights of policy and reference over the scores of this context."""
        of_reference = nullcontext() if self.reference is None else self.reference.scoring()
        with self.policy.scoring(), of_reference:
            yield

    def discard_gradients(self) -> None:
        """Forget updates that were broken off."""
        self.policy.discard_gradients()
        if self.critic is not None:
            self.critic.discard_gradients()

    def save(self, folder: Path, progress: Progress, save: Save) -> None:
        """Write shards under `learner/`, `critic/` and, if it changes, `reference/`, and what others load
        under `model/` (`from_pretrained`) and `adapter/` (peft). Writes of all ranks together are first."""
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
        """Restore exactly what `save` wrote; the number of ranks may differ."""
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
    """Return the precision of `model/`; merged adapters need float32, whatever their base has."""
    if config.compute_dtype != "bfloat16":
        return torch.float32
    if config.lora is None:
        return torch.bfloat16
    log.info(
        "checkpoints: model/ has the adapters merged, in float32, because bfloat16 would round off most"
        " of a small update; adapter/ has only the adapters"
    )
    return torch.float32


def _refuse_text_only(model: PackedModel, policy: PackedModel, *, key: str, path: str) -> None:
    """Refuse a text-only model beside a vision-language policy."""
    if vision_tower(model.causal_lm) is None and vision_tower(policy.causal_lm) is not None:
        raise ConfigError(f"{key}: {path!r} {TEXT_ONLY}")


def _vision_rates(
    config: LearnerSection, policy: PackedModel, folder: Path
) -> dict[nn.Parameter, float]:
    rate, tower = config.vision_learning_rate, vision_tower(policy.causal_lm)
    if rate is None:
        return {}
    if tower is None:
        raise ConfigError(
            f"learner.vision_learning_rate: {folder} is text-only and has no vision tower; remove it"
        )
    return dict.fromkeys(tower.parameters(), rate)


def _plan_memory(config: LearnerSection, folder: Path, *, device_type: str) -> tuple[int, Kept]:
    """Log the memory estimate, and return what it leaves room for on every rank: tokens of a chunk of
    logits, and what is kept between micro-batches.

    Raises `ConfigError` if not even an empty micro-batch would fit. Memory of engines on the same GPU
    counts if they have started; if they have not, a rank keeps what fits into its own share.
    """
    on_host = _free_on_host()
    is_gpu = device_type == "cuda"
    free, share = on_host, on_host // config.num_ranks
    if is_gpu:
        free, whole = torch.cuda.mem_get_info()
        is_shared = config.gpus_per_rank != "auto" and config.gpus_per_rank < 1
        share = min(free, int(whole * config.gpus_per_rank)) if is_shared else free
    least = torch.tensor([share], device=device_type)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)  # all ranks must make the same collectives
    share = int(least.item())
    chunk_tokens = choose_chunk(config, folder, free=share, is_gpu=is_gpu)
    config = config.model_copy(update={"logprob_chunk_tokens": chunk_tokens})
    kept = choose_kept(config, folder, free=share)
    estimate = estimate_of(config, folder, kept=kept)
    if estimate is None:
        return chunk_tokens, kept
    refusal = estimate.refusal(free, free_on_host=on_host)
    if refusal is not None:
        raise ConfigError(f"model.path: {folder}: {refusal}")
    if dist.get_rank() == 0:
        log.info(
            "learner memory: %s; %s, logits in chunks of %d tokens", estimate, kept, chunk_tokens
        )
        advice = estimate.advice(free)
        if advice is not None:
            log.warning("learner memory: %s", advice)
    return chunk_tokens, kept


def _free_on_host() -> int:
    """Return the memory that Linux can give without swapping; a huge number where unknown."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**62
