"""A pass of random tokens before the first step, which compiles the models while engines start."""

import itertools
import sys
from collections.abc import Iterator

import numpy as np
import torch

from raylearner.config.learner import LearnerSection
from raylearner.config.section import number
from raylearner.errors import LearnerError, summary
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.batch.prefixes import SharedPrefix
from raylearner.learner.model.models import Models

NUM_SEQUENCES = (4, 6)
"""Numbers of sequences of the passes: with a second shape the compiler makes kernels for all of them."""
BUDGET_SHARE = 0.5
"""Share of the budget of a micro-batch: memory at the peak of the first step is not needed yet."""


def should_warm_up(section: LearnerSection) -> bool:
    """Return whether a rank runs the passes: not where engines measure memory on its GPU meanwhile, and not
    on CPUs, where they gain nothing without compilation.
    """
    gpus = number(section.gpus_per_rank)
    return gpus >= 1 or (gpus == 0 and section.compile is True)


def warm_up(models: Models, section: LearnerSection, *, temperature: float, device: str) -> None:
    """Score random tokens, and compute and discard their gradients; weights and random states stay.

    Every rank must call it. Raises `LearnerError` where the model does not compile.
    """
    from torch._dynamo.exc import TorchDynamoException  # takes seconds

    devices = [torch.cuda.current_device()] if device == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            for tokens in _tokens(models, section, device=device):
                _pass(models, tokens, temperature=temperature)
    except TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)
        raise LearnerError(
            f"learner.compile: the model does not compile: {summary(cause)}; set it to false, which makes steps about"
            " a third slower"
        ) from error
    finally:
        models.discard_gradients()


def _tokens(models: Models, section: LearnerSection, *, device: str) -> Iterator[PackedTokens]:
    """Yield micro-batches of different shapes, the same ones on every rank."""
    budget = int(section.token_budget * BUDGET_SHARE)
    longest = min(budget // max(NUM_SEQUENCES), _max_positions(models))
    kinds = (False, True) if models.shares_prefixes else (False,)
    for shares_prefix, num_rows in itertools.product(kinds, NUM_SEQUENCES):
        length = max(4, longest - num_rows)
        ids = np.random.default_rng(num_rows).integers(0, _vocabulary(models), length)
        num_shared = length // 2
        scored = np.arange(length) > (num_shared if shares_prefix else 0)
        prefix = SharedPrefix(family=0, num_tokens=num_shared) if shares_prefix else None
        yield PackedTokens.of(
            [ids] * num_rows,
            [scored] * num_rows,
            prefixes=[prefix] * num_rows,
            reader=models.reader,
            device=device,
        )


def _vocabulary(models: Models) -> int:
    """Return the number of ids that may be drawn: not those of placeholders, which are at the end."""
    head = models.policy.causal_lm.get_output_embeddings()
    assert head is not None
    return max(2, len(head.get_parameter("weight")) // 2)


def _max_positions(models: Models) -> int:
    """Return the number of positions that the model knows: learned ones have no others."""
    config = models.policy.causal_lm.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def _pass(models: Models, tokens: PackedTokens, *, temperature: float) -> None:
    policy, critic, reference = models.policy, models.critic, models.reference
    policy.score(tokens, temperature)
    if reference is not None:
        reference.score(tokens, temperature=temperature)
    scores = policy(tokens, temperature)
    outputs = (scores.logprobs, scores.entropy, scores.state_values)
    total = torch.stack([output.sum() for output in outputs if output is not None]).sum()
    policy.backward(0.0 * total)
    if critic is not None:
        critic.score(tokens)
        critic.backward(0.0 * critic.state_values(tokens).sum(), is_last=True)
