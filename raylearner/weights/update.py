"""Records of a push: the update, the probe that verifies it, and an engine's receipt."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raylearner.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Prompts with the learner's log-probabilities, which an engine must reproduce."""

    token_ids: tuple[tuple[int, ...], ...]
    """Sequences of at least 2 tokens, as engines take them: one placeholder for each image."""
    logprobs: tuple[tuple[float, ...], ...]
    """Log-probabilities of the last tokens of each sequence: all but the first, or those after its images."""
    tolerance: float
    images: tuple[tuple[bytes, ...], ...] = ()
    """Encoded images of each sequence; empty if there are none."""
    statistic: Literal["max", "mean"] = "max"
    """Statistic of |engine - learner| over all tokens that must be within `tolerance`."""

    def prompts(self) -> Iterator[tuple[tuple[int, ...], tuple[bytes, ...], int]]:
        """Yield token ids, images, and the number of last tokens to score."""
        images = self.images or ((),) * len(self.token_ids)
        for ids, shown, scored in zip(self.token_ids, images, self.logprobs, strict=True):
            yield ids, shown, len(scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """One push: its version, its tensors in the form of a transport, and the probe.

    The payload has the `checksums` of the tensors sent, by name.
    """

    policy_version: PolicyVersion
    transport: str
    payload: Mapping[str, Any]
    probe: Probe
    should_recompute: bool = True
    """Whether running requests are computed again from their tokens; otherwise their keys and values stay."""
    is_collective: bool = False
    """Whether it is made for the members of one push, who must all receive it; joiners need another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """An engine's acknowledgement of one push."""

    policy_version: PolicyVersion
    logprob_error: float
    """|engine - learner| log-probability on the probe, in nats."""
    pause_s: float
    """Time without generation, which begins with the wait for the step in flight."""
    update_s: float
    """Part of the pause in which the parameters were written."""
    probe_s: float
    """Time to score the probe."""
    verify_s: float = 0.0
    """Time to compare the checksums of all parameters, while the engine generates."""
    num_verified: int = 0
    """Number of tensors whose checksums match those sent."""
    stage_s: float = 0.0
    """Time for the tensors to arrive while the engine generated."""
    num_recomputed: int = 0
    """Number of tokens whose keys and values running requests lost."""
