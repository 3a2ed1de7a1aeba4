"""Rollout actors: rendering, images, sampling, engines."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

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
    """How large and how many images of prompts and observations may be; for vision models only."""

    min_pixels: PositiveInt = 262_144
    """Smaller images are enlarged to so many pixels."""
    max_pixels: PositiveInt = 4_194_304
    """Larger images are shrunk to so many pixels."""
    max_images: PositiveInt = 16
    """Most images of one trajectory; an observation that exceeds them ends it as truncated."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        return self


Tag = Annotated[str, Field(pattern=r"\S")]
ReasoningTags = Literal["auto"] | tuple[tuple[Tag, Tag], ...] | None


class RendererSection(Section):
    """How messages become tokens."""

    observation_role: Literal["user", "tool", "inline"] = "user"
    """`user` and `tool` answer with a chat message; `inline` continues the assistant's own turn."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template."""
    reasoning_tags: ReasoningTags = "auto"
    """Pairs of an opening and a closing tag around a policy's reasoning, `[["<think>", "</think>"]]`:
    what is between them is not parsed, not scored and does not stop a turn, whether the chat template's
    header opens it or the policy. `auto` takes the known tags that the chat template writes; null takes
    reasoning for text like any other. Turns under `sampling.regex` do stop in it."""
    max_prompt_tokens: PositiveInt = 256
    """A longer prompt is refused with its length."""
    max_response_tokens: PositiveInt = 256
    """Tokens after the prompt, observations included."""
    max_observation_tokens: PositiveInt = 128
    """An observation is cut to so many tokens, with a visible mark."""
    max_context_tokens: PositiveInt | None = None
    """A turn starts from so many tokens at most, prompt and observations included; an episode that
    needs more ends as truncated. Default: prompt and response together."""
    images: ImagesSection = ImagesSection()
    """Sizes and number of images, for models that see them."""


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
    regex: str | None = None
    """Every turn matches it (structured outputs of vLLM)."""
    extra_arguments: dict[str, Any] = Field(default_factory=dict)
    """Other SamplingParams of vLLM."""


class VllmEngine(Section):
    """vLLM's AsyncLLM inside each rollout actor."""

    kind: Literal["vllm"]
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Engine precision; float32 on CPUs matches the learner to about 1e-6."""
    head_dtype: Literal["model", "float32"] = "float32"
    """Precision of logits, as `learner.head_dtype`; `model` is the engine's own."""
    max_model_tokens: PositiveInt = 1024
    """Longest sequence the engine takes."""
    max_sequences: PositiveInt = 64
    """Sequences decoded at once."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory; an engine on a fraction of a GPU takes that fraction of it."""
    kv_cache_gib: PositiveInt = 1
    """Key-value cache on CPUs, in GiB."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one engine."""
    eager: bool = True
    """Without CUDA graphs and compilation: starts faster, runs slower."""
    sleep: bool = False
    """Free the engine's GPU memory while the learner steps, and wake with the next weights (vLLM's sleep mode, level 2): for synchronous runs that share GPUs (`replay.max_staleness: 0`, `weights.transport: ipc`). On CPUs engines only pause."""
    extra_arguments: dict[str, Any] = Field(default_factory=dict)
    """Other AsyncEngineArgs of vLLM, of those that change speed, memory and reports alone."""


class ScriptedEngine(Section):
    """A deterministic stand-in for logic tests and fault injection; never a policy."""

    kind: Literal["scripted"]
    script: str
    """`module:Class` called with the claim's tokens and seed."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the script."""


class TransformersEngine(Section):
    """A transformers model on one device: for tiny models, and machines without vLLM."""

    kind: Literal["transformers"]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Engine precision."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""
    max_model_tokens: PositiveInt = 512
    """Longest sequence the engine takes."""
    max_sequences: PositiveInt = 64
    """Sequences decoded at once; keys and values of all at full length are kept."""


EngineSection = Annotated[
    VllmEngine | TransformersEngine | ScriptedEngine, Field(discriminator="kind")
]


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
    gpus_per_actor: AutoFloat = "auto"
    """GPUs of one actor; a fraction puts several engines on one GPU; auto shares out what there is."""
    max_restarts: NaturalInt = 5
    """Replacements of dead actors before the run ends with the cause; one that was only left hanging in a push by another's failure does not count."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest an engine may take to start."""
