"""The start of all actors: the first failure is raised, and everything that started is ended."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raylearner.errors import ConfigError, EngineError, LearnerError
from raylearner.run import run_actors
from raylearner.run.model import RunModel
from raylearner.run.run_actors import RunActors
from raylearner.run.watchdog import Watchdog

CONFIG: Any = SimpleNamespace(
    run=SimpleNamespace(name="run", watchdog_s=100.0),
    rewards=None,
    weights=SimpleNamespace(transport="shared_files", deadline_s=1.0, max_failed_pushes=1),
    actors=SimpleNamespace(is_elastic=False, start_timeout_s=100.0),
)


class Part:
    """A part of the run that starts after the model, fails with `error`, or never ends."""

    def __init__(self, ended: list[str], name: str, error: Exception | None = None) -> None:
        self._ended, self._name, self._error = ended, name, error
        self.groups = self.actor = self.fail_push = None
        self.actors: dict[str, Any] = {}

    async def start(self, *, model: Any = None) -> None:
        if model is not None:
            await model
        if self._error is not None:
            raise self._error
        await asyncio.sleep(3600)

    async def phases(self) -> list[str]:
        return ["loading"]

    def close(self) -> None:
        self._ended.append(self._name)

    stop = close


def install(monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception]) -> list[str]:
    """Replace all parts by stand-ins; return the names of those that were ended."""
    ended: list[str] = []
    for name in ("RewardActors", "ReplayProcess", "LearnerGroup", "RolloutFleet", "Publisher"):
        part = Part(ended, name, errors.get(name))
        monkeypatch.setattr(run_actors, name, lambda *_, part=part, **__: part)
    monkeypatch.setattr(run_actors.LearnerSpec, "of_run", lambda *_, **__: None)
    return ended


async def start(making: Any, lines: list[Sequence[str]]) -> None:
    model = RunModel("none", making=making)
    model.report("3/5")
    async with asyncio.timeout(5):
        await RunActors.start(
            CONFIG,
            [],
            folder=Path(),
            model=model,
            watchdog=Watchdog(100.0, step=lambda: 0),
            tracer=None,  # type: ignore[arg-type]
            on_wait=lines.append,
        )


@pytest.mark.parametrize(
    "errors",
    [
        {"model": ConfigError("no such column")},
        {"RolloutFleet": EngineError("no memory")},  # while the learner loads
        {"LearnerGroup": LearnerError("it does not fit")},
        {"RewardActors": ConfigError("no such model")},
    ],
)
async def test_the_first_failure_is_raised_and_ends_everything(
    errors: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = install(monkeypatch, errors)

    async def make() -> None:
        await asyncio.sleep(0.05)
        if "model" in errors:
            raise errors["model"]

    lines: list[Sequence[str]] = []
    (error,) = errors.values()
    with pytest.raises(type(error)) as raised:
        await start(make(), lines)
    assert raised.value is error
    assert sorted(ended) == sorted(
        ["Publisher", "RolloutFleet", "LearnerGroup", "ReplayProcess", "RewardActors"]
    )
    assert lines == [
        ["model: 3/5", "engines 0/1 ready: loading", "learner ranks 0/1 ready: loading"]
    ] * len(lines)


async def test_a_cancelled_start_ends_the_preparation_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = install(monkeypatch, {})
    outcomes: list[str] = []

    async def make() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            outcomes.append("ended")

    starting = asyncio.ensure_future(start(make(), []))
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert outcomes == ["ended"]
    assert len(ended) == 5
