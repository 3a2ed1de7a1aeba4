"""What a check says of a configuration whose single values are valid."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A key that clashes with others, why, and the nearest choice that would do."""

    key: str
    text: str
