"""The probe of a push: log-probabilities of random prompts, compared between engine and learner.

Checksums verify the parameters (`verification`). The probe covers the rest: a kernel's packed copy
or a tied head that kept its old weights, a cache that outlived the push, and other settings, where
they change log-probabilities by more than the tolerance.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from raylearner.errors import WeightTransferError
from raylearner.types import PolicyVersion
from raylearner.weights.update import Probe

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
    """Return random token sequences, different for every policy version, so that no cache holds them."""
    if num_tokens < 2:
        raise ValueError(f"a probe needs at least 2 tokens, got {num_tokens}")
    special = set(special_token_ids)
    ordinary = np.array([i for i in range(vocab_size) if i not in special], dtype=np.int64)
    if len(ordinary) == 0:
        raise ValueError(
            f"all {vocab_size} tokens of the vocabulary are special: no token to probe with"
        )
    generator = np.random.default_rng([seed, policy_version])
    drawn = generator.choice(ordinary, size=(num_sequences, num_tokens))
    return tuple(tuple(int(token) for token in row) for row in drawn)


def logprob_error(engine_logprobs: Sequence[Sequence[float]], probe: Probe) -> float:
    """Return |engine - learner| log-probability: the probe's statistic of it over all tokens.

    Infinite if either is not a number.
    """
    if len(engine_logprobs) != len(probe.logprobs):
        raise WeightTransferError(
            f"the engine scored {len(engine_logprobs)} of {len(probe.logprobs)} probe prompts"
        )
    errors: list[float] = []
    for index, (engine, learner) in enumerate(zip(engine_logprobs, probe.logprobs, strict=True)):
        if len(engine) != len(learner):
            raise WeightTransferError(
                f"probe prompt {index}: {len(engine)} log-probabilities from the engine, "
                f"{len(learner)} from the learner"
            )
        for ours, theirs in zip(engine, learner, strict=True):
            error = abs(ours - theirs)
            errors.append(math.inf if math.isnan(error) else error)
    if not errors:
        return 0.0
    return max(errors) if probe.statistic == "max" else sum(errors) / len(errors)


def verify_logprobs(
    engine_logprobs: Sequence[Sequence[float]], probe: Probe, *, policy_version: PolicyVersion
) -> float:
    """Return the log-probability error; raise `WeightTransferError` beyond the probe's tolerance."""
    error = logprob_error(engine_logprobs, probe)
    if not error <= probe.tolerance:
        raise WeightTransferError(
            f"verification of policy version {policy_version} failed: the engine's "
            f"log-probabilities of {len(probe.token_ids)} probe prompts differ from the learner's "
            f"by {error:.3g} nats ({probe.statistic}), more than the tolerance of "
            f"{probe.tolerance:.3g}; the engine does not have the learner's weights"
        )
    return error
