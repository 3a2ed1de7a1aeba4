"""What the replay tells about itself: metrics, and lines for the watchdog."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raylearner.replay.ledger import Ledger
from raylearner.replay.record import GroupRecord, SampleRecord, SampleState
from raylearner.replay.staleness import is_mixed_version
from raylearner.replay.tally import distribution
from raylearner.types import PolicyVersion, Trajectory


def buffer_metrics(ledger: Ledger, *, now_s: float) -> dict[str, float]:
    """Groups by state, totals of the run, and what is known of the episodes that run now."""
    counts = ledger.counts
    ages_s = [now_s - sample.started_at_s for _, _, sample in ledger.running_samples()]
    dropped = {"stale": 0, "zero_variance": 0, "all_failed": 0, "time_limit": 0}
    return {
        "buffer/groups/running": len(ledger.running),
        "buffer/groups/held": len(ledger.held),
        "buffer/groups/awaiting_scores": len(ledger.held) - ledger.num_ready,
        "buffer/groups/leased": len(ledger.leased),
        "buffer/groups/admitted": counts.admitted,
        "buffer/groups/trained": counts.trained,
        "buffer/samples/claimed": counts.claimed,
        "buffer/samples/reissued": counts.reissued,
        **{f"buffer/dropped/{why}": n for why, n in (dropped | counts.dropped).items()},
        "buffer/started/count": len(ages_s),
        **distribution("buffer/started/age_s", ages_s),
    }


def take_metrics(
    trajectories: Sequence[Trajectory],
    versions: Sequence[NDArray[np.int32]],
    policy_version: PolicyVersion,
    *,
    num_masked_tokens: int = 0,
    num_over_stale_tokens: int = 0,
) -> dict[str, float]:
    """What a take holds. Staleness is that of each trajectory's oldest trained token.

    `versions` are those of the trained tokens of each trajectory.
    """
    ages = [policy_version - int(array.min()) for array in versions if len(array)]
    num_mixed = sum(is_mixed_version(t) for t in trajectories)
    return {
        "buffer/staleness/mean": sum(ages) / len(ages) if ages else 0.0,
        "buffer/staleness/max": max(ages, default=0),
        "buffer/masked_tokens": num_masked_tokens,
        "buffer/over_stale_trained": num_over_stale_tokens,
        "buffer/mixed_version_fraction": num_mixed / max(len(trajectories), 1),
    }


def describe(
    ledger: Ledger,
    *,
    now_s: float,
    engine_versions: Mapping[str, PolicyVersion],
    wanted: tuple[int, PolicyVersion] | None,
) -> list[str]:
    """Who plays what since when, and what claims and `take` wait for: one line each."""
    by_actor: dict[str, list[tuple[float, GroupRecord, int, SampleRecord]]] = {}
    for group, index, sample in ledger.running_samples():
        entry = (now_s - sample.started_at_s, group, index, sample)
        by_actor.setdefault(sample.claimant or "?", []).append(entry)
    lines: list[str] = []
    for actor_id in sorted(by_actor.keys() | engine_versions.keys()):
        entries = by_actor.get(actor_id, [])
        line = f"{actor_id} runs {len(entries)} episodes"
        if entries:
            age_s, group, index, sample = max(entries, key=lambda entry: entry[0])
            key = (group.group_id, index, sample.attempt)
            line += f", the oldest {key} for {age_s:.1f} s"
        version = engine_versions.get(actor_id)
        unfit = None if version is None else ledger.why_unfit(version)
        lines.append(line if unfit is None else f"{line}; it gets no claim: {unfit}")
    num_pending = sum(g.num_in(SampleState.PENDING) for g in ledger.running.values())
    full = ledger.why_full()
    lines.append(
        f"{num_pending} samples are pending; new groups are "
        + ("admitted when claimed" if full is None else f"not admitted: {full}")
    )
    oldest = next(iter(ledger.running.values()), None)
    if oldest is not None:
        lines.append(
            f"group {oldest.group_id} runs for {now_s - oldest.admitted_at_s:.1f} s (limit "
            f"{ledger.config.group_time_limit_s:g} s): {oldest.num_in(SampleState.DONE)} of "
            f"{ledger.config.group_size} done, {oldest.num_in(SampleState.RUNNING)} running, "
            f"{oldest.num_in(SampleState.PENDING)} pending"
        )
    if wanted is None:
        lines.append(f"no take waits; {len(ledger.leased)} groups are leased")
    else:
        num_groups, version = wanted
        why = ""
        num_awaiting = len(ledger.held) - ledger.num_ready
        if num_awaiting:
            why = f", {num_awaiting} of the complete await the rewards of functions that see groups"
        elif len(ledger.held) >= num_groups:
            why = ", held back for running groups that would become too old"
        lines.append(
            f"take of {num_groups} groups at version {version} waits: {len(ledger.held)} "
            f"complete, {len(ledger.running)} running, {len(ledger.leased)} leased{why}"
        )
    return lines
