"""The schema of a run: every key, its meaning, its unit and its default.

`RunConfig` stops at the controller: a component receives its own section, math receives numbers.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """What all sections share: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunSection(Section):
    """The run as a whole."""

    name: str = "run"
    """Shown in logs, on the Ray dashboard and in job metadata."""
    dir: str | None = None
    """Run directory; it must not exist yet. Default: `runs/<name>-<time>`."""
    num_steps: PositiveInt = 100
    """Learner steps to commit before the run ends."""
    seed: NaturalInt = 0
    """Seeds prompt order, model initialisation and the scripted parts; vLLM samples unseeded."""
    checkpoint_every_steps: NaturalInt = 50
    """A checkpoint is written every so many steps and at the last one; 0 keeps the last only."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; older ones are removed once a newer one is whole."""
    watchdog_s: PositiveFloat = 600.0
    """The run ends, naming who waits for whom, after so many seconds without any progress."""
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


class WarmStart(Section):
    """Supervised steps on imperfect scripted demonstrations, before the first policy version."""

    num_steps: PositiveInt = 300
    """Optimizer steps."""
    batch_size: PositiveInt = 64
    """Demonstrations per step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate of the warm start."""
    tool_fraction: Fraction = 0.35
    """Fraction of demonstrations that use the tool rightly; the rest guess an answer."""


class TinyModel(Section):
    """A small random model made on the spot, with its own tokenizer and chat template."""

    kind: Literal["tiny"]
    hidden_size: PositiveInt = 128
    """Width; at least 32 per attention head for vLLM's CPU kernels."""
    num_layers: PositiveInt = 2
    """Transformer blocks."""
    num_heads: PositiveInt = 4
    """Attention heads, keys and values included."""
    intermediate_size: PositiveInt = 512
    """Width of the feed-forward part."""
    max_length: PositiveInt = 512
    """Longest sequence, in tokens."""
    is_tied: bool = True
    """Whether the output head shares the input embedding."""
    warm_start: WarmStart | None = None
    """Present: the model imitates demonstrations of the calculator task before the run."""


class PretrainedModel(Section):
    """A transformers causal language model."""

    kind: Literal["pretrained"]
    path: str
    """Checkpoint directory or hub id."""


ModelSection = Annotated[TinyModel | PretrainedModel, Field(discriminator="kind")]


class CalculatorData(Section):
    """Generated sums and products of two operands, split so that evaluation is never trained on."""

    kind: Literal["calculator"]
    split: Literal["train", "evaluation"] = "train"
    """Operand pairs are divided by hash: a pair belongs to one split only."""
    num_prompts: PositiveInt = 2000
    """Distinct prompts generated."""
    max_operand: PositiveInt = 99
    """Operands are drawn from 1 to this."""
    operations: tuple[Literal["+", "-", "*"], ...] = ("+", "*")
    """Operations that occur."""
    seed: NaturalInt = 0
    """Seeds the generator."""


class JsonlData(Section):
    """A JSONL file, one prompt a line: `prompt` (text) or `messages`, `answer`, other columns."""

    kind: Literal["jsonl"]
    path: str
    """File to read."""
    prompt_column: str = "prompt"
    """Column with the text or the list of messages."""
    answer_column: str = "answer"
    """Column with the expected answer, where a reward needs one."""
    source: str = "default"
    """Name under which rewards of this data are reported."""


DataSource = Annotated[CalculatorData | JsonlData, Field(discriminator="kind")]


class DataSection(Section):
    """Where prompts come from."""

    train: DataSource
    """Prompts to train on, reshuffled each epoch without end."""
    evaluation: DataSource | None = None
    """Held-out prompts."""
    system_prompt: str | None = None
    """Put before each prompt that has no system message."""


class SingleTurn(Section):
    """One completion, then the end."""

    kind: Literal["single_turn"]


class ToolUse(Section):
    """Turns with tools, ended by an answer."""

    kind: Literal["tool_use"]
    tools: tuple[Literal["calculator"], ...] = ("calculator",)
    """Tools on offer."""
    max_turns: PositiveInt = 4
    """Turns with tools; one last turn without tools follows."""
    invalid_action_penalty: NonNegativeFloat = 0.0
    """Taken from the reward for each turn with neither a tool call nor an answer; never shown."""
    tag_match: Literal["first", "last"] = "first"
    """Which pair of tags counts when a turn has several."""
    observation_tag: str = "result"
    """Tag around what a tool answers."""


