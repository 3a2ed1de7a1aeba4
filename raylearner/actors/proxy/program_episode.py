"""One episode that a program plays by itself, calling the engine through its own endpoint.

Consumes a claim; produces the episode's segments. Waits for the program, unblocked by its end, by its
time limit, or by a conversation in which no call can be answered any more.
"""

import asyncio
import time
from dataclasses import dataclass

from raylearner.actors.episode import EpisodeKit, scored
from raylearner.actors.proxy.agent import Agent
from raylearner.actors.proxy.conversation import Conversation
from raylearner.actors.proxy.program import Task
from raylearner.environments.protocol import Outcome
from raylearner.errors import EnvironmentFault, TrajectoryError
from raylearner.tokenization.transcript import Transcript
from raylearner.types import Claim, Sampling, StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How an episode ended; with `error` it failed."""

    stop_reason: StopReason
    error: str | None = None
    answer: str | None = None


async def play_program_episode(
    kit: EpisodeKit, agent: Agent, claim: Claim, sampling: Sampling
) -> list[Trajectory]:
    """Lets the program play `claim`, and scores it. Failures are data, as in `play_episode`."""
    started_at_s = time.time()
    conversation = Conversation(
        engine=kit.engine,
        renderer=kit.renderer,
        claim=claim,
        sampling=sampling,
        max_calls=agent.max_calls,
        tracer=kit.tracer,
    )
    with kit.tracer.span("episode", group=claim.group_id, sample=claim.sample_index):
        try:
            answer = await _run(agent, conversation, claim)
            end = _ended(conversation, answer)
        except TrajectoryError as cause:
            cause = conversation.failure or cause
            end = _End(stop_reason=StopReason.ERROR, error=f"{cause.kind}: {cause}")
        finally:
            conversation.close()
        if conversation.is_aborted:
            end = _End(stop_reason=StopReason.ABORTED)
        outcome = _outcome(conversation, end)
        transcripts = conversation.transcripts or [_empty(kit, claim)]
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
            for number, transcript in enumerate(transcripts)
        ]
        if end.error is not None or end.stop_reason is StopReason.ABORTED:
            return segments
        return await scored(kit, claim, segments, outcome)


async def _run(agent: Agent, conversation: Conversation, claim: Claim) -> str | None:
    """The program's answer; None too when it had to be ended because the length was used up."""
    with agent.server.session(conversation) as api_key:
        task = Task(prompt=claim.prompt, base_url=agent.server.base_url, api_key=api_key)
        program = asyncio.ensure_future(agent.program.run(task))
        over = asyncio.ensure_future(conversation.over.wait())
        try:
            done, _ = await asyncio.wait(
                [program, over], timeout=agent.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if program in done:
                return program.result()
            if not done:
                raise EnvironmentFault(
                    f"{agent.program} did not end within {agent.timeout_s:g} s (environment.timeout_s)"
                )
            return None
        finally:
            program.cancel()
            over.cancel()
            await asyncio.wait([program, over])


def _ended(conversation: Conversation, answer: str | None) -> _End:
    if conversation.failure is not None:
        raise conversation.failure
    if not conversation.transcripts and not conversation.is_aborted:
        refusal = conversation.first_refusal
        raise EnvironmentFault(
            f"every call of the program was refused: {refusal}"
            if refusal
            else "the program ended without a single call of the endpoint"
        )
    if answer is not None:
        return _End(stop_reason=StopReason.ANSWER, answer=answer)
    return _End(stop_reason=conversation.stop_reason or StopReason.END)


def _outcome(conversation: Conversation, end: _End) -> Outcome:
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


def _empty(kit: EpisodeKit, claim: Claim) -> Transcript:
    transcript = Transcript(renderer=kit.renderer, claim=claim)
    transcript.open_empty()
    return transcript
