"""Evaluation on held-out prompts."""

from raylearner.config.actors import SamplingSection
from raylearner.config.section import NaturalInt, PositiveFloat, PositiveInt, Section


class EvaluationSection(Section):
    """Evaluation on held-out prompts; `evaluation: null` switches it off."""

    before_first_step: bool = True
    """Evaluates a new run before its first step."""
    every_steps: NaturalInt = 0
    """Evaluates every k steps, on one actor while training continues, besides step 0 and the last step; 0:
    only at those two."""
    num_prompts: PositiveInt = 128
    """Number of prompts of one evaluation."""
    samples_per_prompt: PositiveInt = 1
    """Number of episodes of each prompt. With several, pass@k and the majority vote are reported too."""
    solved_reward: float = 1.0
    """Minimum reward of an episode that counts as solved in pass@k and in the majority vote."""
    time_limit_s: PositiveFloat = 3600.0
    """Maximum time of one evaluation. Unfinished episodes are then aborted, count as not solved and are
    reported as `unfinished`."""
    sampling: SamplingSection = SamplingSection()
    """Sampling in evaluations. With one sample per prompt, the temperature is 0 (greedy) by default; other
    keys default to those of `sampling`, as does the temperature with several."""

    def with_sampling(self, training: SamplingSection) -> "EvaluationSection":
        """Return the section with each key of `sampling` that is not set taken from training."""
        greedy = {"temperature": 0.0} if self.samples_per_prompt == 1 else {}
        keys = greedy | self.sampling.model_dump(exclude_unset=True)
        return self.model_copy(update={"sampling": training.model_copy(update=keys)})
