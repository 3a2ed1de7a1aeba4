"""Evaluation on held-out prompts."""

from raylearner.config.rollout import SamplingSection
from raylearner.config.section import NaturalInt, PositiveInt, Section


class EvaluationSection(Section):
    """Evaluation on held-out prompts."""

    every_steps: NaturalInt = 0
    """Also every k steps, on one actor beside training; step 0 and the end always. 0: those two only."""
    num_prompts: PositiveInt = 128
    """Prompts of one evaluation."""
    sampling: SamplingSection = SamplingSection(temperature=0.0)
    """Greedy by default."""
