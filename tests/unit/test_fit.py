"""Pushed weights against the files of the engine's model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raylearner.errors import WeightTransferError
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.update import Probe, WeightUpdate
from raylearner.weights.verification import check_shapes, check_tensor_names

MODEL = {"model.embed_tokens.weight": torch.zeros(100, 8), "model.norm.weight": torch.zeros(8)}
LARGER = MODEL | {"model.embed_tokens.weight": torch.zeros(104, 8)}


def update(payload: dict[str, Any], transport: str) -> WeightUpdate:
    probe = Probe(token_ids=(), logprobs=(), tolerance=1.0)
    return WeightUpdate(policy_version=1, transport=transport, payload=payload, probe=probe)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("transport", ["shared_files", "nccl"])
def test_another_vocabulary_is_told_with_both_shapes(tmp_path: Path, transport: str) -> None:
    (tmp_path / "model").mkdir()
    save_file(MODEL, tmp_path / "model" / "model.safetensors")

    def payload(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        if transport == "shared_files":
            return write_weights(tensors.items(), tmp_path / "pushes", 1, torch.bfloat16)
        return {"names": list(tensors), "shapes": [list(t.shape) for t in tensors.values()]}

    engine = str(tmp_path / "model")
    check_shapes(update(payload(MODEL), transport), engine)
    check_shapes(update(payload(MODEL | {"renamed": torch.ones(1)}), transport), engine)
    check_shapes(update(payload(LARGER), transport), "owner/name")
    with pytest.raises(
        WeightTransferError,
        match=r"embed_tokens.weight is \(100, 8\) .* and \(104, 8\) in the learner's \(1 tensors",
    ):
        check_shapes(update(payload(LARGER), transport), engine)


def test_tensors_beside_those_with_checksums_are_named(tmp_path: Path) -> None:
    whole = write_weights(MODEL.items(), tmp_path, 1, torch.bfloat16)
    check_tensor_names(update(whole, "shared_files"))
    sums = whole["checksums"]
    for changed in ({k: sums[k] for k in list(sums)[1:]}, sums | {"added": sums[next(iter(sums))]}):
        with pytest.raises(WeightTransferError, match=r"embed_tokens\.weight|added"):
            check_tensor_names(update({**whole, "checksums": changed}, "shared_files"))
