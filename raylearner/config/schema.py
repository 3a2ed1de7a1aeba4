"""The schema of a run: every key, its meaning, its unit and its default.

`RunConfig` stops at the controller: components receive their own sections. The sections are defined
in the modules beside this one.
"""

import math
from typing import Literal, Self

from pydantic import model_validator

from raylearner.config.actors import (
    ActorRange,
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
from raylearner.config.evaluation import EvaluationKeys, EvaluationSection, HeldOut
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
    """Name of the run: of its directory, in logs, on the Ray dashboard and in job metadata."""
    dir: str | None = None
    """Run directory, which must not exist yet. Default: `runs/<name>-<time>`."""
    num_steps: PositiveInt = 100
    """Number of learner steps."""
    seed: Seed = 0
    """Seed of prompt order, model initialization and scripted parts; sampling in vLLM is not seeded."""
    checkpoint_every_steps: NaturalInt = 50
    """Writes a checkpoint every k steps and at the last one; 0: at the last one only."""
    checkpoint_every_s: PositiveFloat | None = None
    """Also writes a checkpoint after the first step that ends at least this many seconds after the last one
    was started."""
    max_checkpoint_failures: PositiveInt = 3
    """Number of checkpoints in a row that cannot be written, for example on a full disk, after which the run
    ends. The final one gets the same number of attempts; the run fails without it."""
    keep_last: PositiveInt = 2
    """Number of checkpoints kept; an older one is removed once a newer one is complete."""
    checkpoint_async: bool = True
    """Writes checkpoints while training continues, which pauses only to copy the state to host memory (12
    bytes per trained parameter); false pauses until all is on disk."""
    watchdog_s: PositiveFloat = 600.0
    """Maximum time without progress of any episode, and of every other wait of the run: for a learner step,
    for the replay actor, for a checkpoint to grow, for an actor to respond. It is three times as long for
    the first step, and at least `actors.start_timeout_s` for starting and restoring. At the limit, actors
    that are stuck are killed and replaced; if that is not possible, the run ends with an error that names
    them."""
    deadline: str | None = None
    """Time at which the machines become unavailable, as ISO 8601 or seconds since 1970. Default:
    RAYLEARNER_DEADLINE or SLURM_JOB_END_TIME of the environment.
    """
    deadline_margin_s: PositiveFloat = 300.0
    """Time before the deadline at which the run writes a checkpoint and stops."""
    max_learner_restarts: NaturalInt = 2
    """Maximum number of rollbacks within `restart_window_s` after the death of a learner rank or the replay
    actor: to the last checkpoint, or to the start of the run if there is none."""
    restart_window_s: PositiveFloat = 3600.0
    """Time window in which restarts are counted: those of rollout actors (`actors.max_restarts`), and of the
    learner and the replay actor (`max_learner_restarts`)."""


class ClusterSection(Section):
    """The Ray cluster that the run uses."""

    address: str | None = None
    """Address of an existing cluster. Default: RAY_ADDRESS, which jobs set, or else a new local cluster."""
    num_cpus: PositiveInt | None = None
    """Number of CPUs that a local cluster offers. Default: those of the machine."""
    object_store_bytes: PositiveInt = 400_000_000
    """Size of the object store of a local cluster, in bytes."""
    dashboard: bool = False
    """Starts Ray's dashboard on 127.0.0.1 with a local cluster."""


class ReplaySection(Section):
    """Groups, staleness and limits on failures."""

    groups_per_step: PositiveInt = 16
    """Number of groups, and so of prompts, per learner step."""
    group_size: PositiveInt = 8
    """Number of episodes per prompt."""
    extra: NaturalInt = 0
    """Number of episodes started beyond `group_size`; the first `group_size` to end make up the group."""
    play_greedy: bool = False
    """Plays one more episode of each prompt with greedy sampling. It does not train; its reward is the
    baseline of `remax`."""
    max_staleness: NaturalInt = 2
    """Maximum number of policy versions between sampling a token and training on it; 0 is synchronous."""
    on_stale: Literal["mask", "drop", "wait", "train"] = "mask"
    """Treatment of tokens beyond `max_staleness` at training time: mask them, drop their group, wait for
    groups that would pass it, or train on them. See docs/staleness.md."""
    max_concurrent_groups: PositiveInt | None = None
    """Maximum number of groups running at once. Default: bounded by staleness alone."""
    group_time_limit_s: PositiveFloat = 600.0
    """Maximum time to complete a group; `partial_groups` applies after it."""
    partial_groups: Literal["train", "drop"] = "train"
    """At the time limit: train on the episodes that ended, at least two, or drop the group."""
    drop_zero_variance: bool = False
    """Drops groups whose rewards are all equal, and plays others in their place."""
    max_filtered_groups: PositiveInt = 1000
    """Maximum number of groups dropped in a row for equal rewards; the run then ends with an error."""
    max_attempts: PositiveInt = 3
    """Maximum number of actors that may die while they play an episode, before it counts as failed. When an
    actor dies, only those of its episodes with the most deaths so far count it."""
    max_error_fraction: Fraction = 0.5
    """Maximum fraction of failed episodes among the last `error_window`; the run ends above it."""
    max_tool_failure_fraction: Fraction = 0.9
    """Maximum fraction of failed calls of a tool in the last `error_window` episodes that called it,
    failures shown to the policy included; the run ends above it. 1 never ends a run."""
    error_window: PositiveInt = 64
    """Number of episodes over which failures are counted."""


class WeightsSection(Section):
    """Weight transfer to the engines."""

    every_steps: PositiveInt = 1
    """Publishes every k-th policy version."""
    transport: Literal["auto", "shared_files", "nccl", "ipc", "adapter"] = "auto"
    """`nccl` broadcasts between separate GPUs. `ipc` shares memory on GPUs where every learner rank runs
    beside engines. `shared_files` writes safetensors to memory-backed storage on one machine. `adapter`
    writes only LoRA adapters there; the other transports carry them merged, to engines in float32. `auto`
    chooses by where actors run."""
    folder: str = "/dev/shm"
    """Folder of shared files; the run creates its own folder inside and removes it at the end."""
    cache: Literal["auto", "recompute", "keep"] = "auto"
    """What happens to the keys and values of running requests at a push: `recompute` computes them again under
    the new weights, `keep` continues with stale ones. Requests sent after a push never use stale ones, but
    those that still waited at the push do. `auto` keeps them in asynchronous runs, unless a vision tower is trained."""
    deadline_s: PositiveFloat = 120.0
    """Maximum time for an engine to acknowledge a push; an engine that takes longer has failed and is replaced."""
    max_failed_pushes: PositiveInt = 3
    """Number of weight pushes in a row that reach no engine, after which the run ends. The first push of a run
    must reach an engine."""
    verify_tolerance: PositiveFloat | Literal["auto"] = "auto"
    """Maximum |learner - engine| log-probability on the probe prompts, in nats, for a weight update to count as verified; auto depends on precision: 1e-3 in float32 on CPUs, 0.05 on GPUs, 0.25 in half precision."""
    verify_statistic: Literal["auto", "max", "mean"] = "auto"
    """Statistic of that difference over the probe's tokens; auto is the mean in half precision, where single tokens differ by more than a nat, and the maximum in float32."""
    num_probe_tokens: PositiveInt = 32
    """Length of a probe prompt."""


class CompletionsSection(Section):
    """A table of a few completions: prompt, completion, rewards, advantage and logged numbers."""

    every_steps: NaturalInt = 1
    """Writes the table every k steps; 0: never."""
    num_completions: PositiveInt = 4
    """Number of rows, spread from the lowest reward to the highest."""
    unique_prompts: bool = False
    """Shows at most one row per prompt."""
    max_characters: PositiveInt = 400
    """Maximum length of prompts and completions; longer ones are cut in the middle."""
    log: bool = False
    """Also writes the table to the log, besides TensorBoard."""


class ProfileSection(Section):
    """Profiles of chosen learner steps by torch's profiler, one file per rank."""

    steps: tuple[PositiveInt, ...]
    """Learner steps to profile; the first step after a start is slower than the rest."""
    record_memory: bool = False
    """Also records allocations."""
    record_stacks: bool = False
    """Also records Python stacks; larger files and a slower step."""


class WandbSection(Section):
    """Weights & Biases; needs `pip install wandb`."""

    project: str = "raylearner"
    """Name of the project."""
    entity: str | None = None
    """Team or user. Default: that of the account."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files to upload later."""


class ObservabilitySection(Section):
    """What is recorded besides `metrics.jsonl` and the log; `observability: null` switches all of it off."""

    tensorboard: bool = True
    """Writes TensorBoard files to `tensorboard/`."""
    ray_metrics: bool = True
    """Exports all metrics through Ray, for Prometheus and Grafana."""
    wandb: WandbSection | None = None
    """If present, metrics also go to Weights & Biases."""
    trajectories_every_steps: NaturalInt = 1
    """Writes `trajectories/step_NNNNNN.jsonl` every k steps; 0: never."""
    completions: CompletionsSection | None = CompletionsSection()
    """Completions as text; null switches them off."""
    trace: bool = True
    """Writes a timeline to `trace.json` (Chrome trace format)."""
    profile: ProfileSection | None = None
    """If present, chosen learner steps are profiled into `profile/`."""


NOTHING_RECORDED = ObservabilitySection(
    tensorboard=False,
    ray_metrics=False,
    trajectories_every_steps=0,
    completions=None,
    trace=False,
)

__all__ = [
    "ActorRange",
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
    "EvaluationKeys",
    "EvaluationSection",
    "FileData",
    "Fraction",
    "GrpoAdvantage",
    "HeldOut",
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
    """The configuration of a run."""

    run: RunSection = RunSection()
    cluster: ClusterSection = ClusterSection()
    model: ModelSection
    data: DataSection
    environment: EnvironmentSection
    """Form of an episode: one completion, turns with tools, a program or a user-defined class."""
    renderer: RendererSection = RendererSection()
    sampling: SamplingSection = SamplingSection()
    rewards: RewardSection = RewardSection()
    actors: ActorsSection
    replay: ReplaySection = ReplaySection()
    learner: LearnerSection = LearnerSection()
    weights: WeightsSection = WeightsSection()
    evaluation: EvaluationSection | None = EvaluationSection()
    observability: ObservabilitySection | None = ObservabilitySection()

    @model_validator(mode="after")
    def _inherit_sampling(self) -> Self:
        """Take keys of `evaluation` that are not set from elsewhere."""
        if self.evaluation is not None:
            evaluation = self.evaluation.resolved(self.sampling)
            object.__setattr__(self, "evaluation", evaluation)  # frozen
        return self

    @property
    def held_out(self) -> list[HeldOut]:
        """All sets of held-out prompts, that of `data.evaluation` first; none with `evaluation: null`."""
        return [] if self.evaluation is None else self.evaluation.held_out(self.data.evaluation)

    @property
    def sources(self) -> dict[str, tuple[DataSource, ...]]:
        """All sources of prompts, by the key of their list."""
        found = {"data.train": self.data.train}
        if self.data.evaluation is not None:
            found["data.evaluation"] = self.data.evaluation
        return found | {held_out.data_key: held_out.sources for held_out in self.held_out}

    @property
    def recorded(self) -> ObservabilitySection:
        """What is recorded besides `metrics.jsonl` and the log; nothing with `observability: null`."""
        return self.observability or NOTHING_RECORDED

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
        """CPUs with which the run starts; the replay actor and the controller reserve none."""
        return (
            self.actors.min_actors * self.actors.cpus_per_actor
            + self.learner.num_ranks * self.learner.cpus_per_rank
            + sum(model.cpus for model in self.rewards.models.values())
        )

    @property
    def engines_per_rank(self) -> int:
        """Maximum number of engines beside a learner rank that share its GPU."""
        return math.ceil(self.actors.max_actors / self.learner.num_ranks)

    @property
    def engines_sleep(self) -> bool:
        """Whether engines free their memory while the learner steps."""
        engine = self.actors.engine
        return isinstance(engine, VllmEngine) and engine.sleep

    @property
    def gpus_needed(self) -> float:
        """GPUs with which the run starts; `auto` counts as none until it is resolved."""
        return (
            self.actors.min_actors * number(self.actors.gpus_per_actor)
            + self.learner.num_ranks * number(self.learner.gpus_per_rank)
            + sum(model.gpus for model in self.rewards.models.values())
        )
