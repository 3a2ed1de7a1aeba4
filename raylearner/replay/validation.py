"""The data contract: rules that an episode must fulfil to be stored."""

from collections.abc import Sequence

import numpy as np

from raylearner.types import PolicyVersion, StopReason, Trajectory

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PNG_SIDES = (16, 20)
"""Offsets of width and height in the header of a PNG, big-endian."""


def episode_error(
    episode: Sequence[Trajectory], *, prompt_id: str, policy_version: PolicyVersion
) -> str | None:
    """Return the first rule that an episode violates, as text; None for a valid one.

    Weights are published after the commit that makes them, so a token of a version above
    `policy_version` was sampled by weights that a rollback discarded.
    """
    key, reward = episode[0].episode_key, episode[0].reward
    if any(segment.episode_key != key for segment in episode):
        return "the segments of an episode must carry the same claim"
    if len({segment.segment for segment in episode}) != len(episode):
        return "the segments of an episode must have different numbers"
    if any(segment.reward != reward for segment in episode):
        return "the segments of an episode must carry the same reward"
    for segment in episode:
        if segment.prompt_id != prompt_id:
            return f"prompt_id must be the claim's, {prompt_id!r}, got {segment.prompt_id!r}"
        if segment.stop_reason is StopReason.ABORTED:
            return "an aborted episode is played again, not stored"
        if (error := trajectory_error(segment)) is not None:
            return error
        newest = int(segment.policy_versions.max())
        if newest > policy_version:
            return f"policy_versions must not be newer than the learner's, got {newest}"
    return None


def trajectory_error(trajectory: Trajectory) -> str | None:
    """Return the first rule of the data contract that a trajectory violates; None for a valid one."""
    size = len(trajectory.token_ids)
    arrays = {
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "train_mask": trajectory.train_mask,
        "behavior_logprobs": trajectory.behavior_logprobs,
        "policy_versions": trajectory.policy_versions,
    }
    lengths = {name: len(array) for name, array in arrays.items()}
    if size == 0:
        return "token_ids is empty: a trajectory holds at least its prompt"
    if len(set(lengths.values())) != 1:
        return f"arrays must have equal length, got {lengths}"
    for name in ("loss_mask", "train_mask"):
        if arrays[name].dtype != np.bool_:
            return f"{name} must be bool, got {arrays[name].dtype}"
    if trajectory.token_ids.min() < 0:
        return "token_ids must not be negative"
    if (trajectory.train_mask & ~trajectory.loss_mask).any():
        return "train_mask must be a subset of loss_mask"
    if not np.array_equal(np.isfinite(trajectory.behavior_logprobs), trajectory.loss_mask):
        return "behavior_logprobs must be finite exactly where loss_mask is True"
    if ((trajectory.behavior_logprobs > 1e-4) & trajectory.loss_mask).any():
        return "behavior_logprobs must not be positive"
    if ((trajectory.policy_versions >= 0) != trajectory.loss_mask).any():
        return "policy_versions must be >= 0 exactly where loss_mask is True, -1 elsewhere"
    if (error := _image_error(trajectory)) is not None:
        return error
    if trajectory.images and (trajectory.loss_mask & trajectory.is_placeholder).any():
        return "placeholders of images must not be sampled"
    if trajectory.reward is not None and not np.isfinite(trajectory.reward):
        return f"reward must be a finite number or None, got {trajectory.reward!r}"
    if trajectory.stop_reason is StopReason.ERROR and trajectory.error is None:
        return "stop_reason 'error' needs a cause in error"
    return None


def _image_error(trajectory: Trajectory) -> str | None:
    runs, num_images = trajectory.placeholder_runs, len(trajectory.images)
    if len(runs) != num_images:
        return (
            f"every image needs its placeholders: {num_images} images, "
            f"{len(runs)} runs of placeholders"
        )
    if trajectory.image_unit is None:
        return None
    for number, (image, num_placeholders) in enumerate(
        zip(trajectory.images, runs, strict=True), 1
    ):
        if not image.startswith(PNG_MAGIC):
            return f"image {number} of {num_images} is not a PNG"
        width, height = (int.from_bytes(image[at : at + 4]) for at in PNG_SIDES)
        num_features = (width // trajectory.image_unit) * (height // trajectory.image_unit)
        if num_features != num_placeholders:
            return (
                f"image {number} of {num_images}, {width}x{height}, has {num_features} "
                f"features, but {num_placeholders} placeholders"
            )
    return None
