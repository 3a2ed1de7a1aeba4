"""One learner rank's side of a push: gathered weights, and the probe that engines must reproduce."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
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
from raylearner.weights.group import WeightGroup
from raylearner.weights.probe import probe_tokens
from raylearner.weights.transports.shared_files import write_adapter, write_weights
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


class WeightWriter:
    """One rank's side of all pushes, for every transport; promises the order of collectives."""

    def __init__(self, source: WeightSource, spec: LearnerSpec) -> None:
        self._source = source
        self._spec = spec
        self._transport = (
            "shared_files" if spec.weights.transport == "auto" else spec.weights.transport
        )
        self._dtype = DTYPES[spec.engine_dtype]
        self._version: PolicyVersion = 0
        self._sender: Any = None
        self._share: Any = None
        self._abandoned: str | None = None

    def write(
        self,
        version: PolicyVersion,
        *,
        members: Sequence[str] = (),
        group: WeightGroup | None = None,
    ) -> WeightUpdate | None:
        """Gather the weights of `version` and probe them. Every rank must call it.

        Rank 0 returns the update; with `ipc` every rank that has members does. With `nccl` nothing is
        sent yet: `send` must follow, while the members receive.
        """
        started = time.monotonic()
        self._version, config = version, self._spec.weights
        payload = self._make_payload(members, group)
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
        if dist.get_rank() != 0 and "handles" not in payload:
            return None
        return WeightUpdate(
            policy_version=version,
            transport=self._transport,
            payload=payload,
            probe=probe,
            should_clear_caches=config.clear_caches,
            is_collective=self._transport in ("nccl", "ipc"),
        )

    def send(self, group: WeightGroup) -> dict[str, float] | str:
        """Broadcast to the group. Return timings, or why it broke off, which leaves the learner intact.

        Raises `LearnerError` where this rank itself failed.
        """
        sender = self._get_sender()
        if group.key == self._abandoned:
            sender.abandon(group.key)
        try:
            return sender.send(group, deadline_s=self._spec.weights.deadline_s)
        except WeightTransferError as error:
            return f"policy version {self._version}: {error}"

    def abandon(self, group: WeightGroup) -> None:
        """End a `send` that hangs or has not begun yet; called from another thread."""
        self._abandoned = group.key
        if self._sender is not None:
            self._sender.abandon(group.key)

    def release(self) -> None:
        """Free the GPU memory kept for the last push."""
        if self._share is not None:
            self._share.release()

    def _make_payload(self, members: Sequence[str], group: WeightGroup | None) -> dict[str, Any]:
        policy, dtype = self._source.policy, self._dtype
        if self._transport == "nccl":
            assert group is not None, "a broadcast needs its group"
            shapes = policy.weight_shapes()
            return {
                "group": group,
                "names": [name for name, _ in shapes],
                "dtype_names": [self._spec.engine_dtype] * len(shapes),
                "shapes": [list(shape) for _, shape in shapes],
                # Announced before anything is sent: engines compare as soon as they have loaded it.
                "checksums": policy.weight_checksums(dtype),
            }
        is_adapter = self._transport == "adapter"
        weights: Iterator[tuple[str, Tensor]] = (
            lora.adapter_weights(policy.causal_lm, dtype)
            if is_adapter
            else policy.named_weights(dtype)
        )
        if self._transport == "ipc" and (members or dist.get_rank() == 0):
            from raylearner.weights.transports.ipc import IpcShare

            self._share = self._share or IpcShare()
            return self._share.share(weights, dtype, members=members)
        if dist.get_rank() != 0:
            for _ in weights:
                pass
            return {}
        folder, version = str(self._spec.weights_folder), self._version
        if is_adapter:
            config = lora.adapter_config(policy.causal_lm, base=str(self._source.folder))
            return write_adapter(weights, config, folder, version, dtype)
        return write_weights(weights, folder, version, dtype)

    def _get_sender(self) -> Any:
        if self._sender is None:
            # Imports vLLM, which no other transport needs in the learner.
            from raylearner.weights.transports.nccl import LayerSource, NcclSender

            policy, dtype = self._source.policy, self._dtype
            source = LayerSource(policy.weight_shapes(), lambda: policy.named_weights(dtype), dtype)
            self._sender = NcclSender(source, rank=dist.get_rank())
        return self._sender


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
        image_seed = [seed] if config.clear_caches else [seed, policy_version]
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
        firsts = [reader.behind_images(ids) for ids in sequences]
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
