"""What a vLLM worker's places for LoRA adapters hold, next to the adapter that they should hold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from raylearner.weights.checksums import Checksums, plain

WEIGHTS_FILE = "adapter_model.safetensors"


@torch.no_grad()
def adapter_report(manager: Any, path: str) -> dict[str, Any]:
    """Checksums of the adapter's tensors as this rank reads them, and the names of those it does not hold.

    vLLM multiplies B by the adapter's scale and cuts both for its rank, so that the places are compared
    with what that makes of the tensors, bit for bit. `manager` is vLLM's `LoRAModelManager`.
    """
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    tensors = load_file(Path(path) / WEIGHTS_FILE)
    sums = Checksums()
    for name, tensor in tensors.items():
        sums.add(name, tensor)
    helper = PEFTHelper.from_local_dir(path, None)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    names: dict[tuple[str, bool], str] = {}
    for name in tensors:
        names[parse_fine_tuned_lora_name(name, mapper)] = name
    dtype = manager.lora_config.lora_dtype

    def expected(module: str, *, is_first: bool) -> Tensor | None:
        name = names.get((module, is_first))
        if name is None:
            return None
        tensor = tensors[name].to(dtype)
        _, scale = helper.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0])
        return tensor if is_first or scale == 1 else tensor * scale

    held: set[str] = set()
    for module_name, layer in manager.modules.items():
        parts = manager.packed_modules.get(module_name, [module_name])
        if not any((part, True) in names for part in parts):
            continue
        index = next(i for i, adapter in enumerate(manager.lora_index_to_id) if adapter is not None)
        first = [expected(part, is_first=True) for part in parts]
        second = [expected(part, is_first=False) for part in parts]
        if _holds(layer, index, first, second, is_packed=module_name in manager.packed_modules):
            held |= {names[part, k] for part in parts for k in (True, False) if (part, k) in names}
    return {
        "arrived": {name: plain(found) for name, found in sums.result().items()},
        "not_held": sorted(tensors.keys() - held),
    }


def _holds(
    layer: Any,
    index: int,
    first: Sequence[Tensor | None],
    second: Sequence[Tensor | None],
    *,
    is_packed: bool,
) -> bool:
    """Whether the layer's place for adapter `index` has both factors of every part, and nothing else."""
    a: Any = list(first) if is_packed else first[0]
    b: Any = list(second) if is_packed else second[0]
    if is_packed and hasattr(layer, "n_slices") and len(b) != layer.n_slices:
        a, b = layer.expand_packed_lora(a, b)
    if layer.tp_size > 1:
        a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    return all(
        _is_at(stack[index, 0], value)
        for stacks, values in ((layer.lora_a_stacked, a), (layer.lora_b_stacked, b))
        for stack, value in zip(_listed(stacks), _listed(values), strict=True)
    )


def _is_at(place: Tensor, value: Tensor | None) -> bool:
    """A place may be larger than what it holds, and is 0 beyond."""
    if value is None:
        return not place.any()
    rows, columns = value.shape
    return (
        torch.equal(place[:rows, :columns], value.to(place.device))
        and not place[rows:].any()
        and not place[:, columns:].any()
    )


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]
