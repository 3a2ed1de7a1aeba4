"""The schema of a run: every key, its meaning, its unit and its default.

`RunConfig` stops at the controller: a component receives its own section, math receives numbers.
The sections live in the modules beside this one, which names them all in one place.
"""

import math
from typing import Literal, Self

from pydantic import model_validator

from raylearner.config.actors import (
    ActorsSection,
    EngineSection,
    RendererSection,
    SamplingSection,
    ScriptedEngine,
    TransformersEngine,
    VllmEngine,
)
from raylearner.config.data import CalculatorData, DataSection, DataSource, FileData
from raylearner.config.environment import (
    CustomEnvironment,
    EnvironmentSection,
    OpenAiProxy,
    SingleTurn,
    ToolUse,
)
from raylearner.config.learner import LearnerSection
from raylearner.config.model import ModelSection, PretrainedModel, TinyModel, WarmStart
from raylearner.config.rewards import RewardFunction, RewardSection
from raylearner.config.section import (
    Fraction,
    Name,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    number,
)
from raylearner.learner.objective.advantages import GrpoAdvantage, RlooAdvantage
from raylearner.learner.objective.behavior_losses import DecoupledPpo
from raylearner.learner.objective.corrections import CorrectionSection
from raylearner.learner.objective.estimate import AdvantageSection
from raylearner.learner.objective.kl import KlSection
from raylearner.learner.objective.losses import LossSection
from raylearner.learner.objective.value_loss import CriticSection


class RunSection(Section):
    """The run as a whole."""

    name: Name = "run"
    """Names the run directory; shown in logs, on the Ray dashboard and in job metadata."""
    dir: str | None = None
    """Run directory; it must not exist yet. Default: `runs/<name>-<time>`."""
    num_steps: PositiveInt = 100
    """Learner steps to commit before the run ends."""
    seed: Seed = 0
    """Seeds prompt order, model initialisation and the scripted parts; vLLM samples unseeded."""
    checkpoint_every_steps: NaturalInt = 50
    """A checkpoint is written every so many steps and at the last one; 0 keeps the last only."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; older ones are removed once a newer one is whole."""
    checkpoint_async: bool = True
    """Training stands still only while state is copied to host memory, 12 bytes a trained parameter, and goes on while that is written; false waits until all is on disk."""
    watchdog_s: PositiveFloat = 600.0
    """The run ends, naming who waits for whom, after so many seconds without any progress of episodes, in a learner step, or without an answer of the replay actor."""
    deadline: str | None = None
    """When the machines are taken away: ISO 8601, or seconds since 1970. Default: RAYLEARNER_DEADLINE, or SLURM_JOB_END_TIME, of the environment."""
    deadline_margin_s: PositiveFloat = 300.0
    """So long before the deadline the run writes a checkpoint and stops."""
    max_learner_restarts: NaturalInt = 2
    """How often a learner that died is restored from the last checkpoint before the run ends."""


class ClusterSection(Section):
    """The Ray cluster the run uses."""

    address: str | None = None
    """Address of an existing cluster; empty starts a local one (RAY_ADDRESS, set by jobs, wins)."""
    num_cpus: PositiveInt | None = None
    """CPUs that a local cluster offers. Default: those of the machine."""
    object_store_bytes: PositiveInt = 400_000_000
    """Object store of a local cluster, in bytes."""
    dashboard: bool = False
    """Starts Ray's dashboard on 127.0.0.1 with a local cluster."""


class ReplaySection(Section):
    """Admission, staleness and groups."""

    groups_per_step: PositiveInt = 16
    """Groups in one take."""
    group_size: PositiveInt = 8
    """Episodes of one prompt."""
    extra: NaturalInt = 0
    """Episodes started beyond `group_size`; the first `group_size` done make the group."""
    play_greedy: bool = False
    """One more episode of each prompt, sampled greedily. It never trains; its reward is the baseline of remax."""
    max_staleness: NaturalInt = 2
    """Most versions between sampling a token and training on it; 0 is synchronous."""
    on_stale: Literal["mask", "drop", "wait", "train"] = "mask"
    """What happens to what is too old at `take`; see docs/architecture.md."""
    max_concurrent_groups: PositiveInt | None = None
    """Groups running at once. Default: bounded by staleness alone."""
    group_time_limit_s: PositiveFloat = 600.0
    """A group still incomplete after so long is closed by the partial-group rule."""
    partial_groups: Literal["train", "drop"] = "train"
    """At the time limit: train on what is done (at least two episodes), or drop the group."""
    drop_zero_variance: bool = False
    """Groups whose rewards are all equal are dropped and refilled."""
    max_filtered_groups: PositiveInt = 1000
    """So many filtered groups in a row end the run with the reason."""
    max_attempts: PositiveInt = 3
    """Times one sample is started, when its actor dies, before it counts as failed."""
    max_error_fraction: Fraction = 0.5
    """The run ends when more of the last `error_window` episodes failed."""
    max_tool_failure_fraction: Fraction = 0.9
    """The run ends when a tool failed more of its calls in the last `error_window` episodes that called it. Counts failures that are shown to the policy; 1 never ends a run."""
    error_window: PositiveInt = 64
    """Episodes over which failures are counted."""