EnvironmentSection = Annotated[SingleTurn | ToolUse, Field(discriminator="kind")]


class RendererSection(Section):
    """How messages become tokens."""

    observation_role: Literal["user", "tool", "inline"] = "user"
    """`user` and `tool` answer with a chat message; `inline` continues the assistant's own turn."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template."""
    max_prompt_tokens: PositiveInt = 256
    """A longer prompt is refused with its length."""
    max_response_tokens: PositiveInt = 256
    """Tokens after the prompt, observations included."""
    max_observation_tokens: PositiveInt = 128
    """An observation is cut to so many tokens, with a visible mark."""


class SamplingSection(Section):
    """How tokens are drawn."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus."""
    top_k: NaturalInt = 0
    """0 is off."""
    min_p: Fraction = 0.0
    """0 is off."""
    repetition_penalty: PositiveFloat = 1.0
    """1 is off."""
    max_turn_tokens: PositiveInt = 256
    """Most tokens of one turn."""


class RewardFunction(Section):
    """One reward function and its weight."""

    kind: str
    """A built-in name, or `module:function`."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function as keywords."""


class RewardSection(Section):
    """What an episode is worth."""

    functions: tuple[RewardFunction, ...] = (RewardFunction(kind="exact_answer"),)
    """Summed by weight; None means that a function does not apply."""
    timeout_s: PositiveFloat = 30.0
    """A function that takes longer is an error of its trajectory."""


class VllmEngine(Section):
    """vLLM's AsyncLLM inside each rollout actor."""

    kind: Literal["vllm"]
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Engine precision; float32 on CPUs matches the learner to about 1e-6."""
    max_model_tokens: PositiveInt = 1024
    """Longest sequence the engine takes."""
    max_sequences: PositiveInt = 64
    """Sequences decoded at once."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory."""
    kv_cache_gib: PositiveInt = 1
    """Key-value cache on CPUs, in GiB."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one engine."""
    is_eager: bool = True
    """Without CUDA graphs and compilation: starts faster, runs slower."""
    extra_arguments: dict[str, Any] = Field(default_factory=dict)
    """Other AsyncEngineArgs."""


class ScriptedEngine(Section):
    """A deterministic stand-in for logic tests and fault injection; never a policy."""

    kind: Literal["scripted"]
    script: str
    """`module:Class` called with the claim's tokens and seed."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the script."""


EngineSection = Annotated[VllmEngine | ScriptedEngine, Field(discriminator="kind")]


class ActorsSection(Section):
    """Rollout actors."""

    num_actors: PositiveInt = 2
    """Rollout actors, one engine each."""
    engine: EngineSection
    """The engine inside."""
    max_concurrent_episodes: PositiveInt = 32
    """Episodes in flight per actor."""
    cpus_per_actor: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for one actor."""
    gpus_per_actor: NonNegativeFloat = 0.0
    """GPUs of one actor; a fraction puts several engines on one GPU."""
    max_restarts: NaturalInt = 5
    """Replacements of dead actors before the run ends with the cause."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest an engine may take to start."""


class ReplaySection(Section):
    """Admission, staleness and groups."""

    groups_per_step: PositiveInt = 16
    """Groups in one take."""
    group_size: PositiveInt = 8
    """Episodes of one prompt."""
    extra: NaturalInt = 0
    """Episodes started beyond `group_size`; the first `group_size` done make the group."""
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
    should_drop_zero_variance: bool = False
    """Groups whose rewards are all equal are dropped and refilled."""
    max_filtered_groups: PositiveInt = 1000
    """So many filtered groups in a row end the run with the reason."""
    max_attempts: PositiveInt = 3
    """Times one sample is started, when its actor dies, before it counts as failed."""
    max_error_fraction: Fraction = 0.5
    """The run ends when more of the last `error_window` episodes failed."""
    error_window: PositiveInt = 64
    """Episodes over which failures are counted."""


