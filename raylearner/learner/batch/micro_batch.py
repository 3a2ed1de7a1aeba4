"""Rows of a batch as the tensors of one forward pass.

Legend: `T` packed tokens, `R` rows, `N` scored tokens, `E` episodes of the whole batch; `C` computed
tokens and `S` computed sequences, fewer than `T` and more than `R` where rows share prefixes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raylearner.learner.batch.pack import TokenRow
from raylearner.learner.batch.prefixes import Layout, SharedPrefix
from raylearner.learner.batch.rows import Rows
from raylearner.learner.batch.sharing import Sharing
from raylearner.learner.model.images import ImageReader, PackedImages
from raylearner.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Input of the model: sequences end to end. The learner, probes and warm starts all pack with `of`.

    The model computes `C` tokens, and returns the scores of `T`.
    """

    input_ids: Tensor  # [C]
    position_ids: Tensor  # [C], or [3, C] for a vision-language model
    cu_seqlens: Tensor  # [S + 1] int32
    max_length: int
    scored: Tensor  # [N] int64 positions in T to score, never a sequence's first
    images: PackedImages | None = None
    """Images of a vision-language model."""
    sharing: Sharing | None = None
    """Where rows share prefixes; without it `C` is `T`."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[np.ndarray],
        scored: Sequence[np.ndarray],
        *,
        reader: ImageReader | None = None,
        images: Sequence[Sequence[bytes]] | None = None,
        names: Sequence[str] | None = None,
        prefixes: Sequence[SharedPrefix | None] | None = None,
        device: torch.device | str = "cpu",
    ) -> "PackedTokens":
        """Pack sequences; `scored` is a bool array for each, False at its first token.

        A vision-language model needs its `reader`, and the `images` of each sequence. `names` identify
        the sequences in errors; by default they are numbered. Sequences with equal `prefixes` share them.
        Without sequences there is one dummy token without a score.
        """
        images = images if images is not None else [()] * len(sequences)
        if reader is None and any(images):
            raise ValueError("a trajectory has images, but the model is text-only")
        if not sequences:
            sequences, scored = [np.zeros(1, np.int64)], [np.zeros(1, np.bool_)]
            images = [()]
        names = names or [f"sequence {number}" for number in range(len(sequences))]
        lengths = [len(sequence) for sequence in sequences]
        is_scored = np.concatenate(scored)
        starts = np.cumsum([0, *lengths])
        assert not is_scored[starts[:-1]].any(), "the first token of a sequence has no prefix"
        prefixes = prefixes or [None] * len(sequences)
        for is_one_scored, prefix in zip(scored, prefixes, strict=True):
            if prefix is not None:
                is_free = not is_one_scored[: prefix.num_tokens + 1].any()
                assert is_free, "a score after a shared token would be the same for all rows"
        layout = Layout.of(lengths, prefixes)
        pieces = [(row, 0, length) for row, length in enumerate(lengths)]
        if layout is not None:
            pieces = list(layout.pieces)
        positions = [
            torch.arange(len(sequence))[None]
            if reader is None
            else reader.positions(sequence, seen)
            for sequence, seen in zip(sequences, images, strict=True)
        ]
        sizes = [end - start for _, start, end in pieces]
        shown = [
            (image, names[row])
            for row, start, end in pieces
            for image in _images(images[row], prefixes[row], start, end)
        ]
        return cls(
            input_ids=torch.as_tensor(
                np.concatenate([sequences[row][a:b] for row, a, b in pieces]).astype(np.int64),
                device=device,
            ),
            position_ids=torch.cat([positions[row][:, a:b] for row, a, b in pieces], dim=-1)
            .squeeze(0)
            .to(device),
            cu_seqlens=torch.as_tensor(np.cumsum([0, *sizes]).astype(np.int32), device=device),
            max_length=max(sizes),
            scored=torch.as_tensor(np.flatnonzero(is_scored), device=device),
            images=None
            if reader is None
            else reader.pack(
                [image for image, _ in shown], names=[name for _, name in shown], device=device
            ),
            sharing=None if layout is None else Sharing.of(layout, device=device),
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of whole rows."""
        return len(self.input_ids if self.sharing is None else self.sharing.places)

    def places(self, tokens: Tensor) -> Tensor:
        """Return where tokens of whole rows are computed: positions in `T` to positions in `C`."""
        return tokens if self.sharing is None else self.sharing.places[tokens]

    def spread(self, values: Tensor) -> Tensor:
        """Give the tokens of whole rows their computed values: `[C] -> [T]`."""
        return values if self.sharing is None else values[self.sharing.places]

    def pad(self, multiple: int) -> "PackedTokens":
        """Add an unscored sequence at the end that makes `C` a multiple."""
        num_tokens = len(self.input_ids)
        missing = -num_tokens % multiple
        if not missing:
            return self
        new = torch.arange(missing, device=self.input_ids.device)
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, missing)),
            position_ids=torch.cat(
                [self.position_ids, new.expand(*self.position_ids.shape[:-1], -1)], -1
            ),
            cu_seqlens=F.pad(self.cu_seqlens, (0, 1), value=num_tokens + missing),
            max_length=max(self.max_length, missing),
            sharing=None
            if self.sharing is None
            else replace(self.sharing, keys=self.sharing.keys.pad(num_tokens, missing)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward and backward, besides advantages and proximal log-probabilities."""

    tokens: PackedTokens
    rows: Rows
    episodes: Tensor  # [R] index into the episode table
    segments: Tensor  # [R] number of the row within its episode
    is_truncated: Tensor  # [R] bool
    turns: Tensor  # [T] number of the token's turn in its row, -1 before the first
    anchors: Tensor  # [T] equal where turns start from the same state
    token_versions: Tensor  # [T] -1 where not sampled
    train_mask: Tensor  # [T] bool
    sampled_mask: Tensor  # [T] bool, of the same rows
    on_policy_mask: Tensor  # [T] bool, sampled by the learner's present version
    behavior_logprobs: Tensor  # [T] NaN where not sampled

    @classmethod
    def of(
        cls,
        rows: Sequence[TokenRow],
        *,
        policy_version: PolicyVersion,
        dtype: torch.dtype,
        reader: ImageReader | None = None,
        device: torch.device | str = "cpu",
    ) -> "MicroBatch":
        """Pack rows; without any, make a row with one token that neither trains nor counts."""
        trajectories = [row.trajectory for row in rows]
        tokens = PackedTokens.of(
            [trajectory.token_ids for trajectory in trajectories],
            [trajectory.loss_mask for trajectory in trajectories],
            reader=reader,
            images=[trajectory.images for trajectory in trajectories],
            names=[f"group {t.group_id}, sample {t.sample_index}" for t in trajectories],
            prefixes=[row.prefix for row in rows],
            device=device,
        )
        lengths = [trajectory.num_tokens for trajectory in trajectories] or [1]

        def flat(arrays: list[np.ndarray], empty: np.ndarray) -> Tensor:
            return torch.as_tensor(np.concatenate(arrays) if arrays else empty, device=device)

        nothing = np.zeros(1, np.bool_)
        return cls(
            tokens=tokens,
            rows=Rows.from_lengths(torch.tensor(lengths, device=device)),
            episodes=torch.tensor([row.episode for row in rows] or [0], device=device),
            segments=torch.tensor([t.segment for t in trajectories] or [0], device=device),
            is_truncated=torch.tensor([t.is_truncated for t in trajectories] or [False]).to(device),
            turns=flat([row.turns for row in rows], np.full(1, -1, np.int32)).long(),
            anchors=flat([_anchors(row) for row in rows], np.zeros(1, np.int64)),
            token_versions=flat(
                [t.policy_versions for t in trajectories], np.full(1, -1, np.int32)
            ).long(),
            train_mask=flat([t.train_mask for t in trajectories], nothing),
            sampled_mask=flat([t.loss_mask for t in trajectories], nothing),
            on_policy_mask=flat(
                [t.policy_versions == policy_version for t in trajectories], nothing
            ),
            behavior_logprobs=flat(
                [t.behavior_logprobs for t in trajectories], np.full(1, np.nan, np.float32)
            ).to(dtype),
        )


def _images(
    images: Sequence[bytes], prefix: SharedPrefix | None, start: int, end: int
) -> Sequence[bytes]:
    """Return the images of a piece of a sequence: its prefix, the rest, or all of it."""
    if prefix is None:
        return images
    last = prefix.num_images if end == prefix.num_tokens else None
    return images[prefix.num_images if start else 0 : last]


def _anchors(row: TokenRow) -> np.ndarray:  # [T] int64
    by_turn = np.array([0, *row.anchors], np.int64)
    return by_turn[row.turns + 1]
