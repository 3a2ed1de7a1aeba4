"""How weights enter a running vLLM: through its weight-transfer engines, or as an adapter."""

import asyncio
from typing import TYPE_CHECKING, Any

from raylearner.errors import WeightTransferError
from raylearner.weights.fit import refuse_misfit, refuse_other_tensors
from raylearner.weights.group import WeightGroup, backend
from raylearner.weights.update import WeightUpdate
from raylearner.weights.verification import refuse_adapter_differences, refuse_differences

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

ADAPTER_ID = 1
"""The only slot for an adapter; the adapter's name carries its policy version."""


class WeightReceiver:
    """Owns one engine's side of a transport; the caller pauses the engine around `replace`."""

    def __init__(self, transport: str, *, actor_id: str) -> None:
        """`actor_id` identifies this engine in pushes made for particular members."""
        self._transport = transport
        self._actor_id = actor_id
        self._group_key: str | None = None
        self.adapter: LoRARequest | None = None
        """The adapter that every request must name, once one has arrived."""

    @property
    def _vllm_transport(self) -> str:
        """The transport of vLLM's weight transfer; adapters are loaded from files."""
        return "shared_files" if self._transport == "adapter" else self._transport

    @property
    def backend(self) -> str:
        """The backend of vLLM's weight transfer."""
        return backend(self._vllm_transport)

    @property
    def shares_memory(self) -> bool:
        """Whether weights are read from the learner's own GPU memory."""
        return self._transport == "ipc"

    async def initialize(self, llm: "AsyncLLM") -> None:
        """Prepare the transport and mark tokens with the initial policy version, 0."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        # The communicator of a broadcast is created at its first push, among all members.
        arguments = {"shared_files": {}, "ipc": {"packed": True}}.get(self._vllm_transport)
        if arguments is not None:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=arguments))
        await llm.update_weight_version("0")

    async def prepare(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        """Check the update and join its group, which may take long and needs no pause.

        Raises `WeightTransferError` for another transport or other tensors.
        """
        if update.transport != self._transport:
            raise WeightTransferError(
                f"weights arrived via {update.transport!r}; this engine expects {self._transport!r}"
            )
        await asyncio.to_thread(refuse_misfit, update, llm.model_config.model)
        await asyncio.to_thread(refuse_other_tensors, update)
        if update.transport == "nccl":
            await self._join(llm, update.payload["group"])

    async def replace(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        """Replace the weights, and the version that tokens are marked with from here on."""
        if update.transport == "adapter":
            await self._replace_adapter(llm, update)
        else:
            await self._replace_weights(llm, update)

    async def verify(self, llm: "AsyncLLM", update: WeightUpdate) -> int:
        """Return the number of tensors that every rank holds exactly as they were sent.

        Raises `WeightTransferError` naming the tensors that differ.
        """
        if update.transport == "adapter":
            path = update.payload["path"]
            reports = await llm.collective_rpc("adapter_report", args=(path,))
            refuse = refuse_adapter_differences
        else:
            reports = await llm.collective_rpc("weight_report")
            refuse = refuse_differences
        return refuse(update.payload["checksums"], reports, policy_version=update.policy_version)

    async def _replace_weights(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=self._arguments(update)))
        await llm.finish_weight_update(str(update.policy_version))

    async def _replace_adapter(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        """Load the adapter in place of the last one, so that running requests continue under it."""
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

    async def _join(self, llm: "AsyncLLM", group: WeightGroup) -> None:
        """Connect to the learner and the other members, unless the last push had the same group."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if group.key == self._group_key:
            return
        if self._group_key is not None:
            await llm.shutdown_weight_transfer_engine()
        self._group_key = None
        arguments = group.receiver_arguments(self._actor_id)
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=arguments))
        self._group_key = group.key

    def _arguments(self, update: WeightUpdate) -> dict[str, Any]:
        payload = dict(update.payload)
        del payload["checksums"]
        if update.transport == "nccl":
            del payload["group"]
        elif update.transport == "ipc":
            payload["ipc_handles_pickled"] = payload.pop("handles")[self._actor_id]
        return payload
