"""Prompts and their order."""

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
    """Keys that all sources share."""

    source: MetricName | None = None
    """Name under which rewards of this source are reported. Default: that of the task or file."""
    weight: PositiveFloat = 1.0
    """Share of the groups, relative to the weights of the other sources."""

    @property
    def source_name(self) -> str:
        """Return the name under which the source is reported."""
        return self.source or self._default_name()

    def _default_name(self) -> str:
        return str(getattr(self, "kind", ""))


class CalculatorData(_Source):
    """Generated sums and products of two operands; no pair of operands occurs in both splits."""

    kind: Literal["calculator"]
    split: Literal["train", "evaluation"] = "train"
    """Split; pairs of operands are divided by hash."""
    num_prompts: PositiveInt = 2000
    """Number of distinct prompts."""
    max_operand: PositiveInt = 99
    """Maximum operand; the minimum is 1."""
    operations: tuple[Literal["+", "-", "*"], ...] = ("+", "*")
    """Operations that occur."""
    seed: NaturalInt = 0
    """Seed of the generator."""


class ReasoningGymData(_Source):
    """Generated prompts of one reasoning-gym task; the reward of kind `reasoning_gym` scores them.

    Prompts are divided by a hash of the question: one belongs to one split only, whatever the seed.
    """

    kind: Literal["reasoning_gym"]
    task: str
    """Name of the task, such as `leg_counting`."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task; `size` and `seed` are not among them."""
    split: Literal["train", "evaluation"] = "train"
    """Split; one question in five is held out for `evaluation`."""
    num_prompts: PositiveInt = 1000
    """Number of distinct prompts; fewer if the task does not have that many."""
    seed: NaturalInt = 0
    """Seed of the generator."""

    def _default_name(self) -> str:
        return self.task


class _Table(_Source):
    """Columns of a table. Columns that are not named here are kept as they are."""

    prompt_column: str = "prompt"
    """Column with the prompt: text, a list of messages as in OpenAI's API, or such a list as JSON text."""
    answer_column: str = "answer"
    """Column with the expected answer, or a list of accepted ones; `reward_model.ground_truth` is the
    field of a column. May be absent while it has its default name."""
    doc_id_column: str = "doc_id"
    """Column with the id of the document that tools search. May be absent while it has its default name."""
    prompt_id_column: str = "prompt_id"
    """Column with the id of the row. Default: the position of the row, if there is no `prompt_id`."""
    image_column: str | None = None
    """Column with the images of the prompt: encoded bytes, paths below the folder of the file, data URLs,
    or a list of these; empty or null for none. They are read and checked when the run starts, and kept in
    memory. Default: rows have no images."""
    image_mark: Annotated[str, Field(min_length=1)] = "<image>"
    """Text in a prompt that an image replaces. Without any, images come before the first user message."""
    prefill: bool = False
    """Lets a last message of the assistant start the policy's turn. Rows that end with one are refused
    otherwise, since it is often the expected answer."""
    max_prompts: PositiveInt | None = None
    """Number of rows to read, from the start. Default: all."""


class FileData(_Table):
    """A JSONL file with one prompt per line, or a Parquet file with one per row."""

    kind: Literal["jsonl", "parquet"]
    path: str
    """Path of the file."""

    def _default_name(self) -> str:
        return PurePath(self.path).stem


class HubData(_Table):
    """A dataset of the Hugging Face hub, or a local directory in the same form, read by `datasets`."""

    kind: Literal["hub"]
    path: str
    """Id of the dataset, or a directory."""
    config: str | None = None
    """Name of the dataset's configuration, if it has several."""
    split: str = "train"
    """Split, including slices such as `train[:1000]`."""
    revision: str | None = None
    """Branch, tag or commit."""

    def _default_name(self) -> str:
        return PurePath(self.path).name


DataSource = Annotated[
    CalculatorData | ReasoningGymData | FileData | HubData,
    Field(discriminator="kind"),
]


class Shuffle(Section):
    """Each prompt of a source once per epoch, in a new random order; sources alternate by weight."""

    kind: Literal["shuffle"]


class ByDifficulty(Section):
    """As `shuffle`, but prompts whose recent groups gave no learning signal are skipped in most
    epochs.
    """

    kind: Literal["by_difficulty"]
    keep_every: PositiveInt = 4
    """Number of epochs in which such a prompt is played once."""
    min_groups: PositiveInt = 1
    """Number of groups in a row with equal rewards before a prompt is held back."""


class UserSampler(Section):
    """A user-defined class that receives every trained group and orders the prompts that follow."""

    kind: Reference
    """`module:Class` that implements `raylearner.replay.sampler.Sampler`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""


SamplerSection = Annotated[
    Annotated[Shuffle, Tag("shuffle")]
    | Annotated[ByDifficulty, Tag("by_difficulty")]
    | Annotated[UserSampler, Tag(OPEN_KIND)],
    Discriminator(kind_tag),
]


class ExampleMessage(Section):
    """One message of a worked example."""

    role: Literal["user", "assistant"]
    """Author of the message; observations of tools have the role `user` here."""
    content: str
    """Text of the message."""


class DataSection(Section):
    """Prompts and their order."""

    train: Annotated[tuple[DataSource, ...], ONE_OR_MORE]
    """Prompts to train on, repeated without end: one source, or a list of several mixed by weight."""
    evaluation: Annotated[tuple[DataSource, ...] | None, ONE_OR_MORE] = None
    """Held-out prompts: one source, or a list of several."""
    sampler: SamplerSection = Shuffle(kind="shuffle")
    """Order of the prompts."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """Treatment of rows whose prompt has more than `renderer.max_prompt_tokens` tokens, with system prompt,
    examples and tools: the run is refused, or the rows are left out. Both report the rows at the start."""
    system_prompt: str | None = None
    """System message of each prompt that has none."""
    examples: tuple[ExampleMessage, ...] = ()
    """Worked examples, message by message, before each prompt; they teach small models to use tags.
    """

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights of the training sources, by name."""
        return {source.source_name: source.weight for source in self.train}
