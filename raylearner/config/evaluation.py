"""Evaluation on held-out prompts: the one of `data.evaluation`, and further sets of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from raylearner.config.actors import SamplingSection
from raylearner.config.data import DataSource
from raylearner.config.section import (
    ONE_OR_MORE,
    Name,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class EvaluationKeys(Section):
    """Keys of one set of held-out prompts."""

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


class EvaluationSet(EvaluationKeys):
    """One more set of held-out prompts. Keys that are not set are those of `evaluation`."""

    name: Name
    """Name of the set, before its metrics: `evaluation/<name>/reward/mean`."""
    data: Annotated[tuple[DataSource, ...], ONE_OR_MORE]
    """Prompts of the set: one source, or a list of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A set of held-out prompts of a run."""

    name: str
    """Empty for the prompts of `data.evaluation`."""
    data_key: str
    """Key of its sources."""
    section_key: str
    """Key of its section."""
    sources: tuple[DataSource, ...]
    section: EvaluationKeys


class EvaluationSection(EvaluationKeys):
    """Evaluation on held-out prompts; `evaluation: null` switches it off."""

    before_first_step: bool = True
    """Evaluates a new run before its first step."""
    sets: tuple[EvaluationSet, ...] = ()
    """Further sets of held-out prompts besides `data.evaluation`, with their own data, sampling and interval."""

    def resolved(self, training: SamplingSection) -> "EvaluationSection":
        """Return the section with all defaults that come from other keys."""
        own = self.sampling.model_dump(exclude_unset=True)
        sets: list[EvaluationSet] = []
        for one in self.sets:
            keys = EvaluationKeys.model_fields.keys() - one.model_fields_set - {"sampling"}
            whole = one.model_copy(update={key: getattr(self, key) for key in keys})
            sampling = own | one.sampling.model_dump(exclude_unset=True)
            sets.append(whole.model_copy(update=_sampling(whole, training, sampling)))
        return self.model_copy(update={**_sampling(self, training, own), "sets": tuple(sets)})

    def held_out(self, sources: tuple[DataSource, ...] | None) -> list[HeldOut]:
        """Return all sets, first that of `data.evaluation`, whose sources are given."""
        own = HeldOut(
            name="",
            data_key="data.evaluation",
            section_key="evaluation",
            sources=sources or (),
            section=self,
        )
        further = [
            HeldOut(
                name=one.name,
                data_key=f"evaluation.sets.{index}.data",
                section_key=f"evaluation.sets.{index}",
                sources=one.data,
                section=one,
            )
            for index, one in enumerate(self.sets)
        ]
        return further if sources is None else [own, *further]


def _sampling(
    section: EvaluationKeys, training: SamplingSection, keys: Mapping[str, Any]
) -> dict[str, SamplingSection]:
    greedy = {"temperature": 0.0} if section.samples_per_prompt == 1 else {}
    return {"sampling": training.model_copy(update={**greedy, **keys})}
