"""vLLM's AsyncLLM as an engine: generation, and weights that land under running requests.

Consumes requests and weight updates; produces completions and receipts. Waits for vLLM's core, a
child process that ends with this one; a request waits while weights land, and is unblocked by the
end of the update or, when that fails, by an `EngineError`.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil

from raylearner.actors.engines import vllm_process, vllm_requests
from raylearner.actors.engines.vllm_vision import vision_arguments
from raylearner.actors.engines.vllm_weights import WeightEntrance, lora_arguments
from raylearner.config.actors import ImagesSection
from raylearner.config.schema import VllmEngine as VllmEngineSection
from raylearner.errors import EngineError, WeightTransferError
from raylearner.types import (
    Completion,
    PolicyVersion,
    Probe,
    Sampling,
    WeightReceipt,
    WeightUpdate,
)
from raylearner.weights.probe import NUM_PROBE_SEQUENCES, verify_logprobs

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

ABORT_POLL_S = 0.01
"""Between two attempts to abort requests that vLLM had not registered yet."""
SHARED_BELOW = 0.5
"""With a smaller share of a GPU's memory an engine counts on others that start beside it."""
NUM_RESENDS = 5
"""Of a request with images that vLLM's two caches of them disagree on. They do so after a request that
was cancelled on its way and after a sleep; the core tells what it lacks, and gets it with the next."""
PROBE_PRIORITY = -1
"""The smallest number goes first: a probe does not wait behind requests that are prefilled again."""
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
        max_images: int = ImagesSection().max_images,
        num_banned: int = 0,
    ) -> None:
        """`actor_id` is how pushes made for their members name this engine.

        `max_images` is for one request, `num_banned` the most tokens that one bans. `lora_rank` is the rank of the adapters that come by the transport `adapter`.
        """
        self._lora_rank = lora_rank
        self._max_images, self._num_banned = max_images, num_banned
        self._config = config
        self._model_path = model_path
        self._seed = seed
        self._weights = WeightEntrance(weight_transport, actor_id=actor_id)
        self._policy_version = policy_version
        self._llm: AsyncLLM | None = None
        self._failure: str | None = None
        self._is_paused = self._is_asleep = False
        self._receiving = asyncio.Lock()
        self._request_ids = itertools.count()
        self._running: set[str] = set()
        self._end_token_ids: frozenset[int] = frozenset()
        self._processes: set[psutil.Process] = set()
        self._log: vllm_process.ErrorLog | None = None

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
                shares_memory=self._weights.shares_memory,
                num_banned=self._num_banned,
            )
            await asyncio.to_thread(self._create, self._log.configuration())
            assert self._llm is not None
            self._end_token_ids = vllm_requests.end_token_ids(self._llm)
            await self._weights.initialize(self._llm, self._policy_version)
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
        prompt = await vllm_requests.prompt(token_ids, images)
        output = await self._request(prompt, vllm_requests.sampling_parameters(sampling))
        return vllm_requests.completion(output, sampling, self._end_token_ids)

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

    async def sleep(self) -> None:
        """Freeze running requests and free weights and caches, until `receive` brings new weights.

        Requests are recomputed then. Only with `sleep` is memory freed, and only on GPUs.
        """
        async with self._receiving:
            llm = self._alive()
            try:
                # Adapters bring no weights of their base, which the host keeps meanwhile.
                level = 2 if self._lora_rank is None else 1
                await llm.sleep(level=level, mode="keep")
            except Exception as error:
                reason = f"vLLM did not fall asleep: {self._cause(error)}"
                await self._condemn(reason)
                raise EngineError(reason) from error
            self._is_asleep = True

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
            # Probes find a place also while every other is taken, and go first.
            "max_num_seqs": config.max_sequences + NUM_PROBE_SEQUENCES,
            "scheduling_policy": "priority",
            "gpu_memory_utilization": config.memory_fraction,
            "tensor_parallel_size": config.tensor_parallel_size,
            "enforce_eager": config.eager,
            "seed": self._seed,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "log_config_file": log_configuration,
            "weight_transfer_config": WeightTransferConfig(backend=self._weights.backend),
            "worker_extension_cls": EXTENSION,
            **vision_arguments(self._model_path, max_images=self._max_images),
        }
        if self._lora_rank is not None:
            arguments |= lora_arguments(self._lora_rank)
        if config.tensor_parallel_size > 1:
            # vLLM would otherwise ask Ray for GPUs, which this actor holds already.
            arguments["distributed_executor_backend"] = "mp"
        if config.sleep:
            arguments |= vllm_process.sleep_arguments()
        if config.memory_fraction < SHARED_BELOW or config.sleep:
            arguments |= vllm_process.cache_arguments(
                self._model_path, memory_fraction=config.memory_fraction
            )
        if config.head_dtype == "float32" and config.dtype != "float32":
            arguments["hf_overrides"] = {"head_dtype": "float32"}
        # Not returned: frames that vLLM keeps would hold the result beyond `close`.
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**(arguments | config.extra_arguments))
        )

    async def _request(
        self, prompt: Any, parameters: "SamplingParams", *, is_probe: bool = False
    ) -> "RequestOutput":
        num_left = NUM_RESENDS if vllm_requests.has_images(prompt) else 0
        while True:
            try:
                output = await self._send(prompt, parameters, is_probe=is_probe)
                if not num_left or not vllm_requests.was_refused(output):
                    return output
            except EngineError as error:
                if not num_left or not vllm_requests.is_recoverable(error):
                    raise
            num_left -= 1

    async def _send(
        self, prompt: Any, parameters: "SamplingParams", *, is_probe: bool
    ) -> "RequestOutput":
        llm = self._alive()
        request_id = str(next(self._request_ids))
        output: RequestOutput | None = None
        if not is_probe:
            self._running.add(request_id)
        try:
            async for item in llm.generate(
                prompt,
                parameters,
                request_id,
                lora_request=self._weights.adapter,
                priority=PROBE_PRIORITY if is_probe else 0,
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

    async def _receive(self, llm: "AsyncLLM", update: WeightUpdate) -> WeightReceipt:
        await self._weights.meet(llm, update)
        paused = time.monotonic()
        if self._is_asleep:
            await llm.wake_up(tags=["weights"])
        else:
            await llm.pause_generation(mode="keep", clear_cache=False)
            if update.should_clear_caches:
                await self._clear_caches(llm)
        started = time.monotonic()
        await self._weights.replace(llm, update)
        loaded = time.monotonic()
        num_verified = await self._weights.verify(llm, update)
        verified = time.monotonic()
        if self._is_asleep:
            await llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        await llm.resume_generation()
        resumed = time.monotonic()
        logprob_error = verify_logprobs(
            await self._probe_logprobs(update.probe),
            update.probe,
            policy_version=update.policy_version,
        )
        probe_s = time.monotonic() - resumed
        if self._is_paused:
            await llm.pause_generation(mode="keep", clear_cache=False)
        self._policy_version = update.policy_version
        return WeightReceipt(
            policy_version=update.policy_version,
            logprob_error=logprob_error,
            pause_s=resumed - paused,
            update_s=loaded - started,
            probe_s=probe_s,
            verify_s=verified - loaded,
            num_verified=num_verified,
        )

    async def _clear_caches(self, llm: "AsyncLLM") -> None:
        """Of what old weights computed: running requests start over from their tokens and images.

        Nothing is scheduled before the end of the pause, so nothing old is cached anew. Pixels stay
        as they are: with them cleared, the core would refuse requests that come meanwhile.
        """
        if not await llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise EngineError("vLLM did not clear its prefix cache")
        await llm.reset_encoder_cache()

    async def _probe_logprobs(self, probe: Probe) -> list[list[float]]:
        async def score(ids: Sequence[int], images: Sequence[bytes], num: int) -> list[float]:
            prompt = await vllm_requests.prompt(ids, images)
            output = await self._request(prompt, vllm_requests.probe_parameters(), is_probe=True)
            return vllm_requests.probe_logprobs(output, num)

        return await asyncio.gather(*(score(*prompt) for prompt in probe.prompts()))

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
