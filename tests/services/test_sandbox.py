"""Hostile programs end as ordinary results within their limits, and leave nothing behind."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylearner.config.environment import MIB, SandboxSection
from raylearner.errors import ConfigError
from raylearner.sandbox import bubblewrap, seccomp
from raylearner.sandbox import sandbox as sandbox_module
from raylearner.sandbox.sandbox import Sandbox, SandboxResult, SandboxStatus

HOSTILE = sorted((Path(__file__).parents[1] / "hostile").glob("*.py"))
LIMITS = SandboxSection(
    wall_s=4.0,
    cpu_s=0.8,
    memory_bytes=256 * MIB,
    file_bytes=4 * MIB,
    folder_bytes=16 * MIB,
    max_processes=24,
)
SECRET = "a-secret-of-the-run-5f1c"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


def outcome(result: SandboxResult) -> str:
    return result.limit_hit or result.status.value


def processes_of_this_test() -> set[int]:
    """Our descendants, and processes of any sandbox: by ancestry, so that orphans count too."""
    parents: dict[int, int] = {}
    lines: dict[int, bytes] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            lines[int(folder.name)] = (folder / "cmdline").read_bytes()
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    boxed = {pid for pid, line in lines.items() if b"/code/main.py" in line}
    return (family | boxed) - {os.getpid()}


@contextlib.contextmanager
def host_sockets(folder: Path) -> Iterator[str]:
    """Listeners of the host that a program is told of: a port, a path and an abstract name."""
    path, name = str(folder / "host.sock"), f"raylearner-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        named.bind(path)
        abstract.bind("\0" + name)
        named.listen()
        abstract.listen()
        yield f"{tcp.getsockname()[1]}\n{path}\n{name}"


@pytest.mark.parametrize("program", HOSTILE, ids=lambda path: path.stem)
async def test_a_hostile_program_ends_within_its_limits(
    program: Path, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    token = tmp_path / "auth_token"
    token.write_text(SECRET)
    before = processes_of_this_test()
    code = await asyncio.to_thread(program.read_text)
    with host_sockets(tmp_path) as sockets:
        stdin = f"{token}\n/proc/{os.getpid()}/environ" if "secrets" in program.stem else sockets
        started = time.monotonic()
        result = await sandbox.run(code, stdin=stdin)
        took_s = time.monotonic() - started
    expected = code.splitlines()[0].removeprefix("# ends:").split()
    if "cpu" in expected:  # whichever comes first on a busy machine
        expected.append("wall")
    assert outcome(result) in expected, result
    assert "ESCAPED" not in result.stdout
    if said := re.search(r'^ *raise SystemExit\("(.*)"\)$', code, re.MULTILINE):
        assert said[1] in result.stderr, result
    assert SECRET not in result.stdout + result.stderr
    assert took_s < LIMITS.wall_s + sandbox_module.GRACE_S
    assert len(result.stdout) + len(result.stderr) < LIMITS.output_bytes + 200
    assert processes_of_this_test() == before
    assert token.read_text() == SECRET
    assert (await sandbox.run("print(6 * 7)")).stdout == "42\n"


async def test_an_ordinary_program_gets_its_input_and_a_working_standard_library(
    sandbox: Sandbox,
) -> None:
    code = """
import bz2, ctypes, decimal, hashlib, json, lzma, math, multiprocessing, sqlite3, ssl, sys, tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
def square(x):
    return x * x
if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as file, open("mine.txt", "w") as other:
        file.write(b"x"); other.write("y")
    with ProcessPoolExecutor(2) as pool:
        print(list(pool.map(square, range(4))))
    with ThreadPoolExecutor(2) as pool:
        print(list(pool.map(square, range(4))))
    print(sys.stdin.read(), sqlite3.connect("a.db").execute("select 1+1").fetchone(), "ü")
    exit(3)
"""
    result = await sandbox.run(code, stdin="given")
    assert result.stdout == "[0, 1, 4, 9]\n[0, 1, 4, 9]\ngiven (2,) ü\n", result
    assert (result.status, result.return_code, result.limit_hit) == (SandboxStatus.ERROR, 3, None)


async def test_a_traceback_shows_the_program_alone(sandbox: Sandbox) -> None:
    result = await sandbox.run("def f():\n    return 1 / 0\nf()")
    assert result.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert 'File "/code/main.py", line 2, in f' in result.stderr
    assert "supervisor" not in result.stderr


async def test_every_call_starts_in_an_empty_folder_with_an_empty_environment(
    sandbox: Sandbox,
) -> None:
    code = "import os; print(os.listdir(), sorted(os.environ)); open('left', 'w').write('x')"
    first, second = await sandbox.run(code), await sandbox.run(code)
    assert first.stdout == second.stdout
    assert first.stdout.startswith("[] ['HOME', 'LANG', 'LD_LIBRARY_PATH', 'PATH', 'PWD', 'PYTHON")


def test_what_this_process_preloads_is_no_part_of_the_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines preload allocators from wherever they are installed, a folder of /tmp too."""
    before = bubblewrap.find_interpreter(None, ())
    libraries = [Path(p) for p in before.mounts if p.startswith("/") and ".so" in p]
    library = next(p for p in libraries if p.is_file() and p.name.startswith("libm"))
    preloaded = tmp_path / "liballocator.so"
    preloaded.write_bytes(library.read_bytes())
    monkeypatch.setenv("LD_PRELOAD", str(preloaded))
    assert bubblewrap.find_interpreter(None, ()) == before


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("syntax error(", SandboxStatus.ERROR),
        ("", SandboxStatus.OK),
        ("\x00", SandboxStatus.ERROR),
        ("é = '\ud800'", SandboxStatus.OK),  # half a surrogate pair becomes U+FFFD
        ("raise SystemExit('no')", SandboxStatus.ERROR),
    ],
)
async def test_odd_source_is_an_ordinary_result(
    code: str, status: SandboxStatus, sandbox: Sandbox
) -> None:
    assert (await sandbox.run(code)).status is status


