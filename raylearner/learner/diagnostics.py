"""What tells how far the learner is from the policies that sampled, measured and never trained on.

Legend: `T` packed tokens, `R` rows. All return combinable metrics (see `metric`).
"""

import torch
from torch import Tensor

from raylearner.learner.metric import Max, Mean, Metrics, Std
from raylearner.learner.rows import select


def logprob_gap(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Metrics:
    """|proximal - behavior| in nats and |exp - exp| of the probabilities, over the mask `[T]`.

    Behavior log-probabilities that are not finite are left out and their fraction is reported.
    """
    known = mask & behavior_logprobs.isfinite()
    proximal = select(proximal_logprobs.detach(), known)
    behavior = select(behavior_logprobs, known)
    gap = (proximal - behavior).abs()
    difference = (proximal.exp() - behavior.exp()).abs()
    return {
        "logprob_gap/mean": Mean.of(gap, known),
        "logprob_gap/max": Max.of(gap, known),
        "logprob_gap/std": Std.of(gap, known, ddof=1),
        "probability_gap/mean": Mean.of(difference, known),
        "probability_gap/max": Max.of(difference, known),
        "probability_gap/std": Std.of(difference, known, ddof=1),
        "behavior_unknown_fraction": Mean.of(torch.logical_not(known), mask),
    }
