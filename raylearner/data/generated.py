"""Generated prompts: arithmetic, and the tasks of reasoning-gym."""

import hashlib
import random
from typing import Any

from raylearner.config.data import CalculatorData, ReasoningGymData
from raylearner.config.problems import did_you_mean
from raylearner.errors import ConfigError
from raylearner.tools.calculator import calculate
from raylearner.types import Message, Prompt

EVALUATION_SHARE = 5
"""One in this many operand pairs or questions is held out."""
MAX_TRIES = 50
"""Maximum number of expressions drawn per requested one, before fewer are returned.
"""
MAX_QUESTIONS = 20
"""Maximum number of questions generated per requested one."""


def calculator_prompts(source: CalculatorData) -> list[Prompt]:
    """Return distinct expressions of one split."""
    rng = random.Random(source.seed)
    seen: dict[str, Prompt] = {}
    possible = len(source.operations) * source.max_operand**2
    for _ in range(MAX_TRIES * source.num_prompts):
        if len(seen) >= min(source.num_prompts, possible):
            break
        a, b = rng.randint(1, source.max_operand), rng.randint(1, source.max_operand)
        operation = rng.choice(source.operations)
        expression = f"{a}{operation}{b}"
        # Pairs are split without order: a held-out pair is unseen under every operation.
        held_out = _is_held_out(f"{min(a, b)},{max(a, b)}")
        if held_out != (source.split == "evaluation") or expression in seen:
            continue
        seen[expression] = Prompt(
            prompt_id=f"{source.source_name}/{expression}",
            messages=(Message(role="user", content=f"{expression}="),),
            answer=calculate(expression),
            source=source.source_name,
            columns={"expression": expression},
        )
    return list(seen.values())


def reasoning_prompts(source: ReasoningGymData) -> list[Prompt]:
    """Return distinct questions of one split; the column `reasoning_gym` holds the input of
    scoring.

    Raises `ConfigError` for a task that does not exist or refuses its parameters.
    """
    dataset = _reasoning_dataset(source)
    seen: dict[str, Prompt] = {}
    for index in range(len(dataset)):
        if len(seen) >= source.num_prompts:
            break
        entry: dict[str, Any] = dataset[index]
        question = str(entry["question"])
        if question in seen or _is_held_out(question) != (source.split == "evaluation"):
            continue
        digest = hashlib.sha256(question.encode()).hexdigest()[:16]
        answer = entry.get("answer")
        seen[question] = Prompt(
            prompt_id=f"{source.source_name}/{digest}",
            messages=(Message(role="user", content=question),),
            answer=None if answer is None else str(answer),
            source=source.source_name,
            columns={
                "reasoning_gym": {
                    "task": source.task,
                    "parameters": source.parameters,
                    "entry": entry,
                }
            },
        )
    return list(seen.values())


def _reasoning_dataset(source: ReasoningGymData) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"data: source 'reasoning_gym' needs the package reasoning-gym ({error}); install it"
            " from requirements.txt"
        ) from error
    if source.task not in DATASETS:
        hint = did_you_mean(source.task, DATASETS)
        raise ConfigError(
            f"data: reasoning_gym has no task {source.task!r} among its {len(DATASETS)}{hint}"
        )
    size = source.num_prompts * MAX_QUESTIONS
    try:
        return reasoning_gym.create_dataset(
            source.task, size=size, seed=source.seed, **source.parameters
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"data: reasoning_gym task {source.task!r} refuses its parameters"
            f" {source.parameters!r}: {error}"
        ) from error


def _is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % EVALUATION_SHARE == 0
