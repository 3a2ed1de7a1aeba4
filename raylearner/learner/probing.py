"""Log-probabilities of probe prompts by the learner, which an engine must find again after a push."""

from collections.abc import Sequence

import numpy as np
import torch

from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.policy import PackedModel


def probe_logprobs(
    model: PackedModel,
    token_ids: Sequence[Sequence[int]],
    images: Sequence[Sequence[bytes]] = (),
    *,
    reader: ImageReader | None = None,
    device: torch.device | str = "cpu",
) -> list[list[float]]:
    """At temperature 1, of all tokens of each sequence but the first, or of those behind its images.

    `token_ids` and `images` are as engines take them, `reader` is that of a model that sees. Ranks
    must all call it with the same, and find the same.
    """
    images = images or [()] * len(token_ids)
    sequences = [np.asarray(ids, np.int64) for ids in token_ids]
    firsts = [1] * len(sequences)
    if reader is not None:
        sequences = [reader.expand(ids, of) for ids, of in zip(token_ids, images, strict=True)]
        firsts = [reader.behind_images(ids) for ids in sequences]
    scored = [np.arange(len(s)) >= first for s, first in zip(sequences, firsts, strict=True)]
    tokens = PackedTokens.of(sequences, scored, reader=reader, images=images, device=device)
    # Engines score what they are given by all of the vocabulary.
    scores = model.score(tokens, 1.0, has_bans=False)
    rows = scores.logprobs.split([len(s) for s in sequences])
    return [row[first:].tolist() for row, first in zip(rows, firsts, strict=True)]
