"""The schema of a run: every key, its meaning, its unit and its default.

`RunConfig` stops at the controller: a component receives its own section, math receives numbers.
The sections live in the modules beside this one, which names them all in one place.
"""

import math

from raylearner.config.advantage import AdvantageSection, GrpoAdvantage, RlooAdvantage
from raylearner.config.correction import CorrectionSection
from raylearner.config.critic import CriticSection
from raylearner.config.data import CalculatorData, DataSection, DataSource, JsonlData
from raylearner.config.environment import (
    CustomEnvironment,
    EnvironmentSection,
    OpenAiProxy,
    SingleTurn,
    ToolUse,
)
from raylearner.config.evaluation import EvaluationSection
from raylearner.config.kl import KlSection
from raylearner.config.learner import LearnerSection
from raylearner.config.loss import DecoupledPpo, LossSection
from raylearner.config.model import ModelSection, PretrainedModel, TinyModel, WarmStart
from raylearner.config.observability import (
    CompletionsSection,
    ObservabilitySection,
    ProfileSection,
    WandbSection,
)
from raylearner.config.replay import ReplaySection
from raylearner.config.rewards import RewardFunction, RewardSection
from raylearner.config.rollout import (
    ActorsSection,
    EngineSection,
    RendererSection,
    SamplingSection,
    ScriptedEngine,
    TransformersEngine,
    VllmEngine,
)
from raylearner.config.run import ClusterSection, RunSection
from raylearner.config.section import (
    Fraction,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    number,
)
from raylearner.config.weights import WeightsSection

__all__ = [
    "ActorsSection",
    "AdvantageSection",
    "CalculatorData",
    "ClusterSection",
    "CompletionsSection",
    "CorrectionSection",
    "CriticSection",
    "CustomEnvironment",
    "DataSection",
    "DataSource",
    "DecoupledPpo",
    "EngineSection",
    "EnvironmentSection",
    "EvaluationSection",
    "Fraction",
    "GrpoAdvantage",
    "JsonlData",
    "KlSection",
    "LearnerSection",
    "LossSection",
    "ModelSection",
    "NaturalInt",
    "NonNegativeFloat",
    "ObservabilitySection",
    "OpenAiProxy",
    "PositiveFloat",
    "PositiveInt",
    "PretrainedModel",
    "ProfileSection",
    "RendererSection",
    "ReplaySection",
    "RewardFunction",
    "RewardSection",
    "RlooAdvantage",
    "RunConfig",
    "RunSection",
    "SamplingSection",
    "ScriptedEngine",
    "Section",
    "SingleTurn",
    "TinyModel",
    "ToolUse",
    "TransformersEngine",
    "VllmEngine",
    "WandbSection",
    "WarmStart",
    "WeightsSection",
]


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    cluster: ClusterSection = ClusterSection()
    model: ModelSection
    data: DataSection
    environment: EnvironmentSection
    renderer: RendererSection = RendererSection()
    sampling: SamplingSection = SamplingSection()
    rewards: RewardSection = RewardSection()
    actors: ActorsSection
    replay: ReplaySection = ReplaySection()
    learner: LearnerSection = LearnerSection()
    weights: WeightsSection = WeightsSection()
    evaluation: EvaluationSection = EvaluationSection()
    observability: ObservabilitySection = ObservabilitySection()

    @property
    def capacity_groups(self) -> int:
        """Groups running, held and leased together: (max_staleness + 1) * groups_per_step."""
        return (self.replay.max_staleness + 1) * self.replay.groups_per_step

    @property
    def episodes_per_step(self) -> int:
        return self.replay.groups_per_step * self.replay.group_size

    @property
    def max_sequence_tokens(self) -> int:
        return self.renderer.max_prompt_tokens + self.renderer.max_response_tokens

    @property
    def cpus_needed(self) -> float:
        """CPUs of all actors; the replay actor and the controller ask for none."""
        return (
            self.actors.num_actors * self.actors.cpus_per_actor
            + self.learner.num_ranks * self.learner.cpus_per_rank
            + sum(model.cpus for model in self.rewards.models.values())
        )

    @property
    def engines_per_rank(self) -> int:
        """Most engines beside a learner rank where they share its GPU."""
        return math.ceil(self.actors.num_actors / self.learner.num_ranks)

    @property
    def engines_sleep(self) -> bool:
        """Whether engines give their memory back while the learner steps."""
        engine = self.actors.engine
        return isinstance(engine, VllmEngine) and engine.sleep

    @property
    def gpus_needed(self) -> float:
        """GPUs of all actors; `auto` counts as none until it is resolved."""
        return (
            self.actors.num_actors * number(self.actors.gpus_per_actor)
            + self.learner.num_ranks * number(self.learner.gpus_per_rank)
            + sum(model.gpus for model in self.rewards.models.values())
        )
