"""Results of programs in the sandbox: what is returned exactly, and what two calls know of each other."""

import asyncio
import os
import signal

import pytest

from raylearner.config.environment import MIB, SandboxSection
from raylearner.sandbox.sandbox import Sandbox, SandboxStatus
from raylearner.text import visible


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(SandboxSection(wall_s=8.0, memory_bytes=256 * MIB, output_bytes=1000))


@pytest.mark.parametrize(
    ("code", "return_code", "stdout"),
    [
        ("import os; os._exit(256 + 7)", 7, ""),
        ("import os; os._exit(256)", 0, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, ""),
        ("import os; os.abort()", -6, ""),
        ("import os\nif os.fork(): os._exit(5)\nos.setsid(); print('late')", 5, None),
        ("import sys; sys.stdout.write('x' * 1000)", 0, "x" * 1000),
        (
            "import sys; sys.stdout.buffer.write(b'a\\xff\\xc3(\\xed\\xa0\\x80')",
            0,
            "a\ufffd\ufffd(" + "\ufffd" * 3,
        ),
        ("import os; os.write(1, b'a\\0b'); os.close(1); os._exit(0)", 0, "a\0b"),
        ("import sys; print(sys.stdin.read(), repr(sys.stdin.read()))", 0, "given ''\n"),
        ("import os, sys; os.close(0); print(os.listdir())", 0, "[]\n"),
        ("import os; print(os.isatty(0), os.isatty(1))", 0, "False False\n"),
        ("print('\\x1b]0;title\\x07\\x1b[2J\\u202e')", 0, "\x1b]0;title\x07\x1b[2J\u202e\n"),
    ],
)
async def test_exit_status_and_output_are_returned_unchanged(
    code: str, return_code: int, stdout: str | None, sandbox: Sandbox
) -> None:
    result = await sandbox.run(code, stdin="given")
    assert (result.return_code, result.limit_hit) == (return_code, None), result
    assert stdout is None or result.stdout == stdout
    assert "\x1b" not in visible(result.stdout)


async def test_output_of_one_byte_over_the_limit_is_reported(sandbox: Sandbox) -> None:
    result = await sandbox.run("print('x' * 1000)")
    assert (result.status, result.limit_hit) == (SandboxStatus.LIMIT, "output")
    assert result.return_code == -signal.SIGKILL


async def test_concurrent_calls_are_isolated_from_each_other(sandbox: Sandbox) -> None:
    code = """
import os, sys, time
name = sys.stdin.read()
open(f"/tmp/{name}", "w").write(name)
open("/tmp/lock", "x")
time.sleep(0.5)
others = [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())]
print(name, sorted(os.listdir("/tmp")), os.listdir("/dev/shm") == os.listdir("/tmp"), others, os.getuid())
"""
    results = await asyncio.gather(*(sandbox.run(code, stdin=name) for name in ("a", "b")))
    seen = [result.stdout.split("] ", 1)[0] for result in results]
    assert seen == ["a ['a', 'lock'", "b ['b', 'lock'"], results
    assert all("True []" in result.stdout for result in results)
    users = {result.stdout.split()[-1] for result in results}
    assert len(users) == (2 if os.geteuid() == 0 else 1)


async def test_environment_variables_of_the_host_do_not_affect_a_program(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = {
        "LD_PRELOAD": "/nowhere.so",
        "LD_AUDIT": "/nowhere.so",
        "PYTHONSTARTUP": "/nowhere.py",
        "PYTHONPATH": "/nowhere",
        "PYTHONINSPECT": "1",
        "PYTHONBREAKPOINT": "nowhere",
        "WANDB_API_KEY": "a-secret",
        "https_proxy": "http://user:a-secret@proxy:1",
    }
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    code = "import os, sys; print(dict(os.environ), sys.path, sys.flags.inspect)"
    result = await sandbox.run(code)
    assert result.status is SandboxStatus.OK
    assert "nowhere" not in result.stdout + result.stderr
    assert "a-secret" not in result.stdout


async def test_modules_left_by_a_call_are_not_imported_by_the_next(sandbox: Sandbox) -> None:
    left = "for name in ('json', 'sitecustomize', 'usercustomize'):\n open(name + '.py', 'w').write('1/0')"
    assert (await sandbox.run(left)).return_code == 0
    assert (await sandbox.run("import json; print(json.dumps(1))")).stdout == "1\n"
