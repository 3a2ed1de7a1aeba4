"""Samples one turn from an engine, past stop strings that stand in its reasoning."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raylearner.actors.engines.engine import Engine
from raylearner.text import outside
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Completion, CompletionStop, Sampling

SEED_STEP = 1_000_003
"""Between the seeds of the pieces of one turn."""


async def sample_turn(
    engine: Engine,
    renderer: Renderer,
    token_ids: Sequence[int],
    sampling: Sampling,
    *,
    opening: str = "",
    images: Sequence[bytes] = (),
) -> Completion:
    """One turn behind `token_ids`, in the form of engines; `opening` is the thought that it begins in.

    Where the engine stops at a string inside a thought, the turn goes on from there: its tokens,
    log-probabilities and policy versions are those of all pieces as they were sampled, at most
    `sampling.max_tokens` together. Turns under a regex are sampled in one piece.
    """
    piece = until_end(
        await engine.generate(token_ids, sampling, images=images), renderer.end_token_ids
    )
    found, num_pieces = piece, 1
    while _stopped_in_thought(found, piece, renderer, sampling, opening=opening):
        left = sampling.max_tokens - len(found.token_ids)
        if left <= 0:
            return replace(found, stop_reason=CompletionStop.LENGTH)
        seed = None if sampling.seed is None else sampling.seed + num_pieces * SEED_STEP
        piece = until_end(
            await engine.generate(
                [*token_ids, *found.token_ids.tolist()],
                replace(sampling, max_tokens=left, seed=seed),
                images=images,
            ),
            renderer.end_token_ids,
        )
        found, num_pieces = _joined(found, piece), num_pieces + 1
    return found


def until_end(completion: Completion, end_token_ids: tuple[int, ...]) -> Completion:
    """Drops what an engine sampled after the first end token; the end token itself stays."""
    positions = np.flatnonzero(np.isin(completion.token_ids, end_token_ids))
    if len(positions) == 0 or positions[0] + 1 == len(completion.token_ids):
        return completion
    keep = int(positions[0]) + 1
    return Completion(
        token_ids=completion.token_ids[:keep],
        logprobs=completion.logprobs[:keep],
        policy_versions=completion.policy_versions[:keep],
        stop_reason=CompletionStop.END,
    )


def _stopped_in_thought(
    found: Completion, piece: Completion, renderer: Renderer, sampling: Sampling, *, opening: str
) -> bool:
    """Whether `piece`, the last of `found`, ended at a stop string, and the turn has stop strings in its
    thoughts alone. One that is a reasoning tag itself was asked for and ends the turn."""
    stops, reasoning = sampling.stop, renderer.turns.reasoning
    if piece.stop_reason is not CompletionStop.STOP_STRING or sampling.regex is not None:
        return False
    if not any(stop in renderer.decode(piece.token_ids.tolist()) for stop in stops):
        return False
    text = renderer.decode(found.token_ids.tolist())
    spans = reasoning.thoughts(text, opening=opening).spans
    said = outside(text, spans)
    tags = [tag for pair in reasoning.tags for tag in pair]
    asked = [stop for stop in stops if any(stop in tag or tag in stop for tag in tags)]
    return (
        bool(spans)
        and not any(stop in said for stop in stops)
        and not any(stop in text for stop in asked)
    )


def _joined(first: Completion, second: Completion) -> Completion:
    return Completion(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        policy_versions=np.concatenate([first.policy_versions, second.policy_versions]),
        stop_reason=second.stop_reason,
    )
