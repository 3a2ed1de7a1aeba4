"""Whether an engine's parameters hold just what the learner sent: checksums, tensor by tensor.

The learner's are made of what it sends, the engine's of its own parameters after they were loaded,
each rank's part of each tensor by itself. What checksums do not cover is left to the probe (`probe`).
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from raylearner.errors import WeightTransferError
from raylearner.types import PolicyVersion
from raylearner.weights.checksums import NOTHING, Checksum, read

log = logging.getLogger(__name__)

MAX_NAMED = 5
"""Tensors that an error names."""

Report = Mapping[str, Any]
"""Of one rank of an engine: `names` that came, `parts` of them that its parameters hold (name,
parameter, region and checksum of each), `repacked` parameters, of which the parts are what was written
before a kernel packed them, `strays`, whose loaders wrote what they had computed, and for those the
checksums of what `arrived`."""


def refuse_differences(
    sent: Mapping[str, Sequence[int]], reports: Sequence[Report], *, policy_version: PolicyVersion
) -> int:
    """The number of tensors verified; `WeightTransferError` with the names of those that differ.

    `sent` are the learner's `Checksum`s by name, `reports` one for each rank of an engine.
    """
    parts: dict[str, list[tuple[int, str, str, Checksum]]] = {}
    for rank, report in enumerate(reports):
        for name, parameter, region, *sums in report["parts"]:
            parts.setdefault(name, []).append((rank, parameter, region, read(sums)))
    names = [frozenset(report["names"]) for report in reports]
    faults: list[str] = []
    for name, sums in sent.items():
        absent = [rank for rank, came in enumerate(names) if name not in came]
        if absent:
            faults.append(f"{name} never came to {_rank(absent[0], reports)}")
            continue
        fault = _fault(name, Checksum(*sums), parts.get(name, ()), reports)
        if fault is not None and not _has_arrived(name, Checksum(*sums), reports):
            faults.append(f"{name} {fault}")
    for rank, came in enumerate(names):
        faults += [
            f"{name} came to {_rank(rank, reports)} and was not sent"
            for name in sorted(came - sent.keys())
        ]
    _refuse(faults, policy_version)
    _tell_strays(tuple(sorted({stray for report in reports for stray in report["strays"]})))
    return len(sent)


def refuse_adapter_differences(
    sent: Mapping[str, Sequence[int]], reports: Sequence[Report], *, policy_version: PolicyVersion
) -> int:
    """The same of an adapter, by what `adapters.adapter_report` tells of each rank."""
    faults: list[str] = []
    for rank, report in enumerate(reports):
        where = _rank(rank, reports)
        arrived = {name: read(sums) for name, sums in report["arrived"].items()}
        for name, sums in sent.items():
            if name not in arrived:
                faults.append(f"{name} never came to {where}")
            elif arrived[name] != Checksum(*sums):
                faults.append(f"{name} came to {where} with another checksum")
        faults += [
            f"{name} came to {where} and was not sent" for name in sorted(arrived.keys() - sent)
        ]
        faults += [f"{name} is not what {where} holds in its place" for name in report["not_held"]]
    _refuse(faults, policy_version)
    return len(sent)


def _refuse(faults: Sequence[str], policy_version: PolicyVersion) -> None:
    if faults:
        more = f" and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
        raise WeightTransferError(
            f"verification of policy version {policy_version} failed: "
            f"{'; '.join(faults[:MAX_NAMED])}{more}; the engine does not hold the learner's weights"
        )


def _fault(
    name: str,
    sent: Checksum,
    parts: Sequence[tuple[int, str, str, Checksum]],
    reports: Sequence[Report],
) -> str | None:
    """What is wrong with one tensor, of which all ranks hold these parts."""
    if not sent.num_elements:
        return None
    if not parts:
        # A bias of zeros is the same as none, which is what such an engine's model has.
        is_none = name.endswith(".bias") and not sent.words
        return None if is_none else "was loaded into no parameter"
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
                f"came in part: {parameter} holds {whole.num_elements} of its "
                f"{sent.num_elements} elements"
            )
        if whole != sent:
            return f"has another checksum in {parameter}"
    return None


def _has_arrived(name: str, sent: Checksum, reports: Sequence[Report]) -> bool:
    """Whether it is one of which a loader makes something else, and came as it was sent."""
    return any(report["strays"] for report in reports) and all(
        name in report["arrived"] and read(report["arrived"][name]) == sent for report in reports
    )


def _rank(rank: int, reports: Sequence[Report]) -> str:
    return "the engine" if len(reports) == 1 else f"rank {rank} of the engine"


@cache
def _tell_strays(strays: tuple[str, ...]) -> None:
    if strays:
        log.warning(
            "vLLM computes %s of what it is sent: its checksums are compared where tensors arrive, and "
            "not where they are held; the probe covers the rest",
            ", ".join(strays[:MAX_NAMED]) + (" and others" if len(strays) > MAX_NAMED else ""),
        )
