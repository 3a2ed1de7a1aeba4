"""A transformers model as an engine, for machines without vLLM: one decode loop over all requests.

Consumes requests and weight updates; produces completions and receipts. Waits for requests; they
wait for their tokens, for the end of an update and, while paused, for `resume`. Steps and updates
exclude each other, so all tokens of one step are of one policy version.

Legend: `B` running requests, `L` tokens so far, `V` vocab.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from raylearner.actors.engines.token_sampler import Draw, sample
from raylearner.actors.engines.transformers_images import Sight
from raylearner.actors.engines.transformers_slots import Slots
from raylearner.config.schema import TransformersEngine as TransformersEngineSection
from raylearner.errors import EngineError, WeightTransferError
from raylearner.types import (
    Completion,
    CompletionStop,
    PolicyVersion,
    Probe,
    Sampling,
    WeightReceipt,
    WeightUpdate,
)
from raylearner.weights.checksums import Checksums, plain
from raylearner.weights.probe import verify_logprobs
from raylearner.weights.verification import refuse_differences

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True, kw_only=True, eq=False)
class _Request(Draw):
    """One `generate` call; `token_ids` grows from the prompt on."""

    num_prompt_tokens: int
    images: tuple[bytes, ...] = ()
    offset: int = 0
    """Of positions to places, behind images, which take fewer positions than tokens."""
    done: asyncio.Future[Completion]
    logprobs: list[float] = field(default_factory=list[float])
    policy_versions: list[int] = field(default_factory=list[int])
    is_cached: bool = False
    """Whether the keys and values of all its tokens but the last are in its slot."""

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
            self.done.set_exception(EngineError(reason))


class TransformersEngine:
    """Owns one model on one device and its key-value slots; implements `actors.engine.Engine`.

    The same seed and the same order of requests give the same tokens.
    """

    def __init__(
        self,
        config: TransformersEngineSection,
        *,
        model_path: str,
        seed: int,
        weight_transport: str = "shared_files",
        policy_version: PolicyVersion = 0,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._seed = seed
        self._weight_transport = weight_transport
        self._policy_version = policy_version
        self._request_numbers = count()
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []  # at the place of its slot
        self._wanted = asyncio.Event()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._stepping = asyncio.Lock()
        self._loop: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._model: Any = None
        self._came: list[str] = []
        self._cache: Any = None
        self._sight: Sight | None = None

    @property
    def policy_version(self) -> PolicyVersion:
        return self._policy_version

    async def start(self) -> None:
        if self._loop is not None:
            raise EngineError("this engine has started already")
        try:
            await asyncio.to_thread(self._load_model)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(
                f"transformers did not start with {self._model_path!r}: {error}"
            ) from error
        self._loop = asyncio.create_task(self._run())

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, images: Sequence[bytes] = ()
    ) -> Completion:
        prompt = self._accepted(token_ids, sampling, images)
        seed = sampling.seed
        entropy = (self._seed, next(self._request_numbers)) if seed is None else seed
        request = _Request(
            sampling=sampling,
            generator=np.random.default_rng(entropy),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            images=tuple(images),
            offset=self._sight.offset(prompt, images) if self._sight and images else 0,
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
                receipt = await asyncio.to_thread(self._receive, update, paused)
            except BaseException as error:
                self._condemn(f"policy version {update.policy_version} did not arrive: {error}")
                if isinstance(error, WeightTransferError) or not isinstance(error, Exception):
                    raise
                raise WeightTransferError(str(self._failure)) from error
            self._policy_version = update.policy_version
            if update.should_clear_caches:
                for request in self._running:
                    request.is_cached = False
        return receipt

    async def sleep(self) -> None:
        raise EngineError("an engine of kind transformers cannot free its memory; use kind vllm")

    async def pause(self) -> None:
        """Freeze running requests where they are; new ones wait."""
        self._is_open.clear()
        async with self._stepping:
            self._assert_alive()

    async def resume(self) -> None:
        self._assert_alive()
        self._is_open.set()

    async def abort(self) -> None:
        async with self._stepping:
            for request in (*self._running, *self._waiting):
                request.finish(CompletionStop.ABORTED)
            self._waiting.clear()

    async def close(self) -> None:
        """Running requests fail; safe to call twice."""
        self._condemn("this engine is closed")
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop
        self._model = self._cache = None

    def _accepted(
        self, token_ids: Sequence[int], sampling: Sampling, images: Sequence[bytes]
    ) -> list[int]:
        """The prompt with every image's own tokens. Raises `EngineError` for what cannot be sampled."""
        self._assert_alive()
        if self._loop is None:
            raise EngineError("this engine has not started")
        prompt = [int(token) for token in token_ids]
        if images:
            if self._sight is None:
                raise EngineError(f"{self._model_path!r} reads text alone, and came with images")
            prompt = self._sight.expand(prompt, images)
        limit = self._config.max_model_tokens
        if not 1 <= len(prompt) < limit:
            raise EngineError(
                f"prompt has {len(prompt)} tokens, the engine takes 1 to {limit - 1} "
                "(max_model_tokens)"
            )
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens must be >= 1, got {sampling.max_tokens}")
        return prompt

    def _assert_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    def _condemn(self, reason: str) -> None:
        """From here on every call fails at once, running requests included."""
        self._failure = self._failure or reason
        for request in (*self._running, *self._waiting):
            request.fail(self._failure)
        self._waiting.clear()

    # -- the decode loop -----------------------------------------------------------------------

    async def _run(self) -> None:
        while self._failure is None:
            await self._is_open.wait()
            async with self._stepping:
                self._admit()
                if self._running:
                    try:
                        stepped = await asyncio.to_thread(self._step)
                    except Exception as error:  # whatever torch raises: nobody can sample any more
                        self._condemn(f"the decode step failed: {error!r}")
                        return
                    self._record(*stepped)
                else:
                    self._wanted.clear()
            if self._running:
                await asyncio.sleep(0)  # episodes whose turn ended ask for their next one
            else:
                await self._wanted.wait()

    def _admit(self) -> None:
        """Drop what is done, from the highest slot down, then fill free slots in order."""
        for slot in reversed(range(len(self._running))):
            if self._running[slot].done.done():
                last = self._running.pop()
                if slot < len(self._running):
                    self._cache.move(len(self._running), slot, len(last.token_ids))
                    self._running[slot] = last
        while self._waiting and len(self._running) < self._config.max_sequences:
            request = self._waiting.pop(0)
            if not request.done.done():
                self._running.append(request)

    @torch.inference_mode()
    def _step(self) -> tuple[list[int], list[float]]:
        """One more token for each running request."""
        requests = self._running
        first = next((i for i, r in enumerate(requests) if not r.is_cached), len(requests))
        if first < len(requests):
            self._fill(first)
        device = self._device
        lengths = torch.tensor([len(r.token_ids) for r in requests], device=device)
        last = torch.tensor([r.token_ids[-1] for r in requests], device=device)
        places = torch.arange(int(lengths.max()), device=device)
        offsets = torch.tensor([r.offset for r in requests], device=device)
        self._cache.extend(lengths - 1)
        logits = self._model(
            input_ids=last[:, None],
            position_ids=(lengths - 1 + offsets)[:, None],
            attention_mask=(places < lengths[:, None])[:, None, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]  # [B, V]
        tokens, logprobs = sample(logits, requests)
        return tokens.tolist(), logprobs.tolist()

    def _fill(self, first: int) -> None:
        """Keys and values of all tokens but the last, from slot `first` on; equal rows run once."""
        prefixes = [(tuple(r.token_ids[:-1]), r.images) for r in self._running[first:]]
        unique = {prefix: index for index, prefix in enumerate(dict.fromkeys(prefixes))}
        longest = max(len(token_ids) for token_ids, _ in unique)
        if longest:
            rows = [[*token_ids, *[0] * (longest - len(token_ids))] for token_ids, _ in unique]
            positions = torch.arange(longest, device=self._device).expand(len(rows), -1)
            seen: dict[str, Any] = {}
            if self._sight is not None and any(images for _, images in unique):
                positions, seen = self._sight.inputs(self._model, list(unique), longest)
            input_ids = torch.tensor(rows, device=self._device)
            causal = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()
            indices = torch.tensor([unique[prefix] for prefix in prefixes], device=self._device)
            self._cache.fill(first, indices)
            self._model.base_model(  # padding is to the right: what it yields is never looked at
                input_ids=input_ids,
                attention_mask=causal.expand(len(rows), 1, -1, -1),
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                **seen,
            )
        for request in self._running[first:]:
            request.is_cached = True

    def _record(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for request, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            if not np.isfinite(logprob):
                self._condemn(f"the model gave token {token} a log-probability of {logprob}")
                return
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.policy_versions.append(self._policy_version)
            stop = self._stop(request, token)
            if stop is not None:
                request.finish(stop)

    def _stop(self, request: _Request, token: int) -> CompletionStop | None:
        sampling = request.sampling
        if token in self._end_token_ids or token in sampling.stop_token_ids:
            return CompletionStop.END
        if sampling.stop and self._text.ends(request.token_ids, request.num_sampled, sampling.stop):
            return CompletionStop.STOP_STRING
        is_full = len(request.token_ids) >= self._config.max_model_tokens
        if is_full or request.num_sampled >= sampling.max_tokens:
            return CompletionStop.LENGTH
        return None

    # -- model and weights ---------------------------------------------------------------------

    def _load_model(self) -> None:
        disable_progress_bar()
        self._device = torch.device(self._config.device)
        self._sight = Sight.from_pretrained(self._model_path)
        family: Any = AutoModelForCausalLM if self._sight is None else AutoModelForImageTextToText
        model: Any = family.from_pretrained(
            self._model_path, dtype=DTYPES[self._config.dtype], attn_implementation="sdpa"
        )
        kinds = set(
            getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
        )
        if kinds != {"full_attention"}:
            raise EngineError(
                f"layers of kind {', '.join(sorted(kinds))} need another cache; use kind 'vllm'"
            )
        self._model = model.to(self._device).eval()
        self._cache = Slots(self._config.max_sequences, self._config.max_model_tokens)
        self._text = _StopText(AutoTokenizer.from_pretrained(self._model_path))
        ends = model.generation_config.eos_token_id
        self._end_token_ids = {ends} if isinstance(ends, int) else set(ends or ())

    def _receive(self, update: WeightUpdate, paused: float) -> WeightReceipt:
        if update.transport != self._weight_transport:
            raise WeightTransferError(
                f"weights came by {update.transport!r}, this engine takes {self._weight_transport!r}"
            )
        started = time.monotonic()
        self._load_weights(update.payload)
        loaded = time.monotonic()
        num_verified = self._verify(update)
        verified = time.monotonic()
        logprob_error = verify_logprobs(
            self._probe_logprobs(update.probe), update.probe, policy_version=update.policy_version
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

    @torch.no_grad()
    def _load_weights(self, payload: Mapping[str, Any]) -> None:
        """All tensors of the file into the model; refused when one is missing or unknown."""
        tensors = load_file(payload["path"])
        if len(tensors) != payload["num_tensors"]:
            raise WeightTransferError(
                f"{payload['path']} holds {len(tensors)} tensors, {payload['num_tensors']} were "
                "written"
            )
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        if unknown := sorted(tensors.keys() - parameters.keys()):
            raise WeightTransferError(f"weights refused: the model has no {', '.join(unknown[:5])}")
        came = {id(parameters[name]) for name in tensors}  # a tied tensor comes under either name
        if missing := sorted(n for n, p in parameters.items() if id(p) not in came):
            raise WeightTransferError(f"weights refused: never came: {', '.join(missing[:5])}")
        self._came = list(tensors)
        for name, tensor in tensors.items():
            if tensor.shape != parameters[name].shape:
                raise WeightTransferError(
                    f"weights refused: {name} is {tuple(parameters[name].shape)}, "
                    f"got {tuple(tensor.shape)}"
                )
            parameters[name].copy_(tensor)

    def _verify(self, update: WeightUpdate) -> int:
        """Compares what the model's own parameters hold with what was sent, tensor by tensor."""
        sent = update.payload["checksums"]
        sums = Checksums()
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name in sent.keys() & parameters.keys():
            sums.add(name, parameters[name])
        parts = [[name, name, "all of it", *plain(found)] for name, found in sums.result().items()]
        report = {"names": self._came, "parts": parts, "repacked": [], "strays": [], "arrived": {}}
        return refuse_differences(sent, [report], policy_version=update.policy_version)

    @torch.inference_mode()
    def _probe_logprobs(self, probe: Probe) -> list[list[float]]:
        """Log-probabilities of the last tokens of each probe, by a plain forward."""
        found: list[list[float]] = []
        for token_ids, images, num_scored in probe.prompts():
            seen: dict[str, Any] = {}
            if images and self._sight is not None:
                token_ids = tuple(self._sight.expand(token_ids, images))
                row = (token_ids, images)
                seen["position_ids"], more = self._sight.inputs(self._model, [row], len(token_ids))
                seen |= more
            ids = torch.tensor([token_ids], device=self._device)
            logits = self._model(ids, use_cache=False, **seen).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            found.append(logprobs[len(logprobs) - num_scored :].tolist())
        return found


class _StopText:
    """Tells whether the text sampled so far holds a stop string, special tokens included.

    Only tokens that hold the last character of one, or half a character, are looked at closely.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def ends(self, token_ids: Sequence[int], num_sampled: int, stop: Sequence[str]) -> bool:
        last = token_ids[-1]
        if last not in self._alone:
            self._alone[last] = self._decode([last])
        alone = self._alone[last]
        if "\ufffd" not in alone and not any(text[-1] in alone for text in stop):
            return False
        # A token holds at least one byte, so more tokens than bytes need no look.
        num_looked = min(num_sampled, max(len(text.encode()) for text in stop))
        tail = self._decode(token_ids[len(token_ids) - num_looked :])
        return any(text in tail for text in stop)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
