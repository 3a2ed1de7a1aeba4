"""How an engine starts: its CUDA graphs, its scheduler, its second attempt, and whose turn it is to compile."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError

from raylearner.actors.engines import vllm_arguments, vllm_process
from raylearner.actors.engines.vllm import VllmEngine
from raylearner.actors.engines.vllm_compilation import COMPILER_ERRORS, naming_failures, turn
from raylearner.config.schema import VllmEngine as Section
from raylearner.errors import CompilationError


def arguments(model: Path, **section: Any) -> dict[str, Any]:
    config = Section.model_validate({"kind": "vllm", "max_sequences": 56} | section)
    return vllm_arguments.engine_arguments(
        config,
        model_path=str(model),
        seed=0,
        weight_backend="nccl",
        lora_rank=None,
        receives_beside_weights=False,
        max_images=1,
    )


@pytest.mark.parametrize("max_sequences", [1, 9, 64, 264, 520, 2000])
def test_graphs_cover_every_batch_with_little_padding(max_sequences: int) -> None:
    sizes = vllm_arguments.capture_sizes(max_sequences)
    assert sizes == sorted(set(sizes))
    assert max_sequences in sizes, "a full batch is not padded"
    assert sizes[-1] == max(max_sequences, 512)
    assert len(sizes) <= 35, "vLLM's own are 51 up to 512"
    for smaller, larger in itertools.pairwise(sizes):
        assert larger <= 1.25 * smaller or larger <= 32


def test_graphs_are_sized_by_the_engine_unless_a_user_sizes_them(
    tied_checkpoint: Path,
) -> None:
    given = arguments(tied_checkpoint, eager=False)
    assert given["cudagraph_capture_sizes"] == vllm_arguments.capture_sizes(given["max_num_seqs"])
    assert not given["enforce_eager"]
    assert "cudagraph_capture_sizes" not in arguments(tied_checkpoint, eager=True)
    for name, value in (("max_cudagraph_capture_size", 8), ("compilation_config", {"mode": 0})):
        own = arguments(tied_checkpoint, eager=False, extra_arguments={name: value})
        assert "cudagraph_capture_sizes" not in own
        assert own[name] == value


@pytest.mark.parametrize(
    ("is_cpu", "extra", "ahead"),
    [
        (True, {}, False),
        (True, {"async_scheduling": True}, False),
        (False, {}, True),
        (False, {"async_scheduling": False}, False),
        (False, {"distributed_executor_backend": "ray"}, False),
    ],
)
def test_the_scheduler_fits_the_way_of_scheduling(
    monkeypatch: pytest.MonkeyPatch,
    tied_checkpoint: Path,
    is_cpu: bool,
    extra: dict[str, Any],
    ahead: bool,
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
    given = arguments(tied_checkpoint, extra_arguments=extra)
    assert given["async_scheduling"] is ahead
    assert given["scheduler_cls"].endswith(".AsyncPartScheduler" if ahead else ".PartScheduler")


class FailingEngine(VllmEngine):
    """Fails to create its vLLM in some modes, as its worker logs it."""

    def __init__(self, error: Exception, *fails: bool) -> None:
        """`fails` are the values of `enforce_eager` with which it fails."""
        super().__init__(None, sleep_level=2)  # type: ignore[arg-type]
        self.attempts: list[dict[str, Any]] = []
        self._error, self._fails = error, fails

    def _create(self, arguments: dict[str, Any]) -> None:
        self.attempts.append(arguments)
        if arguments["enforce_eager"] in self._fails:
            kind = f"{type(self._error).__module__}.{type(self._error).__name__}"
            self._log._errors.write_text(f"{kind}: {self._error}\n")
            raise RuntimeError("Engine core initialization failed. See root cause above.")


async def test_an_engine_whose_graphs_fail_starts_again_without_and_names_the_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_process, "children", list)
    engine = FailingEngine(CompilationError("graphs of 520 tokens do not fit"), False)
    given = {"enforce_eager": False, "cudagraph_capture_sizes": [1, 2], "dtype": "bfloat16"}
    await engine._create_in_some_mode(given, set())
    assert engine.attempts == [given, {"enforce_eager": True, "dtype": "bfloat16"}]
    (record,) = caplog.records
    assert "actors.engine.eager" in record.message
    assert "520 tokens" in record.message
    await engine.close()


async def test_an_engine_that_fails_for_another_cause_is_started_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_process, "children", list)
    engine = FailingEngine(ValueError("no such model"), True, False)
    with pytest.raises(RuntimeError, match="root cause"):
        await engine._create_in_some_mode({"enforce_eager": False}, set())
    assert len(engine.attempts) == 1
    await engine.close()


@pytest.mark.parametrize(
    ("error", "is_named"),
    [
        (InternalTorchDynamoError("no such operation"), True),
        (torch.OutOfMemoryError("a larger batch"), False),
    ],
)
def test_failures_of_the_compiler_are_named_and_others_are_not(
    error: Exception, is_named: bool
) -> None:
    with pytest.raises(CompilationError if is_named else type(error)) as caught:  # noqa: SIM117
        with naming_failures(*COMPILER_ERRORS):
            raise error
    assert (caught.value.__cause__ is error) == is_named


class Compilers:
    """Engines in threads that compile in turn, each with its own open file, as processes have."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running = self.most = 0
        self.ends: list[str] = []

    def start(self, name: str, *, key: str = "model", fails: bool = False, **limit: float) -> Any:
        thread = threading.Thread(target=self._compile, args=(name, key, fails), kwargs=limit)
        thread.start()
        return thread

    def _compile(self, name: str, key: str, fails: bool, **limit: float) -> None:
        try:
            with turn(self._folder, key, **limit):
                self.running += 1
                self.most = max(self.most, self.running)
                if key == "model" and not (self._folder / "model.done").exists():
                    time.sleep(0.5)
                self.running -= 1
                if fails:
                    raise ValueError("cannot compile")
        except ValueError:
            pass
        self.ends.append(name)


def test_one_engine_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    compilers = Compilers(tmp_path / "cache")
    first = compilers.start("first")
    time.sleep(0.2)
    others = [compilers.start(f"other {i}") for i in range(3)]
    compilers.start("another model", key="other").join()
    assert compilers.ends == ["another model"]
    for thread in (first, *others):
        thread.join()
    assert compilers.ends[1] == "first"
    assert (tmp_path / "cache" / "model.done").exists()


def test_a_failed_compilation_and_a_long_one_give_the_turn_to_the_next(tmp_path: Path) -> None:
    compilers = Compilers(tmp_path)
    failed = compilers.start("failed", fails=True)
    time.sleep(0.2)
    impatient = compilers.start("impatient", max_wait_s=0.0)
    patient = compilers.start("patient")
    for thread in (failed, impatient, patient):
        thread.join()
    assert compilers.most == 2, "only the impatient one ran beside another"
    assert compilers.ends[0] == "failed"
    assert (tmp_path / "model.done").exists()


def test_without_a_place_for_the_cache_nobody_waits(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with turn(file / "below", "model"):
        pass
