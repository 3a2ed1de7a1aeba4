"""Configurations of tests, and the problems of those that are refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")

# The least configuration that loads.
MINIMAL = """\
model: {kind: tiny}
data: {train: {kind: calculator}}
environment: {kind: single_turn}
actors: {engine: {kind: vllm, max_model_tokens: 512}}
learner: {compute_dtype: float32}
"""


def problems_of(file: str, overrides: Sequence[str], **options: Any) -> dict[str, str]:
    """Return the texts of a configuration's problems by key; there are none if it loads."""
    try:
        load([file], list(overrides), **options)
    except ConfigProblems as error:
        return {problem.key: problem.text for problem in error.problems}
    return {}
