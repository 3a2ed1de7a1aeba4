"""One episode: engine, environment and renderer, from a claim to a scored trajectory.

Plain async functions, no Ray: the same code runs in rollout actors, in evaluation and in tests.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from raylearner.actors.engines.engine import Engine
from raylearner.data.dialogue import read_dialogue
from raylearner.environments.protocol import Environment, Outcome
from raylearner.errors import DialogueError, EngineDead, EnvironmentFault, TrajectoryError
from raylearner.observability.spans import Tracer
from raylearner.rewards.functions import view_of
from raylearner.rewards.scorer import Scorer
from raylearner.text import outside
from raylearner.tokenization.renderer import Renderer, unless_long
from raylearner.tokenization.transcript import Transcript
from raylearner.types import (
    Claim,
    Completion,
    CompletionStop,
    Sampling,
    StopReason,
    Trajectory,
)
from raylearner.user_code.frames import describe

CLOSE_LIMIT_S = 10.0
"""Maximum time to close the environment of a cancelled episode."""
SEED_STEP = 1_000_003
"""Distance between the seeds of the pieces of one turn."""


class Player(Protocol):
    """Plays complete episodes without turns from here, as agent programs do."""

    async def play(self, kit: "EpisodeKit", claim: Claim, sampling: Sampling) -> list[Trajectory]:
        """Return the episode's segments, scored."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKit:
    """Parts shared by all episodes of an actor. `make_environment` gives each episode its own."""

    engine: Engine
    renderer: Renderer
    scorer: Scorer
    make_environment: Callable[[], Environment]
    tracer: Tracer
    agent: Player | None = None
    """Plays the episodes, if any: `make_environment` is then not called."""


