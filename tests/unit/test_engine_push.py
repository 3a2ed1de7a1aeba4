"""What a vLLM engine does before, in and after the pause of a push, with a vLLM that only takes calls."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
import torch

from raylearner.actors.engines import vllm_arguments
from raylearner.actors.engines.vllm import VllmEngine
from raylearner.config.schema import VllmEngine as VllmEngineSection
from raylearner.errors import EngineDead, WeightTransferError
from raylearner.weights.checksums import checksum, plain
from raylearner.weights.transports import shared_files, transport
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.update import Probe, WeightUpdate

TENSORS = {"a": torch.arange(6.0), "b": torch.ones(4)}


class Llm:
    """Notes calls in their order, and answers as one worker of vLLM that received `TENSORS`."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self.free_bytes: int | None = None
        self.held: Mapping[str, torch.Tensor] = TENSORS
        self.model_config = SimpleNamespace(model=str(folder))
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.pause)
        self.errored, self.output_handler = False, None
        self.output_processor = SimpleNamespace(request_states={})
        self._polls = 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        match method:
            case "free_weight_bytes":
                return [self.free_bytes]
            case "begin_weight_task":
                self.calls.append(args[0])
                self._task, self._polls = args[0], 0
                return [None]
            case "poll_weight_task":
                self._polls += 1
                if self._polls < 3:
                    return [(False, None)]
                return [(True, True if self._task == "stage" else self._report())]
            case _:
                self.calls.append(method)
                return [None]

    async def pause(self, **_: Any) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")

    async def sleep(self, **_: Any) -> None:
        self.calls.append("sleep")

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    async def reset_prefix_cache(self, **_: Any) -> bool:
        self.calls.append("reset prefixes")
        return True

    async def reset_encoder_cache(self) -> None:
        self.calls.append("reset images")

    def shutdown(self, **_: Any) -> None:
        pass

    def _report(self) -> dict[str, Any]:
        parts = [[name, name, "all", *plain(checksum(t))] for name, t in self.held.items()]
        return {"names": list(self.held), "parts": parts, "computed": [], "arrived": {}}


@pytest.fixture
def llm(tmp_path: Path) -> Llm:
    return Llm(tmp_path / "model")


