"""The learner's side of a push: full weights written once, with the proof that they must meet."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from raylearner.config.schema import WeightsSection
from raylearner.types import PolicyVersion, Probe, WeightUpdate
from raylearner.weights.proof import probe_tokens
from raylearner.weights.shared_files import write_weights


class WeightSource(Protocol):
    """What of a learner is needed; every rank calls the same, in the same order."""

    @property
    def policy_version(self) -> PolicyVersion: ...

    @property
    def model_folder(self) -> Path: ...

    def named_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]: ...

    def probe_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]: ...


def write_update(
    source: WeightSource, config: WeightsSection, *, folder: str, dtype: str, seed: int
) -> WeightUpdate | None:
    """Every rank gathers and probes; rank 0 writes in `dtype` and returns the update."""
    version = source.policy_version
    payload: dict[str, object] = {}
    if dist.get_rank() == 0:
        weights = source.named_weights(dtype)
        payload = write_weights(weights, folder, version, getattr(torch, dtype))
    else:
        for _ in source.named_weights(dtype):
            pass
    vocab_size, special = vocabulary(source.model_folder)
    token_ids = probe_tokens(
        seed=seed,
        policy_version=version,
        vocab_size=vocab_size,
        special_token_ids=special,
        num_tokens=config.num_probe_tokens,
    )
    logprobs = source.probe_logprobs(token_ids)
    if dist.get_rank() != 0:
        return None
    return WeightUpdate(
        policy_version=version,
        transport=config.transport,
        payload=payload,
        probe=Probe(
            token_ids=token_ids,
            logprobs=tuple(tuple(row) for row in logprobs),
            tolerance=config.proof_tolerance,
        ),
        should_clear_caches=config.should_clear_caches,
    )


def vocabulary(model_folder: Path) -> tuple[int, frozenset[int]]:
    """Token ids that have a text, counted, and the special ones among them."""
    size = int(json.loads((model_folder / "config.json").read_text())["vocab_size"])
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