async def test_code_that_is_too_long_is_a_limit_of_its_own(sandbox: Sandbox) -> None:
    assert (await sandbox.run("#" * (sandbox_module.MAX_CODE_BYTES + 1))).limit_hit == "code"


async def test_calls_beyond_the_limit_wait_and_their_wait_is_not_their_time() -> None:
    sandbox = Sandbox(SandboxSection(wall_s=8.0, max_concurrent=2))
    results = await asyncio.gather(*(sandbox.run("print(1)") for _ in range(8)))
    assert {r.stdout for r in results} == {"1\n"}


async def test_normal_calls_work_beside_hostile_ones(sandbox: Sandbox) -> None:
    names = ("fork_bomb", "spread_allocation", "endless_output", "endless_loop")
    hostile = [p.read_text() for p in HOSTILE if p.stem in names]
    calls = [sandbox.run(code) for code in hostile for _ in range(2)]
    calls += [sandbox.run(f"print({n})") for n in range(6)]
    results = await asyncio.gather(*calls)
    assert SandboxStatus.OK not in {r.status for r in results[:8]}
    assert [r.stdout for r in results[8:]] == [f"{n}\n" for n in range(6)]


async def test_a_cancelled_call_leaves_no_process(sandbox: Sandbox) -> None:
    before = processes_of_this_test()
    fork_then_sleep = "import os, time\nos.fork()\ntime.sleep(60)"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await sandbox.run(fork_then_sleep)
    assert processes_of_this_test() == before


def test_no_process_outlives_a_killed_run(tmp_path: Path) -> None:
    script = (
        "import asyncio; from raylearner.sandbox.sandbox import Sandbox\n"
        "code = 'import os, time; open(\"/dev/stdout\"); os.fork(); time.sleep(77.125)'\n"
        "print(asyncio.run(Sandbox().run(code)))"
    )
    run = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 120

    def boxed() -> set[int]:
        found = set[int]()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"/code/main.py" in (folder / "cmdline").read_bytes():
                    found.add(int(folder.name))
        return found

    def programs() -> int:
        commands = [Path(f"/proc/{pid}/cmdline") for pid in boxed()]
        with contextlib.suppress(OSError):
            return sum(b"--" not in command.read_bytes().split(b"\0") for command in commands)
        return 0

    # The test of isolation comes first and is one process; the program itself forks.
    while programs() < 2:
        assert run.poll() is None, f"ended before its program was seen, exit code {run.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    while boxed() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not boxed()


async def test_no_thread_and_no_descriptor_stays(sandbox: Sandbox) -> None:
    await sandbox.run("1")
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        await sandbox.run("print('x' * 10**6)")
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)


def test_where_isolation_is_not_available_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find_bubblewrap", lambda: str(broken))
    sandbox_module._probe.cache_clear()
    with pytest.raises(ConfigError, match="No permissions to create new namespace"):
        Sandbox(LIMITS)


def test_a_python_that_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.python"):
        Sandbox(SandboxSection(python="/nowhere/python"))


async def test_who_insists_gets_no_isolation_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        sandbox = Sandbox(LIMITS.model_copy(update={"isolation": "none"}))
    assert "isolation is none" in caplog.text
    assert (await sandbox.run("import os; print(os.listdir())")).stdout == "['main.py']\n"
    before = processes_of_this_test()
    looping = "import os\nos.setsid() if os.fork() == 0 else 0\nwhile 1: pass"
    assert (await sandbox.run(looping)).limit_hit in ("cpu", "wall")
    assert processes_of_this_test() == before


async def test_packages_are_visible_only_when_configured(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("VALUE = 12")
    with pytest.raises(ConfigError, match=r"sandbox\.packages"):
        Sandbox(SandboxSection(packages=(str(tmp_path),)))
    os.chmod(tmp_path, 0o755)
    shown = Sandbox(SandboxSection(packages=(str(tmp_path),)))
    assert (await shown.run("import only_here; print(only_here.VALUE)")).stdout == "12\n"
    assert "ModuleNotFoundError" in (await Sandbox(LIMITS).run("import only_here")).stderr
    assert "ModuleNotFoundError" in (await Sandbox(LIMITS).run("import pydantic")).stderr


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_a_whole_number_of_instructions(machine: str) -> None:
    program = seccomp.program(machine)
    assert program is not None
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096
    assert seccomp.program("unknown") is None
