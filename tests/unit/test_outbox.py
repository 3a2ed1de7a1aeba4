import asyncio
from itertools import chain

import pytest
from episodes import make_trajectory

from raylearner.actors.outbox import Outbox
from raylearner.types import Trajectory


def make_episode(index: int) -> list[Trajectory]:
    return [make_trajectory(sample_index=index)]


class Replay:
    """Remembers its calls; fails those whose number is listed."""

    def __init__(self, *, delay_s: float = 0.0, failing: tuple[int, ...] = ()) -> None:
        self.calls: list[list[int]] = []
        self.max_in_flight = self._in_flight = 0
        self._delay_s = delay_s
        self._failing = failing

    async def put(self, episodes: list[list[Trajectory]]) -> list[str]:
        number = len(self.calls)
        self.calls.append([episode[0].sample_index for episode in episodes])
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        await asyncio.sleep(self._delay_s)
        self._in_flight -= 1
        if number in self._failing:
            raise ConnectionError(f"call {number} lost")
        return [f"accepted {episode[0].sample_index}" for episode in episodes]


async def send_all(outbox: Outbox, count: int) -> list[str | BaseException]:
    return await asyncio.gather(
        *(outbox.send(make_episode(i)) for i in range(count)), return_exceptions=True
    )


async def test_episodes_go_together_and_each_sender_gets_its_own_outcome() -> None:
    replay = Replay()
    outcomes = await send_all(Outbox(replay.put, max_episodes=4, max_delay_s=0.01), 10)
    assert outcomes == [f"accepted {i}" for i in range(10)]
    assert replay.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


async def test_one_call_is_in_flight_at_a_time() -> None:
    replay = Replay(delay_s=0.005)
    await send_all(Outbox(replay.put, max_episodes=2, max_delay_s=0.0), 9)
    assert replay.max_in_flight == 1
    assert list(chain(*replay.calls)) == list(range(9))


async def test_a_lone_episode_leaves_after_the_delay() -> None:
    replay = Replay()
    async with asyncio.timeout(5):
        assert await Outbox(replay.put, max_episodes=9, max_delay_s=0.01).send(make_episode(3))
    assert replay.calls == [[3]]


async def test_a_lost_call_raises_in_its_senders_only() -> None:
    replay = Replay(failing=(0,))
    outbox = Outbox(replay.put, max_episodes=2, max_delay_s=0.01)
    outcomes = await send_all(outbox, 4)
    assert [isinstance(outcome, ConnectionError) for outcome in outcomes] == [
        True,
        True,
        False,
        False,
    ]
    assert await outbox.send(make_episode(0)) == "accepted 0", "the sender may try again"


async def test_a_short_answer_is_an_error() -> None:
    async def put(episodes: list[list[Trajectory]]) -> list[str]:
        return []

    with pytest.raises(RuntimeError, match="0 outcomes"):
        await Outbox(put, max_delay_s=0.0).send(make_episode(0))


async def test_a_cancelled_senders_episode_still_goes() -> None:
    replay = Replay()
    outbox = Outbox(replay.put, max_episodes=9, max_delay_s=0.02)
    sender = asyncio.create_task(outbox.send(make_episode(0)))
    other = asyncio.create_task(outbox.send(make_episode(1)))
    await asyncio.sleep(0)
    sender.cancel()
    assert await other == "accepted 1"
    assert replay.calls == [[0, 1]]
