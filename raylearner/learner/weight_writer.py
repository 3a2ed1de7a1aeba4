"""One learner rank's side of a push: gathered weights, and the probe that engines must reproduce."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raylearner.config.resources import TOLERANCE_CPU
from raylearner.config.schema import WeightsSection
from raylearner.errors import WeightTransferError
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model import lora
from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.policy import DTYPES, PackedModel
from raylearner.learner.spec import LearnerSpec
from raylearner.types import PolicyVersion
from raylearner.weights.checksums import Checksum
from raylearner.weights.probe import probe_tokens
from raylearner.weights.transports import WeightGroup, transport_of
from raylearner.weights.update import Probe, WeightUpdate

log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """The parts of `Models` that a push reads."""

    @property
    def folder(self) -> Path: ...

    @property
    def policy(self) -> PackedModel: ...

    @property
    def reader(self) -> ImageReader | None: ...


class EngineWeights:
    """The policy's weights in the engines' precision; implements `transport.Weights`."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source = source
        self.dtype = dtype

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._source.policy.named_weights(self.dtype)

    def shapes(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        return self._source.policy.weight_shapes()

    def checksums(self) -> Mapping[str, Checksum]:
        return self._source.policy.weight_checksums(self.dtype)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return lora.adapter_weights(self._source.policy.causal_lm, self.dtype)

    def adapter_config(self) -> Mapping[str, Any]:
        return lora.adapter_config(self._source.policy.causal_lm, base=str(self._source.folder))


class WeightWriter:
    """One rank's side of all pushes, for every transport; guarantees the order of collectives."""

    def __init__(self, source: WeightSource, spec: LearnerSpec) -> None:
        self._source = source
        self._spec = spec
        self._transport = transport_of(spec.weights.transport)
        self._version: PolicyVersion = 0
        self._sender = self._transport.make_sender(
            EngineWeights(source, DTYPES[spec.engine_dtype]),
            rank=dist.get_rank(),
            folder=spec.weights_folder,
            deadline_s=spec.weights.deadline_s,
        )

    def write(
        self,
        version: PolicyVersion,
        *,
        members: Sequence[str] = (),
        group: WeightGroup | None = None,
    ) -> WeightUpdate | None:
        """Gather the weights of `version` and probe them. Every rank must call it.

        Ranks with a part of the payload return it, rank 0 always. The weights of a broadcast are not
        sent yet: `send` must follow, while the members receive.
        """
        started = time.monotonic()
        self._version, config = version, self._spec.weights
        payload = self._sender.write(version, members, group)
        probe = make_probe(
            self._source,
            config,
            policy_version=version,
            seed=self._spec.run.seed,
            device=self._spec.device,
        )
        if self._spec.should_free_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.info("policy version %d written in %.3f s", version, time.monotonic() - started)
        if payload is None:
            return None
        return WeightUpdate(
            policy_version=version,
            transport=self._transport.module,
            payload=payload,
            probe=probe,
            should_recompute=config.cache != "keep",
            is_collective=self._transport.is_collective,
        )

    def send(self, group: WeightGroup) -> dict[str, float] | str:
        """Broadcast to the group. Return timings, or why the push broke off without harm to the
        learner.

        Raises `LearnerError` where this rank itself failed.
        """
        try:
            return self._sender.send(group)
        except WeightTransferError as error:
            return f"policy version {self._version}: {error}"

    def abandon(self, group: WeightGroup) -> None:
        """End a `send` that hangs or has not begun yet; called from another thread."""
        self._sender.abandon(group)

    def release(self) -> None:
        """Free the GPU memory kept for the last push."""
        self._sender.release()


def make_probe(
    source: WeightSource,
    config: WeightsSection,
    *,
    policy_version: PolicyVersion,
    seed: int,
    device: torch.device | str = "cpu",
) -> Probe:
    """Return probe prompts with the learner's log-probabilities, which engines must reproduce.

    Every rank must call it, and makes the same.
    """
    vocab_size, special = read_vocabulary(source.folder)
    token_ids = probe_tokens(
        seed=seed,
        policy_version=policy_version,
        vocab_size=vocab_size,
        special_token_ids=special,
        num_tokens=config.num_probe_tokens,
    )
    images: tuple[tuple[bytes, ...], ...] = ()
    if source.reader is not None:
        # If caches are cleared the image may repeat; otherwise each push must show a new one.
        image_seed = [seed] if config.cache != "keep" else [seed, policy_version]
        image, block = source.reader.probe(image_seed)
        *others, last = token_ids
        token_ids = (*others, (*block, *last))
        images = (*((),) * len(others), (image,))
    logprobs = probe_logprobs(source.policy, token_ids, images, reader=source.reader, device=device)
    tolerance = config.verify_tolerance
    return Probe(
        token_ids=token_ids,
        logprobs=tuple(map(tuple, logprobs)),
        tolerance=TOLERANCE_CPU if tolerance == "auto" else tolerance,
        images=images,
        statistic="mean" if config.verify_statistic == "mean" else "max",
    )


def probe_logprobs(
    model: PackedModel,
    token_ids: Sequence[Sequence[int]],
    images: Sequence[Sequence[bytes]] = (),
    *,
    reader: ImageReader | None = None,
    device: torch.device | str = "cpu",
) -> list[list[float]]:
    """Return log-probabilities at temperature 1 of each sequence's tokens but the first, or of those
    after its images.

    `token_ids` and `images` are in the engines' form; a vision-language model needs its `reader`.
    Every rank must call it with the same arguments, and gets the same numbers.
    """
    images = images or [()] * len(token_ids)
    sequences = [np.asarray(ids, np.int64) for ids in token_ids]
    firsts = [1] * len(sequences)
    if reader is not None:
        sequences = [reader.expand(ids, of) for ids, of in zip(token_ids, images, strict=True)]
        firsts = [reader.end_of_images(ids) for ids in sequences]
    scored = [np.arange(len(s)) >= first for s, first in zip(sequences, firsts, strict=True)]
    tokens = PackedTokens.of(sequences, scored, reader=reader, images=images, device=device)
    # Engines score given tokens over the whole vocabulary, banned tokens included.
    scores = model.score(tokens, 1.0, has_bans=False)
    rows = scores.logprobs.split([len(s) for s in sequences])
    return [row[first:].tolist() for row, first in zip(rows, firsts, strict=True)]


@lru_cache(maxsize=1)
def read_vocabulary(model_folder: Path) -> tuple[int, frozenset[int]]:
    """Return the number of token ids that have a text, and the special ones among them."""
    config = json.loads((model_folder / "config.json").read_text())
    size = int(config.get("text_config", config)["vocab_size"])
    tokenizer_file = model_folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        return size, frozenset()
    tokenizer = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    added = tokenizer.get("added_tokens", [])
    entries = tokenizer["model"]["vocab"]
    largest = max(entries.values()) if isinstance(entries, dict) else len(entries) - 1
    largest = max([largest, *(token["id"] for token in added)])
    special = frozenset(token["id"] for token in added if token["special"])
    return min(size, largest + 1), special
