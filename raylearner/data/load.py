"""All prompts of a run, from one source or several."""

from collections.abc import Sequence
from dataclasses import replace

from raylearner.config.data import CalculatorData, DataSource, ExampleMessage, ReasoningGymData
from raylearner.data.dialogue import check_order
from raylearner.data.generated import calculator_prompts, reasoning_prompts
from raylearner.data.table import table_prompts
from raylearner.errors import ConfigError, DialogueError
from raylearner.types import Message, Prompt


def load_prompts(
    sources: Sequence[DataSource],
    *,
    system_prompt: str | None = None,
    examples: Sequence[ExampleMessage] = (),
    max_images: int | None = None,
) -> list[Prompt]:
    """Return the prompts of all sources, mixed in proportion to their weights while they last.

    Any beginning of the list has the same mixture as the whole list. `system_prompt` is put before
    prompts without a system message, `examples` behind the system message of every prompt. Raises
    `ConfigError` with every source that cannot be read: the file, the row and the error; rows with
    more than `max_images` images are refused.
    """
    loaded: list[list[Prompt]] = []
    problems: list[str] = []
    for source in sources:
        try:
            loaded.append(_load(source, max_images))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    shown = tuple(Message(role=example.role, content=example.content) for example in examples)
    if shown:
        try:
            check_order(shown, prefill=True)
        except DialogueError as error:
            raise ConfigError(f"data.examples: {error}") from error
    prompts = _mixed(loaded, [source.weight for source in sources])
    return [_with_head(prompt, system_prompt, shown) for prompt in prompts]


def _load(source: DataSource, max_images: int | None) -> list[Prompt]:
    match source:
        case CalculatorData():
            prompts = calculator_prompts(source)
        case ReasoningGymData():
            prompts = reasoning_prompts(source)
        case _:
            prompts = table_prompts(source, max_images=max_images)
    if not prompts:
        raise ConfigError(f"data: source {source.kind!r} has no prompts to train on")
    return prompts


def _mixed(loaded: Sequence[list[Prompt]], weights: Sequence[float]) -> list[Prompt]:
    """Take prompts one by one, always from the source furthest behind its share."""
    taken = [0] * len(loaded)
    mixed: list[Prompt] = []
    while True:
        left = [i for i, prompts in enumerate(loaded) if taken[i] < len(prompts)]
        if not left:
            return mixed
        behind = min(left, key=lambda i: (taken[i] + 1) / weights[i])
        mixed.append(loaded[behind][taken[behind]])
        taken[behind] += 1


def _with_head(prompt: Prompt, system_prompt: str | None, shown: tuple[Message, ...]) -> Prompt:
    messages = prompt.messages
    if system_prompt is not None and not any(m.role == "system" for m in messages):
        messages = (Message(role="system", content=system_prompt), *messages)
    num_head = 1 if messages and messages[0].role == "system" else 0
    return replace(prompt, messages=(*messages[:num_head], *shown, *messages[num_head:]))
