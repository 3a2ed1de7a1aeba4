"""Code execution: the service's wire form, the local sandbox, and the text that the policy reads."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from servers import PROMPT, calling, tool_of

from raylearner.errors import ToolError
from raylearner.tools.tool import Tool


def remote(reply: Any, **settings: Any) -> AbstractAsyncContextManager[tuple[Tool, list[Any]]]:
    return calling("code_execution", {"/run_code": lambda body: reply}, **settings)


def finished(stdout: str | None, stderr: str | None, return_code: int | None) -> dict[str, Any]:
    run = {"stdout": stdout, "stderr": stderr, "return_code": return_code, "status": "Finished"}
    return {"status": "Success", "run_result": run, "compile_result": None, "message": ""}


@pytest.mark.parametrize(
    ("reply", "text", "is_error"),
    [
        (finished("4\n", "", 0), "Code output: 4\n\nErrors: ", False),
        (
            finished("a" * 5000, "b" * 5000, 1),
            f"Code output: {'a' * 1000}\nErrors: {'b' * 1000}",
            True,
        ),
        (finished(None, None, None), "Code output: \nErrors: ", True),
    ],
    ids=["ordinary", "each stream is cut", "absent streams are empty"],
)
async def test_the_service_is_called_in_its_form(reply: Any, text: str, is_error: bool) -> None:
    async with remote(reply) as (tool, bodies):
        observation = await tool.call("print(2 + 2)", prompt=PROMPT)
    assert (observation.text, observation.is_error) == (text, is_error)
    assert bodies == [{"code": "print(2 + 2)", "language": "python"}]


async def test_a_service_that_could_not_run_is_a_failure() -> None:
    reply = {"status": "SandboxError", "message": "no place", "run_result": None}
    async with remote(reply, on_failure="fail") as (tool, _):
        with pytest.raises(ToolError, match="no place"):
            await tool.call("x", prompt=PROMPT)
    async with remote(reply) as (tool, _):
        assert (await tool.call("x", prompt=PROMPT)).is_error


@pytest.mark.parametrize("code", ["```python\nprint(1)\n```", "```\nprint(1)```", "\nprint(1)\n"])
async def test_a_fence_around_the_whole_code_is_removed(code: str) -> None:
    async with remote(finished("1\n", "", 0)) as (tool, bodies):
        await tool.call({"code": code}, prompt=PROMPT)
    assert bodies[0]["code"].strip() == "print(1)"


async def test_without_a_service_code_runs_in_the_sandbox() -> None:
    tool = tool_of("code_execution")
    good = await tool.call("print(6 * 7)", prompt=PROMPT)
    assert good.text == "Code output: 42\n\nErrors: "
    bad = await tool.call("open('/etc/passwd')", prompt=PROMPT)
    assert "FileNotFoundError" in bad.text
    assert bad.is_error
    assert (await tool.call(" ", prompt=PROMPT)).text == "error: code is empty"
    assert tool.drain_metrics()["tools/code_execution/calls"] == 3
    await tool.close()
