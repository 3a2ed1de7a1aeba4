"""A service that runs Python in the local sandbox: `python -m raylearner.services.code --port N`.

Answers `POST /run_code` with `{"code", "language": "python"}` in the SandboxFusion form: `{"status":
"Success" | "Failed" | "SandboxError", "message", "run_result": {"status", "execution_time",
"return_code", "stdout", "stderr"}}`.
"""

import sys
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError

from raylearner.config.environment import SandboxSection
from raylearner.errors import ConfigError, ToolError
from raylearner.sandbox.sandbox import Sandbox, SandboxResult, SandboxStatus
from raylearner.services.server import make_app, make_parser, serve


class RunRequest(BaseModel):
    """One program; fields of the wire form that do not apply here are ignored."""

    code: str
    language: Literal["python"] = "python"
    stdin: str | None = None


def code_app(section: SandboxSection) -> FastAPI:
    sandbox = Sandbox(section)
    app = make_app("code")

    @app.post("/run_code")
    async def run_code(request: RunRequest) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        try:
            result = await sandbox.run(request.code, stdin=request.stdin or "")
        except ToolError as error:
            return {"status": "SandboxError", "message": str(error), "run_result": None}
        return _reply(result)

    return app


def _reply(result: SandboxResult) -> dict[str, Any]:
    is_late = result.limit_hit in ("wall", "cpu")
    return {
        "status": "Success" if result.status is SandboxStatus.OK else "Failed",
        "message": f"limit: {result.limit_hit}" if result.limit_hit else "",
        "run_result": {
            "status": "TimeLimitExceeded" if is_late else "Finished",
            "execution_time": result.wall_s,
            "return_code": result.return_code,
            "stdout": result.stdout,
            "stderr": result.stderr,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    command = make_parser("Run Python programs in the local sandbox.")
    defaults = SandboxSection()
    command.add_argument("--wall-s", type=float, default=defaults.wall_s)
    command.add_argument("--cpu-s", type=float, default=defaults.cpu_s)
    command.add_argument("--memory-bytes", type=int, default=defaults.memory_bytes)
    command.add_argument("--max-processes", type=int, default=defaults.max_processes)
    command.add_argument("--max-concurrent", type=int, default=None)
    command.add_argument(
        "--package",
        action="append",
        default=[],
        help="folder of packages that programs can import; repeatable",
    )
    command.add_argument(
        "--isolation",
        choices=("bubblewrap", "none"),
        default=defaults.isolation,
        help="none runs code with the rights of this process (default: %(default)s)",
    )
    options = command.parse_args(arguments)

    def make() -> FastAPI:
        try:
            section = SandboxSection(
                isolation=options.isolation,
                packages=tuple(options.package),
                wall_s=options.wall_s,
                cpu_s=options.cpu_s,
                memory_bytes=options.memory_bytes,
                max_processes=options.max_processes,
                max_concurrent=options.max_concurrent,
            )
        except ValidationError as error:
            problems = error.errors(include_url=False)
            lines = [f"--{str(p['loc'][0]).replace('_', '-')}: {p['msg']}" for p in problems]
            raise ConfigError("; ".join(lines)) from error
        return code_app(section)

    return serve(make, options)


if __name__ == "__main__":
    sys.exit(main())
