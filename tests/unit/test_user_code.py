"""Users' code that blocks, spins, or will not be cancelled: time limits hold, the actor's own loop goes
on, errors name the function and where it stood, and the next call works."""

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from episodes import make_view
from kits import make_claim, make_kit, make_renderer, no_environment, play_one

from raylearner.actors.proxy.agent import Agent
from raylearner.actors.proxy.chat_server import ChatServer
from raylearner.actors.proxy.program import FunctionProgram
from raylearner.actors.rollout_worker import RolloutWorker
from raylearner.config import schema
from raylearner.config.environment import FunctionTool
from raylearner.config.rewards import RewardSection
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.errors import RewardError, ToolError, UserCodeStuck
from raylearner.rewards.scorer import Scorer
from raylearner.tools.function import Function
from raylearner.types import Message, Prompt, Sampling
from raylearner.user_code import host
from raylearner.user_code.host import CallFailed, CallTimeout, UserCode

LIMIT_S = 0.15
MAX_LATENCY_S = 3.0
"""Of the loop that receives weights; the functions below would hold it for 20 s or for good."""

USERS_CODE = """
import asyncio, time

async def sleeps():
    time.sleep(20)

async def spins():
    while True:
        pass

async def swallows():
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            await asyncio.sleep(0.05)
        except BaseException:
            continue

async def child_blocks():
    async def block():
        time.sleep(20)
    await asyncio.gather(block())

BAD = {f.__name__: f for f in (sleeps, spins, swallows, child_blocks)}

async def misbehave(columns):
    if columns.get("how") in BAD:
        await BAD[columns["how"]]()

async def reward(episode):
    await misbehave(episode.prompt.columns)
    return 1.0

async def tool(text: str, prompt):
    await misbehave(prompt.columns)
    return text

async def program(*, base_url, api_key, messages, columns):
    await misbehave(columns)
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        reply = await client.chat.completions.create(model="m", messages=messages)
    return reply.choices[0].message.content

class World:
    stop, tool_schemas = (), ()

    async def reset(self, prompt):
        self.columns = prompt.columns
        return prompt.messages

    async def step(self, message):
        from raylearner.environments.protocol import Reply
        await misbehave(self.columns)
        return Reply(is_done=True)

    def outcome(self):
        from raylearner.environments.protocol import Outcome
        return Outcome(metrics={"asked": 1.0})

    async def close(self):
        pass
"""

Run = Callable[[Prompt], Awaitable[str | None]]
"""Calls the user's code for a prompt, and returns its error."""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, and threads of the test's own."""
    name = f"users_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(USERS_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    own = UserCode(grace_s=0.1, linger_s=0.2)
    monkeypatch.setattr(host, "shared", lambda: own)
    return name


def make_prompt(**columns: Any) -> Prompt:
    return Prompt(
        prompt_id="p",
        messages=(Message(role="user", content="1+1="),),
        answer="2",
        columns=columns,
    )


@asynccontextmanager
async def hosted(kind: str, code: str, folder: Path) -> AsyncIterator[tuple[Run, str]]:
    """How the product runs a kind of users' code, and what errors call it."""
    if kind == "reward":
        functions = [{"kind": f"{code}:reward", "name": "mine", "timeout_s": LIMIT_S}]
        scorer = Scorer(RewardSection.model_validate({"functions": functions}))

        async def run(prompt: Prompt) -> str | None:
            try:
                await scorer.score(make_view("2", prompt=prompt))
            except RewardError as error:
                return str(error)
            return None

        yield run, "reward 'mine'"
    elif kind == "tool":
        section = FunctionTool(
            kind="function", function=f"{code}:tool", timeout_s=LIMIT_S, on_failure="fail"
        )
        tool = Function(section)

        async def run(prompt: Prompt) -> str | None:
            try:
                await tool.call("x", prompt=prompt)
            except ToolError as error:
                return str(error)
            return None

        yield run, f"{code}:tool"
    else:
        agent, make_environment = None, no_environment
        if kind == "program":
            program = FunctionProgram(f"{code}:program", {})
            agent = Agent(
                server=ChatServer.start(), program=program, timeout_s=LIMIT_S, max_calls=4
            )
        else:
            make_environment = EnvironmentFactory(
                schema.CustomEnvironment(kind="custom", path=f"{code}:World", timeout_s=LIMIT_S)
            ).make
        kit = make_kit(make_renderer(folder), make_environment=make_environment, agent=agent)

        async def run(prompt: Prompt) -> str | None:
            return (await play_one(kit, make_claim(prompt), max_tokens=8, seed=1)).error

        yield run, f"{code}:{'program' if kind == 'program' else 'World, step'}"
        if agent is not None:
            await agent.close()


