"""Code execution: the service's wire form, the local sandbox, and what the policy is shown."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from raylearner.config.environment import CodeExecutionTool
from raylearner.errors import ToolError
from raylearner.tools.code_execution import CodeExecution
from raylearner.types import Prompt

PROMPT = Prompt(prompt_id="p", messages=())


@asynccontextmanager
async def remote(reply: Any, **settings: Any) -> AsyncIterator[tuple[CodeExecution, list[Any]]]:
    bodies: list[Any] = []

    async def run_code(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/run_code", run_code)
    async with TestServer(app) as server:
        section = {"kind": "code_execution", "url": str(server.make_url("")), **settings}
        tool = CodeExecution(CodeExecutionTool.model_validate(section))
        yield tool, bodies
        await tool.close()


def finished(stdout: str | None, stderr: str | None, return_code: int | None) -> dict[str, Any]:
    run = {"stdout": stdout, "stderr": stderr, "return_code": return_code, "status": "Finished"}
    return {"status": "Success", "run_result": run, "compile_result": None, "message": ""}


async def test_the_service_is_asked_in_its_form() -> None:
    async with remote(finished("4\n", "", 0)) as (tool, bodies):
        observation = await tool.call("print(2 + 2)", prompt=PROMPT)
    assert observation.text == "Code output: 4\n\nErrors: "
    assert not observation.is_error
    assert bodies == [{"code": "print(2 + 2)", "language": "python"}]


async def test_each_stream_is_cut() -> None:
    async with remote(finished("a" * 5000, "b" * 5000, 1)) as (tool, _):
        observation = await tool.call("x", prompt=PROMPT)
    assert observation.text == f"Code output: {'a' * 1000}\nErrors: {'b' * 1000}"
    assert observation.is_error


async def test_absent_streams_are_empty() -> None:
    async with remote(finished(None, None, None)) as (tool, _):
        assert (await tool.call("x", prompt=PROMPT)).text == "Code output: \nErrors: "


async def test_a_service_that_could_not_run_is_a_failure() -> None:
    reply = {"status": "SandboxError", "message": "no place", "run_result": None}
    async with remote(reply, on_failure="fail") as (tool, _):
        with pytest.raises(ToolError, match="SandboxError' no place"):
            await tool.call("x", prompt=PROMPT)
    async with remote(reply) as (tool, _):
        assert (await tool.call("x", prompt=PROMPT)).is_error


@pytest.mark.parametrize("code", ["```python\nprint(1)\n```", "```\nprint(1)```", "\nprint(1)\n"])
async def test_a_fence_around_the_whole_code_is_no_part_of_it(code: str) -> None:
    async with remote(finished("1\n", "", 0)) as (tool, bodies):
        await tool.call({"code": code}, prompt=PROMPT)
    assert bodies[0]["code"].strip() == "print(1)"


async def test_without_a_service_code_runs_in_the_sandbox() -> None:
    tool = CodeExecution(CodeExecutionTool(kind="code_execution"))
    good = await tool.call("print(6 * 7)", prompt=PROMPT)
    assert good.text == "Code output: 42\n\nErrors: "
    bad = await tool.call("open('/etc/passwd')", prompt=PROMPT)
    assert "FileNotFoundError" in bad.text
    assert bad.is_error
    empty = await tool.call(" ", prompt=PROMPT)
    assert empty.text == "error: code is empty"
    metrics = tool.drain_metrics()
    assert metrics["tools/code_execution/calls"] == 3
    await tool.close()
