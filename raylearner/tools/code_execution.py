"""Runs the policy's Python and returns its output, each stream cut."""

import re
from typing import Any

from pydantic import BaseModel, TypeAdapter

from raylearner.config.environment import CodeExecutionTool
from raylearner.sandbox.sandbox import Sandbox
from raylearner.tools.service import BadReply, Service
from raylearner.tools.tool import Arguments, Observation, Tool, function_schema, text_argument
from raylearner.types import Prompt

_FORM = '{"status": text, "run_result": {"stdout": text, "stderr": text, "return_code": number}}'
_FENCE = "```"
_LANGUAGE = re.compile(f"{_FENCE}[a-zA-Z0-9]*")
MAX_MESSAGE_CHARACTERS = 200


class _Run(BaseModel):
    stdout: str | None = None
    stderr: str | None = None
    return_code: int | None = None


class _Reply(BaseModel):
    status: str
    message: str = ""
    run_result: _Run | None = None


_REPLY = TypeAdapter(_Reply)


class CodeExecution(Tool):
    """The SandboxFusion wire form where a url is given, the local sandbox otherwise."""

    def __init__(self, section: CodeExecutionTool) -> None:
        super().__init__(section.function_name, section.tag, on_failure=section.on_failure)
        self._section = section
        self._service = (
            Service(self.name, section.url, section.http, self.metrics) if section.url else None
        )
        self._sandbox = Sandbox(section.sandbox) if self._service is None else None

    @property
    def schema(self) -> dict[str, Any]:
        return function_schema(
            self.name,
            "Runs a Python program in a sandbox and returns its output.",
            {"code": {"type": "string", "description": "The complete program."}},
        )

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()

    async def _call(self, arguments: Arguments, prompt: Prompt) -> Observation:
        code = _unfenced(text_argument(arguments, "code"))
        stdout, stderr, return_code = await self._run(code)
        most = self._section.max_stream_characters
        return Observation(
            text=f"Code output: {stdout[:most]}\nErrors: {stderr[:most]}",
            is_error=return_code != 0,
        )

    async def _run(self, code: str) -> tuple[str, str, int]:
        if self._sandbox is not None:
            result = await self._sandbox.run(code)
            return result.stdout, result.stderr, result.return_code
        assert self._service is not None
        body = {"code": code, "language": "python"}
        reply = await self._service.post("/run_code", body, _REPLY, expected=_FORM)
        if reply.run_result is None:
            raise BadReply(
                f"{self.name}: the service could not run code: status {reply.status!r}"
                f" {reply.message[:MAX_MESSAGE_CHARACTERS]}"
            )
        run = reply.run_result
        code_given = -1 if run.return_code is None else run.return_code
        return run.stdout or "", run.stderr or "", code_given


def _unfenced(code: str) -> str:
    """Return the code inside of a Markdown fence around all of it."""
    language = _LANGUAGE.match(code)
    if language is None:
        return code
    rest = code[language.end() :].rstrip()
    first_line = rest.rfind("\n", 0, len(rest) - len(rest.lstrip())) + 1
    if not first_line or not rest.endswith(_FENCE):
        return code
    return rest[first_line:].removesuffix(_FENCE).removesuffix("\n")
