"""vLLM's AsyncLLM as an engine: generation, and weights that land under running requests.

Consumes requests and weight updates; produces completions and receipts. Waits for vLLM's core, a
child process that ends with this one; a request waits while weights land, and is unblocked by the
end of the update or, when that fails, by an `EngineError`.
"""

import asyncio
import contextlib
import io
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import psutil

from raylearner.actors import vllm_process
from raylearner.config.schema import VllmEngine as VllmEngineSection
from raylearner.errors import EngineError, WeightTransferError
from raylearner.types import (
    BAN_BIAS,
    Completion,
    CompletionStop,
    PolicyVersion,
    Probe,
    Sampling,
    WeightReceipt,
    WeightUpdate,
)
from raylearner.weights import proof
from raylearner.weights.group import WeightGroup

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

ABORT_POLL_S = 0.01
"""Between two attempts to abort requests that vLLM had not registered yet."""
SHARED_BELOW = 0.5
"""With a smaller share of a GPU's memory an engine counts on others that start beside it."""
ADAPTER_ID = 1
"""The one place for an adapter; its name says which policy version it holds."""
EXTENSION = "raylearner.weights.receiver.WorkerExtension"


class VllmEngine:
    """Owns one AsyncLLM and its processes; implements `actors.engine.Engine`.

    Every token's policy version is vLLM's own weight version at the step that sampled it.
    """

    def __init__(
        self,
        config: VllmEngineSection,
        *,
        model_path: str,
        seed: int,
        weight_transport: str,
        actor_id: str = "",
        policy_version: PolicyVersion = 0,
        lora_rank: int | None = None,
    ) -> None:
        """`actor_id` is how pushes made for their members name this engine.

        `lora_rank` is the rank of the adapters that come by the transport `adapter`.
        """
        self._lora_rank = lora_rank
        self._adapter: LoRARequest | None = None
        self._config = config
        self._model_path = model_path
        self._seed = seed
        self._weight_transport = weight_transport
        self._actor_id = actor_id
        self._group_key: str | None = None
        self._policy_version = policy_version
        self._llm: AsyncLLM | None = None
        self._failure: str | None = None
        self._is_paused = False
        self._receiving = asyncio.Lock()
        self._request_ids = itertools.count()
        self._running: set[str] = set()
        self._end_token_ids: frozenset[int] = frozenset()
        self._processes: set[psutil.Process] = set()
        self._log: vllm_process.ErrorLog | None = None

    @property
    def _backend(self) -> str:
        """Of vLLM's weight transfer; adapters come another way."""
        is_adapter = self._weight_transport == "adapter"
        return "shared_files" if is_adapter else self._weight_transport

    @property
    def policy_version(self) -> PolicyVersion:
        return self._policy_version

    async def start(self) -> None:
        """Start vLLM; on failure nothing of it is left and the error names the cause."""
        if self._llm is not None:
            raise EngineError("this engine has started already")
        before = set(vllm_process.children())
        self._log = vllm_process.ErrorLog()
        try:
            vllm_process.set_environment(
                kv_cache_gib=self._config.kv_cache_gib,
                shares_memory=self._weight_transport == "ipc",
            )
            await asyncio.to_thread(self._create, self._log.configuration())
            await self._initialize()
        except BaseException as error:
            cause = self._log.cause(error)
            await self._end(set(vllm_process.children()) - before)
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"vLLM did not start with {self._model_path!r}: {cause}") from error
        self._processes = set(vllm_process.children()) - before

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, images: Sequence[bytes] = ()
    ) -> Completion:
        prompt = _prompt(token_ids)
        if images:
            prompt = {
                "prompt_token_ids": prompt["prompt_token_ids"],
                "multi_modal_data": {"image": [_decoded(image) for image in images]},
            }
        output = await self._request(prompt, self._parameters(sampling))
        return self._completion(output, sampling)

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        async with self._receiving:
            llm = self._alive()
            try:
                return await self._receive(llm, update)
            except BaseException as error:
                reason = (
                    f"policy version {update.policy_version} did not arrive: {self._cause(error)}"
                )
                await self._condemn(reason)
                if isinstance(error, WeightTransferError) or not isinstance(error, Exception):
                    raise
                raise WeightTransferError(reason) from error

    async def pause(self) -> None:
        """Freeze running requests where they are; new ones wait. Nothing is cleared."""
        async with self._receiving:
            await self._alive().pause_generation(mode="keep", clear_cache=False)
            self._is_paused = True

    async def resume(self) -> None:
        async with self._receiving:
            await self._alive().resume_generation()
            self._is_paused = False

    async def abort(self) -> None:
        llm = self._alive()
        targets = set(self._running)
        while targets := targets & self._running:
            await llm.abort(list(targets))
            await asyncio.sleep(ABORT_POLL_S)

    async def close(self) -> None:
        """End vLLM's processes, the stubborn ones by force; safe to call twice."""
        await self._end(self._processes)

    async def _end(self, processes: set[psutil.Process]) -> None:
        self._failure = self._failure or "this engine is closed"
        self._processes = set()
        llm, self._llm = self._llm, None
        if llm is not None:
            # It would log the end of the core as an error.
            if llm.output_handler is not None:
                llm.output_handler.cancel()
            with contextlib.suppress(Exception):
                await asyncio.to_thread(llm.shutdown, timeout=vllm_process.END_TIMEOUT_S)
        await asyncio.to_thread(vllm_process.end, list(processes))
        if self._log is not None:
            self._log.remove()

    def _create(self, log_configuration: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        import raylearner.weights.receiver  # noqa: F401 - registers the backend here as well

        config = self._config
        arguments: dict[str, Any] = {
            "model": self._model_path,
            "dtype": config.dtype,
            "max_model_len": config.max_model_tokens,
            "max_num_seqs": config.max_sequences,
            "gpu_memory_utilization": config.memory_fraction,
            "tensor_parallel_size": config.tensor_parallel_size,
            "enforce_eager": config.is_eager,
            "seed": self._seed,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "log_config_file": log_configuration,
            "weight_transfer_config": WeightTransferConfig(backend=self._backend),
            "worker_extension_cls": EXTENSION,
        }
        if self._lora_rank is not None:
            arguments |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": _lora_room(self._lora_rank),
            }
        if config.memory_fraction < SHARED_BELOW:
            arguments |= vllm_process.cache_arguments(
                self._model_path, memory_fraction=config.memory_fraction
            )
        if config.head_dtype == "float32" and config.dtype != "float32":
            arguments["hf_overrides"] = {"head_dtype": "float32"}
        # Not returned: frames that vLLM keeps would hold the result beyond `close`.
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**(arguments | config.extra_arguments))
        )

    async def _initialize(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        llm = self._llm
        assert llm is not None
        self._end_token_ids = _end_token_ids(llm)
        # A broadcast's communicator is made at its first push, among all members.
        arguments = {"shared_files": {}, "ipc": {"packed": True}}.get(self._backend)
        if arguments is not None:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=arguments))
        await llm.update_weight_version(str(self._policy_version))

    def _parameters(self, sampling: Sampling) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        regex = sampling.regex
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            logit_bias=dict.fromkeys(sampling.banned_token_ids, BAN_BIAS) or None,
            logprobs=0,
            flat_logprobs=True,
            # Stop strings are looked for in the text, special tokens included.
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
            **sampling.extra_arguments,
        )

    async def _request(
        self, prompt: Any, parameters: "SamplingParams", *, is_probe: bool = False
    ) -> "RequestOutput":
        llm = self._alive()
        request_id = str(next(self._request_ids))
        output: RequestOutput | None = None
        if not is_probe:
            self._running.add(request_id)
        try:
            async for item in llm.generate(
                prompt, parameters, request_id, lora_request=self._adapter
            ):
                output = item
        except Exception as error:
            if llm.errored and self._failure is None:
                self._failure = f"vLLM died: {self._cause(error)}"
            raise EngineError(self._failure or f"vLLM refused: {self._cause(error)}") from error
        finally:
            self._running.discard(request_id)
        if self._failure is not None:
            raise EngineError(self._failure)
        if output is None:
            raise EngineError("vLLM ended a request without an output")
        return output

    def _completion(self, output: "RequestOutput", sampling: Sampling) -> Completion:
        sampled = output.outputs[0]
        size = len(sampled.token_ids)
        token_ids = np.asarray(sampled.token_ids, dtype=np.int32)
        logprobs = np.asarray(_own_logprobs(sampled.logprobs, size), dtype=np.float32)
        policy_versions = np.full(size, -1, dtype=np.int32)
        for span in sampled.weight_versions or ():
            policy_versions[span.start : span.end] = int(span.version)
        if (policy_versions < 0).any():
            raise EngineError("vLLM reported tokens without a weight version")
        ends = self._end_token_ids.union(sampling.stop_token_ids)
        end = next((i + 1 for i, token in enumerate(sampled.token_ids) if token in ends), size)
        completion = Completion(
            token_ids=token_ids[:end],
            logprobs=logprobs[:end],
            policy_versions=policy_versions[:end],
            stop_reason=_stop_reason(sampled.finish_reason, sampled.stop_reason),
        )
        if not np.isfinite(completion.logprobs).all():
            raise EngineError("vLLM reported a log-probability that is not finite")
        return completion

    async def _receive(self, llm: "AsyncLLM", update: WeightUpdate) -> WeightReceipt:
        if update.transport != self._weight_transport:
            raise WeightTransferError(
                f"weights came by {update.transport!r}, this engine takes {self._weight_transport!r}"
            )
        if update.transport == "nccl":
            await self._join(llm, update)
        paused = time.monotonic()
        # Clears prefix, multimodal and encoder caches; running requests start over from their
        # tokens. Nothing is scheduled before the end of the pause, so nothing old is cached anew.
        await llm.pause_generation(mode="keep", clear_cache=update.should_clear_caches)
        started = time.monotonic()
        if update.transport == "adapter":
            await self._replace_adapter(llm, update)
        else:
            await self._replace_weights(llm, update)
        finished = time.monotonic()
        await llm.resume_generation()
        resumed = time.monotonic()
        proof_gap = proof.check(
            await self._probe_logprobs(update.probe),
            update.probe,
            policy_version=update.policy_version,
        )
        proof_s = time.monotonic() - resumed
        if self._is_paused:
            await llm.pause_generation(mode="keep", clear_cache=False)
        self._policy_version = update.policy_version
        return WeightReceipt(
            policy_version=update.policy_version,
            proof_gap=proof_gap,
            pause_s=resumed - paused,
            update_s=finished - started,
            proof_s=proof_s,
        )

    async def _replace_weights(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await llm.start_weight_update()
        await llm.update_weights(
            WeightTransferUpdateRequest(update_info=self._update_arguments(update))
        )
        await llm.finish_weight_update(str(update.policy_version))

    async def _replace_adapter(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        """In the place of the one before, so that running requests go on under the new one."""
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
        self._adapter = LoRARequest(request.lora_name, ADAPTER_ID, request.lora_path)

    async def _join(self, llm: "AsyncLLM", update: WeightUpdate) -> None:
        """Meet the learner and the other members, unless this is the group of the last push."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        group: WeightGroup = update.payload["group"]
        if group.key == self._group_key:
            return
        if self._group_key is not None:
            await llm.shutdown_weight_transfer_engine()
        self._group_key = None
        arguments = group.receiver_arguments(self._actor_id)
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=arguments))
        self._group_key = group.key

    def _update_arguments(self, update: WeightUpdate) -> dict[str, Any]:
        payload = dict(update.payload)
        if update.transport == "nccl":
            del payload["group"]
        elif update.transport == "ipc":
            payload["ipc_handles_pickled"] = payload.pop("handles")[self._actor_id]
        return payload

    async def _probe_logprobs(self, probe: Probe) -> list[list[float]]:
        """Log-probabilities of each probe token but the first, past the prefix cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=True,
        )
        outputs = await asyncio.gather(
            *(self._request(_prompt(ids), parameters, is_probe=True) for ids in probe.token_ids)
        )
        return [
            _own_logprobs(output.prompt_logprobs, len(token_ids), first=1)
            for output, token_ids in zip(outputs, probe.token_ids, strict=True)
        ]

    def _alive(self) -> "AsyncLLM":
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._llm is None:
            raise EngineError("this engine has not started")
        return self._llm

    async def _condemn(self, reason: str) -> None:
        """From here on every call fails at once, running requests included."""
        self._failure = self._failure or reason
        llm = self._llm
        if llm is not None and self._running:
            # Their outputs are produced on this side, even when the core answers no more.
            with contextlib.suppress(Exception):
                await llm.abort(list(self._running))

    def _cause(self, error: BaseException) -> str:
        assert self._log is not None
        return self._log.cause(error)


def _own_logprobs(flat: Any, size: int, *, first: int = 0) -> list[float]:
    """Of each position from `first` on, the entry of the token that stands there."""
    if size == first:
        return []
    starts = flat.start_indices[first:size]
    if len(starts) != size - first:
        raise EngineError(
            f"vLLM reported {len(starts)} log-probabilities for {size - first} tokens"
        )
    return [flat.logprobs[start] for start in starts]


def _stop_reason(finish_reason: str | None, detail: int | str | None) -> CompletionStop:
    match finish_reason:
        case "stop":
            return CompletionStop.STOP_STRING if isinstance(detail, str) else CompletionStop.END
        case "length":
            return CompletionStop.LENGTH
        case "abort":
            return CompletionStop.ABORTED
        case _:
            raise EngineError(f"vLLM ended a request with {finish_reason!r} ({detail!r})")


def _end_token_ids(llm: "AsyncLLM") -> frozenset[int]:
    """The tokens at which vLLM itself stops."""
    ends: set[int] = set()
    tokenizer = llm.tokenizer
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    configured = llm.model_config.try_get_generation_config().get("eos_token_id")
    if configured is not None:
        ends.update([configured] if isinstance(configured, int) else configured)
    return frozenset(ends)


def _lora_room(rank: int) -> int:
    """The least of the ranks that vLLM has kernels for."""
    from vllm.config.lora import MaxLoRARanks

    rooms = [room for room in get_args(MaxLoRARanks) if room >= rank]
    if not rooms:
        raise EngineError(f"vLLM takes adapters of at most rank {max(get_args(MaxLoRARanks))}")
    return min(rooms)


def _prompt(token_ids: Sequence[int]) -> dict[str, Any]:
    # The form of a prompt that vLLM's renderer has dealt with: nothing is tokenized.
    return {"type": "token", "prompt_token_ids": [int(token) for token in token_ids]}


def _decoded(image: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(image)).convert("RGB")
