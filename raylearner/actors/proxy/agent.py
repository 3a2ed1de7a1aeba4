"""Episodes that a program plays, calling the engine through an endpoint of the episode.

Consumes a claim; produces the episode's segments. Waits for the program, unblocked by its end, by its
time limit, or by a conversation in which no further call can be answered.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raylearner.actors.episode import EpisodeKit, score_segments
from raylearner.actors.proxy.conversation import Conversation
from raylearner.actors.proxy.program import Program, Task, make_program
from raylearner.config.environment import EnvironmentSection, OpenAiProxy
from raylearner.environments.protocol import Outcome
from raylearner.errors import EngineDead, EnvironmentFault, TrajectoryError
from raylearner.tokenization.transcript import Transcript
from raylearner.types import Claim, Sampling, StopReason, Trajectory

if TYPE_CHECKING:
    from raylearner.actors.proxy.chat_server import ChatServer


async def start_agent(config: EnvironmentSection) -> "Agent | None":
    """Return the agent of `openai_proxy` with its server started, or None for other environments.

    Raises `ConfigError` for a program that cannot be loaded.
    """
    if not isinstance(config, OpenAiProxy):
        return None
    from raylearner.actors.proxy.chat_server import ChatServer  # its framework takes half a second

    return Agent(
        program=make_program(config),
        timeout_s=config.timeout_s,
        max_calls=config.max_calls,
        server=ChatServer.start(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """End of an episode; with `error` it failed."""

    stop_reason: StopReason
    error: TrajectoryError | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A program, its limits and the server that it calls; shared by all episodes of an actor."""

    program: Program
    timeout_s: float
    max_calls: int
    server: "ChatServer"

    async def close(self) -> None:
        await self.server.close()

    async def play(self, kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
        """Let the program play `claim`, and score it. Failures are data, as in `play_episode`.

        Raises `EngineDead`.
        """
        started_at_s = time.time()
        conversation = Conversation(
            engine=kit.engine,
            renderer=kit.renderer,
            claim=claim,
            sampling=sampling,
            max_calls=self.max_calls,
            tracer=kit.tracer,
        )
        with kit.tracer.span("episode", group=claim.group_id, sample=claim.sample_index):
            try:
                end = _find_end(conversation, await self._run_program(conversation, claim))
            except TrajectoryError as cause:
                cause = conversation.failure or cause
                if isinstance(cause, EngineDead):
                    raise cause from None
                end = _End(stop_reason=StopReason.ERROR, error=cause)
            finally:
                conversation.close()
            if conversation.is_aborted:
                end = _End(stop_reason=StopReason.ABORTED)
            outcome = _make_outcome(conversation, end)
            segments = [
                transcript.close(
                    stop_reason=end.stop_reason,
                    error=end.error,
                    metrics=outcome.metrics,
                    given_answer=end.answer,
                    segment=number,
                    started_at_s=started_at_s,
                    finished_at_s=time.time(),
                )
                for number, transcript in enumerate(
                    conversation.transcripts or [_make_empty_transcript(kit, claim)]
                )
            ]
            if end.error is not None or end.stop_reason is StopReason.ABORTED:
                return segments
            return await score_segments(kit, claim, segments, outcome)

    async def _run_program(self, conversation: Conversation, claim: Claim) -> str | None:
        """Return the program's answer; also None when it was ended because the length was used up."""
        with self.server.session(conversation) as api_key:
            task = Task(prompt=claim.prompt, base_url=self.server.base_url, api_key=api_key)
            program = asyncio.ensure_future(self.program.run(task))
            over = asyncio.ensure_future(conversation.over.wait())
            try:
                done, _ = await asyncio.wait(
                    [program, over], timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if program in done:
                    return program.result()
                if not done:
                    raise EnvironmentFault(
                        f"{self.program} did not end within {self.timeout_s:g} s"
                        " (environment.timeout_s)"
                    )
                return None
            finally:
                program.cancel()
                over.cancel()
                await asyncio.wait([program, over])


def _find_end(conversation: Conversation, answer: str | None) -> _End:
    if conversation.failure is not None:
        raise conversation.failure
    if not conversation.transcripts and not conversation.is_aborted:
        refusal = conversation.first_refusal
        raise EnvironmentFault(
            f"every call of the program was refused: {refusal}"
            if refusal
            else "the program ended without calling the endpoint"
        )
    if answer is not None:
        return _End(stop_reason=StopReason.ANSWER, answer=answer)
    return _End(stop_reason=conversation.stop_reason or StopReason.END)


def _make_outcome(conversation: Conversation, end: _End) -> Outcome:
    return Outcome(
        metrics={
            "turns": float(conversation.num_calls),
            "valid_actions": float(
                sum(turn.is_valid and not turn.is_cut for turn in conversation.turns)
            ),
            "tool_calls": float(conversation.num_tool_calls),
            "segments": float(len(conversation.transcripts)),
            "finished": float(end.stop_reason in (StopReason.ANSWER, StopReason.END)),
        }
    )


def _make_empty_transcript(kit: EpisodeKit, claim: Claim) -> Transcript:
    transcript = Transcript(renderer=kit.renderer, claim=claim)
    transcript.open_empty()
    return transcript
