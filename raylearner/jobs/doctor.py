"""Diagnosis of a machine: requirements of runs, their status, and how to meet them."""

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

from raylearner import leftovers, network
from raylearner.config import devices
from raylearner.config.report import versions
from raylearner.errors import ConfigError
from raylearner.jobs import client as jobs_client
from raylearner.run import machine
from raylearner.sandbox import host
from raylearner.sandbox.sandbox import Sandbox

Verdict = Literal["ok", "note", "problem"]

MIN_SHARED_BYTES = 2 * 2**30
"""For Ray's object store and NCCL's buffers; containers often have 64 MB."""
MIN_DISK_BYTES = 10 * 2**30
PROBE_TIMEOUT_S = 180.0
"""Importing vLLM from a cold disk takes a minute."""
PORTS = {6379: "Ray's head", 8265: "Ray's dashboard and jobs"}


OUTSIDE = ("http://example.org", "https://example.org")
"""Examples of services outside the machine and its cluster."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    subject: str
    text: str
    advice: str = ""


def findings() -> Iterator[Finding]:
    """Yield findings one by one; imports are tested in separate processes."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        *(_versions, _torch, _speed, _torchvision, _vllm, _tune),
        *(
            _shared_memory,
            _leftovers,
            _disk,
            _sockets,
            _sandbox,
            _ports,
            _proxies,
            _token,
            _cluster,
        ),
    )
    for check in checks:
        yield from check()


def _versions() -> Iterator[Finding]:
    found = versions()
    yield Finding("ok", "versions", ", ".join(f"{name} {value}" for name, value in found.items()))
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding(
            "problem", "python", found["python"], "use 3.11 or 3.12, for which vLLM has wheels"
        )


def _probe(code: str) -> tuple[bool, str]:
    """Return whether `code` ran in a separate process, and the last line it printed."""
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
    is_fine, output = _probe(_TORCH)
    if not is_fine:
        yield Finding("problem", "torch", output, "run `bash launch/setup.sh` again")
        return
    found = json.loads(output)
    if found["gpus"]:
        names = ", ".join(f"{gpu['name']} ({gpu['gib']} GiB)" for gpu in found["gpus"])
        yield Finding("ok", "GPUs", names)
        if found["nccl"] is None:
            advice = "install the CUDA build of torch; until then weights travel as shared files"
            yield Finding("problem", "NCCL", "missing in this torch", advice)
        else:
            yield Finding("ok", "NCCL", found["nccl"])
    elif shutil.which("nvidia-smi") and found["cuda"] is None:
        advice = "install requirements.txt instead of requirements-cpu.txt"
        yield Finding("problem", "GPUs", "present, but this torch is a CPU build", advice)
    elif shutil.which("nvidia-smi"):
        advice = "compare `nvidia-smi`'s CUDA version with torch.version.cuda; update the driver"
        yield Finding("problem", "GPUs", f"torch (CUDA {found['cuda']}) finds none", advice)
    else:
        yield Finding("ok", "GPUs", "none: runs use the CPU, over gloo and shared files")


def _speed() -> Iterator[Finding]:
    """Report the ways that runs take on GPUs here."""
    found = devices.probe()
    if not found.gpus:
        return
    if found.compiler_error is None:
        text = "on: kernels can be compiled, so engines capture CUDA graphs and long runs compile the learner"
        yield Finding("ok", "compilation", text)
    else:
        text = (
            "off: engines run eagerly, at less than half the speed, and the learner a third slower"
        )
        yield Finding("problem", "compilation", text, found.compiler_error)
    yield _attention(found)


_FLASH_3 = "from raylearner.learner.model.attention import activate_flash_3; activate_flash_3()"


def _attention(found: devices.Devices) -> Finding:
    """Report the learner's kernel, and why a faster one is not used."""
    kernel = devices.attention_kernel(
        found.min_capability or 0.0, is_half=True, has_flash_attn=found.has_flash_attn
    )
    if kernel == "sdpa":
        text = f"SDPA, one sequence at a time: the kernels for packed sequences need compute capability {devices.MIN_PACKED_CAPABILITY:g}"
        return Finding("note", "attention", text, "expect slower steps of the learner")
    failed: list[str] = []
    for name, is_installed, code in (
        ("FlashAttention-3", found.has_flash_3, _FLASH_3),
        ("flash-attn", found.has_flash_attn, "import flash_attn"),
    ):
        is_fine, output = _probe(code) if is_installed else (False, "")
        if is_fine:
            break
        failed += [f"{name} does not work with this torch: {output}"] if is_installed else []
    else:
        name = "torch's varlen kernel"
    if failed:
        text = f"{name}, since {'; '.join(failed)}"
        return Finding("note", "attention", text, "reinstall it for this torch, or uninstall it")
    text = f"{name}, in bfloat16"
    if found.is_hopper and not found.has_flash_3:
        text += "; FlashAttention-3, which is about twice as fast, is not installed"
    return Finding("ok", "attention", text)


