"""One episode: engine, environment and renderer, from a claim to a scored trajectory.

Plain async functions, no Ray: the same code runs in rollout actors, in evaluation and in tests.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raylearner.actors.engines.engine import Engine
from raylearner.actors.proxy.agent import Agent
from raylearner.actors.turn import sample_turn
from raylearner.data.dialogue import read_dialogue
from raylearner.environments.protocol import Environment, Outcome
from raylearner.errors import DialogueError, EnvironmentFault, TrajectoryError
from raylearner.observability.spans import Tracer
from raylearner.rewards.functions import view_of
from raylearner.rewards.scorer import Scorer
from raylearner.tokenization.renderer import Renderer, unless_long
from raylearner.tokenization.transcript import Transcript
from raylearner.types import (
    Claim,
    CompletionStop,
    Sampling,
    StopReason,
    Trajectory,
)
from raylearner.user_code.frames import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKit:
    """What every episode of an actor shares. `make_environment` gives each episode its own."""

    engine: Engine
    renderer: Renderer
    scorer: Scorer
    make_environment: Callable[[], Environment]
    tracer: Tracer
    agent: Agent | None = None
    """Where programs play the episodes by themselves: `make_environment` is then not called."""


async def play_episode(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> Trajectory:
    """Plays and scores `claim`. Failures are data: a trajectory with stop reason `error`.

    Only cancellation propagates; nothing is then reported.
    """
    started_at_s = time.time()
    transcript = Transcript(renderer=kit.renderer, claim=claim)
    with kit.tracer.span("episode", group=claim.group_id, sample=claim.sample_index):
        stop_reason, error, outcome = await _from_reset_to_close(kit, transcript, sampling)
        if not transcript.token_ids:
            transcript.open_empty()
        outcome = replace(outcome, shown=_seen(outcome.shown, transcript))
        trajectory = transcript.close(
            stop_reason=stop_reason,
            error=error,
            metrics=outcome.metrics,
            shown=outcome.shown,
            started_at_s=started_at_s,
            finished_at_s=time.time(),
        )
        if error is not None or stop_reason is StopReason.ABORTED:
            return trajectory
        (trajectory,) = await scored(kit, claim, [trajectory], outcome)
        return trajectory


async def _from_reset_to_close(
    kit: EpisodeKit, transcript: Transcript, sampling: Sampling
) -> tuple[StopReason, str | None, Outcome]:
    """How the episode ended, its first failure, and what its environment reports."""
    try:
        environment = kit.make_environment()
    except Exception as cause:
        return StopReason.ERROR, _said(cause), Outcome()
    stop_reason, error, outcome = StopReason.ERROR, None, Outcome()
    try:
        stop_reason = await _play(kit, environment, transcript, sampling)
    except Exception as cause:  # an environment may raise whatever its author let through
        error = _said(cause)
    finally:
        try:
            await environment.close()
            outcome = environment.outcome()
        except Exception as cause:
            stop_reason, error = StopReason.ERROR, error or _said(cause)
    return stop_reason, error, outcome


def _said(cause: Exception) -> str:
    if isinstance(cause, TrajectoryError):
        return f"{cause.kind}: {cause}"
    return f"{EnvironmentFault.kind}: the environment {describe(cause)}"


def _seen(shown: tuple[str, ...], transcript: Transcript) -> tuple[str, ...]:
    """Without the pages that came last and no longer fitted."""
    return shown[: len(shown) - transcript.num_left_out]


async def _play(
    kit: EpisodeKit, environment: Environment, transcript: Transcript, sampling: Sampling
) -> StopReason:
    prompt = transcript.claim.prompt
    try:
        messages = read_dialogue(await environment.reset(prompt), prefill=prompt.prefill)
    except DialogueError as error:
        raise EnvironmentFault(f"what reset returned: {error}") from error
    messages = await kit.renderer.fit_images(messages)
    opening = [message.content for message in messages]
    tools = environment.tool_schemas
    await unless_long(opening, partial(transcript.open, messages, tools=tools))
    seed = sampling.seed
    while transcript.remaining_tokens > 0 and not transcript.is_full:
        budget = min(sampling.max_tokens, transcript.remaining_tokens)
        turn_sampling = replace(sampling, stop=environment.stop, max_tokens=budget, seed=seed)
        with kit.tracer.span("turn", group=transcript.claim.group_id) as turn:
            with kit.tracer.span("generate") as generate:
                completion = await sample_turn(
                    kit.engine,
                    kit.renderer,
                    transcript.engine_token_ids,
                    turn_sampling,
                    opening=transcript.open_thought,
                    images=transcript.images,
                )
                generate.arguments["tokens"] = len(completion.token_ids)
            transcript.add_completion(completion)
            if completion.stop_reason is CompletionStop.ABORTED:
                transcript.add_reply(())
                return StopReason.ABORTED
            with kit.tracer.span("environment") as step:
                reply = await environment.step(transcript.message)
                if reply.tool is not None:
                    step.name = f"tool {reply.tool}"
            turn.arguments["is_valid"] = reply.is_valid
        messages = await kit.renderer.fit_images(reply.messages)
        fits = await unless_long(
            [*opening, *(message.content for message in messages)],
            partial(
                transcript.add_reply,
                messages,
                tool=reply.tool,
                is_valid=reply.is_valid,
                foreign_form=reply.foreign_form,
                num_shown=reply.num_shown,
            ),
        )
        if reply.is_done:
            ran_out = completion.stop_reason is CompletionStop.LENGTH
            is_cut = ran_out and reply.stop_reason is not StopReason.ANSWER
            return StopReason.MAX_TOKENS if is_cut else reply.stop_reason
        if not fits:
            return StopReason.MAX_TOKENS
        seed = None if seed is None else seed + 1
    return StopReason.MAX_TOKENS


async def scored(
    kit: EpisodeKit, claim: Claim, segments: Sequence[Trajectory], outcome: Outcome
) -> list[Trajectory]:
    """The segments of one episode with what it is worth, the same for each; none trains when a
    reward fails."""
    view = view_of(claim.prompt, segments, kit.scorer.weights.keys())
    try:
        with kit.tracer.span("reward", group=claim.group_id):
            score = await kit.scorer.score(view)
    except TrajectoryError as cause:
        return [segment.failed(f"{cause.kind}: {cause}") for segment in segments]
    reward, rewards = score.reward, score.rewards
    if outcome.penalty and (reward is not None or kit.scorer.is_partial):
        rewards = {**rewards, "invalid_action_penalty": -outcome.penalty}
        reward = None if reward is None else reward - outcome.penalty
    return [
        replace(
            segment,
            reward=reward,
            rewards=rewards,
            columns=score.columns,
            metrics={**segment.metrics, **score.metrics},
        )
        for segment in segments
    ]
