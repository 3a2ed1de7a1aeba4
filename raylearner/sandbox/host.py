"""What this machine must allow for the sandbox, and which of it is missing."""

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from raylearner.sandbox import bubblewrap, seccomp

VERSION_TIMEOUT_S = 10.0
CONTAINER = (
    "start the container with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    " --security-opt systempaths=unconfined`, in Kubernetes with `procMount: Unmasked` and"
    " `seccompProfile: Unconfined`"
)


def describe() -> str:
    """Return how calls are isolated here. Raises `ConfigError` without bubblewrap."""
    version = _version(bubblewrap.find_bubblewrap())
    users = "each call as a user of its own" if os.geteuid() == 0 else "all calls as one user"
    calls = "system calls are filtered"
    if seccomp.program() is None:
        calls = f"system calls are not filtered on {platform.machine()}"
    return f"{version} isolates programs, {users}; {calls}"


def blockers(proc: Path = Path("/proc"), *, user: int | None = None) -> list[str]:
    """Return settings of this machine that may prevent isolation, each with its change."""
    return list(_blockers(proc, os.geteuid() if user is None else user))


def _blockers(proc: Path, user: int) -> Iterator[str]:
    if _read(proc / "sys/user/max_user_namespaces") == "0":
        yield "`sysctl -w user.max_user_namespaces=15000` (now 0)"
    if user != 0 and _read(proc / "sys/kernel/unprivileged_userns_clone") == "0":
        yield "`sysctl -w kernel.unprivileged_userns_clone=1` (now 0)"
    if user != 0 and _read(proc / "sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        yield (
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (now 1), or an AppArmor profile"
            " for bwrap with `userns,`"
        )
    status = dict(
        line.split(":", 1) for line in _read(proc / "self/status").splitlines() if ":" in line
    )
    if _is_filtered(status) or _is_masked(_read(proc / "self/mountinfo")):
        yield f"{CONTAINER} (system calls are filtered, or /proc is masked)"


def _is_filtered(status: Mapping[str, str]) -> bool:
    return status.get("Seccomp", "0").strip() == "2"


def _is_masked(mounts: str) -> bool:
    """Whether something is mounted over parts of /proc, as containers do."""
    targets = (line.split()[4] for line in mounts.splitlines() if len(line.split()) > 4)
    return any(t.startswith("/proc/") and t != "/proc/sys/fs/binfmt_misc" for t in targets)


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "bubblewrap"
    return done.stdout.strip() or "bubblewrap"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
