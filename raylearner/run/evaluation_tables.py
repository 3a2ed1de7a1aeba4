"""Tables of one evaluation for the console: by source, with several samples, by reward function."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from raylearner.observability.lines import sources_of, without_set

COLUMNS = {
    "reward/mean": "reward",
    "reward/standard_error": "±",
    "reward/mean_without_failed": "without failed",
    "num_prompts": "prompts",
    "errors": "failed",
    "unfinished": "not ended",
    "turns/mean": "turns",
    "sampled_tokens/mean": "tokens",
}
"""Numbers of an evaluation, and their names in the table."""
WITHOUT_FAULTS = {"reward/mean_without_failed": "errors", "unfinished": "unfinished"}
"""Columns that are left out where none of these episodes exist."""
MAX_PASSES = 6
"""Maximum number of columns for pass@k, the largest k last."""


def make_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return a table with a row for all prompts and one for each source, then those that have something to say:
    pass@k and the majority vote where prompts were sampled several times, and several reward functions.
    """
    title, record = _title(record), without_set(record)
    rows = {"all": "", **{source: f"{source}/" for source in sources_of(record)}}
    left_out = [key for key, count in WITHOUT_FAULTS.items() if not record.get(count)]
    columns = {key: name for key, name in COLUMNS.items() if key not in left_out}
    tables = [_by_source(record, rows, columns, title)]
    passes = [key for key in record if re.fullmatch(r"pass@\d+", key)][-MAX_PASSES:]
    votes = [key for key in record if re.fullmatch(r"majority@\d+", key)]
    if passes:
        columns = {key: key for key in (*passes, *votes)}
        samples = record["samples_per_prompt"]
        tables.append(_by_source(record, rows, columns, f"{samples} samples of each prompt"))
    functions = sorted(
        found[1] for key in record if (found := re.fullmatch(r"reward/([^/]+)/mean", key))
    )
    if len(functions) > 1:
        tables.append(_by_function(record, rows, functions))
    return tables


def _title(record: Mapping[str, Any]) -> str:
    start = f"{record['set']}: " if "set" in record else ""
    return f"{start}step {record['step']}, policy version {record['policy_version']}"


def _by_source(
    record: Mapping[str, Any], rows: Mapping[str, str], columns: Mapping[str, str], title: str
) -> Table:
    table = _start(title, ("source", *columns.values()))
    for source, prefix in rows.items():
        table.add_row(Text(source), *(_cell(record.get(f"{prefix}{key}"), key) for key in columns))
    return table


def _by_function(
    record: Mapping[str, Any], rows: Mapping[str, str], functions: Sequence[str]
) -> Table:
    table = _start("mean of each reward function, without failed episodes", ("source", *functions))
    for source, prefix in rows.items():
        keys = (f"{prefix}reward/{name}/mean" for name in functions)
        table.add_row(Text(source), *(_cell(record.get(key)) for key in keys))
    return table


def _start(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if index else "left", overflow="fold")
    return table


def _cell(value: float | None, key: str = "") -> str:
    digits = 2 if key.endswith("standard_error") else 4
    return "-" if value is None else f"{value:.{digits}g}"
