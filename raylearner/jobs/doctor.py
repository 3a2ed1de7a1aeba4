"""What a machine has for runs, and what to do about what it lacks."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from raylearner import network
from raylearner.config.report import versions
from raylearner.errors import ConfigError
from raylearner.jobs import jobs
from raylearner.run import machine

Verdict = Literal["ok", "note", "problem"]

MIN_SHARED_BYTES = 2 * 2**30
"""Ray's object store and NCCL's buffers live there; containers often have 64 MB."""
MIN_DISK_BYTES = 10 * 2**30
PROBE_TIMEOUT_S = 180.0
"""Importing vLLM from a cold disk takes a minute."""
PORTS = {6379: "Ray's head", 8265: "Ray's dashboard and jobs"}


OUTSIDE = ("http://example.org", "https://example.org")
"""Stand for services outside of this machine and its cluster."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    subject: str
    text: str
    advice: str = ""


def findings() -> Iterator[Finding]:
    """Everything that is looked at, as it is known; imports happen in processes of their own."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        *(_versions, _torch, _torchvision, _vllm, _tune),
        *(_shared_memory, _disk, _sockets, _ports, _proxies, _token, _cluster),
    )
    for check in checks:
        yield from check()


def _versions() -> Iterator[Finding]:
    found = versions()
    yield Finding("ok", "versions", ", ".join(f"{name} {value}" for name, value in found.items()))
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding(
            "problem", "python", found["python"], "use 3.11 or 3.12: vLLM has no other wheels"
        )


def _probe(code: str) -> tuple[bool, str]:
    """Whether `code` ran in a process of its own, and what it printed last."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end within {PROBE_TIMEOUT_S:g} s"
    output = done.stdout if done.returncode == 0 else done.stderr
    lines = output.strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}"


_TORCH = """
import json, torch
gpus = [
    {"name": p.name, "gib": round(p.total_memory / 2**30)}
    for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus, "nccl": nccl}))
"""


def _torch() -> Iterator[Finding]:
    is_fine, said = _probe(_TORCH)
    if not is_fine:
        yield Finding("problem", "torch", said, "run `bash launch/setup.sh` again")
        return
    found = json.loads(said)
    if found["gpus"]:
        names = ", ".join(f"{gpu['name']} ({gpu['gib']} GiB)" for gpu in found["gpus"])
        yield Finding("ok", "GPUs", names)
        if found["nccl"] is None:
            advice = "install the CUDA build of torch; weights go by shared files until then"
            yield Finding("problem", "NCCL", "this torch has none", advice)
        else:
            yield Finding("ok", "NCCL", found["nccl"])
    elif shutil.which("nvidia-smi") and found["cuda"] is None:
        advice = "install requirements.txt instead of requirements-cpu.txt"
        yield Finding("problem", "GPUs", "the machine has some, this torch is a CPU build", advice)
    elif shutil.which("nvidia-smi"):
        advice = "compare `nvidia-smi`'s CUDA version with torch.version.cuda; update the driver"
        yield Finding("problem", "GPUs", f"torch (CUDA {found['cuda']}) sees none", advice)
    else:
        yield Finding("ok", "GPUs", "none: runs use the CPU, over gloo and shared files")


def _torchvision() -> Iterator[Finding]:
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        yield Finding(
            "ok", "torchvision", "not installed: text models need none, vLLM's vision models do"
        )
        return
    is_fine, said = _probe("import torchvision; torchvision.ops.nms")
    if is_fine:
        yield Finding("ok", "torchvision", f"{version} imports beside this torch")
    else:
        advice = (
            "run `bash launch/setup.sh`, which lets it import beside a CPU torch, or install the build"
            " for this torch; for text models `pip uninstall torchvision torchaudio` will do"
        )
        yield Finding("problem", "torchvision", f"{version} does not fit torch: {said}", advice)


