"""How a causal language model comes from files to shards: each rank reads its own rows and no others."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from raylearner.config.checks import CONTEXT_KEY, SEES_IMAGES, SLICED_LAYERS, heads_fault
from raylearner.config.learner import LoraSection
from raylearner.config.model_files import LENGTH_DEPENDENT, model_faults, rope_types, scoring_faults
from raylearner.errors import ConfigError
from raylearner.learner import optimizer
from raylearner.learner.model import attention, lora
from raylearner.learner.model.attention import Backend
from raylearner.learner.model.fidelity import refuse_unfaithful
from raylearner.learner.model.policy import ModelOptions, PackedModel, vision_tower
from raylearner.tokenization.tokenizer import unknown_token_ids

log = logging.getLogger(__name__)

MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model")
"""What is fetched of a hub repository."""

RANDOM_WIDTH = 0.02
"""Standard deviation of weights that are drawn."""


def model_directory(path: str, *, needs_weights: bool = True) -> Path:
    """The local directory of a model given as one or as a hub id; ConfigError without, or with faults."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        looks_local = folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
        if looks_local or folder.exists():
            raise ConfigError(f"model.path: no such directory: {path!r}")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(path, allow_patterns=list(MODEL_FILES)))
        except Exception as error:
            raise ConfigError(
                f"model.path: {path!r} is no directory, and not to be had as a hub id either: {error}"
            ) from error
    for fault in model_faults(folder, needs_weights=needs_weights):
        raise ConfigError(f"model.path: {fault}")
    return folder


def load_model(path: str, *, dtype: torch.dtype, chunk_tokens: int = 1024) -> PackedModel:
    """A causal language model on the CPU with weights in `dtype`, packed attention, dropout off."""
    folder = model_directory(path)
    try:
        config = AutoConfig.from_pretrained(folder)
        backend = _backend("cpu", dtype, "auto")
        causal_lm = _family(config).from_pretrained(
            folder, dtype=dtype, attn_implementation=_attention(config, backend)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {folder} is no causal language model: {error}") from error
    _refuse_other_scores(folder)
    _pack_images(causal_lm, backend)
    model = PackedModel(
        causal_lm, chunk_tokens=chunk_tokens, banned_token_ids=_banned(causal_lm.config, folder)
    )
    eager = partial(_eager, causal_lm, backend)
    refuse_unfaithful(model, folder, eager=eager, compute_dtype=dtype)
    return model


def load_sharded(
    path: str,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    options: ModelOptions,
    has_value_head: bool = False,
    random_seed: int | None = None,
    adapters: LoraSection | None = None,
    adapter_seed: int = 0,
    banned_token_ids: Sequence[int] | None = None,
) -> PackedModel:
    """The same, sharded over the mesh: each rank reads its own rows of the files and no others.

    What is trained is in `dtype`; with adapters the rest is frozen and kept in `compute_dtype`. With `random_seed` weights are drawn, and only `config.json` is read. `banned_token_ids` are the model's own, unless it scores what another one samples.
    """
    folder = model_directory(path, needs_weights=random_seed is None)
    backend = _backend(mesh.device_type, compute_dtype, options.attention)
    try:
        config = AutoConfig.from_pretrained(folder)
        implementation = _attention(config, backend)
        with _parameters_on_meta():
            causal_lm = _family(config).from_config(
                config, dtype=dtype, attn_implementation=implementation
            )
        causal_lm.tie_weights()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {folder} is no causal language model: {error}") from error
    if options.context is not None:
        _refuse_slices(config, folder, size=options.context.size)
    _refuse_other_scores(folder)
    reader = None if random_seed is not None else TensorReader(folder, causal_lm)
    unknown = [] if reader is None else reader.missing(n for n, _ in causal_lm.named_parameters())
    if unknown:
        # Checkpoints whose tensors transformers merges or turns: it must load them whole.
        log.warning("%s is loaded whole by every rank: it has no %s", folder, unknown[0])
        causal_lm = _family(config).from_pretrained(
            folder, dtype=dtype, attn_implementation=implementation
        )
    frozen = vision_tower(causal_lm) if options.is_tower_frozen else None
    if adapters is not None:
        excluded = None if frozen is None else _inside(causal_lm, frozen)
        lora.inject(causal_lm, adapters, base_dtype=compute_dtype, excluded=excluded)
    if frozen is not None:
        frozen.requires_grad_(False)
    model = PackedModel(
        causal_lm,
        chunk_tokens=options.chunk_tokens,
        is_head_exact=options.is_head_exact,
        should_compile=options.should_compile,
        banned_token_ids=_banned(config, folder) if banned_token_ids is None else banned_token_ids,
        context=options.context,
    )
    if has_value_head:
        model.add_value_head(dtype)
    model.prepare_blocks(options)
    shard(
        model,
        mesh,
        compute_dtype=compute_dtype,
        wanted_attention=options.attention,
        should_reshard=options.should_reshard,
        should_offload=options.should_offload,
    )
    device = torch.device(mesh.device_type)
    if not unknown:
        home = torch.device("cpu") if options.should_offload else device
        model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(home))
    if options.should_offload:
        _move_buffers(model, device)
    if not unknown:
        _fill(model.causal_lm, reader, random_seed)
        if model.value_head is not None:
            for parameter in model.value_head.parameters():
                optimizer.local(parameter.detach()).zero_()
    if adapters is not None:
        lora.initialize(model.causal_lm, adapters, seed=adapter_seed)
    eager = partial(_eager, causal_lm, backend)
    refuse_unfaithful(model, folder, eager=eager, compute_dtype=compute_dtype, device=device)
    return model


