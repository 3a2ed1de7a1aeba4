"""What a machine's GPUs and compilers can do, as far as it decides how fast a run is.

Imports neither torch nor Triton, so that it is known before anything is loaded.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

MIN_CAPABILITY = 7.0
"""Lowest compute capability that Triton compiles for."""
MIN_PACKED_CAPABILITY = 8.0
"""Lowest compute capability of flash-attn and of torch's varlen kernel."""
MIB = 2**20
HOPPER = 9
"""Major compute capability of the GPUs that FlashAttention-3 is for."""
QUERY_TIMEOUT_S = 30.0

Kernel = Literal["sdpa", "flash_attn", "varlen"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver names it."""

    name: str
    capability: float
    num_bytes: int | None = None
    """Size of its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPUs of one or more machines; problems are those of any of them."""

    gpus: tuple[Gpu, ...] = ()
    """Empty also where `nvidia-smi` does not answer."""
    compiler_error: str | None = None
    """Why kernels cannot be compiled, and what to do."""
    has_flash_attn: bool = False
    """Whether flash-attn is installed, on all machines."""
    has_flash_3: bool = False
    """Whether FlashAttention-3 is, and all GPUs are Hopper ones, which it is for."""

    @property
    def min_bytes(self) -> int | None:
        """Return the memory of the smallest GPU; None if the memory of any is unknown."""
        sizes = [gpu.num_bytes for gpu in self.gpus]
        return None if None in sizes else min((n for n in sizes if n is not None), default=None)

    @property
    def min_capability(self) -> float | None:
        return min((gpu.capability for gpu in self.gpus), default=None)

    @property
    def is_hopper(self) -> bool:
        """Whether there are GPUs, and all are of the kind that FlashAttention-3 is for."""
        return bool(self.gpus) and all(int(gpu.capability) == HOPPER for gpu in self.gpus)

    @property
    def names(self) -> str:
        """`2 x NVIDIA H200`, by name."""
        counts = {gpu.name: self.gpus.count(gpu) for gpu in self.gpus}
        return ", ".join(f"{count} x {name}" for name, count in counts.items())


UNKNOWN = Devices()
"""Machines that were not examined, on which nothing is taken to be missing."""


def probe() -> Devices:
    """Return what this machine can do."""
    gpus = tuple(find_gpus())
    return Devices(
        gpus=gpus,
        compiler_error=next(compiler_errors(gpus), None),
        has_flash_attn=find_spec("flash_attn") is not None,
        has_flash_3=find_spec("flash_attn_interface") is not None and Devices(gpus=gpus).is_hopper,
    )


def merge(found: Iterable[Devices]) -> Devices:
    """Return what all machines can do together."""
    machines = list(found)
    return Devices(
        gpus=tuple(gpu for machine in machines for gpu in machine.gpus),
        compiler_error=next((m.compiler_error for m in machines if m.compiler_error), None),
        has_flash_attn=all(machine.has_flash_attn for machine in machines),
        has_flash_3=all(machine.has_flash_3 for machine in machines),
    )


def find_gpus() -> list[Gpu]:
    """Return the visible GPUs that `nvidia-smi` lists; none where it fails."""
    query = "--query-gpu=name,compute_cap,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        )
        rows = [line.rsplit(",", 2) for line in done.stdout.splitlines() if line.strip()]
        gpus = [Gpu(name.strip(), float(c), _bytes(size)) for name, c, size in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [number.strip() for number in visible]
    if all(number.isdigit() for number in numbers):  # not ids, and not empty
        return [gpu for number, gpu in enumerate(gpus) if str(number) in numbers]
    return gpus


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * MIB if mebibytes.strip().isdigit() else None


def compiler_errors(gpus: Iterable[Gpu]) -> Iterator[str]:
    """Yield why Triton and inductor cannot compile kernels for these GPUs here, and what to do."""
    for gpu in gpus:
        if gpu.capability < MIN_CAPABILITY:
            yield (
                f"{gpu.name} has compute capability {gpu.capability:g}, and Triton compiles for"
                f" {MIN_CAPABILITY:g} and higher"
            )
    if find_spec("triton") is None:
        yield "Triton is not installed; `pip install triton` in the version that torch requires"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        yield "no C compiler was found (CC, gcc, clang); install gcc"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        yield f"Python's headers are missing ({header}); install python3-dev"


def attention_kernel(capability: float, *, is_half: bool, has_flash_attn: bool) -> Kernel:
    """Return the learner's fastest kernel on a device, whose compute capability is 0 for a CPU.

    Kernels for packed sequences need half precision.
    """
    if not is_half or capability < MIN_PACKED_CAPABILITY:
        return "sdpa"
    return "flash_attn" if has_flash_attn else "varlen"
