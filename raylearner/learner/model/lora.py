"""LoRA through peft: adapters in a sharded model, exported merged or on their own.

A model with adapters has, in place of a linear layer's `weight`, `base_layer.weight`, which is
frozen, and `lora_A.default.weight` [r, in] and `lora_B.default.weight` [out, r], which are trained.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from raylearner.config.learner import LoraSection, lora_rank
from raylearner.errors import ConfigError
from raylearner.learner.model.gather import gather

if TYPE_CHECKING:  # peft takes a second to import: only learners with adapters do
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
"""Prefix of names in peft's files."""

ItemT = TypeVar("ItemT")


def inject(
    causal_lm: PreTrainedModel,
    section: LoraSection,
    *,
    base_dtype: torch.dtype,
    excluded: str | None = None,
) -> None:
    """Add the adapters of `section`; freeze all other weights and keep them in `base_dtype`.

    New adapters leave out modules whose names match the regular expression `excluded`. Raises
    `ConfigError` for modules that the model does not have, and for other kinds of adapters than plain
    LoRA.
    """
    from peft import inject_adapter_in_model

    config = _config(section, excluded)
    try:
        inject_adapter_in_model(config, causal_lm, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"learner.lora.target_modules: {error}") from error
    for name, layer in _layers(causal_lm):
        if not isinstance(layer.base_layer, nn.Linear):
            raise ConfigError(
                f"learner.lora.target_modules: {name} is a {type(layer.base_layer).__name__}; "
                "only linear layers can have adapters"
            )
    for parameter in causal_lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(base_dtype)


def has_adapters(causal_lm: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in causal_lm.named_parameters())


@torch.no_grad()
def initialize(causal_lm: nn.Module, section: LoraSection, *, seed: int) -> None:
    """Load the weights of `section.path`, or draw A (the same on any number of ranks) and zero B."""
    reader = None if section.path is None else _AdapterReader(Path(section.path).expanduser())
    for index, (name, parameter) in enumerate(causal_lm.named_parameters()):
        if not is_adapter(name):
            continue
        if reader is not None:
            whole = reader.tensor(name, tuple(parameter.shape))
        elif ".lora_B." in name:
            whole = torch.zeros(parameter.shape)
        else:
            # Kaiming's uniform with slope sqrt(5), as peft draws it.
            bound = 1 / math.sqrt(parameter.shape[1])
            generator = torch.Generator().manual_seed(seed + 1_000_003 * index)
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        _copy(parameter, whole)
    if reader is not None:
        reader.refuse_leftovers()


@torch.no_grad()
def add_initial(causal_lm: nn.Module, section: LoraSection) -> None:
    """Add the adapter in `section.path` to a model of full weights, which makes it the initial policy.

    Without a path it does nothing. Raises `ConfigError` for an adapter that does not fit.
    """
    if section.path is None:
        return
    config = _config(section, None)
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    reader = _AdapterReader(Path(section.path).expanduser())
    for name, parameter in causal_lm.named_parameters():
        layer = name.removesuffix(".weight")
        if layer not in reader.layers:
            continue
        rows, columns = parameter.shape
        first = reader.tensor(f"{layer}.lora_A.{ADAPTER}.weight", (config.r, columns))
        second = reader.tensor(f"{layer}.lora_B.{ADAPTER}.weight", (rows, config.r))
        own, start = _own_rows(parameter)
        part = second[start : start + len(own)].to(own.device, own.dtype)
        own.addmm_(part, first.to(own.device, own.dtype), alpha=scale)
    reader.refuse_leftovers()


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Return the weight's name in a checkpoint without adapters."""
    return name.replace(".base_layer.", ".")