@contextmanager
def _eager(causal_lm: PreTrainedModel, backend: Backend) -> Iterator[None]:
    """Inside, attention of text is the one that transformers writes out."""
    name: Any = "eager"
    if _sees(causal_lm.config):
        name = {"": name, "text_config": name, "vision_config": "sdpa"}
    causal_lm.set_attn_implementation(name)
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(_attention(causal_lm.config, backend))
        _pack_images(causal_lm, backend)


def _inside(model: nn.Module, part: nn.Module) -> str:
    """A regular expression of the names of what the part holds."""
    (name,) = (name for name, module in model.named_modules() if module is part)
    return rf"{re.escape(name)}\..*"


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """FSDP moves parameters of an offloaded model as they are needed, and nothing else."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without storage, and buffers with their true values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def _fill(causal_lm: nn.Module, reader: "TensorReader | None", random_seed: int | None) -> None:
    """Each rank's rows, from the files or, as initial weights of that width, from a generator."""
    for index, (name, parameter) in enumerate(causal_lm.named_parameters()):
        local, start = optimizer.local(parameter), 0
        if isinstance(parameter, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start = offset[0] if offset else 0
        if not local.numel() or lora.is_adapter(name):
            continue
        if reader is not None:
            local.copy_(
                reader.rows(lora.base_name(name), start, len(local), tuple(parameter.shape))
            )
        elif parameter.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            assert random_seed is not None
            generator = torch.Generator(local.device).manual_seed(
                random_seed + 1_000_003 * index + start
            )
            local.normal_(0.0, RANDOM_WIDTH, generator=generator)


class TensorReader:
    """Rows of the tensors in a directory's safetensors files; nothing else of them is read.

    Tensors go by the names that they have in the model, whatever the files call them: checkpoints of
    vision models are often older than the names that transformers gives their parts today.
    """

    def __init__(self, folder: Path, causal_lm: PreTrainedModel) -> None:
        files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        self._places = {
            name: (files[key], key) for name, key in _names_in_model(files, causal_lm).items()
        }

    def missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self._places]

    def rows(self, name: str, start: int, count: int, shape: tuple[int, ...]) -> Tensor:
        path, key = self._places[name]
        with safe_open(path, "pt") as file:
            view = file.get_slice(key)
            found = tuple(view.get_shape())
            if found != shape:
                raise ConfigError(
                    f"model.path: {path}: {key} is {found}, config.json makes it {shape}"
                )
            return view[start : start + count]


