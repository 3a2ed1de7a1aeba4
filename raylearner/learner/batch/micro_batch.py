"""Rows of a batch as the tensors of one forward pass.

Legend: `T` packed tokens, `R` rows, `N` scored tokens, `E` episodes of the whole batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raylearner.learner.batch.pack import TokenRow
from raylearner.learner.batch.rows import Rows
from raylearner.learner.model.images import ImageReader, PackedImages
from raylearner.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Input of the model: sequences end to end. The learner, probes and warm starts all pack with `of`."""

    input_ids: Tensor  # [T]
    position_ids: Tensor  # [T], or [3, T] for a vision-language model
    cu_seqlens: Tensor  # [R + 1] int32
    max_length: int
    scored: Tensor  # [N] int64 positions in T to score, never a sequence's first
    images: PackedImages | None = None
    """Images of a vision-language model."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[np.ndarray],
        scored: Sequence[np.ndarray],
        *,
        reader: ImageReader | None = None,
        images: Sequence[Sequence[bytes]] | None = None,
        names: Sequence[str] | None = None,
        device: torch.device | str = "cpu",
    ) -> "PackedTokens":
        """Pack sequences; `scored` is a bool array for each, False at its first token.

        A vision-language model needs its `reader`, and the `images` of each sequence. `names` identify
        the sequences in errors; by default they are numbered. Without sequences there is one dummy token
        without a score.
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
        return cls(
            input_ids=torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(device),
            position_ids=torch.cat(
                [torch.arange(length) for length in lengths]
                if reader is None
                else [reader.positions(s, i) for s, i in zip(sequences, images, strict=True)],
                dim=-1,
            ).to(device),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)).to(device),
            max_length=max(lengths),
            scored=torch.from_numpy(np.flatnonzero(is_scored)).to(device),
            images=None
            if reader is None
            else reader.pack(
                [image for of_one in images for image in of_one],
                names=[n for n, of_one in zip(names, images, strict=True) for _ in of_one],
                device=device,
            ),
        )

    def pad(self, multiple: int) -> "PackedTokens":
        """Add an unscored sequence at the end that makes `T` a multiple."""
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
            device=device,
        )
        lengths = [trajectory.num_tokens for trajectory in trajectories] or [1]

        def flat(arrays: list[np.ndarray], empty: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays) if arrays else empty).to(device)

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


def _anchors(row: TokenRow) -> np.ndarray:  # [T] int64
    by_turn = np.array([0, *row.anchors], np.int64)
    return by_turn[row.turns + 1]
