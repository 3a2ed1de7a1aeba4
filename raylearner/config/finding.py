"""What a check says of a configuration whose single values are valid."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """A key that clashes with others, why, and the nearest choice that would do."""

    key: str
    text: str


def is_missing_directory(path: str) -> bool:
    """Whether a path can only mean a directory, and there is none: hub ids are `name` or `owner/name`."""
    owner, separator, _ = path.partition("/")
    is_below_folder = bool(separator) and Path(owner).is_dir()
    is_local = path.startswith((".", "~", os.sep)) or path.count("/") > 1 or is_below_folder
    return is_local and not Path(path).expanduser().is_dir()
