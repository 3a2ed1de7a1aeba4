"""What checksums cannot see of a push: log-probabilities of probe prompts, engine against learner.

That parameters hold what was sent is for `verification`; a kernel's packed copy or a tied head that kept
its old weights, a cache that outlived the push and other settings show here, where they change
log-probabilities by more than the tolerance.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from raylearner.errors import WeightTransferError
from raylearner.types import PolicyVersion, Probe

NUM_PROBE_SEQUENCES = 2


def probe_tokens(
    *,
    seed: int,
    policy_version: PolicyVersion,
    vocab_size: int,
    special_token_ids: Iterable[int],
    num_tokens: int,
    num_sequences: int = NUM_PROBE_SEQUENCES,
) -> tuple[tuple[int, ...], ...]:
    """Token sequences that no cache has seen: other ones for every policy version."""
    if num_tokens < 2:
        raise ValueError(f"a probe needs at least 2 tokens, got {num_tokens}")
    special = set(special_token_ids)
    ordinary = np.array([i for i in range(vocab_size) if i not in special], dtype=np.int64)
    if len(ordinary) == 0:
        raise ValueError(f"all {vocab_size} tokens of the vocabulary are special: nothing to probe")
    generator = np.random.default_rng([seed, policy_version])
    drawn = generator.choice(ordinary, size=(num_sequences, num_tokens))
    return tuple(tuple(int(token) for token in row) for row in drawn)


def gap(engine_logprobs: Sequence[Sequence[float]], probe: Probe) -> float:
    """|engine - learner| log-probability, the probe's statistic of it over all tokens.

    Infinite where either is not a number.
    """
    if len(engine_logprobs) != len(probe.logprobs):
        raise WeightTransferError(
            f"the engine answered {len(engine_logprobs)} of {len(probe.logprobs)} probe prompts"
        )
    differences: list[float] = []
    for index, (engine, learner) in enumerate(zip(engine_logprobs, probe.logprobs, strict=True)):
        if len(engine) != len(learner):
            raise WeightTransferError(
                f"probe prompt {index}: {len(engine)} log-probabilities from the engine, "
                f"{len(learner)} from the learner"
            )
        for ours, theirs in zip(engine, learner, strict=True):
            difference = abs(ours - theirs)
            differences.append(math.inf if math.isnan(difference) else difference)
    if not differences:
        return 0.0
    return max(differences) if probe.statistic == "max" else sum(differences) / len(differences)


def check(
    engine_logprobs: Sequence[Sequence[float]], probe: Probe, *, policy_version: PolicyVersion
) -> float:
    """The gap, when it is within the probe's tolerance; `WeightTransferError` when it is not."""
    found = gap(engine_logprobs, probe)
    if not found <= probe.tolerance:
        raise WeightTransferError(
            f"proof of policy version {policy_version} failed: the engine's log-probabilities of "
            f"{len(probe.token_ids)} probe prompts differ from the learner's by {found:.3g} "
            f"({probe.statistic}), allowed are {probe.tolerance:.3g}; the engine does not hold the learner's weights"
        )
    return found
