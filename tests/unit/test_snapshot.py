"""The replay on disk: saved, restored, and refused where it does not fit."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from episodes import assert_same
from replays import PROMPTS, claim, fill, make_buffer, make_episode, resume, taken

from raylearner.errors import CheckpointError, TooManyFailures
from raylearner.replay import snapshot
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.groups import SampleState

BUSY = {"group_size": 3, "groups_per_step": 3, "drop_zero_variance": True}


def busy_buffer() -> ReplayBuffer:
    """Something in every state: trained, dropped, leased, held, running with one done, pending."""
    buffer = make_buffer(**BUSY)
    fill(buffer, 1, reward=1.0)
    fill(buffer, 3)
    buffer.take(1, 0)
    buffer.commit([1], 0)
    buffer.take(1, 0)
    a, b = claim(buffer, 2)
    buffer.put(make_episode(a, images=(b"png",), num_segments=2, error="tool: down"))
    buffer.put(make_episode(b, versions=()))
    claim(buffer, 2)
    return buffer


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_load_gives_back_what_was_saved(tmp_path: Path) -> None:
    buffer = busy_buffer()
    snapshot.take_snapshot(buffer).save(tmp_path)
    resumed = make_buffer(**BUSY)
    snapshot.load(resumed, tmp_path)
    assert sorted(resumed.ledger.held) == [2, 3], "leased is done again"
    assert resumed.ledger.counts.reissued == 2
    assert resumed.policy_version == buffer.policy_version
    assert resumed.store.groups.keys() == buffer.store.groups.keys()
    for group_id, episodes in buffer.store.groups.items():
        assert resumed.store.groups[group_id].keys() == episodes.keys()
        for index, episode in episodes.items():
            for left, right in zip(resumed.store.groups[group_id][index], episode, strict=True):
                assert_same(left, right)
    states = [sample.state for sample in resumed.ledger.running[4].samples]
    assert states == [SampleState.DONE, SampleState.DONE, SampleState.PENDING]
    changed = {"buffer/groups/held", "buffer/groups/leased", "buffer/samples/reissued"}
    changed |= {k for k in buffer.metrics() if k.startswith(("buffer/started", "buffer/staleness"))}
    before, after = buffer.metrics(), resumed.metrics()
    assert {k: before[k] for k in before if k not in changed} == {
        k: after[k] for k in after if k not in changed
    }


def test_a_resumed_replay_goes_on_like_the_uninterrupted_one(tmp_path: Path) -> None:
    buffer = make_buffer()
    fill(buffer, 3)
    snapshot.take_snapshot(buffer).save(tmp_path)
    resumed = make_buffer()
    snapshot.load(resumed, tmp_path)
    for _ in range(6):
        takes, plays = [], []
        for each in (buffer, resumed):
            claims = fill(each, 2, versions=(each.policy_version,))
            plays.append([(c.key, c.seed, c.prompt.prompt_id) for c in claims])
            take = each.take(2, each.policy_version)
            takes.append(taken(take))
            each.commit(takes[-1], each.policy_version + 1)
        assert plays[0] == plays[1]
        assert takes[0] == takes[1]


@pytest.mark.parametrize("groups_per_step", [1, 2, 4])
def test_steps_are_those_that_were_made_whatever_a_take_holds_now(
    groups_per_step: int, tmp_path: Path
) -> None:
    buffer = make_buffer()
    for _ in range(3):
        fill(buffer, 2, versions=(buffer.policy_version,))
        buffer.commit(taken(buffer.take(2, buffer.policy_version)), buffer.policy_version + 1)
    snapshot.take_snapshot(buffer).save(tmp_path)
    resumed = make_buffer(groups_per_step=groups_per_step)
    snapshot.load(resumed, tmp_path)
    assert resumed.ledger.num_steps == 3
    (claimed, *_) = claim(resumed, 1)
    assert claimed.step == 3


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    buffer = busy_buffer()
    snapshot.take_snapshot(buffer).save(tmp_path / "a")
    snapshot.take_snapshot(buffer).save(tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert {"ledger.json", "buffer.npz"} < digest(tmp_path / "a").keys()
    image = hashlib.sha256(b"png").hexdigest()
    assert (tmp_path / "a" / "images" / image).read_bytes() == b"png"


def test_a_cut_does_not_see_what_comes_after_it(tmp_path: Path) -> None:
    buffer = busy_buffer()
    cut = snapshot.take_snapshot(buffer)
    cut.save(tmp_path / "a")
    buffer.release()
    buffer.take(2, 0)
    buffer.commit([2, 3], 1)
    claim(buffer, 9)
    cut.save(tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_a_resume_with_edited_rows_drops_the_groups_of_these_rows_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file lies elsewhere now, so every id changed; the row of the running group was edited."""
    buffer = busy_buffer()
    snapshot.take_snapshot(buffer).save(tmp_path)
    running = buffer.ledger.running[4]
    rows = [replace(p, prompt_id=f"moved-{i}", source="moved") for i, p in enumerate(PROMPTS)]
    snapshot.load(resumed := make_buffer(prompts=rows, **BUSY), tmp_path)
    assert resumed.ledger.running.keys() == buffer.ledger.running.keys()
    assert not caplog.records
    index = running.prompt_index
    rows[index] = replace(rows[index], answer="another")
    snapshot.load(resumed := make_buffer(prompts=rows, **BUSY), tmp_path)
    kept = [r for r in buffer.ledger.held.values() if r.prompt_index != index]
    kept += [r for r in buffer.ledger.leased.values() if r.prompt_index != index]
    assert 4 not in resumed.ledger.running
    assert resumed.ledger.held.keys() == {record.group_id for record in kept}
    assert resumed.store.groups.keys() <= resumed.ledger.held.keys() | resumed.ledger.running.keys()
    assert buffer.ledger.size - resumed.ledger.size == 2
    assert resumed.metrics()["buffer/dropped/changed_row"] == 2
    (record,) = caplog.records
    assert f"moved-{index}" in record.getMessage()
    for group_id in resumed.ledger.held:
        ids = {(t.prompt_id, t.source) for t in resumed.store.trajectories(group_id)}
        row = rows[resumed.ledger.held[group_id].prompt_index]
        assert ids == {(row.prompt_id, "moved")}


