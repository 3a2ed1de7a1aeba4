"""Supervised steps on demonstrations, so that a tiny model has some behaviour to reinforce."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from raylearner.config.schema import WarmStart
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model.images import ImageReader
from raylearner.learner.model.loading import load_model
from raylearner.learner.optimizer import learning_rate_at
from raylearner.types import Trajectory

WARMUP_STEPS = 20
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
REPORT_EVERY_STEPS = 10
NUM_LAST_STEPS = 20
"""Number of last steps whose mean loss is reported."""


def warm_start(
    folder: Path,
    demonstrations: Sequence[Trajectory],
    config: WarmStart,
    *,
    seed: int,
) -> Iterator[str]:
    """Train the model in `folder` in place, in float32; yield the progress with the mean loss of the
    last steps.

    Tokens under the loss masks are imitated. Demonstrations come in a seeded order, repeated if there
    are too few. Images train the vision tower too.
    """
    model = load_model(str(folder), dtype=torch.float32)
    reader = ImageReader.from_pretrained(str(folder))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    rng = np.random.default_rng(seed)
    order: list[int] = []
    losses: list[float] = []
    for step in range(config.num_steps):
        while len(order) < config.batch_size:
            order.extend(int(index) for index in rng.permutation(len(demonstrations)))
        chosen = [demonstrations[index] for index in order[: config.batch_size]]
        del order[: config.batch_size]
        tokens = PackedTokens.of(
            [trajectory.token_ids for trajectory in chosen],
            [trajectory.loss_mask for trajectory in chosen],
            reader=reader,
            images=[trajectory.images for trajectory in chosen],
        )
        logprobs = model(tokens).logprobs
        loss = -logprobs.sum() / len(tokens.scored)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(
                step,
                peak=config.learning_rate,
                schedule="cosine",
                warmup=min(WARMUP_STEPS, config.num_steps // 2),
                num_updates=config.num_steps,
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % REPORT_EVERY_STEPS == 0 or step + 1 == config.num_steps:
            loss = np.mean(losses[-NUM_LAST_STEPS:])
            yield f"warm start, step {step + 1}/{config.num_steps}, loss {loss:.3f}"
    model.causal_lm.save_pretrained(folder)