class WeightsSection(Section):
    """How weights reach the engines."""

    every_steps: PositiveInt = 1
    """Every k-th policy version is published."""
    transport: Literal["auto", "shared_files", "nccl", "ipc", "adapter"] = "auto"
    """`nccl` broadcasts between separate GPUs, `ipc` shares memory on GPUs where every learner rank lives beside engines, `shared_files` writes safetensors to memory-backed storage on one machine, `adapter` writes LoRA adapters there and nothing else; the others carry them merged, to engines in float32; auto chooses by where actors are."""
    folder: str = "/dev/shm"
    """Where shared files live; a folder of the run's own is made inside and removed at the end."""
    clear_caches: bool = True
    """Running requests are recomputed under the new weights; off keeps stale key-values."""
    deadline_s: PositiveFloat = 120.0
    """Maximum time for an engine to acknowledge a push; an engine that takes longer has failed and is replaced."""
    verify_tolerance: PositiveFloat | Literal["auto"] = "auto"
    """Maximum |learner - engine| log-probability on the probe prompts, in nats, for a weight update to count as verified; auto depends on precision: 1e-3 in float32 on CPUs, 0.05 on GPUs, 0.25 in half precision."""
    verify_statistic: Literal["auto", "max", "mean"] = "auto"
    """Statistic of that difference over the probe's tokens; auto is the mean in half precision, where single tokens differ by more than a nat, and the maximum in float32."""
    num_probe_tokens: PositiveInt = 32
    """Length of a probe prompt."""


class EvaluationSection(Section):
    """Evaluation on held-out prompts."""

    every_steps: NaturalInt = 0
    """Evaluates every k steps, on one actor beside training, besides step 0 and the last step; 0: only at those two."""
    num_prompts: PositiveInt = 128
    """Number of prompts of one evaluation."""
    sampling: SamplingSection = SamplingSection(temperature=0.0)
    """Sampling in evaluations. The temperature is 0 (greedy) by default; other keys default to those of `sampling`."""


class CompletionsSection(Section):
    """A table of a few completions: prompt, completion, rewards, advantage, logged numbers."""

    every_steps: NaturalInt = 1
    """Every so many steps; 0 never."""
    num_completions: PositiveInt = 4
    """Rows, spread from the worst reward to the best."""
    unique_prompts: bool = False
    """At most one row a prompt."""
    max_characters: PositiveInt = 400
    """Longer prompts and completions are cut in the middle."""
    log: bool = False
    """Also writes the table to the log; TensorBoard has it anyway."""


class ProfileSection(Section):
    """Profiles of chosen learner steps by torch's profiler, one file a rank."""

    steps: tuple[PositiveInt, ...]
    """Learner steps to profile; the first step after a start is slower than the rest."""
    record_memory: bool = False
    """Also records allocations."""
    record_stacks: bool = False
    """Also records Python stacks; larger files and a slower step."""


class WandbSection(Section):
    """Weights & Biases; the package is installed by whoever wants it."""

    project: str = "raylearner"
    """Project there."""
    entity: str | None = None
    """Team or user; empty is the account's default."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files to upload later."""


class ObservabilitySection(Section):
    """What is recorded."""

    tensorboard: bool = True
    """Writes `tensorboard/`."""
    ray_metrics: bool = True
    """Exports every number through Ray's metrics, for Prometheus and Grafana."""
    wandb: WandbSection | None = None
    """Present: numbers also go to Weights & Biases."""
    trajectories_every_steps: NaturalInt = 1
    """Writes `trajectories/step_NNNNNN.jsonl` every k steps; 0 never."""
    completions: CompletionsSection | None = CompletionsSection()
    """Completions as text; null switches them off."""
    trace: bool = True
    """Writes `trace.json` (Chrome trace)."""
    profile: ProfileSection | None = None
    """Present: chosen learner steps are profiled into `profile/`."""


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
    "FileData",
    "Fraction",
    "GrpoAdvantage",
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
    evaluation: EvaluationSection | None = EvaluationSection()
    observability: ObservabilitySection = ObservabilitySection()

    @model_validator(mode="after")
    def _inherit_sampling(self) -> Self:
        """Take keys of `evaluation.sampling` that are not set from `sampling`."""
        if self.evaluation is not None:
            own = self.evaluation.sampling
            keys = {"temperature": 0.0} | own.model_dump(exclude_unset=True)
            sampling = self.sampling.model_copy(update=keys)
            self.__dict__["evaluation"] = self.evaluation.model_copy(update={"sampling": sampling})
        return self

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