def test_other_numbers_of_rows_are_refused_before_a_start(tmp_path: Path) -> None:
    snapshot.take_snapshot(busy_buffer()).save(tmp_path)
    snapshot.refuse_other_data(tmp_path, PROMPTS)
    for prompts in (PROMPTS[:-1], [*PROMPTS, PROMPTS[0]]):
        with pytest.raises(CheckpointError):
            snapshot.refuse_other_data(tmp_path, prompts)
        with pytest.raises(CheckpointError):
            snapshot.load(make_buffer(prompts=prompts, **BUSY), tmp_path)


def test_a_folder_without_a_whole_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        snapshot.load(make_buffer(), tmp_path)
    snapshot.take_snapshot(busy_buffer()).save(tmp_path)
    (tmp_path / "buffer.npz").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        snapshot.load(make_buffer(), tmp_path)


def test_another_format_is_refused() -> None:
    metadata, arrays = snapshot.take_snapshot(busy_buffer()).state()
    with pytest.raises(CheckpointError, match="format 99"):
        snapshot.restore(make_buffer(), metadata | {"format": 99}, arrays, {})


def test_the_error_window_survives_a_resume() -> None:
    values = {"groups_per_step": 9, "error_window": 4, "max_error_fraction": 0.5}
    buffer = make_buffer(**values)
    claims = claim(buffer, 8)
    for each in claims[:2]:
        buffer.put(make_episode(each, error="tool: down"))
    resumed = resume(buffer, make_buffer(**values))
    first, second = claim(resumed, 2)
    resumed.put(make_episode(first))
    resumed.put(make_episode(second, error="tool: down"))
    with pytest.raises(TooManyFailures, match="3 of the last 4"):
        resumed.take(9, 0)


def test_a_run_that_goes_back_plays_again_what_came_after_the_dump_and_counts_it() -> None:
    buffer = make_buffer()
    old, new, running = claim(buffer, 3)
    buffer.put(make_episode(old, versions=(0, 0)))
    metadata, arrays = snapshot.take_snapshot(buffer).state()
    buffer.commit([], 1)
    buffer.put(make_episode(new, versions=(0, 1)))
    assert buffer.metrics()["buffer/groups/held"] == 1
    snapshot.restore(buffer, metadata, arrays, {})
    assert buffer.metrics()["buffer/dropped/rolled_back"] == 1
    assert buffer.policy_version == 0
    assert buffer.claim("a", 1, 9).claims == [], "the engine still holds the lost policy"
    assert [c.key[:2] for c in claim(buffer, 2)] == [(0, 1), (1, 0)]
    assert buffer.put(make_episode(running)) == "late"
