"""Completion of overrides by the shell."""

from raylearner.config.schema import RunConfig
from raylearner.config.section import dotted_keys


def complete_argument(incomplete: str) -> list[str]:
    """Return the keys of the schema that begin with the text; with none, shells complete files."""
    if not incomplete:
        return []
    return [
        f"{key}=" for key in dict.fromkeys(dotted_keys(RunConfig)) if key.startswith(incomplete)
    ]