def merge(causal_lm: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors by their transformers names, each adapter added to its layer.

    Every rank must iterate to the end. Raises `ConfigError` for less than float32, which would round off
    most of a small update.
    """
    if torch.finfo(dtype).bits < 32:
        raise ConfigError(
            f"learner.lora: adapters cannot be merged into {str(dtype).removeprefix('torch.')} weights:"
            " rounding would lose most of a small update; use weights.transport 'adapter', or"
            " actors.engine.dtype 'float32'"
        )
    return _iterate_merged(causal_lm, dtype)


def _iterate_merged(causal_lm: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    scaling = {name: layer.scaling[ADAPTER] for name, layer in _layers(causal_lm)}
    for name, parts in _by_layer(gather(causal_lm.named_parameters(), dtype)):
        if len(parts) == 1:
            yield name, parts[0]
            continue
        base, first, second = parts
        yield name, torch.addmm(base, second, first, alpha=scaling[name.removesuffix(".weight")])


def merge_shapes(causal_lm: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and full shapes of what `merge` yields, in its order."""
    shapes = ((name, tuple(p.shape)) for name, p in causal_lm.named_parameters())
    return [(name, parts[0]) for name, parts in _by_layer(shapes)]


def adapter_weights(causal_lm: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors of the adapters, by peft's names. Every rank must iterate to the end."""
    adapters = ((name, p) for name, p in causal_lm.named_parameters() if is_adapter(name))
    for name, tensor in gather(adapters, dtype):
        yield _PREFIX + name.replace(f".{ADAPTER}.", "."), tensor


def adapter_config(causal_lm: Any, *, base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json, for the model directory or hub id `base`."""
    config = causal_lm.peft_config[ADAPTER].to_dict()
    config |= {"base_model_name_or_path": base, "inference_mode": True}
    return json.loads(json.dumps(config, default=_as_json))


@contextmanager
def disable_adapters(causal_lm: nn.Module) -> Iterator[None]:
    """Use the model without its adapters in this context."""
    layers = [layer for _, layer in _layers(causal_lm)]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale


def _config(section: LoraSection, excluded: str | None) -> "LoraConfig":
    from peft import LoraConfig, PeftConfig

    if section.path is None:
        modules = section.target_modules
        return LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,  # pyright: ignore[reportArgumentType] - peft accepts floats
            target_modules=modules if isinstance(modules, str) else list(modules),
            exclude_modules=excluded,
            task_type="CAUSAL_LM",
        )
    lora_rank(section)
    config = PeftConfig.from_pretrained(str(Path(section.path).expanduser()))
    extras = (
        "use_dora",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "trainable_token_indices",
    )
    used = [key for key in extras if getattr(config, key, None)]
    if not isinstance(config, LoraConfig) or used or config.bias != "none":
        what = ", ".join(used) or f"type {config.peft_type}, bias {getattr(config, 'bias', None)}"
        raise ConfigError(
            f"learner.lora.path: {section.path!r}: only plain LoRA adapters can be trained further, "
            f"this one has {what}"
        )
    config.inference_mode, config.lora_dropout = False, 0.0
    return config


def _layers(causal_lm: nn.Module) -> Iterator[tuple[str, "LoraLayer"]]:
    from peft.tuners.lora import LoraLayer

    for name, module in causal_lm.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _by_layer(items: Iterable[tuple[str, ItemT]]) -> Iterator[tuple[str, list[ItemT]]]:
    """Yield each weight by its name without adapters: `[weight]`, or `[base, A, B]`."""
    pending: dict[str, list[ItemT]] = {}
    for name, item in items:
        if name.endswith(".base_layer.weight"):
            pending[base_name(name)] = [item]
        elif is_adapter(name):
            weight = name[: name.index(".lora_")] + ".weight"
            pending[weight].append(item)
            if ".lora_B." in name:
                yield weight, pending.pop(weight)
        else:
            yield base_name(name), [item]


def _copy(parameter: nn.Parameter, whole: Tensor) -> None:
    own, start = _own_rows(parameter)
    own.copy_(whole[start : start + len(own)])


def _own_rows(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Return this rank's rows of a parameter, and the index of the first."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    local = parameter.to_local()
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return local, offset[0] if local.numel() else 0


def _as_json(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)


class _AdapterReader:
    """Reads tensors of a file that peft wrote, by their names in the model."""

    def __init__(self, folder: Path) -> None:
        from peft import PeftConfig

        self._path = folder / WEIGHTS_FILE
        if not self._path.is_file():
            raise ConfigError(f"learner.lora.path: {folder} has no {WEIGHTS_FILE}")
        with safe_open(self._path, "pt") as file:
            self._names = frozenset(file.keys())
        self._unread = set(self._names)
        self._base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path

    @property
    def layers(self) -> set[str]:
        """Names of the adapted linear layers."""
        ends = (".lora_A.weight", ".lora_B.weight")
        return {
            name.removeprefix(_PREFIX).removesuffix(end)
            for name in self._names
            for end in ends
            if name.endswith(end)
        }

    def refuse_leftovers(self) -> None:
        """Raise `ConfigError` if the file adapts layers that the model does not have."""
        if self._unread:
            raise self._misfit(f"the model has no layer for its {min(self._unread)}")

    def _misfit(self, what: str) -> ConfigError:
        return ConfigError(
            f"learner.lora.path: {self._path}: {what}; the adapter was made for another base,"
            f" {self._base!r}"
        )

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        key = _PREFIX + name.replace(f".{ADAPTER}.", ".")
        with safe_open(self._path, "pt") as file:
            if key not in file.keys():  # noqa: SIM118 - no mapping
                raise self._misfit(f"it has no {key}")
            self._unread.discard(key)
            tensor = file.get_tensor(key)
        if tuple(tensor.shape) != shape:
            raise self._misfit(f"{key} is {tuple(tensor.shape)}, this model needs {shape}")
        return tensor
