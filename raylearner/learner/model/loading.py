"""Loading a causal language model from files into shards: each rank reads only its own rows."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
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

from raylearner.config.checks import CONTEXT_KEY, NO_VISION_CONTEXT, SLICED_LAYERS, context_error
from raylearner.config.learner import LoraSection
from raylearner.config.model_files import (
    LENGTH_DEPENDENT,
    local_directory,
    model_errors,
    rope_types,
    scoring_errors,
)
from raylearner.errors import ConfigError
from raylearner.learner import optimizer
from raylearner.learner.checkpoint.state import read_shapes
from raylearner.learner.model import attention, lora
from raylearner.learner.model.attention import Backend
from raylearner.learner.model.fidelity import can_share_prefixes, refuse_unfaithful
from raylearner.learner.model.images import vision_tower
from raylearner.learner.model.policy import ModelOptions, PackedModel
from raylearner.tokenization.tokenizer import unknown_token_ids

log = logging.getLogger(__name__)

RANDOM_WIDTH = 0.02
"""Standard deviation of random weights."""


def model_directory(path: str, *, needs_weights: bool = True) -> Path:
    """Return the local directory of a model given by path or hub id.

    Raises `ConfigError` if there is none or its files are unusable.
    """
    folder = local_directory(path)
    for problem in model_errors(folder, needs_weights=needs_weights):
        raise ConfigError(f"model.path: {problem}")
    return folder


def load_model(path: str, *, dtype: torch.dtype, chunk_tokens: int = 1024) -> PackedModel:
    """Load a causal language model on the CPU with weights in `dtype`, packed attention, dropout off."""
    folder = model_directory(path)
    try:
        config = AutoConfig.from_pretrained(folder)
        backend = attention.register_backend("cpu", dtype)
        causal_lm = _auto_class(config).from_pretrained(
            folder, dtype=dtype, attn_implementation=attention.implementation_of(config, backend)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: {folder} is not a causal language model: {error}"
        ) from error
    _refuse_other_scores(folder)
    attention.set_attention(causal_lm, backend)
    model = PackedModel(
        causal_lm, chunk_tokens=chunk_tokens, banned_token_ids=_banned(causal_lm.config, folder)
    )
    eager = partial(attention.use_eager, causal_lm, backend)
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
    """Load a model sharded over the mesh.

    Trained weights are in `dtype`; with adapters the rest is frozen and kept in `compute_dtype`. With
    `random_seed` weights are drawn, and only `config.json` is read. `banned_token_ids` defaults to the
    model's own; a model that scores another one's samples needs those of the other.
    """
    folder = model_directory(path, needs_weights=random_seed is None)
    backend = attention.register_backend(mesh.device_type, compute_dtype, options.attention)
    try:
        config = AutoConfig.from_pretrained(folder)
        implementation = attention.implementation_of(config, backend)
        with _parameters_on_meta():
            causal_lm = _auto_class(config).from_config(
                config, dtype=dtype, attn_implementation=implementation
            )
        causal_lm.tie_weights()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path: {folder} is not a causal language model: {error}"
        ) from error
    if options.context is not None:
        _refuse_slices(config, folder, size=options.context.size)
    _refuse_other_scores(folder)
    files = None if random_seed is not None else ModelFiles(folder, causal_lm)
    missing = [] if files is None else files.find_missing(causal_lm)
    if missing:
        # Only transformers can merge or transpose the tensors of such checkpoints.
        log.warning("every rank loads all of %s, which has no %s", folder, missing[0])
        causal_lm = _auto_class(config).from_pretrained(
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
        kept=options.kept,
    )
    if has_value_head:
        model.add_value_head(dtype)
    model.prepare_blocks(options)
    shard(
        model,
        mesh,
        compute_dtype=compute_dtype,
        wanted_attention=options.attention,
        should_reshard=not options.kept.weights,
        should_offload=options.should_offload,
    )
    device = torch.device(mesh.device_type)
    if not missing:
        home = torch.device("cpu") if options.should_offload else device
        model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(home))
    if options.should_offload:
        _move_buffers(model, device)
    if not missing:
        if files is not None:
            files.load(model.causal_lm)
        elif random_seed is not None:
            _draw_weights(model.causal_lm, random_seed)
        if model.value_head is not None:
            for parameter in model.value_head.parameters():
                optimizer.local(parameter.detach()).zero_()
    if adapters is not None:
        lora.initialize(model.causal_lm, adapters, seed=adapter_seed)
    eager = partial(attention.use_eager, causal_lm, backend)
    noise = refuse_unfaithful(
        model, folder, eager=eager, compute_dtype=compute_dtype, device=device
    )
    if options.may_share_prefixes:
        model.shares_prefixes = can_share_prefixes(
            model, folder, noise=noise, compute_dtype=compute_dtype, device=device
        )
    model.reshard_all()  # the optimizer takes the shards
    return model


def _inside(model: nn.Module, part: nn.Module) -> str:
    """Return a regular expression that matches the names of everything in the part."""
    (name,) = (name for name, module in model.named_modules() if module is part)
    return rf"{re.escape(name)}\..*"


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device: FSDP moves only the parameters of an offloaded model."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters without storage in this context, and buffers with their values."""
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
def _draw_weights(causal_lm: nn.Module, seed: int) -> None:
    """Fill each rank's rows with random weights, the same on any number of ranks."""
    for index, (name, parameter) in enumerate(causal_lm.named_parameters()):
        local, start = optimizer.local(parameter), 0
        if isinstance(parameter, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start = offset[0] if offset else 0
        if not local.numel() or lora.is_adapter(name):
            continue
        if parameter.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = torch.Generator(local.device).manual_seed(seed + 1_000_003 * index + start)
            local.normal_(0.0, RANDOM_WIDTH, generator=generator)


class ModelFiles:
    """The tensors of a directory's safetensors files, by their names in the model.

    Files may use other names: checkpoints of vision-language models are often older than the names
    that transformers uses today.
    """

    def __init__(self, folder: Path, causal_lm: PreTrainedModel) -> None:
        self._folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        self._shapes = read_shapes(self._reader)
        self._keys = _names_in_model(self._shapes, causal_lm)

    def find_missing(self, causal_lm: nn.Module) -> list[str]:
        return [name for name, _ in causal_lm.named_parameters() if name not in self._keys]

    def load(self, causal_lm: nn.Module) -> None:
        """Fill each rank's shards; it reads only their rows. Every rank must call it."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in causal_lm.named_parameters():
            if lora.is_adapter(name):
                continue
            key = self._keys[lora.base_name(name)]
            if self._shapes[key] != tuple(parameter.shape):
                raise ConfigError(
                    f"model.path: {self._folder}: {key} is {self._shapes[key]} in the files and "
                    f"{tuple(parameter.shape)} by config.json"
                )
            tensors[key] = parameter.detach()
        load(tensors, storage_reader=self._reader)


def _names_in_model(keys: Iterable[str], causal_lm: PreTrainedModel) -> dict[str, str]:
    """Return a checkpoint's keys by the names under which transformers loads them.

    Keys that transformers converts into other tensors are left out.
    """
    changes = get_model_conversion_mapping(causal_lm)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    expected = causal_lm.state_dict()
    names: dict[str, str] = {}
    for key in sorted(keys):  # in transformers' order: some renamings depend on earlier ones
        name, conversion = rename_source_key(
            key, renamings, converters, causal_lm.base_model_prefix, expected
        )
        if name not in expected and key in expected:
            name, conversion = key, None
        if conversion is None:
            names[name] = key
    return names


def _auto_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class that loads a model of this kind."""
    return AutoModelForImageTextToText if attention.is_vision(config) else AutoModelForCausalLM


def _banned(config: PreTrainedConfig, folder: Path) -> tuple[int, ...]:
    """Return tokens that engines must not sample: image placeholders, and ids without a text."""
    placeholders = (
        (config.image_token_id, config.video_token_id) if attention.is_vision(config) else ()
    )
    try:
        return (*placeholders, *unknown_token_ids(str(folder)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder} has no loadable tokenizer: {error}") from error


def _refuse_other_scores(folder: Path) -> None:
    """Refuse families known to score differently; `refuse_unfaithful` measures the others."""
    for problem in scoring_errors(folder):
        raise ConfigError(f"model.path: {problem}")


def _refuse_slices(config: PreTrainedConfig, folder: Path, *, size: int) -> None:
    """Refuse models that ranks of a context group cannot share with equal results."""
    text: Any = config.get_text_config()
    num_heads: int = text.num_attention_heads
    kinds = sorted(rope_types(config.to_dict()) & {*LENGTH_DEPENDENT})
    problem = context_error(
        size,
        num_heads=num_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
    )
    if attention.is_vision(config):
        problem = NO_VISION_CONTEXT
    elif others := set(getattr(text, "layer_types", None) or ()) - set(SLICED_LAYERS):
        problem = f"must be 1 for a model with layers of {', '.join(sorted(others))}; set it to 1"
    elif kinds:
        problem = f"must be 1 for rotary embeddings of type {kinds[0]}; set it to 1"
    if problem is not None:
        raise ConfigError(f"{CONTEXT_KEY}: {folder}: {problem}")


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
    """Apply FSDP2, one unit per block and one for the rest; gradients are summed, not averaged.

    A mesh of two dimensions has copies along the first and shards along the second.
    """
    backend = attention.register_backend(mesh.device_type, compute_dtype, wanted_attention)
    attention.set_attention(model.causal_lm, backend)
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
    if mesh.size(-1) > 1:
        _prefetch(model)
    return model


def _prefetch(model: PackedModel) -> None:
    """Start to gather a block's weights before the block in front of it computes, also where the host is late.

    In a backward FSDP does so by itself.
    """
    for block, following in pairwise(model.blocks):
        assert isinstance(block, FSDPModule)
        assert isinstance(following, FSDPModule)
        block.set_modules_to_forward_prefetch([following])
