"""Pushes into a module with vLLM's own layerwise reload, without an engine: loaders first, copies later."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raylearner.errors import WeightTransferError
from raylearner.weights.checksums import Checksum, checksum
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.verification import verify_weights

pytestmark = pytest.mark.vllm

ROWS, DIM = 4, 8


class Fused(nn.Module):
    """Two tensors in one parameter, behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * ROWS, DIM), requires_grad=False)

        def load(param: Tensor, loaded: Tensor, place: int) -> None:
            param.data.narrow(0, place * ROWS, ROWS).copy_(loaded)

        self.weight.weight_loader = load  # pyright: ignore[reportAttributeAccessIssue]


class Model(nn.Module):
    """Counts the calls of its loaders; with `scales`, it computes what it loads."""

    def __init__(self, *, scales: bool = False) -> None:
        super().__init__()
        self.qk = Fused()
        self.norm = nn.LayerNorm(DIM, bias=False).requires_grad_(False)
        self.num_loads = 0
        if scales:

            def load(param: Tensor, loaded: Tensor) -> None:
                param.data.copy_(loaded * 2)

            self.norm.weight.weight_loader = load  # pyright: ignore[reportAttributeAccessIssue]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self.num_loads += 1
        for name, tensor in weights:
            weight = self.norm.weight if name == "norm" else self.qk.weight
            loader = getattr(weight, "weight_loader", default_weight_loader)
            loader(weight, tensor, *(() if name == "norm" else ("qk".index(name),)))
        return {"qk.weight", "norm.weight"}


class Pushes:
    """One worker's side, and the tensors of each version."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        from raylearner.actors.engines.vllm_transfer import VerifiedTransfer
        from raylearner.weights.transports.shared_files import Receiver

        self.model = Model(**options)
        record_metadata_for_reloading(self.model)
        config: Any = SimpleNamespace(parallel_config=None, model_config=None)
        kind = type("Transfer", (VerifiedTransfer, Receiver.vllm_engine()), {})
        self.transfer = kind(config, config, torch.device("cpu"), self.model)
        self._folder = folder
        self.tensors: dict[str, Tensor] = {}

    def arguments(self, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        shapes = {"q": (ROWS, DIM), "k": (ROWS, DIM), "norm": (DIM,)}
        self.tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
        payload = write_weights(self.tensors.items(), self._folder, seed, torch.float32)
        return {key: value for key, value in payload.items() if key != "checksums"}

    def sums(self) -> dict[str, Checksum]:
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}

    def push(self, seed: int) -> int:
        """Return the number of calls of loaders that a staged push made, after its verification."""
        before = self.model.num_loads
        assert self.transfer.stage(self.arguments(seed))
        held = [parameter.clone() for parameter in self.model.parameters()]
        self.transfer.apply()
        assert not any(map(torch.equal, held, self.model.parameters())), "staging changed nothing"
        self.verify()
        return self.model.num_loads - before

    def verify(self) -> None:
        verify_weights(self.sums(), [self.transfer.report()], policy_version=1)
        assert torch.equal(self.model.qk.weight[:ROWS], self.tensors["q"])
        assert torch.equal(self.model.qk.weight[ROWS:], self.tensors["k"])


def test_loaders_take_the_first_push_and_copies_the_later_ones(tmp_path: Path) -> None:
    pushes = Pushes(tmp_path)
    parameters = [parameter.data_ptr() for parameter in pushes.model.parameters()]
    assert pushes.push(0) == 1
    assert pushes.push(1) == 0
    assert pushes.push(2) == 0
    # CUDA graphs hold the addresses.
    assert [parameter.data_ptr() for parameter in pushes.model.parameters()] == parameters


def test_a_push_that_was_not_staged_and_one_after_a_sleep_go_through_the_loaders(
    tmp_path: Path,
) -> None:
    pushes = Pushes(tmp_path)
    pushes.push(0)
    for has_slept in (False, True):
        pushes.transfer.receive(pushes.arguments(1 + has_slept), has_slept=has_slept)
        pushes.verify()
    assert pushes.model.num_loads == 3
    assert pushes.push(3) == 0


def test_what_loaders_compute_is_never_copied(tmp_path: Path) -> None:
    pushes = Pushes(tmp_path, scales=True)
    assert [pushes.push(seed) for seed in range(3)] == [1, 1, 1]
    assert torch.equal(pushes.model.norm.weight, pushes.tensors["norm"] * 2)


def test_a_copy_that_did_not_arrive_is_found_late(tmp_path: Path) -> None:
    pushes = Pushes(tmp_path)
    pushes.push(0)
    assert pushes.push(1) == 0
    pushes.model.qk.weight[ROWS, 0] += 1
    with pytest.raises(WeightTransferError, match="k has another checksum"):
        pushes.verify()


def test_cached_memory_of_the_models_own_stream_is_not_free_for_a_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raylearner.actors.engines.vllm_transfer import Background

    segments = [
        {"stream": 7, "total_size": 400, "active_size": 100},
        {"stream": 7, "total_size": 20, "active_size": 20},
        {"stream": 0, "total_size": 5000, "active_size": 1000},
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    background = Background(torch.device("cpu"))
    assert background.free_bytes() is None
    monkeypatch.setattr(background, "_stream", SimpleNamespace(cuda_stream=7))
    assert background.free_bytes() == 10 + 300


@pytest.mark.parametrize("shares_gpu", [True, False])
def test_memory_of_a_push_is_freed_at_its_end_where_others_use_the_gpu(
    monkeypatch: pytest.MonkeyPatch, shares_gpu: bool
) -> None:
    from raylearner.actors.engines.vllm_worker import WorkerExtension

    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    worker = WorkerExtension()
    worker.device = torch.device("cuda")
    cache = SimpleNamespace(kv_cache_memory_bytes=2**30 if shares_gpu else None)
    worker.vllm_config = SimpleNamespace(cache_config=cache)
    worker.weight_transfer_engine = SimpleNamespace(report=lambda: calls.append("report"))
    worker._report()
    assert calls == ["report"] + ["empty_cache"] * shares_gpu
