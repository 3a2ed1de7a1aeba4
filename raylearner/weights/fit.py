"""Whether what is pushed has the shapes of the model that an engine runs, told before it takes any."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from raylearner.config.memory import file_shapes, shapes
from raylearner.errors import WeightTransferError
from raylearner.weights.update import WeightUpdate

Shape = tuple[int, ...]


def refuse_misfit(update: WeightUpdate, model_path: str) -> None:
    """Raises `WeightTransferError` naming the first tensor that the engine's files have otherwise.

    Names that are in one of the two only are left to the engine, which knows how it renames them;
    so are models whose files are not in a directory here.
    """
    ours = _of_model(model_path)
    theirs = _pushed(update.payload)
    wrong = [name for name, shape in theirs.items() if ours.get(name, shape) != shape]
    if wrong:
        name = wrong[0]
        raise WeightTransferError(
            f"weights refused: {name} is {ours[name]} in the engine's model {model_path!r} and"
            f" {theirs[name]} in the learner's ({len(wrong)} tensors differ): another vocabulary or"
            " size; learner and engine must be given the same model"
        )


def refuse_other_tensors(update: WeightUpdate) -> None:
    """Raises `WeightTransferError` naming the first tensor that travels without a checksum, or not at all."""
    theirs, sent = _pushed(update.payload), update.payload["checksums"]
    if theirs and (others := sorted(theirs.keys() ^ sent.keys())):
        name = others[0]
        fault = "was sent and is not there" if name in sent else "is there and was not sent"
        raise WeightTransferError(
            f"weights refused: {name} {fault} ({len(others)} tensors, policy version"
            f" {update.policy_version})"
        )


@lru_cache(maxsize=1)
def _of_model(model_path: str) -> Mapping[str, Shape]:
    """An engine runs one model, and is pushed to at every step."""
    return shapes(Path(model_path).expanduser())


def _pushed(payload: Mapping[str, Any]) -> dict[str, Shape]:
    if "shapes" in payload:
        pairs = zip(payload["names"], payload["shapes"], strict=True)
        return {name: tuple(shape) for name, shape in pairs}
    path = Path(payload.get("path", ""))
    return file_shapes(path) if path.is_file() else {}