async def play_episode(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
    """Play and score `claim`, and return its segments, at least one.

    Failures are data: segments with the stop reason `error`. Only cancellation and `EngineDead`
    propagate, and nothing is then reported.
    """
    if kit.agent is not None:
        return await kit.agent.play(kit, claim, sampling)
    started_at_s = time.time()
    transcript = Transcript(renderer=kit.renderer, claim=claim)
    with kit.tracer.span("episode", group=claim.group_id, sample=claim.sample_index):
        stop_reason, error, outcome = await _play_in_environment(kit, transcript, sampling)
        if not transcript.token_ids:
            transcript.open_empty()
        # Pages shown last that did not fit are left out.
        shown = outcome.shown[: len(outcome.shown) - transcript.num_left_out]
        trajectory = transcript.close(
            stop_reason=stop_reason,
            error=error,
            metrics=outcome.metrics,
            tool_errors=outcome.tool_errors,
            shown=shown,
            started_at_s=started_at_s,
            finished_at_s=time.time(),
        )
        if error is not None or stop_reason is StopReason.ABORTED:
            return [trajectory]
        return await score_segments(kit, claim, [trajectory], outcome)


async def _play_in_environment(
    kit: EpisodeKit, transcript: Transcript, sampling: Sampling
) -> tuple[StopReason, TrajectoryError | None, Outcome]:
    """Return how the episode ended, its first failure, and the environment's outcome."""
    try:
        environment = kit.make_environment()
    except Exception as cause:
        return StopReason.ERROR, _failure(cause), Outcome()
    stop_reason, error, outcome = StopReason.ERROR, None, Outcome()
    try:
        stop_reason = await _play_turns(kit, environment, transcript, sampling)
    except EngineDead:
        raise
    except Exception as cause:  # a custom environment may raise anything
        error = _failure(cause)
    finally:
        try:
            async with asyncio.timeout(_close_limit_s()):
                await environment.close()
            outcome = environment.outcome()
        except Exception as cause:
            stop_reason, error = StopReason.ERROR, error or _failure(cause)
    return stop_reason, error, outcome


def _close_limit_s() -> float | None:
    """Return the limit of closing the environment of an episode that was cancelled, so that its slot is
    free soon; any other is bounded by the environment's own limit.
    """
    task = asyncio.current_task()
    return CLOSE_LIMIT_S if task is not None and task.cancelling() else None


def _failure(cause: Exception) -> TrajectoryError:
    if isinstance(cause, TrajectoryError):
        return cause
    return EnvironmentFault(f"the environment {describe(cause)}")


async def _play_turns(
    kit: EpisodeKit, environment: Environment, transcript: Transcript, sampling: Sampling
) -> StopReason:
    prompt = transcript.claim.prompt
    try:
        messages = read_dialogue(await environment.reset(prompt), prefill=prompt.prefill)
    except DialogueError as error:
        raise EnvironmentFault(f"messages returned by reset: {error}") from error
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


async def score_segments(
    kit: EpisodeKit, claim: Claim, segments: Sequence[Trajectory], outcome: Outcome
) -> list[Trajectory]:
    """Return the segments of one episode with its reward, the same for each.

    When a reward function fails, none of them trains.
    """
    view = view_of(claim.prompt, segments, kit.scorer.weights.keys())
    try:
        with kit.tracer.span("reward", group=claim.group_id):
            score = await kit.scorer.score(view)
    except TrajectoryError as cause:
        return [segment.failed(cause) for segment in segments]
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


# -- one turn -----------------------------------------------------------------------------------


async def sample_turn(
    engine: Engine,
    renderer: Renderer,
    token_ids: Sequence[int],
    sampling: Sampling,
    *,
    opening: str = "",
    images: Sequence[bytes] = (),
) -> Completion:
    """Sample one turn after `token_ids`, which are in the engine's form.

    `opening` is the tag of the thought that the turn begins in. Where the engine stops at a string
    inside a thought, the turn continues from there: its tokens, log-probabilities and policy versions
    are those of all pieces as they were sampled, at most `sampling.max_tokens` together. Turns under a
    regex are sampled in one piece.
    """
    turn, num_pieces, left = None, 0, sampling.max_tokens
    while left > 0 or turn is None:
        sampled = [] if turn is None else turn.token_ids.tolist()
        seed = None if sampling.seed is None else sampling.seed + num_pieces * SEED_STEP
        completion = await engine.generate(
            [*token_ids, *sampled], replace(sampling, max_tokens=left, seed=seed), images=images
        )
        piece = _cut_at_end(completion, renderer.end_token_ids)
        turn = piece if turn is None else _join(turn, piece)
        if not _stopped_in_thought(turn, piece, renderer, sampling, opening=opening):
            return turn
        num_pieces, left = num_pieces + 1, sampling.max_tokens - len(turn.token_ids)
    return replace(turn, stop_reason=CompletionStop.LENGTH)


def _cut_at_end(completion: Completion, end_token_ids: Sequence[int]) -> Completion:
    """Drop tokens that an engine sampled after the first end token, which stays."""
    ends = np.flatnonzero(np.isin(completion.token_ids, end_token_ids))
    if len(ends) == 0 or ends[0] + 1 == len(completion.token_ids):
        return completion
    size = int(ends[0]) + 1
    return Completion(
        token_ids=completion.token_ids[:size],
        logprobs=completion.logprobs[:size],
        policy_versions=completion.policy_versions[:size],
        stop_reason=CompletionStop.END,
    )


def _stopped_in_thought(
    turn: Completion, piece: Completion, renderer: Renderer, sampling: Sampling, *, opening: str
) -> bool:
    """Return whether the last `piece` ended at a stop string, and stop strings occur in thoughts only.

    A stop string that is part of a reasoning tag was requested as such and ends the turn.
    """
    stops, reasoning = sampling.stop, renderer.turns.reasoning
    if piece.stop_reason is not CompletionStop.STOP_STRING or sampling.regex is not None:
        return False
    if not any(stop in renderer.decode(piece.token_ids.tolist()) for stop in stops):
        return False
    text = renderer.decode(turn.token_ids.tolist())
    spans = reasoning.thoughts(text, opening=opening).spans
    spoken = outside(text, spans)
    tags = [tag for pair in reasoning.tags for tag in pair]
    tag_stops = [stop for stop in stops if any(stop in tag or tag in stop for tag in tags)]
    return (
        bool(spans)
        and not any(stop in spoken for stop in stops)
        and not any(stop in text for stop in tag_stops)
    )


def _join(first: Completion, second: Completion) -> Completion:
    return Completion(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        policy_versions=np.concatenate([first.policy_versions, second.policy_versions]),
        stop_reason=second.stop_reason,
    )
