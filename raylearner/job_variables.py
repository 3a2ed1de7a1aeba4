"""Environment variables that `--env NAME` passes to a job.

Values in a job's runtime environment are shown on the Jobs page, in its metadata and in Ray's logs. So
they travel in a separate package, of which only the hash is shown; every process of the job reads them
at its start. Ray keeps the package in its store during the job, and unpacks it on the job's machines,
readable by Ray's user: anyone who may submit jobs there can read them.
"""

import importlib.util
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from raylearner import leftovers
from raylearner.errors import ConfigError

PACKAGE = "raylearner_variables"
"""Name of the package among the job's modules."""
FILE = "variables.json"
OPTION = "--env"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@contextmanager
def packed(names: Sequence[str], environment: Mapping[str, str]) -> Iterator[Path | None]:
    """Yield a directory to send with a job, None without names; it is deleted at the end.

    Raises `ConfigError` with every invalid name, and every variable that is not set.
    """
    problems = [problem for name in names if (problem := _problem(name, environment))]
    if problems:
        raise ConfigError("\n".join(problems))
    if not names:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix=leftovers.prefix("variables")) as folder:
        package = Path(folder) / PACKAGE
        package.mkdir(mode=0o700)
        content = {
            "salt": secrets.token_hex(
                16
            ),  # salt: the visible hash reveals nothing about the values
            "variables": {name: environment[name] for name in names},
        }
        descriptor = os.open(package / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        yield package


def take() -> None:
    """Set the variables that were passed to this job, if any, in this process."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / FILE
        if path.is_file():
            os.environ.update(json.loads(path.read_text(encoding="utf-8"))["variables"])


def _problem(name: str, environment: Mapping[str, str]) -> str | None:
    if "=" in name:
        return f"{OPTION} {name.partition('=')[0]}=..: names a variable and takes no value; export it first"
    if not _NAME.fullmatch(name):
        return f"{OPTION} {name}: is not a valid variable name"
    if name not in environment:
        return f"{OPTION} {name}: the environment variable is not set here; export it first"
    return None
