"""What an episode must fulfil to be stored."""

from collections.abc import Sequence

from raylearner.types import PolicyVersion, StopReason, Trajectory


def broken_rule(
    episode: Sequence[Trajectory], *, prompt_id: str, policy_version: PolicyVersion
) -> str | None:
    """The first rule that an episode breaks, in words.

    Weights are published after the commit that makes them, so a token of a version above
    `policy_version` comes from weights that a rollback threw away.
    """
    key, reward = episode[0].episode_key, episode[0].reward
    if any(segment.episode_key != key for segment in episode):
        return "the segments of an episode carry the same claim"
    if len({segment.segment for segment in episode}) != len(episode):
        return "the segments of an episode are numbered apart"
    if any(segment.reward != reward for segment in episode):
        return "the segments of an episode carry the same reward"
    for segment in episode:
        if segment.prompt_id != prompt_id:
            return f"the prompt is the claim's, {prompt_id!r}, got {segment.prompt_id!r}"
        if segment.stop_reason is StopReason.ABORTED:
            return "an aborted episode is played again"
        rule = segment.broken_rule()
        if rule is not None:
            return rule
        newest = int(segment.policy_versions.max())
        if newest > policy_version:
            return f"no token is of a version after the learner's, got {newest}"
    return None
