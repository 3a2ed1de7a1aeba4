"""Test at load that packed rows score as in the model's own forward.

Model families change logits after the head, attention or positions in their own ways, and no list
of configuration keys covers the next family. Three short rows are scored by the model's own
forward, one by one by ours, and packed; all must agree. The middle row is packed once more between
other rows: its computation then has the same shapes, so rounding cannot hide an influence of other
rows. Whether rows may share a prefix is measured after that, and changes speed only.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raylearner.config.checks import SLICED_LAYERS
from raylearner.errors import ConfigError
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.batch.prefixes import SharedPrefix
from raylearner.learner.model.images import vision_tower
from raylearner.learner.model.policy import PackedModel

log = logging.getLogger(__name__)

ROW_LENGTHS = (19, 12, 9)
"""Lengths of the packed rows: the middle one is between two others, the last one has far positions.
"""

NUM_SHARED = 7
"""Number of tokens of the shared prefix."""

TOLERANCES = {"exact": 1e-4, "gpu": 0.02, "half": 0.25}
"""Maximum mean |difference| over a row's tokens, in nats: float32 and finer on CPUs, on GPUs, whose
kernels may use TF32, and half precision."""

QUIET = {"exact": 1e-4, "gpu": 1e-3, "half": 0.005}
"""The same where only the other rows differ. If ours and the model's own forward differ by more,
that is allowed: the rounding of a mixture's experts depends on how many tokens each has.
"""

Eager = Callable[[], AbstractContextManager[None]]
"""A context in which the model uses eager attention."""


@torch.no_grad()
def refuse_unfaithful(
    model: PackedModel,
    folder: Path,
    *,
    eager: Eager,
    compute_dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> float:
    """Raise `ConfigError` naming the model's family if its packed rows score differently.

    Otherwise return by how much other kernels change a score, in nats. Every rank must call it. It takes
    eight passes over at most forty tokens.
    """
    config: Any = model.causal_lm.config
    text: Any = config.get_text_config()
    what = f"model.path: {folder} ({config.model_type})"
    rows, others = (_rows(model, text, config, seed=seed) for seed in (0, 1))
    is_vision = vision_tower(model.causal_lm) is not None
    try:
        with model.plain_blocks():
            alone = [_score(model, [row], device, is_vision) for row in rows]
            far = _far_start(text) - ROW_LENGTHS[-1]
            packed = _score(model, rows, device, is_vision, far=far)
            mixed = _score(model, [others[0], rows[1], others[2]], device, is_vision)
            with eager():
                plain = [_score(model, [row], device, is_vision, is_plain=True) for row in rows]
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{what}: the learner cannot score packed rows of this model: {type(error).__name__}: {error};"
            " use a model of another family"
        ) from error
    precision = _precision(compute_dtype, device)
    tolerance = TOLERANCES[precision]
    own = max(_gap(a, b) for a, b in zip(alone, plain, strict=True))
    # Far positions may change the last row itself, but not other rows.
    starts = np.cumsum([0, *ROW_LENGTHS])
    beside = max(_gap(alone[i], packed[starts[i] : starts[i + 1]]) for i in range(len(rows) - 1))
    middle = slice(starts[1], starts[2])
    moved, quiet = _gap(packed[middle], mixed[middle]), max(QUIET[precision], own)
    log.info("%s: rows score as by the model's own forward, within %.2g nats", what, own)
    if not own <= tolerance:
        raise ConfigError(
            f"{what}: the learner's log-probabilities differ by {own:.3g} nats from those of the"
            f" model's own forward, more than {tolerance:g}: it changes its logits, attention or"
            " positions in a way that the learner does not implement; use a model of another family"
        )
    if not (beside <= tolerance and moved <= quiet):
        found, allowed = (moved, quiet) if beside <= tolerance else (beside, tolerance)
        raise ConfigError(
            f"{what}: a row's log-probabilities change by {found:.3g} nats with the rows that are"
            f" packed beside it, more than {allowed:.3g}, as with rotary embeddings that depend on"
            " the longest row or layers that keep a state; use a model of another family"
        )
    return max(own, beside)


@torch.no_grad()
def can_share_prefixes(
    model: PackedModel,
    folder: Path,
    *,
    noise: float,
    compute_dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> bool:
    """Return whether rows score the same with a shared prefix; if not, say what that costs.

    Every rank must call it. It takes two passes over at most sixty tokens. `noise` is what other kernels
    change.
    """
    config: Any = model.causal_lm.config
    text: Any = config.get_text_config()
    other_layers = sorted(set(getattr(text, "layer_types", None) or ()) - set(SLICED_LAYERS))
    if other_layers:
        problem = f"it has layers of {', '.join(other_layers)}"
    else:
        first, *others = _rows(model, text, config, seed=2)
        start = first[:NUM_SHARED]
        rows = [first, *(np.concatenate([start, other]) for other in others)]
        is_vision = vision_tower(model.causal_lm) is not None
        prefixes = [SharedPrefix(family=0, num_tokens=NUM_SHARED)] * len(rows)
        try:
            with model.plain_blocks():
                whole, shared = (
                    _score(model, rows, device, is_vision, prefixes=p, num_given=NUM_SHARED + 1)
                    for p in (None, prefixes)
                )
            gap = float((whole - shared).abs().sum() / (whole != 0).sum())
            allowed = max(QUIET[_precision(compute_dtype, device)], 3 * noise)
            problem = None if gap <= allowed else f"scores would change by {gap:.3g} nats"
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        log.warning(
            "%s: the prompt that rows of a group have in common is computed for each row, because %s",
            folder,
            problem,
        )
    agrees = torch.tensor(int(problem is None), device=device)
    dist.all_reduce(agrees, op=dist.ReduceOp.MIN)  # ranks must make the same passes
    return bool(agrees.item())


def _precision(compute_dtype: torch.dtype, device: torch.device | str) -> str:
    """Return the key of `TOLERANCES`."""
    if torch.finfo(compute_dtype).bits < 32:
        return "half"
    return "exact" if torch.device(device).type == "cpu" else "gpu"


def _rows(model: PackedModel, text: Any, config: Any, *, seed: int) -> list[np.ndarray]:
    """Draw rows of random tokens, without special ones."""
    special: set[int] = set(model.banned_token_ids)
    for values in (config.to_dict(), text.to_dict()):
        for key, value in values.items():
            if key.endswith("token_id") and value is not None:
                special |= set(value) if isinstance(value, list) else {value}
    ordinary = np.array([token for token in range(text.vocab_size) if token not in special])
    generator = np.random.default_rng(seed)
    return [generator.choice(ordinary, size=length) for length in ROW_LENGTHS]


def _far_start(text: Any) -> int:
    """Return a far position: twice the model's length with rotary embeddings, else its length."""
    length: int = getattr(text, "max_position_embeddings", None) or 2048
    return 2 * length if getattr(text, "rope_parameters", None) else length


def _score(
    model: PackedModel,
    rows: list[np.ndarray],
    device: torch.device | str,
    is_vision: bool,
    *,
    far: int | None = None,
    is_plain: bool = False,
    prefixes: Sequence[SharedPrefix] | None = None,
    num_given: int = 1,
) -> Tensor:  # [T]
    """Score the rows, all but their first `num_given` tokens."""
    scored = [np.arange(len(row)) >= num_given for row in rows]
    tokens = PackedTokens.of(rows, scored, prefixes=prefixes, device=device)
    positions = tokens.position_ids
    if far is not None:
        positions[-len(rows[-1]) :] += max(far, 0)
    if is_vision:
        positions = positions.expand(3, -1)
    tokens = replace(tokens, position_ids=positions)
    return model.score(tokens, has_bans=False, is_plain=is_plain).logprobs


def _gap(left: Tensor, right: Tensor) -> float:
    """Return the mean |difference| over a row's tokens but the first, which has no score."""
    return float((left[1:] - right[1:]).abs().mean())
