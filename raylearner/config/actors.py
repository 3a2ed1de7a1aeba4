"""Rollout actors: rendering, images, sampling, engines."""

from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Discriminator, Field, model_validator

from raylearner.config.section import (
    AutoFloat,
    Fraction,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)


class ImagesSection(Section):
    """Size and number of images in prompts and observations; for vision-language models only."""

    min_pixels: PositiveInt = 262_144
    """Minimum number of pixels; smaller images are enlarged."""
    max_pixels: PositiveInt = 4_194_304
    """Maximum number of pixels; larger images are shrunk."""
    max_images: PositiveInt = 16
    """Maximum number of images in a trajectory; an observation beyond it ends the episode as truncated."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels must be <= max_pixels = {self.max_pixels}, got {self.min_pixels}"
            )
        return self


Tag = Annotated[str, Field(pattern=r"\S")]
ReasoningTags = Literal["auto"] | tuple[tuple[Tag, Tag], ...] | None


class RendererSection(Section):
    """Conversion of messages to tokens."""

    observation_role: Literal["user", "tool", "inline"] = "user"
    """Role of observations: a chat message of the user or the tool, or `inline`, which continues the
    assistant's own turn."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments passed to the chat template."""
    reasoning_tags: ReasoningTags = "auto"
    """Pairs of opening and closing tags around reasoning, such as `[["<think>", "</think>"]]`. Text between
    them is not parsed, not scored and does not stop a turn, whether the policy opens it or the chat
    template's header. `auto` takes the known tags that the chat template writes; null treats reasoning as
    other text. Turns under `sampling.regex` do stop in it."""
    max_prompt_tokens: PositiveInt = 256
    """Maximum length of a prompt; longer ones are refused, see `data.long_prompts`."""
    max_response_tokens: PositiveInt = 256
    """Maximum number of tokens after the prompt, observations included."""
    max_observation_tokens: PositiveInt = 128
    """Maximum length of an observation; longer ones are cut, with a visible mark."""
    max_context_tokens: PositiveInt | None = None
    """Maximum number of tokens before a turn, prompt and observations included; an episode that needs more
    ends as truncated. Default: prompt and response together."""
    images: ImagesSection = ImagesSection()
    """Size and number of images, for vision-language models."""


class SamplingSection(Section):
    """Sampling parameters."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of nucleus sampling; 1 is off."""
    top_k: NaturalInt = 0
    """Number of most likely tokens to sample from; 0 is off."""
    min_p: Fraction = 0.0
    """Minimum probability, relative to the most likely token's; 0 is off."""
    repetition_penalty: PositiveFloat = 1.0
    """Penalty of tokens that occurred before; 1 is off."""
    max_turn_tokens: PositiveInt = 256
    """Maximum number of tokens of one turn."""
    regex: str | None = None
    """Regular expression that every turn matches (structured outputs of vLLM)."""
    extra_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further SamplingParams of vLLM."""


class VllmEngine(Section):
    """vLLM inside each rollout actor."""

    kind: Literal["vllm"]
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the engine; float32 on CPUs matches the learner to about 1e-6."""
    head_dtype: Literal["model", "float32"] = "float32"
    """Precision of logits, as `learner.head_dtype`; `model` is that of the engine."""
    max_model_tokens: PositiveInt = 1024
    """Maximum length of a sequence."""
    max_sequences: PositiveInt = 64
    """Maximum number of sequences decoded at once."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Fraction of the GPU's memory that the engine uses; with a fraction of a GPU, that fraction of it."""
    kv_cache_gib: PositiveInt = 1
    """Size of the key-value cache on CPUs, in GiB."""
    tensor_parallel_size: PositiveInt = 1
    """Number of GPUs per engine."""
    eager: bool | Literal["auto"] = "auto"
    """Runs without CUDA graphs and compilation: starts a minute sooner, generates at less than half the
    speed. `auto` is false on GPUs and true on CPUs."""
    sleep: bool = False
    """Frees the engine's GPU memory while the learner steps, and wakes with the next weights (vLLM's sleep
    mode, level 2). For synchronous runs that share GPUs: `replay.max_staleness: 0`, `weights.transport:
    ipc`. On CPUs engines only pause."""
    extra_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further AsyncEngineArgs of vLLM, limited to those that change only speed, memory and reports."""


class ScriptedEngine(Section):
    """A deterministic substitute for a policy, for logic tests and fault injection."""

    kind: Literal["scripted"]
    script: str
    """`module:Class`, called with the tokens and seed of a claim."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the script."""


class TransformersEngine(Section):
    """A transformers model on one device, for tiny models and machines without vLLM."""

    kind: Literal["transformers"]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the engine."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the model."""
    max_model_tokens: PositiveInt = 512
    """Maximum length of a sequence."""
    max_sequences: PositiveInt = 64
    """Maximum number of sequences decoded at once; memory holds keys and values of all at full length."""


EngineSection = Annotated[
    VllmEngine | TransformersEngine | ScriptedEngine, Field(discriminator="kind")
]


class ActorRange(Section):
    """Range of the number of rollout actors, for a cluster that grows and shrinks."""

    min: PositiveInt = 1
    """Number of engines with which the run starts."""
    max: PositiveInt
    """Maximum number of engines; further ones start as nodes and GPUs become available."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min must be at most max, got {self.min} > {self.max}")
        return self


def _tag(value: Any) -> str:
    if value == "auto":
        return "auto"
    return "range" if isinstance(value, dict | ActorRange) else "number"


ACTORS_BEFORE_RESOLUTION = 2
"""Number of actors that `auto` stands for on machines without GPUs, and before they are known."""

NumActors = Annotated[
    Annotated[PositiveInt, pydantic.Tag("number")]
    | Annotated[Literal["auto"], pydantic.Tag("auto")]
    | Annotated[ActorRange, pydantic.Tag("range")],
    Discriminator(_tag),
]


class ActorsSection(Section):
    """Rollout actors."""

    num_actors: NumActors = "auto"
    """Number of rollout actors, each with one engine. `auto` fills the GPUs that the learner leaves: several
    engines on each if the model is small and their key-value caches fit; 2 without GPUs, or where the learner
    shares its GPU. With `{min, max}` the run starts with `min` engines,
    adds engines up to `max` as nodes and GPUs become available, and continues when they leave."""
    engine: EngineSection
    """Engine of each actor."""
    max_concurrent_episodes: PositiveInt = 32
    """Maximum number of episodes in flight per actor."""
    cpus_per_actor: NonNegativeFloat = 1.0
    """Number of CPUs that Ray reserves per actor."""
    gpus_per_actor: AutoFloat = "auto"
    """Number of GPUs per actor; a fraction puts several engines on one GPU, `auto` divides the GPUs of the
    cluster."""
    max_restarts: NaturalInt = 5
    """Maximum number of failed actors that are replaced within `run.restart_window_s`, failed replacements
    included. Beyond it the run continues with the other actors, and ends with the cause when none is left.
    Deaths caused by a lost node, or by the failed push of another engine, do not count."""
    start_timeout_s: PositiveFloat = 600.0
    """Maximum time for an engine to start. Once the run has started, time spent waiting for free resources
    does not count."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of actors follows the cluster."""
        return isinstance(self.num_actors, ActorRange)

    @property
    def min_actors(self) -> int:
        if self.num_actors == "auto":
            return ACTORS_BEFORE_RESOLUTION
        return self.num_actors.min if isinstance(self.num_actors, ActorRange) else self.num_actors

    @property
    def max_actors(self) -> int:
        return self.num_actors.max if isinstance(self.num_actors, ActorRange) else self.min_actors
