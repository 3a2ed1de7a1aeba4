"""The learner's side of a push: the weights and the probe that verifies them."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from raylearner.config.resources import TOLERANCE_CPU
from raylearner.config.schema import WeightsSection
from raylearner.errors import WeightTransferError
from raylearner.learner.model.images import ImageReader
from raylearner.types import PolicyVersion, Probe, WeightUpdate
from raylearner.weights.checksums import Checksum
from raylearner.weights.group import WeightGroup
from raylearner.weights.probe import probe_tokens
from raylearner.weights.transports.shared_files import write_adapter, write_weights

log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """What of a learner is needed; every rank calls the same, in the same order."""

    @property
    def policy_version(self) -> PolicyVersion: ...

    @property
    def model_folder(self) -> Path: ...

    def named_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]: ...

    def weight_checksums(self, dtype: str) -> Mapping[str, Checksum]: ...

    def weight_shapes(self) -> Sequence[tuple[str, tuple[int, ...]]]: ...

    def adapter_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]: ...

    def adapter_config(self) -> Mapping[str, Any]: ...

    @property
    def image_reader(self) -> ImageReader | None: ...

    def probe_logprobs(
        self, token_ids: Sequence[Sequence[int]], images: Sequence[Sequence[bytes]] = ()
    ) -> list[list[float]]: ...


class WeightWriter:
    """One rank's side of all pushes, whatever the transport; promises the order of collectives."""

    def __init__(
        self,
        source: WeightSource,
        config: WeightsSection,
        *,
        folder: str,
        dtype: str,
        seed: int,
        should_free_memory: bool = False,
    ) -> None:
        """`dtype` is the engines' precision, `folder` holds shared files, `seed` makes probes.

        With `should_free_memory` nothing stays cached on the GPU, where an engine wants it back.
        """
        self._should_free_memory = should_free_memory
        self._source = source
        self._config = config
        self._transport = "shared_files" if config.transport == "auto" else config.transport
        self._folder = folder
        self._dtype = dtype
        self._seed = seed
        self._sender: Any = None
        self._share: Any = None
        self._abandoned: str | None = None

    def write(
        self, *, members: Sequence[str] = (), group: WeightGroup | None = None
    ) -> WeightUpdate | None:
        """Every rank gathers and probes; rank 0 returns the update, with `ipc` every one that has members.

        With `nccl` nothing travels yet: `send` must follow, while the members receive.
        """
        version = self._source.policy_version
        started = time.monotonic()
        payload = self._payload(version, members, group)
        probe = make_probe(self._source, self._config, seed=self._seed)
        if self._should_free_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.info("policy version %d written in %.3f s", version, time.monotonic() - started)
        if dist.get_rank() != 0 and "handles" not in payload:
            return None
        return WeightUpdate(
            policy_version=version,
            transport=self._transport,
            payload=payload,
            probe=probe,
            should_clear_caches=self._config.clear_caches,
            is_collective=self._transport in ("nccl", "ipc"),
        )

    def send(self, group: WeightGroup) -> dict[str, float] | str:
        """Broadcast to the group: timings, or why it broke off, which leaves the learner unharmed.

        Raises `LearnerError` where this rank failed by itself.
        """
        sender = self._nccl()
        if group.key == self._abandoned:
            sender.abandon(group.key)
        try:
            return sender.send(group, deadline_s=self._config.deadline_s)
        except WeightTransferError as error:
            return f"policy version {self._source.policy_version}: {error}"

    def abandon(self, group: WeightGroup) -> None:
        """End a `send` that hangs or has not begun yet; called from another thread."""
        self._abandoned = group.key
        if self._sender is not None:
            self._sender.abandon(group.key)

    def release(self) -> None:
        """Free what was kept on this GPU for the last push."""
        if self._share is not None:
            self._share.release()

    def _payload(
        self, version: PolicyVersion, members: Sequence[str], group: WeightGroup | None
    ) -> dict[str, Any]:
        dtype = getattr(torch, self._dtype)
        if self._transport == "nccl":
            assert group is not None, "a broadcast needs its group"
            shapes = self._source.weight_shapes()
            return {
                "group": group,
                "names": [name for name, _ in shapes],
                "dtype_names": [self._dtype] * len(shapes),
                "shapes": [list(shape) for _, shape in shapes],
                # Before anything travels: engines compare as soon as they have loaded it.
                "checksums": self._source.weight_checksums(self._dtype),
            }
        is_adapter = self._transport == "adapter"
        source = self._source
        weights = (source.adapter_weights if is_adapter else source.named_weights)(self._dtype)
        if self._transport == "ipc" and (members or dist.get_rank() == 0):
            from raylearner.weights.transports.ipc import IpcShare

            self._share = self._share or IpcShare()
            return self._share.share(weights, dtype, members=members)
        if dist.get_rank() != 0:
            for _ in weights:
                pass
            return {}
        if is_adapter:
            return write_adapter(weights, source.adapter_config(), self._folder, version, dtype)
        return write_weights(weights, self._folder, version, dtype)

    def _nccl(self) -> Any:
        if self._sender is None:
            # Imports vLLM, which no other transport needs in the learner.
            from raylearner.weights.transports.nccl import LayerSource, NcclSender

            source = LayerSource(
                self._source.weight_shapes(),
                lambda: self._source.named_weights(self._dtype),
                getattr(torch, self._dtype),
            )
            self._sender = NcclSender(source, rank=dist.get_rank())
        return self._sender


def make_probe(source: WeightSource, config: WeightsSection, *, seed: int) -> Probe:
    """What engines must find of the source's present version. Every rank makes the same."""
    version = source.policy_version
    vocab_size, special = vocabulary(source.model_folder)
    token_ids = probe_tokens(
        seed=seed,
        policy_version=version,
        vocab_size=vocab_size,
        special_token_ids=special,
        num_tokens=config.num_probe_tokens,
    )
    images: tuple[tuple[bytes, ...], ...] = ()
    if source.image_reader is not None:
        # The same image again and again, where nothing made of it may outlive a push.
        image_seed = [seed] if config.clear_caches else [seed, version]
        image, block = source.image_reader.probe(image_seed)
        *others, last = token_ids
        token_ids = (*others, (*block, *last))
        images = (*((),) * len(others), (image,))
    tolerance = config.verify_tolerance
    return Probe(
        token_ids=token_ids,
        logprobs=tuple(map(tuple, source.probe_logprobs(token_ids, images))),
        tolerance=TOLERANCE_CPU if tolerance == "auto" else tolerance,
        images=images,
        statistic="mean" if config.verify_statistic == "mean" else "max",
    )


@lru_cache(maxsize=1)
def vocabulary(model_folder: Path) -> tuple[int, frozenset[int]]:
    """Token ids that have a text, counted, and the special ones among them."""
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