@pytest_asyncio.fixture
async def engine(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(shared_files.Receiver(actor_id=""), sleep_level=2)
    monkeypatch.setattr(engine, "_llm", llm)

    async def probe(_: Probe) -> list[list[float]]:
        llm.calls.append("probe")
        return [[0.0]]

    monkeypatch.setattr(engine, "_probe_logprobs", probe)
    yield engine
    await engine.close()


def update(folder: Path, **fields: Any) -> WeightUpdate:
    return WeightUpdate(
        policy_version=7,
        transport="shared_files",
        payload=write_weights(TENSORS.items(), folder, 7, torch.float32),
        probe=Probe(token_ids=((1, 2),), logprobs=((0.0,),), tolerance=0.1),
        **fields,
    )


def between(calls: list[str], first: str, last: str) -> set[str]:
    return set(calls[calls.index(first) + 1 : calls.index(last)])


@pytest.mark.parametrize("should_recompute", [True, False])
async def test_only_the_copy_and_the_reset_of_caches_are_in_the_pause(
    engine: VllmEngine, llm: Llm, tmp_path: Path, should_recompute: bool
) -> None:
    receipt = await engine.receive(update(tmp_path, should_recompute=should_recompute))
    resets = {"reset prefixes", "reset images"} if should_recompute else set[str]()
    assert llm.calls[0] == "stage"
    assert llm.calls[1] == "pause"
    assert between(llm.calls, "pause", "resume") == {"apply_weights", "version 7"} | resets
    assert set(llm.calls[llm.calls.index("resume") + 1 :]) == {"report", "probe"}
    assert receipt.num_verified == len(TENSORS)
    assert engine.policy_version == receipt.policy_version == 7


async def test_wrong_parameters_are_an_error_although_the_engine_has_resumed(
    engine: VllmEngine, llm: Llm, tmp_path: Path
) -> None:
    llm.held = {**TENSORS, "b": torch.zeros(4)}
    with pytest.raises(WeightTransferError, match="b has another checksum"):
        await engine.receive(update(tmp_path))
    assert "resume" in llm.calls
    assert engine.policy_version == 0
    with pytest.raises(EngineDead):
        await engine.abort()


async def test_a_wrong_probe_is_an_error_although_the_engine_has_resumed(
    engine: VllmEngine, llm: Llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe(_: Probe) -> list[list[float]]:
        return [[1.0]]

    monkeypatch.setattr(engine, "_probe_logprobs", probe)
    with pytest.raises(WeightTransferError, match="tolerance"):
        await engine.receive(update(tmp_path))
    assert "resume" in llm.calls
    with pytest.raises(EngineDead):
        await engine.abort()


async def test_tensors_that_do_not_fit_beside_the_weights_arrive_in_the_pause(
    engine: VllmEngine, llm: Llm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm.free_bytes = 1024**3
    await engine.receive(update(tmp_path))
    assert llm.calls[0] == "pause"
    assert {"receive_weights", "version 7"} <= between(llm.calls, "pause", "resume")
    assert "memory_fraction" in caplog.text
    llm.calls.clear()
    llm.free_bytes = 2 * 1024**3
    await engine.receive(update(tmp_path))
    assert llm.calls[0] == "stage"


async def test_ranks_are_asked_the_less_often_the_longer_a_task_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed_s, asked_at = 0.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds

    class Ranks:
        async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            if method == "poll_weight_task":
                asked_at.append(passed_s)
            return [(passed_s >= 1.0, None)] * 2

    monkeypatch.setattr(transport.asyncio, "sleep", sleep)
    await transport.run_task(cast(Any, Ranks()), "stage")
    assert asked_at[0] <= 0.01  # a small model waits for nothing
    assert len(asked_at) < 60
    assert passed_s <= 1.15


async def test_tensors_in_memory_of_others_are_staged_on_a_full_gpu(
    engine: VllmEngine,
    llm: Llm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shared_files.Receiver, "_staging_bytes", lambda self, payload: 0)
    llm.free_bytes = 0
    await engine.receive(update(tmp_path))
    assert llm.calls[0] == "stage"
    assert not caplog.text


async def test_an_engine_that_slept_gets_its_weights_before_its_cache(
    engine: VllmEngine, llm: Llm, tmp_path: Path
) -> None:
    await engine.sleep()
    await engine.receive(update(tmp_path))
    assert llm.calls[:2] == ["sleep", "wake weights"]
    assert between(llm.calls, "wake weights", "wake kv_cache") == {"receive_weights", "version 7"}
    assert llm.calls[llm.calls.index("wake kv_cache") + 1] == "resume"


async def test_requests_that_a_push_computes_again_are_counted_by_their_tokens(
    engine: VllmEngine, llm: Llm, tmp_path: Path
) -> None:
    def state(num_prompt: int, num_sampled: int) -> SimpleNamespace:
        return SimpleNamespace(
            prompt_len=num_prompt,
            is_prefilling=num_sampled == 0,
            detokenizer=SimpleNamespace(num_output_tokens=lambda: num_sampled),
        )

    llm.output_processor.request_states = {"0": state(100, 20), "1": state(50, 1), "2": state(9, 0)}
    assert (await engine.receive(update(tmp_path))).num_recomputed == 171
    kept = await engine.receive(update(tmp_path, should_recompute=False))
    assert kept.num_recomputed == 0


@pytest.mark.parametrize(
    ("gib", "billions", "is_lowered"),
    [(139, 8, True), (139, 1.5, False), (80, 8, True), (24, 8, False)],
)
def test_an_engine_leaves_memory_for_a_push_where_it_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, billions: float, is_lowered: bool
) -> None:
    properties = SimpleNamespace(total_memory=gib * 1024**3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(vllm_arguments, "shapes", lambda _: {"weight": (int(billions * 1e9),)})
    section = VllmEngineSection(kind="vllm", max_model_tokens=256, memory_fraction=0.92)
    share = vllm_arguments._memory_fraction(section, str(tmp_path), has_staging=True)
    needed = billions * 1e9 * 2 / gib / 1024**3
    assert (share < 0.92) == is_lowered
    if is_lowered:
        assert 0.92 - vllm_arguments.MAX_STAGING_SHARE <= share < 1 - needed
    assert vllm_arguments._memory_fraction(section, str(tmp_path), has_staging=False) == 0.92
