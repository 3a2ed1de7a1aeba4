"""What GPUs and compilers decide before anything is loaded, on simulated machines."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raylearner.config import devices
from raylearner.config.devices import Devices, Gpu, attention_kernel, merge, probe
from raylearner.config.loader import load
from raylearner.config.resources import resolve
from raylearner.config.schema import VllmEngine
from raylearner.errors import ConfigError
from raylearner.jobs import doctor

GIB = 2**30
H200 = Gpu("NVIDIA H200", 9.0, 140 * GIB)
A100 = Gpu("NVIDIA A100", 8.0, 80 * GIB)
V100, P100 = Gpu("Tesla V100", 7.0, 32 * GIB), Gpu("Tesla P100", 6.0, 16 * GIB)
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Simulate a machine: its GPUs, programs, packages, and whether Python's headers are there."""

    def simulate(
        *gpus: Gpu,
        programs: tuple[str, ...] = ("gcc",),
        packages: tuple[str, ...] = ("triton",),
        has_headers: bool = True,
    ) -> None:
        rows = "".join(
            f"{gpu.name}, {gpu.capability}, {(gpu.num_bytes or 0) // 2**20}\n" for gpu in gpus
        )

        def run(command: list[str], **_: Any) -> Any:
            if not gpus:
                raise FileNotFoundError(command[0])
            return SimpleNamespace(stdout=rows)

        folder = tmp_path / "include"
        folder.mkdir(exist_ok=True)
        if has_headers:
            (folder / "Python.h").touch()
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(
            devices, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run})
        )
        monkeypatch.setattr(
            devices,
            "shutil",
            SimpleNamespace(which=lambda name: name if name in programs else None),
        )
        monkeypatch.setattr(
            devices, "find_spec", lambda name: object() if name in packages else None
        )
        monkeypatch.setattr(
            devices, "sysconfig", SimpleNamespace(get_paths=lambda: {"include": str(folder)})
        )

    return simulate


def test_a_machine_that_can_do_everything_has_no_error(machine: Machine) -> None:
    machine(H200, H200, packages=("triton", "flash_attn"))
    found = probe()
    assert found == Devices(gpus=(H200, H200), compiler_error=None, has_flash_attn=True)
    assert found.names == "2 x NVIDIA H200"
    machine()
    assert probe().gpus == ()


