"""A transformers model as an engine, for machines without vLLM: one decode loop over all requests.

Consumes requests and weight updates; produces completions and receipts. The loop waits for requests;
a request waits for its tokens and for the end of an update. Steps and updates exclude each other, so
all tokens of one step have one policy version.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Self

import numpy as np

from raylearner.actors.engines.transformers_model import DecodeModel, DecodeRow
from raylearner.config.schema import TransformersEngine as TransformersEngineSection
from raylearner.errors import EngineDead, EngineError, WeightTransferError
from raylearner.types import Completion, CompletionStop, PolicyVersion, Sampling
from raylearner.weights.probe import verify_logprobs
from raylearner.weights.update import WeightReceipt, WeightUpdate


@dataclass(slots=True, kw_only=True, eq=False)
class _Request(DecodeRow):
    """One `generate` call; `token_ids` grows from the prompt on."""

    num_prompt_tokens: int
    done: asyncio.Future[Completion]
    logprobs: list[float] = field(default_factory=list[float])
    policy_versions: list[int] = field(default_factory=list[int])

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def finish(self, stop: CompletionStop) -> None:
        if not self.done.done():
            self.done.set_result(
                Completion(
                    token_ids=np.array(self.token_ids[self.num_prompt_tokens :], dtype=np.int32),
                    logprobs=np.array(self.logprobs, dtype=np.float32),
                    policy_versions=np.array(self.policy_versions, dtype=np.int32),
                    stop_reason=stop,
                )
            )

    def fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(EngineDead(reason))


class TransformersEngine:
    """Owns one model on one device and its key-value slots; implements `Engine`.

    The same seed and the same order of requests give the same tokens.
    """

    def __init__(
        self,
        config: TransformersEngineSection,
        model: DecodeModel,
        *,
        model_path: str,
        seed: int,
        weight_transport: str,
    ) -> None:
        """Use `start`, which loads the model as well."""
        self._config = config
        self._model = model
        self._model_path = model_path
        self._seed = seed
        self._weight_transport = weight_transport
        self._policy_version: PolicyVersion = 0
        self._request_numbers = count()
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []  # at the index of its slot
        self._wanted = asyncio.Event()
        self._stepping = asyncio.Lock()
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._loop = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls,
        config: TransformersEngineSection,
        *,
        model_path: str,
        seed: int,
        weight_transport: str = "shared_files",
    ) -> Self:
        """Load the model and start decoding. Raises `EngineError` with the cause."""
        try:
            model = await asyncio.to_thread(DecodeModel, config, model_path)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"transformers did not start with {model_path!r}: {error}") from error
        return cls(
            config, model, model_path=model_path, seed=seed, weight_transport=weight_transport
        )

    @property
    def policy_version(self) -> PolicyVersion:
        return self._policy_version

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, images: Sequence[bytes] = ()
    ) -> Completion:
        prompt, offset = self._prepare_prompt(token_ids, sampling, images)
        seed = sampling.seed
        entropy = (self._seed, next(self._request_numbers)) if seed is None else seed
        request = _Request(
            sampling=sampling,
            generator=np.random.default_rng(entropy),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            images=tuple(images),
            offset=offset,
            done=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(request)
        self._wanted.set()
        return await request.done  # when this is cancelled, the loop drops the request

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        self._assert_alive()
        paused = time.monotonic()
        async with self._stepping:
            try:
                receipt = await asyncio.to_thread(self._replace_weights, update, paused)
            except BaseException as error:
                self._fail(f"policy version {update.policy_version} could not be loaded: {error}")
                if isinstance(error, WeightTransferError) or not isinstance(error, Exception):
                    raise
                raise WeightTransferError(str(self._failure)) from error
            self._policy_version = update.policy_version
            if not update.should_recompute:
                return receipt
            cached = [request for request in self._running if request.is_cached]
            for request in cached:
                request.is_cached = False
        return replace(receipt, num_recomputed=sum(len(r.token_ids) for r in cached))

    async def sleep(self) -> None:
        raise EngineError("an engine of kind transformers cannot free its memory; use kind vllm")

    async def abort(self) -> None:
        async with self._stepping:
            for request in (*self._running, *self._waiting):
                request.finish(CompletionStop.ABORTED)
            self._waiting.clear()

    async def died(self) -> str:
        await self._failed.wait()
        assert self._failure is not None, "set together"
        return self._failure

    async def close(self) -> None:
        """Fail running requests and free the model; safe to call twice."""
        self._fail("this engine is closed")
        self._loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loop
        self._model.free()

    def _prepare_prompt(
        self, token_ids: Sequence[int], sampling: Sampling, images: Sequence[bytes]
    ) -> tuple[list[int], int]:
        """Return the prompt with every image's own tokens, and the offset of positions behind it.

        Raises `EngineError` for a request that cannot be sampled.
        """
        self._assert_alive()
        prompt, offset = [int(token) for token in token_ids], 0
        if images:
            encoder = self._model.image_encoder
            if encoder is None:
                raise EngineError(f"{self._model_path!r} is text-only; the request has images")
            prompt = encoder.expand(prompt, images)
            offset = encoder.offset(prompt, images)
        limit = self._config.max_model_tokens
        if not 1 <= len(prompt) < limit:
            raise EngineError(
                f"prompt has {len(prompt)} tokens, the engine takes 1 to {limit - 1} "
                "(max_model_tokens)"
            )
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens must be >= 1, got {sampling.max_tokens}")
        return prompt, offset

    def _assert_alive(self) -> None:
        if self._failure is not None:
            raise EngineDead(self._failure)

    def _fail(self, reason: str) -> None:
        """Fail all running requests, and every later call immediately."""
        self._failure = self._failure or reason
        self._failed.set()
        for request in (*self._running, *self._waiting):
            request.fail(self._failure)
        self._waiting.clear()

    def _replace_weights(self, update: WeightUpdate, paused: float) -> WeightReceipt:
        if update.transport != self._weight_transport:
            raise WeightTransferError(
                f"weights arrived via {update.transport!r}; this engine expects"
                f" {self._weight_transport!r}"
            )
        started = time.monotonic()
        names = self._model.load_weights(update.payload)
        loaded = time.monotonic()
        num_verified = self._model.verify_weights(update, names)
        verified = time.monotonic()
        logprob_error = verify_logprobs(
            self._model.probe_logprobs(update.probe),
            update.probe,
            policy_version=update.policy_version,
        )
        finished = time.monotonic()
        return WeightReceipt(
            policy_version=update.policy_version,
            logprob_error=logprob_error,
            pause_s=finished - paused,
            update_s=loaded - started,
            probe_s=finished - verified,
            verify_s=verified - loaded,
            num_verified=num_verified,
        )

    # -- the decode loop -----------------------------------------------------------------------

    async def _run(self) -> None:
        while self._failure is None:
            async with self._stepping:
                self._admit()
                if self._running:
                    try:
                        tokens, logprobs = await asyncio.to_thread(self._model.step, self._running)
                    except Exception as error:  # torch raises errors of any type
                        self._fail(f"the decode step failed: {error!r}")
                        return
                    self._record(tokens, logprobs)
                else:
                    self._wanted.clear()
            if self._running:
                await asyncio.sleep(0)  # episodes whose turn ended request their next one
            else:
                await self._wanted.wait()

    def _admit(self) -> None:
        """Drop finished requests, from the highest slot down, then fill free slots in order."""
        for slot in reversed(range(len(self._running))):
            if self._running[slot].done.done():
                last = self._running.pop()
                if slot < len(self._running):
                    self._model.move_slot(len(self._running), slot, len(last.token_ids))
                    self._running[slot] = last
        while self._waiting and len(self._running) < self._config.max_sequences:
            request = self._waiting.pop(0)
            if not request.done.done():
                self._running.append(request)

    def _record(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for request, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            if not np.isfinite(logprob):
                self._fail(f"the model gave token {token} a log-probability of {logprob}")
                return
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.policy_versions.append(self._policy_version)
            stop = self._stop_of(request, token)
            if stop is not None:
                request.finish(stop)

    def _stop_of(self, request: _Request, token: int) -> CompletionStop | None:
        sampling = request.sampling
        if token in self._model.end_token_ids or token in sampling.stop_token_ids:
            return CompletionStop.END
        if sampling.stop and self._model.ends_with(
            request.token_ids, request.num_sampled, sampling.stop
        ):
            return CompletionStop.STOP_STRING
        is_full = len(request.token_ids) >= self._config.max_model_tokens
        if is_full or request.num_sampled >= sampling.max_tokens:
            return CompletionStop.LENGTH
        return None
