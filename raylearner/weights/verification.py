"""Verification of a weight update: the engine's shapes before it, the parameters' checksums after it.

The learner's checksums are those of the tensors it sends, the engine's are read from its own
parameters after loading, each rank's part of each tensor separately. `probe` covers errors that
checksums do not detect.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from raylearner.config.memory import file_shapes, shapes
from raylearner.errors import WeightTransferError
from raylearner.types import PolicyVersion
from raylearner.weights.checksums import NOTHING, Checksum, read
from raylearner.weights.update import WeightUpdate

log = logging.getLogger(__name__)

MAX_NAMED = 5
"""Maximum number of tensors that an error names."""

Shape = tuple[int, ...]
Report = Mapping[str, Any]
"""One rank's report, in plain types: `names` of the tensors that arrived; `parts` of them that its
parameters hold (name, parameter, region and checksum of each); `repacked` parameters, whose parts are
those written before a kernel repacked them; `computed` parameters, whose loaders wrote values they had
computed; and for these the checksums of the tensors that `arrived`."""


def check_shapes(update: WeightUpdate, model_path: str) -> None:
    """Raise `WeightTransferError` naming the first tensor whose shape differs from the engine's files.

    Names found on one side only are left to the engine, which may rename tensors; so are models whose
    files are not in a local directory.
    """
    expected = _model_shapes(model_path)
    pushed = _pushed_shapes(update.payload)
    wrong = [name for name, shape in pushed.items() if expected.get(name, shape) != shape]
    if wrong:
        name = wrong[0]
        raise WeightTransferError(
            f"weights refused: {name} is {expected[name]} in the engine's model {model_path!r} and"
            f" {pushed[name]} in the learner's ({len(wrong)} tensors differ in shape); give learner and engine"
            " the same model"
        )


def check_tensor_names(update: WeightUpdate) -> None:
    """Raise `WeightTransferError` unless the payload holds exactly the tensors that have checksums."""
    pushed, sums = _pushed_shapes(update.payload), update.payload["checksums"]
    if pushed and (others := sorted(pushed.keys() ^ sums.keys())):
        name = others[0]
        problem = "has a checksum but no data" if name in sums else "has data but no checksum"
        raise WeightTransferError(
            f"weights refused: {name} {problem} ({len(others)} tensors, policy version"
            f" {update.policy_version})"
        )


def verify_weights(
    sent: Mapping[str, Sequence[int]], reports: Sequence[Report], *, policy_version: PolicyVersion
) -> int:
    """Return the number of tensors that the engine holds as they were sent.

    `sent` are the learner's `Checksum`s by name, `reports` one for each rank of the engine. Raises
    `WeightTransferError` naming the tensors that differ.
    """
    parts: dict[str, list[tuple[int, str, str, Checksum]]] = {}
    for rank, report in enumerate(reports):
        for name, parameter, region, *sums in report["parts"]:
            parts.setdefault(name, []).append((rank, parameter, region, read(sums)))
    arrived = [frozenset(report["names"]) for report in reports]
    problems: list[str] = []
    for name, sums in sent.items():
        missing = [rank for rank, names in enumerate(arrived) if name not in names]
        if missing:
            problems.append(f"{name} is missing on {_rank(missing[0], reports)}")
            continue
        problem = _find_problem(name, Checksum(*sums), parts.get(name, ()), reports)
        if problem is not None and not _arrived_intact(name, Checksum(*sums), reports):
            problems.append(f"{name} {problem}")
    for rank, names in enumerate(arrived):
        problems += [
            f"{name} arrived on {_rank(rank, reports)} but was not sent"
            for name in sorted(names - sent.keys())
        ]
    _raise_problems(problems, policy_version)
    _warn_of_computed(tuple(sorted({name for report in reports for name in report["computed"]})))
    return len(sent)


def verify_adapter(
    sent: Mapping[str, Sequence[int]], reports: Sequence[Report], *, policy_version: PolicyVersion
) -> int:
    """Return the number of adapter tensors verified; `reports` are those of `adapter.adapter_report`.

    Raises `WeightTransferError` naming the tensors that differ.
    """
    problems: list[str] = []
    for rank, report in enumerate(reports):
        where = _rank(rank, reports)
        arrived = {name: read(sums) for name, sums in report["arrived"].items()}
        for name, sums in sent.items():
            if name not in arrived:
                problems.append(f"{name} is missing on {where}")
            elif arrived[name] != Checksum(*sums):
                problems.append(f"{name} arrived on {where} with another checksum")
        problems += [
            f"{name} arrived on {where} but was not sent" for name in sorted(arrived.keys() - sent)
        ]
        problems += [f"{name} is not in its slot on {where}" for name in report["not_held"]]
    _raise_problems(problems, policy_version)
    return len(sent)


@lru_cache(maxsize=1)
def _model_shapes(model_path: str) -> Mapping[str, Shape]:
    """Cached: an engine has one model and is pushed to at every step."""
    return shapes(Path(model_path).expanduser())


def _pushed_shapes(payload: Mapping[str, Any]) -> dict[str, Shape]:
    if "shapes" in payload:
        pairs = zip(payload["names"], payload["shapes"], strict=True)
        return {name: tuple(shape) for name, shape in pairs}
    path = Path(payload.get("path", ""))
    return file_shapes(path) if path.is_file() else {}


def _raise_problems(problems: Sequence[str], policy_version: PolicyVersion) -> None:
    if problems:
        more = f" and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise WeightTransferError(
            f"verification of policy version {policy_version} failed: "
            f"{'; '.join(problems[:MAX_NAMED])}{more}; the engine does not have the learner's "
            "weights"
        )


def _find_problem(
    name: str,
    sent: Checksum,
    parts: Sequence[tuple[int, str, str, Checksum]],
    reports: Sequence[Report],
) -> str | None:
    """Return how one tensor, of which the ranks hold these parts, differs from what was sent."""
    if not sent.num_elements:
        return None
    if not parts:
        # A bias of zeros is the same as no bias, which is what such an engine's model has.
        is_no_bias = name.endswith(".bias") and not sent.words
        return None if is_no_bias else "was loaded into no parameter"
    held: dict[str, dict[str, tuple[int, Checksum]]] = {}
    for rank, parameter, region, sums in parts:
        first, before = held.setdefault(parameter, {}).setdefault(region, (rank, sums))
        if sums != before:
            ranks = f"{_rank(first, reports)} and {_rank(rank, reports)}"
            return f"differs between {ranks} in {parameter}"
    for parameter, by_region in held.items():
        whole = NOTHING
        for _, sums in by_region.values():
            whole += sums
        if whole.num_elements != sent.num_elements:
            return (
                f"is incomplete: {parameter} has {whole.num_elements} of its {sent.num_elements} "
                "elements"
            )
        if whole != sent:
            return f"has another checksum in {parameter}"
    return None


def _arrived_intact(name: str, sent: Checksum, reports: Sequence[Report]) -> bool:
    """Whether a loader may have computed other values from the tensor, which arrived as it was sent."""
    return any(report["computed"] for report in reports) and all(
        name in report["arrived"] and read(report["arrived"][name]) == sent for report in reports
    )


def _rank(rank: int, reports: Sequence[Report]) -> str:
    return "the engine" if len(reports) == 1 else f"rank {rank} of the engine"


@cache
def _warn_of_computed(parameters: tuple[str, ...]) -> None:
    if parameters:
        log.warning(
            "vLLM computes %s from the tensors it receives: their checksums are compared on arrival and"
            " not in the parameters; the probe covers the rest",
            ", ".join(parameters[:MAX_NAMED])
            + (" and others" if len(parameters) > MAX_NAMED else ""),
        )
