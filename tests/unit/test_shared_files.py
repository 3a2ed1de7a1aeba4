"""Weight files: whole or absent, tied tensors once, gone when discarded."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raylearner.errors import WeightTransferError
from raylearner.weights.transports import discard_files, shared_files
from raylearner.weights.transports.shared_files import write_weights


def test_a_file_holds_names_values_and_the_requested_dtype(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(3, 4), "b.bias": torch.randn(4).double()}
    payload = write_weights(tensors.items(), tmp_path / "new", 7, torch.bfloat16)
    loaded = load_file(payload["path"])
    assert set(loaded) == set(tensors)
    assert payload["num_tensors"] == 2
    assert payload["num_bytes"] == (12 + 4) * 2
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16))
    assert [p.name for p in (tmp_path / "new").iterdir()] == [Path(payload["path"]).name]


def test_integers_keep_their_type(tmp_path: Path) -> None:
    payload = write_weights([("steps", torch.tensor([3]))], tmp_path, 0, torch.bfloat16)
    assert load_file(payload["path"])["steps"].dtype == torch.int64


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    embedding, head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    tensors = [("embed.weight", embedding.weight), ("head.weight", head.weight.detach())]
    payload = write_weights(tensors, tmp_path, 0, torch.bfloat16)
    assert set(load_file(payload["path"])) == {"embed.weight"}


def test_a_view_that_is_not_contiguous_is_written_whole(tmp_path: Path) -> None:
    square = torch.randn(4, 4)
    payload = write_weights([("a", square), ("b", square.t())], tmp_path, 0, torch.float32)
    loaded = load_file(payload["path"])
    assert torch.equal(loaded["a"], square)
    assert torch.equal(loaded["b"], square.t())


def test_gathered_tensors_that_reuse_an_address_are_no_tie(tmp_path: Path) -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(64):
            yield f"layer.{index}", torch.full((512,), float(index))

    payload = write_weights(gathered(), tmp_path, 0, torch.bfloat16)
    loaded = load_file(payload["path"])
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
