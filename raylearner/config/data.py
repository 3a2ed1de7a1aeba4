"""Where prompts come from."""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import NaturalInt, PositiveInt, Section


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
