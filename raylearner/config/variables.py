"""Variables of the environment that a configuration names, or that what it asks for needs."""

import importlib.util
import netrc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from raylearner.config.finding import Finding
from raylearner.config.schema import RunConfig

SUFFIX = "_variable"
"""Keys that end so hold the name of a variable."""
WANDB_KEY = "WANDB_API_KEY"
HUB_TOKEN = "HF_TOKEN"


def named_variables(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Dotted key and variable, for every key that names one."""
    yield from _named(config.model_dump(), "")


def wants_wandb_key(config: RunConfig) -> bool:
    """Whether a run logs in to Weights & Biases."""
    wandb = config.observability.wandb
    return wandb is not None and wandb.mode == "online"


def check_variables(config: RunConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What a run in this environment would lack, found before anything starts."""
    for key, name in named_variables(config):
        if not environment.get(name):
            yield Finding(
                key,
                f"the environment variable {name} is not set; export it where the run starts, or set"
                " the key to null for a service that needs no key",
            )
    if config.observability.wandb is None:
        return
    if importlib.util.find_spec("wandb") is None:
        yield Finding(
            "observability.wandb",
            "the package wandb is not installed; `pip install wandb`, or leave the section out",
        )
    elif wants_wandb_key(config) and not _is_logged_in(environment):
        yield Finding(
            "observability.wandb",
            f"not logged in to Weights & Biases; run `wandb login`, set {WANDB_KEY}, or set"
            " observability.wandb.mode to offline",
        )


def _is_logged_in(environment: Mapping[str, str]) -> bool:
    """Whether wandb finds a key by itself: in a variable, or in the netrc file."""
    if environment.get(WANDB_KEY) or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    given = environment.get("NETRC")
    home = Path(environment.get("HOME") or Path.home())
    for path in [Path(given)] if given else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc.netrc(str(path)).hosts.get(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _named(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        pairs = list(cast(Mapping[str, Any], tree).items())
    elif isinstance(tree, list | tuple):
        pairs = [(str(i), value) for i, value in enumerate(cast(list[Any], tree))]
    else:
        if isinstance(tree, str) and key.endswith(SUFFIX):
            yield key, tree
        return
    for part, value in pairs:
        if not part.endswith("arguments"):  # of users' own functions and services
            yield from _named(value, f"{key}.{part}".removeprefix("."))