def _names_in_model(keys: Iterable[str], causal_lm: PreTrainedModel) -> dict[str, str]:
    """The keys of a checkpoint by the names that transformers loads them under.

    Those of which it makes other tensors are left out.
    """
    changes = get_model_conversion_mapping(causal_lm)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    expected = causal_lm.state_dict()
    names: dict[str, str] = {}
    for key in sorted(keys):  # as transformers goes through them: some renamings look back
        name, conversion = rename_source_key(
            key, renamings, converters, causal_lm.base_model_prefix, expected
        )
        if name not in expected and key in expected:
            name, conversion = key, None
        if conversion is None:
            names[name] = key
    return names


def _backend(device_type: str, dtype: torch.dtype, wanted: Literal["auto"] | Backend) -> Backend:
    """The kernel that fits, registered with transformers."""
    disable_progress_bar()
    backend = attention.choose_backend(device_type, dtype, wanted)
    for name, attend in (
        (attention.implementation(backend), attention.packed_attention),
        (attention.image_implementation(backend), attention.image_attention),
    ):
        ALL_ATTENTION_FUNCTIONS.register(name, partial(attend, backend=backend))
    return backend


def _sees(config: PreTrainedConfig) -> bool:
    return hasattr(config, "vision_config")


def _family(config: PreTrainedConfig) -> Any:
    """What of transformers makes a model of this kind."""
    return AutoModelForImageTextToText if _sees(config) else AutoModelForCausalLM


def _attention(config: PreTrainedConfig, backend: Backend) -> str | dict[str, str]:
    """That of text; a vision tower gets its own from `_pack_images`, once it is there."""
    name = attention.implementation(backend)
    return {"": name, "text_config": name, "vision_config": "sdpa"} if _sees(config) else name


def _pack_images(causal_lm: PreTrainedModel, backend: Backend) -> None:
    """Past transformers' checks of names, which it makes where models are made."""
    tower = vision_tower(causal_lm)
    if isinstance(tower, PreTrainedModel):
        tower.config._attn_implementation = attention.image_implementation(backend)


def _banned(config: PreTrainedConfig, folder: Path) -> tuple[int, ...]:
    """What no engine may sample: placeholders of images, and ids that the tokenizer does not know."""
    placeholders = (config.image_token_id, config.video_token_id) if _sees(config) else ()
    try:
        return (*placeholders, *unknown_token_ids(str(folder)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder} has no tokenizer that loads: {error}") from error


def _refuse_other_scores(folder: Path) -> None:
    """By name, before anything is read; `refuse_unfaithful` measures the rest."""
    for fault in scoring_faults(folder):
        raise ConfigError(f"model.path: {fault}")


def _refuse_slices(config: PreTrainedConfig, folder: Path, *, size: int) -> None:
    """Models that ranks of a context group could not share, or not without a silent difference."""
    text: Any = config.get_text_config()
    num_heads: int = text.num_attention_heads
    kinds = sorted(rope_types(config.to_dict()) & {*LENGTH_DEPENDENT})
    fault = heads_fault(
        size,
        num_heads=num_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
    )
    if _sees(config):
        fault = SEES_IMAGES
    elif others := set(getattr(text, "layer_types", None) or ()) - set(SLICED_LAYERS):
        fault = f"must be 1 for a model with layers of {', '.join(sorted(others))}; set it to 1"
    elif kinds:
        fault = f"must be 1 for rotary embeddings of type {kinds[0]}; set it to 1"
    if fault is not None:
        raise ConfigError(f"{CONTEXT_KEY}: {folder}: {fault}")


ModelT = TypeVar("ModelT", bound=PackedModel)


def shard(
    model: ModelT,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    wanted_attention: Literal["auto"] | Backend = "auto",
    should_reshard: bool = True,
    should_offload: bool = False,
) -> ModelT:
    """FSDP2 over the mesh, one unit per block and one for the rest; gradients are summed, not averaged.

    A mesh of two dimensions has copies along the first and shards along the second.
    """
    backend = _backend(mesh.device_type, compute_dtype, wanted_attention)
    model.causal_lm.set_attn_implementation(_attention(model.causal_lm.config, backend))
    _pack_images(model.causal_lm, backend)
    master_dtype = next(p for p in model.parameters() if p.requires_grad).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master_dtype else compute_dtype,
        reduce_dtype=master_dtype,
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload if should_offload else OffloadPolicy(),
            reshard_after_forward=should_reshard and module is not model,
        )
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return model
