"""The model of a run while it is made or downloaded, and processes that wait for it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from minimal import MINIMAL
from ray.exceptions import ActorDiedError, RayTaskError

from raylearner.config import model_files
from raylearner.config.schema import LearnerSection, RunConfig
from raylearner.errors import ConfigError, EngineError, EngineLost
from raylearner.learner.learner_group import LearnerGroup
from raylearner.learner.spec import LearnerSpec
from raylearner.run import launching, processes
from raylearner.run import model as models
from raylearner.run.launching import ActorLauncher
from raylearner.run.model import RunModel
from raylearner.run.processes import Finding
from raylearner.run.watchdog import Watchdog


class Calls:
    """The calls that an actor received, in order; `start` returns or raises `outcome`."""

    def __init__(self, outcome: Any = (1, "Stand-in")) -> None:
        self.names: list[str] = []
        self.outcome = outcome

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object) -> Any:
            if name == "start" and isinstance(self.outcome, Exception):
                raise self.outcome
            answers = {"node": "node", "rendezvous_address": ("host", 1), "start": self.outcome}
            return answers.get(name)

        def remote(*arguments: object) -> Any:
            self.names.append(name)
            return asyncio.ensure_future(call(*arguments))

        return SimpleNamespace(remote=remote)


def make_launcher(model: RunModel, actor: Calls, monkeypatch: pytest.MonkeyPatch) -> ActorLauncher:
    monkeypatch.setattr(ActorLauncher, "_create", lambda self, actor_id: actor)
    killed: list[Any] = []
    monkeypatch.setattr(launching, "ray", SimpleNamespace(kill=killed.append, killed=killed))
    config = RunConfig.model_validate(yaml.safe_load(MINIMAL))
    return ActorLauncher(config, model=model, replay=None, colocation=None)


async def launch(launcher: ActorLauncher) -> Any:
    return await launcher.launch("rollout-0", on_placed=lambda node: None, has_to_wait=False)


async def test_an_engine_imports_its_libraries_while_the_model_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, actor = asyncio.Event(), Calls()

    async def make() -> None:
        await done.wait()

    launcher = make_launcher(RunModel("/none", making=make()), actor, monkeypatch)
    launching_one = asyncio.ensure_future(launch(launcher))
    await asyncio.sleep(0.05)
    assert actor.names == ["node", "load_libraries"]
    done.set()
    assert (await launching_one).pid == 1
    assert actor.names == ["node", "load_libraries", "start"]


async def test_the_time_limit_of_an_engine_starts_with_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def make() -> None:
        await asyncio.sleep(0.2)

    launcher = make_launcher(RunModel("/none", making=make()), Calls(), monkeypatch)
    actors = launcher._config.actors.model_copy(update={"start_timeout_s": 0.1})
    launcher._config = launcher._config.model_copy(update={"actors": actors})
    assert (await launch(launcher)).pid == 1


async def test_a_model_that_cannot_be_made_ends_every_waiting_engine_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = RayTaskError("make", "Traceback", ConfigError("column")).as_instanceof_cause()

    async def make() -> None:
        raise failure

    actor = Calls()
    launcher = make_launcher(RunModel("/none", making=make()), actor, monkeypatch)
    with pytest.raises(ConfigError) as raised:
        await launch(launcher)
    assert raised.value is failure
    assert launching.ray.killed == [actor]  # type: ignore[attr-defined]


async def test_an_engine_that_fails_is_not_taken_for_a_failed_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = RayTaskError("start", "Traceback", OSError("no memory")).as_instanceof_cause()
    launcher = make_launcher(RunModel("/none"), Calls(failure), monkeypatch)
    with pytest.raises(EngineError, match="no memory"):
        await launch(launcher)


@pytest.mark.parametrize("does_answer", [True, False])
async def test_an_actor_that_does_not_answer_while_its_engine_starts_is_lost_at_the_watchdogs_limit(
    monkeypatch: pytest.MonkeyPatch, does_answer: bool
) -> None:
    ended = asyncio.get_running_loop().create_future()

    class Stopped(Calls):
        def __getattr__(self, name: str) -> Any:
            return (
                SimpleNamespace(remote=lambda: ended)
                if name == "start"
                else super().__getattr__(name)
            )

    async def answers(actor: Any) -> bool:
        return does_answer

    async def examine(actors: dict[str, Any]) -> list[Finding]:
        return [Finding(name, does_answer, []) for name in actors]

    monkeypatch.setattr(processes, "answers", answers)
    monkeypatch.setattr(processes, "examine", examine)
    monkeypatch.setattr(processes, "end", lambda actors: ended.set_exception(ActorDiedError()))
    launcher = make_launcher(RunModel("/none"), Stopped(), monkeypatch)
    launcher._watchdog = Watchdog(0.1)
    starting = asyncio.ensure_future(launch(launcher))
    await asyncio.wait([starting], timeout=1.0 if does_answer else 30.0)
    if does_answer:
        ended.set_result((1, "Stand-in"))
        assert (await starting).pid == 1
    else:
        with pytest.raises(EngineLost):
            await starting


async def test_a_model_of_the_hub_is_downloaded_once_to_each_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    downloads: list[tuple[str, str]] = []
    problems = [ConfigError("the hub is down")]

    async def download(node: str, path: str) -> None:
        downloads.append((node, path))
        await asyncio.sleep(0.01)
        if problems:
            raise problems.pop()

    monkeypatch.setattr(models, "_download_to", download)
    model = RunModel("owner/name")
    with pytest.raises(ConfigError):
        await model.ready("a")
    assert not model.is_ready("a")
    assert model.awaited == ""
    waiting = asyncio.gather(*(model.ready(node) for node in "aabb"))
    await asyncio.sleep(0)
    assert model.awaited == "downloading to 2 nodes"
    await waiting
    assert model.awaited == ""
    assert model.is_ready("a")
    assert not model.is_ready("c")
    assert [node for node, _ in downloads] == ["a", "a", "b"]  # the first one failed


async def test_ranks_import_their_libraries_before_they_load_the_model() -> None:
    done, rank = asyncio.Event(), Calls(7)
    spec = LearnerSpec(learner=LearnerSection(), model_path="none")
    group = LearnerGroup(spec)
    group.actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: rank))

    async def made() -> None:
        await done.wait()

    starting = asyncio.ensure_future(group.start(model=made()))
    await asyncio.sleep(0.05)
    assert rank.names == ["load_libraries"]
    done.set()
    await starting
    # The port is free when it is found, and may be taken soon.
    assert rank.names[1:3] == ["rendezvous_address", "start"]


def test_the_directory_of_a_model_is_found_or_refused(tmp_path: Path) -> None:
    assert model_files.local_directory(str(tmp_path)) == tmp_path
    assert not model_files.is_hub_id(str(tmp_path))
    assert model_files.is_hub_id("owner/name")
    with pytest.raises(ConfigError, match="none"):
        model_files.local_directory(str(tmp_path / "none"))
