"""Every transport has both sides, and a learner rank's side takes part in gathering on every rank."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raylearner.config.schema import WeightsSection
from raylearner.errors import WeightTransferError
from raylearner.weights.checksums import Checksum, checksum
from raylearner.weights.transports import TRANSPORTS, discard_files, shared_files, transport_of
from raylearner.weights.transports.shared_files import write_weights

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


class Weights:
    """Weights of a learner of which each gather is counted."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.num_gathered = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for item in TENSORS.items():
            self.num_gathered += 1
            yield item

    adapter_tensors = tensors

    def shapes(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in TENSORS.items()]

    def checksums(self) -> Mapping[str, Checksum]:
        return {name: checksum(tensor) for name, tensor in TENSORS.items()}

    def adapter_config(self) -> Mapping[str, Any]:
        return {"r": 1}


def test_every_transport_of_the_configuration_has_both_sides() -> None:
    named = set(get_args(WeightsSection.model_fields["transport"].annotation)) - {"auto"}
    assert named == set(TRANSPORTS)
    assert transport_of("auto") is TRANSPORTS["shared_files"]
    for name, kind in TRANSPORTS.items():
        if name != "nccl":  # imports vLLM
            assert kind.make_receiver("rollout-0").name == name


@pytest.mark.parametrize("name", ["shared_files", "adapter"])
def test_rank_0_writes_files_and_every_rank_gathers(tmp_path: Path, name: str) -> None:
    payloads = []
    for rank in (0, 1):
        weights = Weights()
        sender = transport_of(name).make_sender(weights, rank=rank, folder=tmp_path, deadline_s=1.0)
        payloads.append(sender.write(3, members=("rollout-0",), group=None))
        assert weights.num_gathered == len(TENSORS)
    payload = payloads[0]
    assert payload is not None
    assert payloads[1] is None
    file = next(path for path in tmp_path.rglob("*.safetensors"))
    assert {k: v.tolist() for k, v in load_file(file).items()} == {
        k: v.tolist() for k, v in TENSORS.items()
    }
    assert payload["checksums"] == weights.checksums()
    discard_files(payload)
    assert list(tmp_path.iterdir()) == []


def write_and_load(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    return load_file(write_weights(tensors, folder, 0, dtype)["path"])


def test_a_file_holds_names_values_and_the_requested_dtype(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(3, 4), "b.bias": torch.randn(4).double()}
    integers = write_and_load(tmp_path / "other", [("n", torch.tensor([3]))], torch.bfloat16)
    assert integers["n"].dtype == torch.int64
    payload = write_weights(tensors.items(), tmp_path / "new", 7, torch.bfloat16)
    loaded = load_file(payload["path"])
    assert set(loaded) == set(tensors)
    assert payload["num_tensors"] == 2
    assert payload["num_bytes"] == (12 + 4) * 2
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16))
    assert [p.name for p in (tmp_path / "new").iterdir()] == [Path(payload["path"]).name]


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    embedding, head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    tensors = [("embed.weight", embedding.weight), ("head.weight", head.weight.detach())]
    assert set(write_and_load(tmp_path, tensors)) == {"embed.weight"}


def test_a_view_that_is_not_contiguous_is_written_whole(tmp_path: Path) -> None:
    square = torch.randn(4, 4)
    loaded = write_and_load(tmp_path, [("a", square), ("b", square.t())])
    assert torch.equal(loaded["a"], square)
    assert torch.equal(loaded["b"], square.t())


def test_gathered_tensors_that_reuse_an_address_are_no_tie(tmp_path: Path) -> None:
    gathered = ((f"layer.{i}", torch.full((512,), float(i))) for i in range(64))
    loaded = write_and_load(tmp_path, gathered, torch.bfloat16)
    assert len(loaded) == 64
    assert all(loaded[f"layer.{i}"][0] == i for i in range(64))


def test_a_version_pushed_twice_survives_the_end_of_the_first_push(tmp_path: Path) -> None:
    first = write_weights([("a", torch.zeros(2))], tmp_path, 3, torch.float32)
    second = write_weights([("a", torch.ones(2))], tmp_path, 3, torch.float32)
    discard_files(first)
    discard_files(first)
    assert torch.equal(load_file(second["path"])["a"], torch.ones(2))
    discard_files(second)
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_named_with_demand_and_supply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(WeightTransferError, match=r"is full.* 4\.0 MB and 1\.0 MB are free"):
        write_weights([("a", torch.zeros(1_000_000))], tmp_path, 0, torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_breaks_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_half(tensors: dict[str, torch.Tensor], path: os.PathLike[str]) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_files, "save_file", save_half)
    with pytest.raises(WeightTransferError, match="is full"):
        write_weights([("a", torch.zeros(10))], tmp_path, 0, torch.float32)
    assert list(tmp_path.iterdir()) == []
