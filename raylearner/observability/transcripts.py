"""Trajectories as JSON lines that are readable without raylearner, with their images as files."""

import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.errors import naming
from raylearner.observability.jsonl import dumps
from raylearner.types import Trajectory, TrajectoryKey, Turn

TRAJECTORIES = "trajectories"
"""Folder of a run directory with a file for each step."""
EVALUATIONS = "evaluations"
"""Folder of a run directory with a file for each evaluation."""
IMAGES = "images"
"""Folder, next to the steps' files, of images named by the hash of their content."""

Advantages = Mapping[TrajectoryKey, float]
Logprobs = Mapping[TrajectoryKey, NDArray[np.float32]]


def transcript(
    trajectory: Trajectory,
    *,
    advantage: float | None = None,
    learner_logprobs: NDArray[np.float32] | None = None,
) -> dict[str, Any]:
    """Return one trajectory in plain types.

    `token_ids`, `loss_mask`, `train_mask`, `behavior_logprobs` and `policy_versions` have equal
    length, as does `learner_logprobs` if given; outside the loss mask, log-probabilities are null and
    versions -1. `images` are names of files in the folder `images`, one for each run of `image_token_id`.
    """
    if learner_logprobs is not None:
        learner_logprobs = np.where(trajectory.loss_mask, learner_logprobs, np.float32(np.nan))
    replies = [part for turn in trajectory.turns for part in (turn.text, turn.reply)]
    return {
        "prompt_id": trajectory.prompt_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "attempt": trajectory.attempt,
        "segment": trajectory.segment,
        "source": trajectory.source,
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "columns": dict(trajectory.columns),
        "advantage": advantage,
        "stop_reason": str(trajectory.stop_reason),
        "error": trajectory.error,
        "min_policy_version": trajectory.min_policy_version,
        "max_policy_version": trajectory.max_policy_version,
        "num_tokens": trajectory.num_tokens,
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "num_trained_tokens": trajectory.num_trained_tokens,
        "num_images": len(trajectory.images),
        "images": [_image_name(image) for image in trajectory.images],
        "image_token_id": trajectory.image_token_id,
        "doc_id": trajectory.doc_id,
        "shown": list(trajectory.shown),
        "prompt": trajectory.prompt_text,
        "text": "".join(replies),
        "answer": trajectory.answer,
        "given_answer": trajectory.given_answer,
        "turns": [_turn(turn) for turn in trajectory.turns],
        "metrics": dict(trajectory.metrics),
        "started_at_s": trajectory.started_at_s,
        "duration_s": trajectory.finished_at_s - trajectory.started_at_s,
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "train_mask": trajectory.train_mask.tolist(),
        "behavior_logprobs": _logprobs(trajectory.behavior_logprobs),
        "learner_logprobs": None if learner_logprobs is None else _logprobs(learner_logprobs),
        "policy_versions": trajectory.policy_versions.tolist(),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "start": turn.start,
        "end": turn.end,
        "reply_end": turn.reply_end,
        "text": turn.text,
        "reply": turn.reply,
        "stop_reason": str(turn.stop_reason),
        "min_policy_version": turn.min_policy_version,
        "max_policy_version": turn.max_policy_version,
        "tool": turn.tool,
        "is_valid": turn.is_valid,
        "number": turn.number,
        "foreign_form": turn.foreign_form,
        "opening": turn.opening,
        "thoughts": [list(span) for span in turn.thoughts],
    }


def _logprobs(logprobs: NDArray[np.float32]) -> list[float | None]:
    """Return values with nine significant digits, which restore every float32 exactly."""
    values: list[float] = logprobs.tolist()
    return [float(f"{value:.9g}") if math.isfinite(value) else None for value in values]


def _image_name(image: bytes) -> str:
    return f"{hashlib.sha256(image).hexdigest()[:32]}.png"


def _write_images(folder: Path, trajectory: Trajectory) -> None:
    for image in trajectory.images:
        path = folder / _image_name(image)
        if not path.exists():
            folder.mkdir(exist_ok=True)
            draft = path.with_suffix(".partial")
            with naming(draft):
                draft.write_bytes(image)
            os.replace(draft, path)


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"


def write(
    folder: Path,
    step: int,
    trajectories: Iterable[Trajectory],
    *,
    advantages: Advantages | None = None,
    learner_logprobs: Logprobs | None = None,
    evaluation_set: str = "",
) -> Path:
    """Write one step's file atomically, with the learner's values of its trajectories.

    Those of an `evaluation_set` are added to the file, and name it.

    Each image is written once, however often it is shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = step_file(folder, step)
    draft = path.with_suffix(".partial")
    if evaluation_set and path.exists():
        shutil.copyfile(path, draft)
    else:
        draft.unlink(missing_ok=True)
    with naming(draft), draft.open("a", encoding="utf-8") as file:
        for trajectory in trajectories:
            record = transcript(
                trajectory,
                advantage=(advantages or {}).get(trajectory.key),
                learner_logprobs=(learner_logprobs or {}).get(trajectory.key),
            )
            if evaluation_set:
                record["evaluation_set"] = evaluation_set
            file.write(dumps(record) + "\n")
            _write_images(folder / IMAGES, trajectory)
    os.replace(draft, path)
    return path
