"""Every transport has both sides, and a learner rank's side takes part in gathering on every rank."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raylearner.config.schema import WeightsSection
from raylearner.weights.checksums import Checksum, checksum
from raylearner.weights.transports import TRANSPORTS, discard_files, transport_of

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
