"""vLLM's AsyncLLM as an engine: generation, and weights that are replaced under running requests.

Consumes requests and weight updates; produces completions and receipts. Waits for vLLM's core, a
child process that ends with this one; during a weight update requests wait, unblocked by its end or,
when it fails, by an `EngineDead`.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import psutil

from raylearner.actors.engines import vllm_process, vllm_requests
from raylearner.actors.engines.vllm_arguments import SIZES, engine_arguments
from raylearner.config.actors import ImagesSection
from raylearner.config.schema import VllmEngine as VllmEngineSection
from raylearner.errors import CompilationError, EngineDead, EngineError, WeightTransferError
from raylearner.types import Completion, PolicyVersion, Sampling
from raylearner.weights.probe import verify_logprobs
from raylearner.weights.transports import transport_of
from raylearner.weights.update import Probe, WeightReceipt, WeightUpdate

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from raylearner.weights.transports.transport import Receiver

logger = logging.getLogger(__name__)

DEATH_POLL_S = 0.5
"""Interval at which the death of an idle core is looked for."""
ABORT_POLL_S = 0.01
"""Interval between attempts to abort requests that vLLM had not registered yet."""
NUM_RESENDS = 5
"""Retries of a request with images that vLLM's two image caches disagree on, as they do after a request
was cancelled on its way and after a sleep: the core reports the missing images, and the next request
carries them."""
PROBE_PRIORITY = -1
"""The lowest number goes first: probes do not wait behind requests that are prefilled again."""


class VllmEngine:
    """Owns one AsyncLLM and its processes; implements `actors.engines.engine.Engine`.

    Every token's policy version is vLLM's own weight version at the step that sampled it.
    """

    def __init__(self, receiver: "Receiver", *, sleep_level: int) -> None:
        self._weights = receiver
        self._sleep_level = sleep_level
        self._policy_version: PolicyVersion = 0
        self._llm: AsyncLLM | None = None
        self._failure: str | None = None
        self._is_asleep = False
        self._receiving = asyncio.Lock()
        self._request_ids = itertools.count()
        self._running: set[str] = set()
        self._push_numbers = itertools.count()
        self._cache_salt: str | None = None
        """Part of the key of a request's blocks in the prefix cache, another after each push that keeps
        caches."""
        self._end_token_ids: frozenset[int] = frozenset()
        self._processes: set[psutil.Process] = set()
        self._log = vllm_process.ErrorLog()

    @classmethod
    async def start(
        cls,
        config: VllmEngineSection,
        *,
        model_path: str,
        seed: int,
        weight_transport: str,
        actor_id: str = "",
        lora_rank: int | None = None,
        max_images: int = ImagesSection().max_images,
        num_banned: int = 0,
        report: Callable[[str], None] = lambda phase: None,
    ) -> Self:
        """Start vLLM. On failure all its processes are ended and `EngineError` names the cause.

        `actor_id` identifies the engine in pushes made for particular members, `lora_rank` is the rank
        of adapters received via the transport `adapter`. A request has at most `max_images` images and
        bans `num_banned` tokens. `report` receives the phases of the start.
        """
        transport = transport_of(weight_transport)
        vllm_process.set_environment(
            kv_cache_gib=config.kv_cache_gib,
            shares_memory=transport.shares_memory,
            num_banned=num_banned,
        )
        receiver = await asyncio.to_thread(transport.make_receiver, actor_id)  # may import vLLM
        # With adapters the base's weights are not sent again, so the host keeps them during sleep.
        engine = cls(receiver, sleep_level=2 if lora_rank is None else 1)
        before = set(vllm_process.children())
        engine._log.hold_sockets()
        report("starting vLLM")
        following = asyncio.create_task(
            engine._log.follow_start(report, captures_graphs=config.eager is False)
        )
        try:
            arguments = await asyncio.to_thread(  # which imports vLLM
                engine_arguments,
                config,
                model_path=model_path,
                seed=seed,
                weight_backend=receiver.backend,
                receives_beside_weights=receiver.takes_memory,
                lora_rank=lora_rank,
                max_images=max_images,
            )
            await engine._create_in_some_mode(arguments, before)
            llm = engine._alive()
            engine._end_token_ids = vllm_requests.end_token_ids(llm)
            await receiver.initialize(llm)
        except BaseException as error:
            cause = engine._log.cause(error)
            await engine._end(set(vllm_process.children()) - before)
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"vLLM did not start with {model_path!r}: {cause}") from error
        finally:
            following.cancel()
        engine._processes = set(vllm_process.children()) - before
        engine._log.list_segments(engine._processes)
        return engine

    @property
    def policy_version(self) -> PolicyVersion:
        return self._policy_version

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
                cause = self._log.cause(error)
                reason = f"policy version {update.policy_version} could not be loaded: {cause}"
                await self._fail(reason)
                if isinstance(error, WeightTransferError) or not isinstance(error, Exception):
                    raise
                raise WeightTransferError(reason) from error

    async def sleep(self) -> None:
        """Freeze running requests and free weights and caches, until `receive` brings new weights.

        Requests are then recomputed. Memory is freed only with `sleep`, and only on GPUs.
        """
        async with self._receiving:
            llm = self._alive()
            try:
                await llm.sleep(level=self._sleep_level, mode="keep")
            except Exception as error:
                reason = f"vLLM did not go to sleep: {self._log.cause(error)}"
                await self._fail(reason)
                raise EngineDead(reason) from error
            self._is_asleep = True

    async def abort(self) -> None:
        llm = self._alive()
        targets = set(self._running)
        while targets := targets & self._running:
            await llm.abort(list(targets))
            await asyncio.sleep(ABORT_POLL_S)

    async def died(self) -> str:
        while self._failure is None:
            if self._llm is not None and self._llm.errored:
                return self._note_death(self._llm.dead_error)
            await asyncio.sleep(DEATH_POLL_S)
        return self._failure

    async def close(self) -> None:
        """End vLLM's processes, by force if they do not end in time; safe to call twice."""
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
        self._log.remove()

    async def _create_in_some_mode(
        self, arguments: dict[str, Any], before: set[psutil.Process]
    ) -> None:
        """Create the engine, eagerly if compilation or the capture of CUDA graphs fails.

        `before` are the processes of others here.
        """
        try:
            await asyncio.to_thread(self._create, arguments)
        except Exception as error:
            if not self._log.has_logged(CompilationError):
                raise
            logger.warning(
                "vLLM did not start with CUDA graphs and compilation (%s); it starts again without"
                " (actors.engine.eager: true), which generates at less than half the speed",
                self._log.cause(error),
            )
            await asyncio.to_thread(vllm_process.end, list(set(vllm_process.children()) - before))
            eager = {name: value for name, value in arguments.items() if name not in SIZES}
            await asyncio.to_thread(self._create, eager | {"enforce_eager": True})

    def _create(self, arguments: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        given = {"log_config_file": self._log.configuration(), **arguments}
        # Not returned: frames that vLLM keeps would hold the result beyond `close`.
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))

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
        if self._cache_salt is not None:
            prompt["cache_salt"] = self._cache_salt
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
            if llm.errored:
                self._note_death(error)
            if self._failure is not None:
                raise EngineDead(self._failure) from error
            raise EngineError(f"vLLM refused: {self._log.cause(error)}") from error
        finally:
            self._running.discard(request_id)
        if self._failure is not None:
            raise EngineDead(self._failure)
        if output is None:
            raise EngineError("vLLM ended a request without an output")
        return output

    async def _receive(self, llm: "AsyncLLM", update: WeightUpdate) -> WeightReceipt:
        """Replace the weights; `vllm_transfer` has the timeline."""
        has_slept = self._is_asleep
        await self._weights.prepare(llm, update)
        started = time.monotonic()
        if not has_slept:
            await self._weights.stage(llm, update)
        paused = time.monotonic()
        if has_slept:
            await llm.wake_up(tags=["weights"])
        else:
            # As `AsyncLLM.pause_generation`, which then sleeps for 20 ms.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        if not update.should_recompute:
            # Blocks of earlier requests, and those that they add, serve requests of their time only.
            self._cache_salt = str(next(self._push_numbers))
        stopped = time.monotonic()
        calls: list[Awaitable[None]] = [self._weights.replace(llm, update, has_slept=has_slept)]
        if update.should_recompute and not has_slept:
            calls.append(self._clear_caches(llm))
        await asyncio.gather(*calls)
        replaced = time.monotonic()
        # Tokens sampled before the pause have arrived. Requests that slept lost their keys and values.
        num_recomputed = _count_cached(llm) if has_slept or update.should_recompute else 0
        if has_slept:
            await llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        await llm.resume_generation()
        resumed = time.monotonic()
        probing = asyncio.create_task(self._timed_probe(update))
        try:
            num_verified = await self._weights.verify(llm, update)
            verified = time.monotonic()
            logprob_error, probe_s = await probing
        except BaseException:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            raise
        self._policy_version = update.policy_version
        return WeightReceipt(
            policy_version=update.policy_version,
            logprob_error=logprob_error,
            stage_s=paused - started,
            pause_s=resumed - paused,
            update_s=replaced - stopped,
            probe_s=probe_s,
            verify_s=verified - resumed,
            num_verified=num_verified,
            num_recomputed=num_recomputed,
        )

    async def _clear_caches(self, llm: "AsyncLLM") -> None:
        """Clear results of old weights: running requests start over from their tokens and images.

        Nothing is scheduled before the end of the pause, so nothing old is cached again. Cached pixels
        stay: without them, the core would refuse requests that arrive meanwhile.
        """
        if not await llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise EngineError("vLLM did not clear its prefix cache")
        await llm.reset_encoder_cache()

    async def _timed_probe(self, update: WeightUpdate) -> tuple[float, float]:
        """Return the log-probability error on the probe, and the time to score it."""
        started = time.monotonic()
        logprobs = await self._probe_logprobs(update.probe)
        probe_s = time.monotonic() - started
        version = update.policy_version
        return verify_logprobs(logprobs, update.probe, policy_version=version), probe_s

    async def _probe_logprobs(self, probe: Probe) -> list[list[float]]:
        async def score(ids: Sequence[int], images: Sequence[bytes], num: int) -> list[float]:
            prompt = await vllm_requests.prompt(ids, images)
            output = await self._request(prompt, vllm_requests.probe_parameters(), is_probe=True)
            return vllm_requests.probe_logprobs(output, num)

        return await asyncio.gather(*(score(*prompt) for prompt in probe.prompts()))

    def _alive(self) -> "AsyncLLM":
        if self._failure is not None or self._llm is None:
            raise EngineDead(self._failure or "this engine is closed")
        return self._llm

    def _note_death(self, error: BaseException) -> str:
        self._failure = self._failure or f"vLLM died: {self._log.cause(error)}"
        return self._failure

    async def _fail(self, reason: str) -> None:
        """Fail all running requests, and every later call immediately."""
        self._failure = self._failure or reason
        llm = self._llm
        if llm is not None and self._running:
            # Their outputs are produced on this side, even when the core does not answer.
            with contextlib.suppress(Exception):
                await llm.abort(list(self._running))


def _count_cached(llm: "AsyncLLM") -> int:
    """Return the number of tokens whose keys and values running requests have computed."""
    states = llm.output_processor.request_states.values()
    return sum(
        state.prompt_len + state.detokenizer.num_output_tokens()
        for state in states
        if not state.is_prefilling and state.detokenizer is not None
    )