def test_only_visible_gpus_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(V100, H200)
    for visible, gpus in (("1", (H200,)), ("", (V100, H200)), ("GPU-1f2e", (V100, H200))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert probe().gpus == gpus


def test_the_memory_of_a_gpu_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(stdout="NVIDIA GB10, 12.1, [N/A]\n")
    monkeypatch.setattr(
        devices,
        "subprocess",
        SimpleNamespace(**vars(subprocess) | {"run": lambda *_, **__: answer}),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.find_gpus() == [Gpu("NVIDIA GB10", 12.1, None)]


@pytest.mark.parametrize(
    ("gpu", "options", "named"),
    [
        (P100, {}, ("Tesla P100", "6", "7")),
        (H200, {"packages": ()}, ("Triton",)),
        (H200, {"programs": ()}, ("gcc", "CC")),
        (H200, {"has_headers": False}, ("Python.h",)),
    ],
)
def test_a_machine_that_cannot_compile_names_what_is_missing(
    gpu: Gpu, options: dict[str, Any], named: tuple[str, ...], machine: Machine
) -> None:
    machine(gpu, **options)
    error = probe().compiler_error
    assert error is not None
    assert all(word in error for word in named)


def test_a_cluster_compiles_if_every_machine_can() -> None:
    whole = Devices(gpus=(H200,), has_flash_attn=True)
    other = Devices(gpus=(V100,), compiler_error="no C compiler")
    assert merge([whole, other]) == Devices(gpus=(H200, V100), compiler_error="no C compiler")
    assert merge([whole, whole]).compiler_error is None
    assert merge([whole, other]).min_capability == 7.0
    assert merge([whole, other]).min_bytes == 32 * GIB
    assert Devices(gpus=(H200, Gpu("GPU", 9.0))).min_bytes is Devices().min_bytes is None


@pytest.mark.parametrize(
    ("capability", "is_half", "has_flash_attn", "kernel"),
    [
        (9.0, True, True, "flash_attn"),
        (9.0, True, False, "varlen"),
        (9.0, False, True, "sdpa"),
        (7.5, True, True, "sdpa"),
        (0.0, True, True, "sdpa"),  # a CPU
    ],
)
def test_the_attention_kernel_follows_device_and_precision(
    capability: float, is_half: bool, has_flash_attn: bool, kernel: str
) -> None:
    assert attention_kernel(capability, is_half=is_half, has_flash_attn=has_flash_attn) == kernel


def resolved(found: Devices, *overrides: str) -> Any:
    config = load([QUICKSTART], ["run.num_steps=100000000", *overrides])
    return resolve(config, num_gpus=3, devices=found)


def test_without_a_compiler_everything_runs_uncompiled_and_says_why() -> None:
    missing = Devices(gpus=(H200,) * 3, compiler_error="no C compiler was found")
    slow = resolved(missing)
    assert isinstance(slow.config.actors.engine, VllmEngine)
    assert slow.config.actors.engine.eager is True
    assert slow.config.learner.compile is False
    assert sum("no C compiler was found" in line for line in slow.decisions) == 2
    fast = resolved(Devices(gpus=(H200,) * 3))
    assert fast.config.actors.engine.eager is False
    assert "GPUs: 3 x NVIDIA H200" in fast.decisions


@pytest.mark.parametrize("setting", ["actors.engine.eager=false", "learner.compile=true"])
def test_compilation_that_is_asked_for_is_refused_where_it_is_impossible(setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key}.*no C compiler"):
        resolved(Devices(gpus=(H200,), compiler_error="no C compiler"), setting)


@pytest.mark.parametrize(
    ("gpu", "overrides", "reason"),
    [
        (H200, ("learner.compute_dtype=float32",), "float32"),
        (V100, ("learner.compute_dtype=bfloat16",), "7"),
        (H200, ("learner.compute_dtype=bfloat16", "learner.attention=sdpa"), "sdpa"),
    ],
)
def test_a_slow_attention_kernel_is_reported_with_its_reason(
    gpu: Gpu, overrides: tuple[str, ...], reason: str
) -> None:
    (line,) = (d for d in resolved(Devices(gpus=(gpu,)), *overrides).decisions if "attends" in d)
    assert "SDPA" in line
    assert reason in line


def test_the_doctor_reports_compilation_and_attention(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> dict[str, Any]:
        return {f.subject: f for f in doctor._speed()}

    machine()
    assert found() == {}
    machine(H200)
    assert {f.verdict for f in found().values()} == {"ok"}
    machine(H200, programs=(), packages=("triton", "flash_attn"))
    monkeypatch.setattr(doctor, "_probe", lambda code: (False, "ImportError: undefined symbol"))
    assert found()["compilation"].verdict == "problem"
    assert "gcc" in found()["compilation"].advice
    assert "undefined symbol" in found()["attention"].text
    machine(V100)
    assert found()["attention"].verdict == "note"


@pytest.mark.parametrize(
    ("gpu", "packages", "broken", "verdict", "names", "others"),
    [
        (H200, (), (), "ok", ("varlen", "FlashAttention-3"), ()),
        (A100, (), (), "ok", ("varlen",), ("FlashAttention-3",)),
        (H200, ("flash_attn_interface",), (), "ok", ("FlashAttention-3",), ("varlen",)),
        (H200, ("flash_attn_interface",), ("flash_3",), "note", ("FlashAttention-3", "34"), ()),
        (
            H200,
            ("flash_attn_interface", "flash_attn"),
            ("flash_3",),
            "note",
            ("flash-attn", "34"),
            ("varlen",),
        ),
        (A100, ("flash_attn_interface", "flash_attn"), (), "ok", ("flash-attn",), ("Attention-3",)),
    ],
)
def test_the_doctor_reports_whether_flash_attention_3_is_used(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    packages: tuple[str, ...],
    broken: tuple[str, ...],
    verdict: str,
    names: tuple[str, ...],
    others: tuple[str, ...],
) -> None:
    def probed(code: str) -> tuple[bool, str]:
        is_broken = any(name in code for name in broken)
        return not is_broken, "RuntimeError: at most 34 arguments" if is_broken else ""

    machine(gpu, packages=("triton", *packages))
    monkeypatch.setattr(doctor, "_probe", probed)
    (found,) = (f for f in doctor._speed() if f.subject == "attention")
    assert found.verdict == verdict
    assert all(name in found.text for name in names)
    assert not any(name in found.text for name in others)