async def largest_gap(is_over: asyncio.Event) -> float:
    """Of this loop, in seconds."""
    gap, before = 0.0, time.monotonic()
    while not is_over.is_set():
        await asyncio.sleep(0.005)
        gap, before = max(gap, time.monotonic() - before), time.monotonic()
    return gap


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("reward", "child_blocks"),
        *product(("reward", "tool", "environment", "program"), ("sleeps", "spins", "swallows")),
    ],
)
async def test_time_limits_hold_and_the_loop_goes_on(
    kind: str, how: str, code: str, tokenizer_folder: Path
) -> None:
    async with hosted(kind, code, tokenizer_folder) as (run, name):
        if kind == "program":  # its first call imports the client, which takes its time
            import openai  # noqa: F401
        is_over = asyncio.Event()
        latency = asyncio.create_task(largest_gap(is_over))
        started = time.monotonic()
        error = await run(make_prompt(how=how))
        took_s = time.monotonic() - started
        is_over.set()
        assert await latency < MAX_LATENCY_S
        assert took_s < 10.0
        assert error is not None
        assert name in error
        assert f"{LIMIT_S:g} s" in error
        if kind != "program":  # nothing is lost but the call: the loop that was held is replaced
            async with asyncio.timeout(15):
                while await run(make_prompt()) is not None:
                    pass


async def test_where_it_stood_is_in_the_error() -> None:
    own = UserCode(grace_s=0.1)

    async def block() -> None:
        time.sleep(0.4)  # noqa: ASYNC251

    async def wait() -> None:
        await asyncio.sleep(9)

    def block_a_thread() -> None:
        time.sleep(0.4)

    for function in (wait, block, block_a_thread):
        with pytest.raises(CallTimeout) as caught:
            await own.call(function, name="mine", timeout_s=0.2)
        assert __file__ in str(caught.value)
        assert f"in {function.__name__}" in str(caught.value)


async def test_a_sync_function_that_spins_is_interrupted() -> None:
    own, ended = UserCode(grace_s=0.1, linger_s=0.1), threading.Event()

    def spin() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(CallTimeout):
        await own.call(spin, name="mine", timeout_s=0.1)
    assert await asyncio.to_thread(ended.wait, 3.0)
    assert await own.call(lambda: 7, name="mine", timeout_s=1.0) == 7


async def test_calls_that_wait_behind_one_that_holds_the_loop_are_named_its() -> None:
    own = UserCode(grace_s=0.1)

    async def spin() -> None:
        while True:
            pass

    async def innocent() -> None:
        await asyncio.sleep(3)

    waiting = asyncio.create_task(own.call(innocent, name="other", timeout_s=20.0))
    await asyncio.sleep(0.05)
    with pytest.raises(CallTimeout):
        await own.call(spin, name="reward 'spins'", timeout_s=0.2)
    with pytest.raises(CallFailed) as caught:
        await waiting
    assert "reward 'spins'" in str(caught.value)
    assert "in spin" in str(caught.value)


async def test_too_many_calls_that_never_end_are_the_end_of_the_process() -> None:
    own = UserCode(max_stuck=1, grace_s=0.05)
    until = time.monotonic() + 1.5

    async def clings() -> None:
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    for _ in range(2):
        with pytest.raises(CallTimeout):
            await own.call(clings, name="tool clings", timeout_s=0.05)
    async with asyncio.timeout(3):
        while own.failure is None:  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.05)
    with pytest.raises(UserCodeStuck) as caught:
        own.check()
    assert "tool clings" in str(caught.value)
    with pytest.raises(CallFailed):
        await own.call(clings, name="another", timeout_s=1.0)


async def test_a_rollout_worker_ends_with_the_function_named(
    monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path
) -> None:
    own = UserCode()
    own.failure = "65 calls of users' code never ended: tool clings"
    monkeypatch.setattr(host, "shared", lambda: own)
    worker = RolloutWorker(
        actor_id="a",
        kit=make_kit(make_renderer(tokenizer_folder)),
        sampling=Sampling(),
        max_concurrent_episodes=1,
        claim=None,  # type: ignore[arg-type]
        exchange=None,  # type: ignore[arg-type]
    )
    with pytest.raises(UserCodeStuck) as caught:
        await worker.run()
    assert "tool clings" in str(caught.value)


async def test_async_calls_share_a_loop_and_see_the_context_of_their_caller() -> None:
    own, variable = UserCode(), contextvars.ContextVar("v", default=0)

    async def look() -> tuple[Any, int]:
        return asyncio.get_running_loop(), variable.get()

    def look_in_a_thread() -> int:
        return variable.get()

    variable.set(3)
    (one, a), (other, b) = [await own.call(look, name="f", timeout_s=2.0) for _ in range(2)]
    assert one is other
    assert one is not asyncio.get_running_loop()
    assert (a, b) == (3, 3)
    assert await own.call(look_in_a_thread, name="f", timeout_s=2.0) == 3


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_what_would_end_a_process_is_an_error(error: BaseException) -> None:
    own = UserCode()

    async def leave() -> None:
        raise error

    def leave_plainly() -> None:
        raise error

    for function in (leave, leave_plainly):
        with pytest.raises(CallFailed) as caught:
            await own.call(function, name="f", timeout_s=2.0)
        assert type(error).__name__ in str(caught.value)
    assert await own.call(lambda: 1, name="f", timeout_s=2.0) == 1


async def test_a_cancelled_caller_cancels_the_function() -> None:
    own, cleaned = UserCode(), threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            cleaned.set()

    task = asyncio.create_task(own.call(waits, name="f", timeout_s=20.0))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()
