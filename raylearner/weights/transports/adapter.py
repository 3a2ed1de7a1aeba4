"""LoRA adapters alone, as files in peft's form; the engines keep the base model's weights."""

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from raylearner.errors import WeightTransferError
from raylearner.types import PolicyVersion
from raylearner.weights.checksums import Checksums, plain
from raylearner.weights.transports import WeightGroup, shared_files, transport
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.transports.transport import run_task
from raylearner.weights.update import WeightUpdate
from raylearner.weights.verification import verify_adapter

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ADAPTER_ID = 1
"""The only slot for an adapter; the adapter's name carries its policy version."""


class Sender(transport.Sender):
    """Rank 0 writes a directory as peft does; the other ranks take part in gathering."""

    def write(
        self, policy_version: PolicyVersion, members: Sequence[str], group: WeightGroup | None
    ) -> dict[str, Any] | None:
        weights = self._weights
        tensors = weights.adapter_tensors()
        if self._rank != 0:
            deque(tensors, maxlen=0)
            return None
        config = weights.adapter_config()
        return write_adapter(tensors, config, self._folder, policy_version, weights.dtype)


class Receiver(transport.Receiver):
    """Loads each adapter in place of the last one, so that running requests continue under it."""

    name = "adapter"

    @staticmethod
    def vllm_engine() -> type[Any]:
        return shared_files.Receiver.vllm_engine()

    async def stage(self, llm: "AsyncLLM", update: WeightUpdate) -> bool:
        return False  # a small file, which vLLM reads itself

    async def replace(
        self, llm: "AsyncLLM", update: WeightUpdate, *, has_slept: bool = False
    ) -> None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(
            lora_name=f"policy-{update.policy_version}",
            lora_int_id=ADAPTER_ID,
            lora_path=update.payload["path"],
            load_inplace=True,
        )
        if not await llm.add_lora(request):
            raise WeightTransferError(f"vLLM refused the adapter {request.lora_name}")
        await llm.update_weight_version(str(update.policy_version))
        # Requests must not load it again each time they are scheduled.
        self.adapter = LoRARequest(request.lora_name, ADAPTER_ID, request.lora_path)

    async def verify(self, llm: "AsyncLLM", update: WeightUpdate) -> int:
        reports = await run_task(llm, "adapter_report", update.payload["path"])
        return verify_adapter(
            update.payload["checksums"], reports, policy_version=update.policy_version
        )


def write_adapter(
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    folder: str | Path,
    policy_version: PolicyVersion,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Write one push and return its payload; an incomplete directory never has the name that is read."""
    payload = write_weights(tensors, folder, policy_version, dtype)
    written = Path(payload["path"])
    adapter = written.with_suffix("")
    partial = written.with_suffix(".partial")
    partial.mkdir()
    written.rename(partial / WEIGHTS_FILE)
    (partial / CONFIG_FILE).write_text(json.dumps(dict(config)) + "\n")
    partial.rename(adapter)
    return payload | {"path": str(adapter)}


@torch.no_grad()
def adapter_report(manager: Any, path: str) -> dict[str, Any]:
    """Return checksums of the adapter's tensors as this rank reads them, and names of tensors it does not hold.

    vLLM multiplies B by the adapter's scale and slices both for its rank; its slots are compared bit for
    bit with tensors treated alike. `manager` is vLLM's `LoRAModelManager`.
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
    """Whether slot `index` of the layer holds both factors of every part, and nothing else."""
    a: Any = list(first) if is_packed else first[0]
    b: Any = list(second) if is_packed else second[0]
    if is_packed and hasattr(layer, "n_slices") and len(b) != layer.n_slices:
        a, b = layer.expand_packed_lora(a, b)
    if layer.tp_size > 1:
        a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    return all(
        _slot_holds(stack[index, 0], value)
        for stacks, values in ((layer.lora_a_stacked, a), (layer.lora_b_stacked, b))
        for stack, value in zip(_listed(stacks), _listed(values), strict=True)
    )


def _slot_holds(slot: Tensor, value: Tensor | None) -> bool:
    """Whether the slot holds the value; a slot may be larger, and is 0 beyond."""
    if value is None:
        return not slot.any()
    rows, columns = value.shape
    return (
        torch.equal(slot[:rows, :columns], value.to(slot.device))
        and not slot[rows:].any()
        and not slot[:, columns:].any()
    )


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]