def _torchvision() -> Iterator[Finding]:
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        yield Finding("ok", "torchvision", "not installed: needed for vision-language models only")
        return
    is_fine, output = _probe("import torchvision; torchvision.ops.nms")
    if is_fine:
        yield Finding("ok", "torchvision", f"{version} imports with this torch")
    else:
        advice = (
            "run `bash launch/setup.sh`, which lets it import beside a CPU torch, or install the build"
            " for this torch; for text models `pip uninstall torchvision torchaudio` will do"
        )
        yield Finding("problem", "torchvision", f"{version} does not match torch: {output}", advice)


def _vllm() -> Iterator[Finding]:
    is_fine, output = _probe("import vllm; from vllm.v1.engine.async_llm import AsyncLLM")
    if is_fine:
        yield Finding("ok", "vLLM", "imports")
    else:
        advice = "see the error; the usual cause is a torch or torchvision of another build"
        yield Finding("problem", "vLLM", f"does not import: {output}", advice)


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


def _leftovers() -> Iterator[Finding]:
    found = list(leftovers.find())
    if not found:
        yield Finding("ok", "leftovers", "no files of killed runs")
    for leftover in found:
        advice = "the next `train` or `eval` on this machine will remove it"
        text = f"{leftover.path} of a killed run, {_gib(leftover.num_bytes)}"
        yield Finding("note", "leftovers", text, advice)


def _disk() -> Iterator[Finding]:
    for name, folder in (
        ("disk", Path.cwd()),
        ("disk of Ray's logs", Path(machine.ray_temp_dir()[1])),
    ):
        free = shutil.disk_usage(folder).free
        if free >= MIN_DISK_BYTES:
            yield Finding("ok", name, f"{_gib(free)} free")
        else:
            advice = (
                "checkpoints and spilled objects need space: see run.keep_last, or move run.dir"
            )
            yield Finding("problem", name, f"{_gib(free)} free in {folder}", advice)


def _sockets() -> Iterator[Finding]:
    problems = machine.socket_path_errors(has_vllm=True)
    if not problems:
        yield Finding("ok", "sockets", "paths of temporary directories are short enough")
    for problem in problems:
        yield Finding("problem", "sockets", problem)


def _sandbox() -> Iterator[Finding]:
    """Only runs with the code tool need it, so its absence alone is not a problem."""
    try:
        Sandbox()
        yield Finding("ok", "sandbox", host.describe())
    except ConfigError as error:
        changes = "; ".join(host.blockers())
        advice = (
            f"{'try ' + changes + '; ' if changes else ''}until then runs with the code tool do not start;"
            " alternatively set the url of a code service, or sandbox.isolation to none, which runs the"
            " model's code unprotected"
        )
        yield Finding("note", "sandbox", str(error), advice)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _ports() -> Iterator[Finding]:
    for port, use in PORTS.items():
        with socket.socket() as probe:
            probe.settimeout(1.0)
            is_taken = probe.connect_ex(("127.0.0.1", port)) == 0
        text = f"{port} ({use}) is {'taken' if is_taken else 'free'}"
        advice = "fine if that is your cluster; otherwise give `ray start` another port"
        yield Finding("note" if is_taken else "ok", "port", text, advice if is_taken else "")


def _proxies() -> Iterator[Finding]:
    if not network.are_set():
        return
    try:
        named = {str(found) for url in OUTSIDE if (found := network.proxy_of(url)) is not None}
    except ValueError as error:
        yield Finding("problem", "proxy", str(error), "external services cannot be reached")
        return
    through = f"through {', '.join(sorted(named))}" if named else "directly"
    yield Finding(
        "ok", "proxy", f"external services are called {through}, those of the cluster directly"
    )


def _token() -> Iterator[Finding]:
    mode = os.environ.get("RAY_AUTH_MODE")
    try:
        network.refuse_bad_authentication()
    except ConfigError as error:
        yield Finding("problem", "authentication", str(error))
        return
    if mode == "disabled":
        advice = "unset RAY_AUTH_MODE: anyone who can reach a Ray port can run code as you"
        yield Finding("problem", "authentication", "disabled", advice)
    elif not jobs_client.has_token():
        yield Finding("ok", "authentication", "no token yet: the first local cluster creates one")
    elif not mode:
        advice = "`export RAY_AUTH_MODE=token`, or `ray job submit` fails with 401"
        yield Finding(
            "note", "authentication", "a token exists, but RAY_AUTH_MODE is not set", advice
        )
    else:
        yield Finding("ok", "authentication", "with a token")


def _cluster() -> Iterator[Finding]:
    named = jobs_client.read_address()
    if named is None:
        yield Finding("ok", "cluster", "RAY_ADDRESS is not set: runs start a local one")
        return
    try:
        client = jobs_client.connect()
        running = [job for job in client.list_jobs() if job.status.value == "RUNNING"]
        yield Finding("ok", "cluster", f"{named} answers, {len(running)} jobs run")
    except (ConfigError, RuntimeError, OSError) as error:
        yield Finding("problem", "cluster", str(error).splitlines()[0])
