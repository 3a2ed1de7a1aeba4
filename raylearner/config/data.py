"""Where prompts come from, in which order."""

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from raylearner.config.rewards import MetricName
from raylearner.config.section import (
    ONE_OR_MORE,
    OPEN_KIND,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Reference,
    Section,
    kind_tag,
)


class _Source(Section):
    """What all sources share."""

    source: MetricName | None = None
    """Name under which rewards of this data are reported. Default: the task's or the file's."""
    weight: PositiveFloat = 1.0
    """Share of the groups, relative to the other sources' weights."""

    @property
    def source_name(self) -> str:
        """What it is reported as."""
        return self.source or self._default_name()

    def _default_name(self) -> str:
        return str(getattr(self, "kind", ""))


class CalculatorData(_Source):
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


class ReasoningGymData(_Source):
    """Generated prompts of one reasoning-gym task; the reward of kind `reasoning_gym` scores them.

    Prompts are divided by a hash of the question: one belongs to one split only, whatever the seed.
    """

    kind: Literal["reasoning_gym"]
    task: str
    """Name of the task, such as `leg_counting`."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task; `size` and `seed` are none of them."""
    split: Literal["train", "evaluation"] = "train"
    """One question in five is held out for `evaluation`."""
    num_prompts: PositiveInt = 1000
    """Distinct prompts generated; fewer where the task has no more."""
    seed: NaturalInt = 0
    """Seeds the generator."""

    def _default_name(self) -> str:
        return self.task


class _Table(_Source):
    """What rows of all kinds of tables share. Columns that are not named here are kept as they are."""

    prompt_column: str = "prompt"
    """Text, or a list of messages as OpenAI's API has them, or its JSON text."""
    answer_column: str = "answer"
    """Expected answer, or a list of accepted ones. May be absent while it has its default name."""
    doc_id_column: str = "doc_id"
    """Document that tools search, likewise."""
    prompt_id_column: str = "prompt_id"
    """Id of the row, likewise. Default: its place in the data."""
    image_column: str | None = None
    """Column with the images of the prompt: encoded bytes, paths from the file's folder, data URLs, or a
    list of these; empty or null for none. They are read and checked when the run starts, and kept in
    memory. Default: rows have no images."""
    image_mark: Annotated[str, Field(min_length=1)] = "<image>"
    """Stands in a prompt's text where an image is shown. Without any, images come before the first
    user message."""
    prefill: bool = False
    """Whether a last message of the assistant starts the policy's turn. Otherwise rows that end with one
    are refused, since it is often the expected answer."""
    max_prompts: PositiveInt | None = None
    """Only the first so many rows are read."""


class FileData(_Table):
    """A JSONL file with one prompt per line, or a Parquet file with one per row."""

    kind: Literal["jsonl", "parquet"]
    path: str
    """File to read."""

    def _default_name(self) -> str:
        return PurePath(self.path).stem


class HubData(_Table):
    """A dataset of the Hugging Face hub, or a directory in its form, through `datasets`."""

    kind: Literal["hub"]
    path: str
    """Id of the dataset, or a directory."""
    config: str | None = None
    """Name of the dataset's configuration, where it has several."""
    split: str = "train"
    """Split, slices such as `train[:1000]` included."""
    revision: str | None = None
    """Branch, tag or commit."""

    def _default_name(self) -> str:
        return PurePath(self.path).name


DataSource = Annotated[
    CalculatorData | ReasoningGymData | FileData | HubData,
    Field(discriminator="kind"),
]


class Shuffle(Section):
    """Every prompt of a source once an epoch, shuffled anew each time; sources take turns by weight."""

    kind: Literal["shuffle"]


class ByDifficulty(Section):
    """As `shuffle`, but a prompt that lately taught nothing comes up only every so many epochs.

    It teaches nothing when all its episodes of a group have the same reward: solved every time, or
    never.
    """

    kind: Literal["by_difficulty"]
    keep_every: PositiveInt = 4
    """Epochs in which such a prompt comes up once."""
    min_groups: PositiveInt = 1
    """Groups in a row without a difference before a prompt is held back."""


class UserSampler(Section):
    """A class of the user's that sees every trained group and orders what comes next."""

    kind: Reference
    """`module:Class`, which fulfils `raylearner.replay.sampler.Sampler`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the class as keywords."""


SamplerSection = Annotated[
    Annotated[Shuffle, Tag("shuffle")]
    | Annotated[ByDifficulty, Tag("by_difficulty")]
    | Annotated[UserSampler, Tag(OPEN_KIND)],
    Discriminator(kind_tag),
]


class ExampleMessage(Section):
    """One message of a worked example."""

    role: Literal["user", "assistant"]
    """Who says it; what tools answer comes from the user here."""
    content: str
    """What is said."""


class DataSection(Section):
    """Where prompts come from."""

    train: Annotated[tuple[DataSource, ...], ONE_OR_MORE]
    """Prompts to train on, without end: one source, or a list of several mixed by weight."""
    evaluation: Annotated[tuple[DataSource, ...] | None, ONE_OR_MORE] = None
    """Held-out prompts: one source or several."""
    sampler: SamplerSection = Shuffle(kind="shuffle")
    """Which prompt comes next."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """What happens to rows whose prompt has more than `renderer.max_prompt_tokens` tokens, with the system prompt, examples and tools: the run is refused, or they are left out. Both count and name them at start."""
    system_prompt: str | None = None
    """Put before each prompt that has no system message."""
    examples: tuple[ExampleMessage, ...] = ()
    """Worked examples, message by message, between the system message and each prompt; small models learn from them what tags are for."""

    @property
    def weights(self) -> dict[str, float]:
        """Of the training sources, by name."""
        return {source.source_name: source.weight for source in self.train}