class GrpoAdvantage(Section):
    """Group-relative advantage (arXiv 2402.03300)."""

    kind: Literal["grpo"]
    normalize: Literal["group", "batch", "none"] = "group"
    """Divide by the group's or the batch's standard deviation, or not at all."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class RlooAdvantage(Section):
    """Leave-one-out baseline (arXiv 2402.14740)."""

    kind: Literal["rloo"]


AdvantageSection = Annotated[GrpoAdvantage | RlooAdvantage, Field(discriminator="kind")]


class DecoupledPpo(Section):
    """Decoupled PPO (arXiv 2505.24298) with truncated behaviour weights."""

    kind: Literal["decoupled_ppo"]
    clip_low: PositiveFloat = 0.2
    """Lower clip range of the ratio current/proximal."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range."""
    behavior_weight_cap: PositiveFloat = 2.0
    """Importance weights proximal/behavior are truncated here."""


LossSection = Annotated[DecoupledPpo, Field()]


class LearnerSection(Section):
    """The learner group."""

    num_ranks: PositiveInt = 1
    """Learner actors, one rank each."""
    cpus_per_rank: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for one rank."""
    gpus_per_rank: NonNegativeFloat = 0.0
    """0 trains on the CPU over gloo, 1 over NCCL."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate; 0 freezes the policy."""
    warmup_steps: NaturalInt = 0
    """Linear warm-up, in optimizer updates."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from the peak to zero over the run."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's moments."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm is clipped here."""
    max_tokens_per_micro_batch: PositiveInt = 8192
    """Token budget of one packed micro-batch."""
    num_mini_batches: PositiveInt = 1
    """Optimizer updates per take and epoch."""
    num_epochs: PositiveInt = 1
    """Passes over one take."""
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Precision of forward and backward; masters stay float32 (float64 with float64)."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once."""
    advantage: AdvantageSection = GrpoAdvantage(kind="grpo")
    """How rewards become advantages."""
    loss: LossSection = DecoupledPpo(kind="decoupled_ppo")
    """The objective."""
    aggregation: Literal["token_mean", "sequence_mean_of_sums", "sequence_mean_of_means"] = (
        "token_mean"
    )
    """How token losses become one number, always by global counts."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Entropy bonus."""
    max_skipped_steps: PositiveInt = 5
    """So many steps in a row with a non-finite loss end the run."""


class WeightsSection(Section):
    """How weights reach the engines."""

    every_steps: PositiveInt = 1
    """Every k-th policy version is published."""
    transport: Literal["shared_files"] = "shared_files"
    """`shared_files` writes safetensors to memory-backed storage on one machine."""
    folder: str = "/dev/shm"
    """Where shared files live; a folder of the run's own is made inside and removed at the end."""
    should_clear_caches: bool = True
    """Running requests are recomputed under the new weights; off keeps stale key-values."""
    deadline_s: PositiveFloat = 120.0
    """An engine that has not acknowledged by then is condemned and replaced."""
    proof_tolerance: PositiveFloat = 1e-3
    """Largest |learner - engine| log-probability on the probe prompts."""
    num_probe_tokens: PositiveInt = 32
    """Length of a probe prompt."""


class EvaluationSection(Section):
    """Evaluation on held-out prompts."""

    every_steps: NaturalInt = 0
    """Also every k steps; step 0 and the end always. 0: those two only."""
    num_prompts: PositiveInt = 128
    """Prompts of one evaluation."""
    sampling: SamplingSection = SamplingSection(temperature=0.0)
    """Greedy by default."""


class ObservabilitySection(Section):
    """What is recorded."""

    tensorboard: bool = True
    """Writes `tensorboard/`."""
    trajectories_every_steps: NaturalInt = 1
    """Writes `trajectories/step_NNNNNN.jsonl` every k steps; 0 never."""
    trace: bool = True
    """Writes `trace.json` (Chrome trace)."""


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
        )

    @property
    def gpus_needed(self) -> float:
        return (
            self.actors.num_actors * self.actors.gpus_per_actor
            + self.learner.num_ranks * self.learner.gpus_per_rank
        )
