"""Requests for another number of rollout actors: written, answered, refused, withdrawn."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from raylearner.errors import ConfigError, RaylearnerError
from raylearner.observability import run_directory
from raylearner.run import scaling


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "POLL_S", 0.02)
    monkeypatch.setattr(scaling, "ANSWER_TIMEOUT_S", 2.0)


@asynccontextmanager
async def running(folder: Path, resize: Callable[[int], str]) -> AsyncGenerator[None]:
    with run_directory.lock(folder, is_new=True):
        task = asyncio.create_task(scaling.follow(folder, resize))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_is_carried_out_once_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def resize(number: int) -> str:
        asked.append(number)
        if number > 4:
            raise ConfigError(f"actors={number}: at most 4")
        return f"{number} actors"

    monkeypatch.setattr(scaling, "RUNS", tmp_path)
    folder = tmp_path / "night-20260101-000000"
    async with running(folder, resize):
        assert await asyncio.to_thread(scaling.request, str(folder), "actors=3") == "3 actors"
        assert await asyncio.to_thread(scaling.request, "night", "actors=2") == "2 actors"
        with pytest.raises(ConfigError, match="at most 4"):
            await asyncio.to_thread(scaling.request, "night", "actors=5")
        assert asked == [3, 2, 5]
        assert [path.name for path in folder.iterdir()] == [run_directory.LOCK_FILE]


def test_a_run_that_does_not_answer_leaves_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "ANSWER_TIMEOUT_S", 0.1)
    folder = tmp_path / "run"
    with run_directory.lock(folder, is_new=True):
        with pytest.raises(RaylearnerError) as caught:
            scaling.request(str(folder), "actors=3")
        assert not isinstance(caught.value, ConfigError)
        assert [path.name for path in folder.iterdir()] == [run_directory.LOCK_FILE]


def test_an_expired_request_is_not_carried_out(tmp_path: Path) -> None:
    scaling._write(tmp_path / scaling.REQUEST_FILE, {"id": "x", "actors": 3, "at_s": 1.0})
    assert scaling._take(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ["actors=0", "actors=-1", "actors=two", "actors", "ranks=2"])
def test_a_bad_number_is_refused(number: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=number):
        scaling.request(str(tmp_path), number)


def test_missing_and_ended_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not running"):
        scaling.request(str(tmp_path), "actors=2")
    with pytest.raises(ConfigError, match="nowhere"):
        scaling.request("nowhere", "actors=2")


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
async def test_a_file_that_is_no_request_ends_no_others(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "run"
    async with running(folder, lambda number: f"{number} actors"):
        (folder / scaling.REQUEST_FILE).write_text(text)
        await asyncio.sleep(0.1)
        answer = await asyncio.to_thread(scaling.request, str(folder), "actors=2")
    assert answer == "2 actors"