def _vllm() -> Iterator[Finding]:
    is_fine, said = _probe("import vllm; from vllm.v1.engine.async_llm import AsyncLLM")
    if is_fine:
        yield Finding("ok", "vLLM", "imports")
    else:
        advice = "read its error; mostly a torch or torchvision of another build is to blame"
        yield Finding("problem", "vLLM", f"does not import: {said}", advice)


def _tune() -> Iterator[Finding]:
    is_fine, _ = _probe("import ray.tune")
    if is_fine:
        yield Finding("ok", "Ray Tune", "imports")
    else:
        advice = "`pip install 'ray[tune]'` for sweeps with early stopping"
        yield Finding("note", "Ray Tune", "not installed", advice)


def _shared_memory() -> Iterator[Finding]:
    usage = shutil.disk_usage("/dev/shm")
    text = f"{_gib(usage.free)} of {_gib(usage.total)} free in /dev/shm"
    if usage.free >= MIN_SHARED_BYTES:
        yield Finding("ok", "shared memory", text)
    else:
        advice = "start the container with --shm-size=8g or --ipc=host"
        yield Finding("problem", "shared memory", text, advice)


def _disk() -> Iterator[Finding]:
    for name, folder in (
        ("disk", Path.cwd()),
        ("disk of Ray's logs", Path(machine.ray_temp_dir()[1])),
    ):
        free = shutil.disk_usage(folder).free
        if free >= MIN_DISK_BYTES:
            yield Finding("ok", name, f"{_gib(free)} free")
        else:
            advice = "checkpoints and spilled objects need room: see run.keep_last, or move run.dir"
            yield Finding("problem", name, f"{_gib(free)} free in {folder}", advice)


def _sockets() -> Iterator[Finding]:
    problems = machine.socket_path_errors(has_vllm=True)
    if not problems:
        yield Finding("ok", "sockets", "temporary directories are short enough for them")
    for problem in problems:
        yield Finding("problem", "sockets", problem)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _ports() -> Iterator[Finding]:
    for port, use in PORTS.items():
        with socket.socket() as probe:
            probe.settimeout(1.0)
            is_taken = probe.connect_ex(("127.0.0.1", port)) == 0
        text = f"{port} ({use}) is {'taken' if is_taken else 'free'}"
        advice = "fine where that is your cluster; else give `ray start` another port"
        yield Finding("note" if is_taken else "ok", "port", text, advice if is_taken else "")


def _proxies() -> Iterator[Finding]:
    if not network.are_set():
        return
    try:
        named = {str(found) for url in OUTSIDE if (found := network.proxy_of(url)) is not None}
    except ValueError as error:
        yield Finding("problem", "proxy", str(error), "services outside are not reached")
        return
    through = f"through {', '.join(sorted(named))}" if named else "directly"
    yield Finding("ok", "proxy", f"services outside are called {through}, our own always directly")


def _token() -> Iterator[Finding]:
    mode = os.environ.get("RAY_AUTH_MODE")
    try:
        network.refuse_bad_authentication()
    except ConfigError as error:
        yield Finding("problem", "authentication", str(error))
        return
    if mode == "disabled":
        advice = "unset RAY_AUTH_MODE: whoever reaches a Ray port runs code as you"
        yield Finding("problem", "authentication", "is switched off", advice)
    elif not jobs.has_token():
        yield Finding("ok", "authentication", "no token yet: the first local cluster makes one")
    elif not mode:
        advice = "`export RAY_AUTH_MODE=token`, or `ray job submit` is answered 401"
        yield Finding("note", "authentication", "a token is here, RAY_AUTH_MODE is not set", advice)
    else:
        yield Finding("ok", "authentication", "by token")


def _cluster() -> Iterator[Finding]:
    named = jobs.named_address()
    if named is None:
        yield Finding("ok", "cluster", "RAY_ADDRESS names none: runs start a local one")
        return
    try:
        client = jobs.connect()
        running = [job for job in client.list_jobs() if job.status.value == "RUNNING"]
        yield Finding("ok", "cluster", f"{named} answers, {len(running)} jobs run")
    except (ConfigError, RuntimeError, OSError) as error:
        yield Finding("problem", "cluster", str(error).splitlines()[0])
