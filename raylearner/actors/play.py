"""Plays a claim in whatever way its kit does: turn by turn, or by a program."""

from raylearner.actors.episode import EpisodeKit, play_episode
from raylearner.actors.proxy.program_episode import play_program_episode
from raylearner.types import Claim, Sampling, Trajectory


async def play(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
    """The episode's segments, scored; at least one. Failures are data."""
    if kit.agent is None:
        return [await play_episode(kit, claim, sampling)]
    return await play_program_episode(kit, kit.agent, claim, sampling)
