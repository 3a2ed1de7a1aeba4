"""The journal: what a rollback can keep is on disk, and comes back once."""

import asyncio
from pathlib import Path

import pytest
from replays import Clock, claim, make_buffer, make_episode, resume

from raylearner.replay import journal as journals
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.journal import Journal


def busy_buffer() -> ReplayBuffer:
    return make_buffer(Clock(), group_size=4, groups_per_step=2)


async def written(journal: Journal) -> None:
    if journal._writing is not None:
        await journal._writing


async def test_valid_episodes_since_the_checkpoint_are_restored_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "MAX_DELAY_S", 0.0)
    buffer, journal = busy_buffer(), Journal(tmp_path)
    claims = claim(buffer, 4)
    journal.cut(buffer)
    restored = resume(buffer, busy_buffer())
    later = claim(buffer, 4)
    assert later[0].group_id != claims[0].group_id
    for one in [*claims[:2], later[0]]:
        episode = make_episode(one, images=(b"\x89PNG\r\n\x1a\n",) if one is claims[0] else ())
        journal.add(episode)
    newer = make_episode(claims[2], versions=(1,))
    journal.add(newer)
    await written(journal)
    found = await Journal(tmp_path).read()
    assert [e[0].episode_key for e in found] == [c.key for c in claims[:2]], "nothing else is valid"
    assert Journal(tmp_path).put_back(restored, [*found, *found]) == 2
    assert sorted(restored.store.groups[claims[0].group_id]) == [0, 1]
    keys = {c.key[:2] for c in claim(restored, 2, actor="b")}
    assert keys == {c.key[:2] for c in claims[2:]}, "only the others are played again"


async def test_batches_are_limited_and_removed_at_the_second_checkpoint_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "MAX_BATCH", 2)
    monkeypatch.setattr(journals, "MAX_DELAY_S", 3600.0)
    buffer, journal = busy_buffer(), Journal(tmp_path)
    claims = claim(buffer, 4)
    journal.cut(buffer)
    for one in claims[:3]:
        journal.add(make_episode(one))
    await asyncio.sleep(0.2)
    assert len(await asyncio.to_thread(journals._read, tmp_path)) == 2, "a full batch does not wait"
    assert len(await journal.read()) == 3
    journal.cut(buffer)
    assert len(await journal.read()) == 3
    journal.cut(buffer)
    assert await journal.read() == []
