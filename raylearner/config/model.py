"""The policy that is trained."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import Fraction, PositiveFloat, PositiveInt, Section

TINY_TOKEN_PIXELS = 784
"""Pixels per image token of a tiny model: two by two patches of 14."""
TINY_MIN_PIXELS, TINY_MAX_PIXELS = TINY_TOKEN_PIXELS, 1280 * TINY_TOKEN_PIXELS
"""Minimum and maximum pixels per image of a tiny model: 1 to 1,280 tokens."""


class WarmStart(Section):
    """Supervised steps on imperfect scripted demonstrations, before the first policy version."""

    num_steps: PositiveInt = 300
    """Number of optimizer steps."""
    batch_size: PositiveInt = 64
    """Number of demonstrations per step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate of the warm start."""
    num_demonstrations: PositiveInt = 2000
    """Number of demonstrations played in the environment; they are reused."""
    right_fraction: Fraction = 0.35
    """Fraction of demonstrations that solve the task; the others guess."""
    turns: tuple[str, ...] = ("<calc>{expression}</calc>", "<answer>{answer}</answer>")
    """Turns of a demonstration that solves the task. `{prompt}`, `{answer}` and columns of the prompt are
    filled in."""
    guess: str = "<answer>{number}</answer>"
    """The only turn of a guess. Also fills in `{number}`, drawn up to 9999, and `{other_answer}`, that of
    another prompt."""


class TinyVision(Section):
    """Vision tower of a tiny model, of the Qwen2.5-VL architecture."""

    hidden_size: PositiveInt = 64
    """Width; at least 32 per attention head, in steps of 4."""
    num_layers: PositiveInt = 2
    """Number of vision blocks; the last attends to the whole image, the others to windows of it."""
    num_heads: PositiveInt = 2
    """Number of attention heads."""
    intermediate_size: PositiveInt = 128
    """Width of the feed-forward part."""


class TinyModel(Section):
    """A small random model generated at startup, with its own tokenizer and chat template."""

    kind: Literal["tiny"]
    hidden_size: PositiveInt = 128
    """Width; a multiple of 32 per attention head, for vLLM's CPU kernels."""
    num_layers: PositiveInt = 2
    """Number of transformer blocks."""
    num_heads: PositiveInt = 4
    """Number of attention heads, and of key-value heads."""
    intermediate_size: PositiveInt = 512
    """Width of the feed-forward part."""
    max_length: PositiveInt = 512
    """Maximum length of a sequence, in tokens."""
    tie_embeddings: bool = True
    """Uses the input embedding as the output head."""
    vision: TinyVision | None = None
    """If present, the model has a vision tower."""
    warm_start: WarmStart | None = None
    """If present, the model imitates demonstrations before the run."""


class PretrainedModel(Section):
    """A transformers causal language model."""

    kind: Literal["pretrained"]
    path: str
    """Checkpoint directory or hub id."""

    @property
    def folder(self) -> Path:
        """Return the directory; it does not exist for a hub id."""
        return Path(self.path).expanduser()


ModelSection = Annotated[TinyModel | PretrainedModel, Field(discriminator="kind")]
