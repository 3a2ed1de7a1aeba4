"""What `--resume` goes on from: the last whole checkpoint of a run directory, and never from nothing."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raylearner.config.document import parse
from raylearner.config.problems import Where
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError
from raylearner.learner.checkpoint import checkpoint
from raylearner.learner.checkpoint.checkpoint import Checkpoint
from raylearner.observability import run_directory
from raylearner.observability.run_directory import OR_START_OVER
from raylearner.observability.sinks.sinks import flattened

logger = logging.getLogger(__name__)

UNSET = "not set"
FIXED = ("model.kind", "learner.lora", "learner.critic.trunk", "learner.vision_tower")
"""Keys, and sections, that say which tensors a checkpoint holds and what they mean."""
MOVABLE = ("learner.lora.path",)
"""Paths below them: the same files may lie elsewhere."""
FLOAT64 = "learner.compute_dtype"
"""Tensors have one of two precisions, float64 with float64."""


@contextmanager
def taken_up(folder: Path, *, or_start_over: bool) -> Iterator[Checkpoint | None]:
    """Holds a run directory for this process and yields its last whole checkpoint.

    Without one, `or_start_over` sets the directory aside under a numbered name and yields None, with
    an empty one in its place. Raises `ConfigError` otherwise, and where another run has it.
    """
    with run_directory.claimed(folder, is_new=False):
        latest = checkpoint.latest(folder / "checkpoints")
        if latest is not None:
            logger.info("going on from %s", latest.folder)
            yield latest
            return
        if not or_start_over:
            raise ConfigError(_refusal(folder))
        aside = run_directory.set_aside(folder)
        logger.warning(
            "%s held no whole checkpoint: it is now %s, and it starts over", folder, aside
        )
    with run_directory.claimed(folder, is_new=True):
        yield None


def is_done(folder: Path, *, num_steps: int) -> bool:
    """Whether the last step of a run is on disk already. Reads no checkpoint of an earlier step."""
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is None or newest.step < num_steps:
        return False
    return checkpoint.find_fault(newest.folder) is None


def refuse_without_checkpoint(folder: Path) -> None:
    """Raises `ConfigError` where `taken_up` would find nothing to go on from."""
    if checkpoint.latest(folder / "checkpoints") is None:
        raise ConfigError(_refusal(folder))


def _refusal(folder: Path) -> str:
    found = [f"  {fault}" for fault in checkpoint.faults(folder / "checkpoints")]
    metrics = folder / "metrics.jsonl"
    num_rows = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    return "\n".join(
        [
            f"--resume {folder}: it holds no whole checkpoint to go on from, and {num_rows} steps in"
            " metrics.jsonl; nothing was changed",
            *(found or ["  no checkpoint was begun"]),
            f"  to start over beside it: train {folder / 'config.yaml'} run.dir=ANOTHER",
            f"  to start over in its place: train --resume {folder} {OR_START_OVER}, which keeps what"
            f" is there under a numbered name",
        ]
    )


def changed_keys(folder: Path, config: RunConfig) -> dict[str, tuple[object, object]]:
    """Dotted keys whose value is another than in the directory's `config.yaml`: old and new value.

    Empty where that file is missing. Raises `ConfigError` with every changed key that a checkpoint
    does not let change.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    tree, _ = parse(path.read_text(encoding="utf-8"), Where(0, 0, str(path)))
    old = flattened(tree.plain()) if tree is not None else {}
    new = flattened(config.model_dump(mode="json"))
    keys = [key for key in dict.fromkeys([*old, *new]) if key != "run.dir"]
    changed: dict[str, tuple[object, object]] = {
        key: (old.get(key, UNSET), new.get(key, UNSET))
        for key in keys
        if old.get(key, UNSET) != new.get(key, UNSET)
    }
    refused = [key for key, values in changed.items() if _is_fixed(key, values, new)]
    if refused:
        raise ConfigError(
            "\n".join(
                [
                    *(
                        f"{key}: cannot change at a resume, {_change(changed[key])}"
                        for key in refused
                    ),
                    f"  the checkpoints of {folder} hold other tensors; leave it as it was, or start a"
                    " new run",
                ]
            )
        )
    return changed


def described(changed: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    """A line for each changed key."""
    for key, values in changed.items():
        yield f"changed at this resume: {key}: {_change(values)}"


def _change(values: tuple[object, object]) -> str:
    return f"{values[0]} -> {values[1]}"


def _is_fixed(key: str, values: tuple[object, object], new: Mapping[str, object]) -> bool:
    if key == FLOAT64:
        return "float64" in values
    if key in MOVABLE:
        return False
    if new.get("model.kind") == "tiny" and key.startswith("model."):
        return not key.startswith("model.warm_start")
    return any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)
