"""How a vLLM worker knows the process that must outlive it."""

import os

OWNER_VARIABLE = "RAYLEARNER_ENGINE_OWNER"


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks after boot: a reused id has another one."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def owner_mark() -> str:
    """Names this process in the environment of the processes it starts."""
    return f"{os.getpid()}:{start_time(os.getpid())}"
