"""A deterministic engine for logic tests and fault injection, not for training."""

import asyncio
import importlib
import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from raylearner.config import schema
from raylearner.errors import ConfigError, EngineDead, EngineError
from raylearner.types import Completion, CompletionStop, PolicyVersion, Sampling
from raylearner.weights.update import WeightReceipt, WeightUpdate


class Script(Protocol):
    """Chooses token ids and their log-probabilities from the tokens so far and the seed.

    `EngineError` fails the request, `EngineDead` the engine.
    """

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]: ...


class RandomTokens:
    """A random number of seeded random tokens; log-probabilities are arbitrary but finite."""

    def __init__(
        self, *, vocab_size: int, max_tokens: int = 24, min_tokens: int = 2, delay_s: float = 0.0
    ) -> None:
        self._vocab_size = vocab_size
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._delay_s = delay_s

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        rng = random.Random(f"{sampling.seed}/{len(token_ids)}")
        if self._delay_s:
            await asyncio.sleep(self._delay_s * (1 + 4 * random.random()))
        count = min(rng.randint(self._min_tokens, self._max_tokens), sampling.max_tokens)
        allowed = [t for t in range(self._vocab_size) if t not in sampling.banned_token_ids]
        sampled = [allowed[rng.randrange(len(allowed))] for _ in range(count)]
        return sampled, [-3.0 * rng.random() - 0.01 for _ in range(count)]


class ScriptedEngine:
    """Implements `Engine` with a `Script`; each token carries the version held when it was sampled."""

    def __init__(self, script: Script, *, end_token_ids: Sequence[int]) -> None:
        self._script = script
        self._end_token_ids = set(end_token_ids)
        self._policy_version: PolicyVersion = 0
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._running: set[asyncio.Task[Any]] = set()
        self._aborted: set[asyncio.Task[Any]] = set()

    @property
    def policy_version(self) -> PolicyVersion:
        return self._policy_version

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, images: Sequence[bytes] = ()
    ) -> Completion:
        if self._failure is not None:
            raise EngineDead(self._failure)
        version_before = self._policy_version
        task = asyncio.ensure_future(self._script.complete(token_ids, sampling))
        self._running.add(task)
        try:
            sampled, logprobs = await task
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise
            return _completion([], [], [], CompletionStop.ABORTED)
        except EngineDead as error:
            self._fail(str(error))
            raise
        finally:
            self._running.discard(task)
            self._aborted.discard(task)
        half = len(sampled) // 2
        versions = [version_before] * half + [self._policy_version] * (len(sampled) - half)
        is_ended = bool(sampled) and sampled[-1] in self._end_token_ids
        stop = CompletionStop.END if is_ended else CompletionStop.STOP_STRING
        if len(sampled) >= sampling.max_tokens and not is_ended:
            stop = CompletionStop.LENGTH
        return _completion(sampled, logprobs, versions, stop)

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        self._policy_version = update.policy_version
        return WeightReceipt(
            policy_version=update.policy_version,
            logprob_error=0.0,
            pause_s=0.0,
            update_s=0.0,
            probe_s=0.0,
        )

    async def sleep(self) -> None:
        raise EngineError("a scripted engine has no memory to free")

    async def abort(self) -> None:
        for task in list(self._running):
            self._aborted.add(task)
            task.cancel()

    async def died(self) -> str:
        await self._failed.wait()
        assert self._failure is not None, "set together"
        return self._failure

    async def close(self) -> None:
        self._fail("the scripted engine is closed")
        await self.abort()

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._failed.set()


def load_script(config: schema.ScriptedEngine) -> Script:
    """Return the configured script. Raises `ConfigError` if it cannot be created."""
    module_name, _, attribute = config.script.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)(**config.arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"actors.engine.script: {config.script!r} cannot be created: {error};"
            " expected module:Class and its arguments"
        ) from error


def _completion(
    sampled: list[int], logprobs: list[float], versions: list[int], stop: CompletionStop
) -> Completion:
    return Completion(
        token_ids=np.array(sampled, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        policy_versions=np.array(versions, dtype=np.int32),
        stop_reason=stop,
    )
