"""Tensors followed through loaders that fuse, shard, pad and turn them, deferred as vLLM defers them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from raylearner.errors import WeightTransferError
from raylearner.weights.checksums import checksum, read
from raylearner.weights.trace import Copies, Trace
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.update import Probe, WeightUpdate
from raylearner.weights.verification import check_shapes, check_tensor_names, verify_weights

DIM, ROWS = 8, 6


class Rank(nn.Module):
    """One of two ranks: q and k fused and cut by rows, `o` cut by columns and kept turned, a padded
    embedding, a norm that both have, and a scale of which the loader makes another."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qk = nn.Parameter(torch.zeros(ROWS, DIM))
        self.o = nn.Parameter(torch.zeros(DIM // 2, ROWS))
        self.embedding = nn.Parameter(torch.zeros(4, DIM))
        self.norm = nn.Parameter(torch.zeros(DIM))
        self.scale = nn.Parameter(torch.zeros(3))

    def place(self, name: str, tensor: Tensor) -> tuple[nn.Parameter, Callable[[Tensor], None]]:
        """The parameter that takes the tensor, and what writes this rank's part into it."""
        half = ROWS // 2
        if name in "qk":
            start = 0 if name == "q" else half
            part = tensor[self.rank * half :][:half]
            return self.qk, lambda p: copy(p[start : start + half], part)
        if name == "o":
            columns = tensor[:, self.rank * DIM // 2 :][:, : DIM // 2]
            return self.o, lambda p: copy(p, columns.t())
        if name == "embedding":
            part = tensor[self.rank * 4 :][:4]
            return self.embedding, lambda p: copy(p[: len(part)], part)
        if name == "norm":
            return self.norm, lambda p: copy(p, tensor)
        return self.scale, lambda p: copy(p, -tensor.exp())


def copy(place: Tensor, value: Tensor) -> None:
    place.data.copy_(value)


class Worker:
    """Loads a rank as vLLM does: each parameter's loader is called again by a deferred one."""

    def __init__(self, rank: int, *, repacks: bool = False) -> None:
        self.model = Rank(rank)
        self.trace = Trace(self.model, may_repack=lambda module: repacks)
        self.repacks = repacks

    def load(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        for parameter in self.model.parameters():

            def loader(target: Tensor, write: Callable[[Tensor], None]) -> None:
                write(target)

            @wraps(loader)
            def online_process_loader(*args: Any, held: Any = loader) -> Any:
                return online_process_loader.__wrapped__(*args)

            online_process_loader.__name__ = "online_process_loader"
            parameter.weight_loader = online_process_loader
        self.trace.start()
        for name, tensor in self.trace.track(
            tensors.items() if isinstance(tensors, Mapping) else tensors
        ):
            parameter, write = self.model.place(name, tensor)
            parameter.weight_loader.__wrapped__(parameter, write)
        if self.repacks:
            with torch.no_grad():
                self.model.qk.copy_(self.model.qk.flip(0))
        return self.trace.report()

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Load a push without loaders, in two parts."""
        assert self.trace.is_direct
        assert self.trace.expects({name: (t.shape, t.dtype) for name, t in tensors.items()})
        self.trace.start_copies(tensors)
        names = sorted(tensors)
        for some in (names[:2], names[2:]):
            self.trace.copies({name: tensors[name] for name in some}).run()
        return self.trace.report()


def tensors(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {"q": (6, 8), "k": (6, 8), "o": (6, 8), "embedding": (7, 8), "norm": (8,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def sent(of: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: checksum(tensor) for name, tensor in of.items()}


def refused(of: Mapping[str, Tensor], reports: list[dict[str, Any]]) -> str:
    with pytest.raises(WeightTransferError) as caught:
        verify_weights(sent(of), reports, policy_version=3)
    return str(caught.value)


@pytest.mark.parametrize("repacks", [False, True])
def test_every_part_is_found_again_and_each_one_that_is_missing_is_named(repacks: bool) -> None:
    workers = [Worker(rank, repacks=repacks) for rank in (0, 1)]
    for seed in (0, 1):  # the second push goes by the map that the first one made
        now = tensors(seed)
        reports = [worker.load(now) for worker in workers]
        assert verify_weights(sent(now), reports, policy_version=seed) == len(now)
    assert reports[0]["repacked"] == (["qk"] if repacks else [])
    later = tensors(2)
    for name in now:
        mixed = {**now, name: later[name]}
        text = refused(mixed, reports)
        assert f"{name} has another checksum" in text
        assert text.count("another") == 1
    # One rank that kept its old weights, tensor by tensor.
    for name in now:
        mixed = {**now, name: tensors(0)[name]}
        half_stale = [reports[0], workers[1].load(mixed)]
        assert f"{name} " in refused(now, half_stale)
    fewer = {name: tensor for name, tensor in now.items() if name != "k"}
    assert "k is missing on rank 1" in refused(now, [reports[0], workers[1].load(fewer)])
    assert "k arrived on rank 0 of the engine but was not sent" in refused(fewer, reports)


def test_later_pushes_copy_what_the_loaders_of_the_first_one_copied() -> None:
    direct, loading = ([Worker(rank) for rank in (0, 1)] for _ in range(2))
    first = tensors(0)
    assert not direct[0].trace.is_direct, "nothing was observed yet"
    for worker in direct:
        worker.load(first)
    for seed in (1, 2):
        now = tensors(seed)
        reports = [worker.copy(now) for worker in direct]
        assert verify_weights(sent(now), reports, policy_version=seed) == len(now)
        for worker, other in zip(direct, loading, strict=True):
            other.load(now)
            for copied, loaded in zip(
                worker.model.parameters(), other.model.parameters(), strict=True
            ):
                assert torch.equal(copied, loaded)
    # A copy that went wrong is reported as for any push, and so is one that was not made.
    stale = {**now, "k": first["k"]}
    text = refused(now, [direct[0].copy(stale), direct[1].copy(now)])
    assert "k has another checksum" in text
    direct[0].trace.start_copies(now)
    assert "q has another checksum" in refused(tensors(3), [direct[0].trace.report(), reports[1]])


@pytest.mark.parametrize("change", ["fewer", "dtype", "shape"])
def test_other_tensors_than_at_the_last_push_go_through_the_loaders(change: str) -> None:
    worker = Worker(0)
    now = tensors(0)
    worker.load(now)
    described: dict[str, Any] = {name: (t.shape, t.dtype) for name, t in now.items()}
    assert worker.trace.expects(described)
    match change:
        case "fewer":
            del described["k"]
        case "dtype":
            described["k"] = ((6, 8), torch.bfloat16)
        case "shape":
            described["k"] = ((8, 6), torch.float32)
    assert not worker.trace.expects(described)


@pytest.mark.parametrize("repacks", [True, False])
def test_repacked_and_computed_parameters_go_through_the_loaders(repacks: bool) -> None:
    worker = Worker(0, repacks=repacks)
    worker.load(tensors(0) if repacks else {**tensors(0), "scale": torch.ones(3)})
    assert not worker.trace.is_direct


def test_a_tensor_that_no_parameter_took_is_named() -> None:
    worker = Worker(0)
    now = tensors(0)
    report = worker.load({name: tensor for name, tensor in now.items() if name != "norm"})
    report["names"].append("norm")
    assert "norm was loaded into no parameter" in refused({"norm": now["norm"]}, [report])
    report = {**report, "names": ["q.bias"]}
    assert "q.bias was loaded" in refused({"q.bias": torch.ones(3)}, [report])
    # An engine without a bias computes as one whose bias is 0.
    assert verify_weights(sent({"q.bias": torch.zeros(3)}), [report], policy_version=0) == 1


def test_a_push_that_broke_off_leaves_nothing_that_the_next_one_would_miss() -> None:
    worker = Worker(0)
    now = {"norm": torch.randn(DIM), "scale": torch.randn(3)}

    def breaks_off() -> Iterator[tuple[str, Tensor]]:
        yield "norm", torch.randn(DIM)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        worker.load(breaks_off())
    report = worker.load(now)
    assert report["computed"] == ["scale"]
    assert verify_weights(sent(now), [report], policy_version=1) == 2


def test_copies_of_one_call_have_the_same_types_and_are_all_dense_or_none_is() -> None:
    table = torch.zeros(6, 8, dtype=torch.bfloat16)
    places = [torch.zeros(8), table[0], table[1:, :4], torch.zeros(3, dtype=torch.bfloat16)]
    parts = [torch.full_like(place, i + 1, dtype=torch.bfloat16) for i, place in enumerate(places)]
    copies = Copies(places, parts)
    batches = list(copies.batches())
    for some, of in batches:
        assert len({place.dtype for place in some}) == len({part.dtype for part in of}) == 1
        assert len({place.is_contiguous() for place in some}) == 1
    assert [len(some) for some, _ in batches] == [1, 2, 1]
    copies.run()
    assert [place.float().unique().tolist() for place in places] == [[1], [2], [3], [4]]
    assert not table[1:, 4:].any()


def test_tensors_that_use_the_same_memory_in_turn_are_distinguished() -> None:
    worker, buffer, now = Worker(0), torch.empty(6, 8), tensors(0)
    del now["embedding"], now["norm"]
    report = worker.load((name, buffer.copy_(tensor)) for name, tensor in now.items())
    halves = {name: checksum(now[name][:3]) for name in "qk"}
    held = {part[0]: part[3:] for part in report["parts"]}
    assert held.keys() == now.keys()
    assert {name: read(held[name]) for name in halves} == halves


def test_a_computed_value_in_the_memory_of_an_earlier_tensor_is_not_taken_for_it() -> None:
    worker = Worker(0)
    memory = bytearray(3 * 4)
    norm, scale = torch.randn(DIM), torch.randn(3)
    earlier = torch.tensor([1.0, 2.0, 3.0])

    def push() -> Iterator[tuple[str, Tensor]]:
        yield "embedding", torch.frombuffer(memory, dtype=torch.float32).copy_(earlier).view(1, 3)
        yield "scale", scale
        yield "norm", norm

    def place(name: str, tensor: Tensor) -> tuple[nn.Parameter, Callable[[Tensor], None]]:
        if name == "embedding":
            return worker.model.embedding, lambda p: copy(p[:1, :3], tensor)
        if name == "scale":
            computed = torch.frombuffer(memory, dtype=torch.float32).copy_(-tensor.exp())
            return worker.model.scale, lambda p: copy(p, computed)
        return Rank.place(worker.model, name, tensor)

    worker.model.place = place
    report = worker.load(push())
    assert report["computed"] == ["scale"]
    sums = sent({"embedding": earlier.view(1, 3), "scale": scale, "norm": norm})
    assert verify_weights(sums, [report], policy_version=0) == 3


def test_computed_values_are_verified_on_arrival() -> None:
    worker = Worker(0)
    now = {"scale": torch.randn(3)}
    for seed in (0, 1):
        report = worker.load(now)
        assert report["computed"] == ["scale"]
        assert verify_weights(sent(now), [report], policy_version=seed) == 1
        assert "scale" in refused({"scale": torch.randn(3)}, [report])


MODEL = {"model.embed_tokens.weight": torch.zeros(100, 8), "model.norm.weight": torch.zeros(8)}
LARGER = MODEL | {"model.embed_tokens.weight": torch.zeros(104, 8)}


def make_update(payload: dict[str, Any], transport: str) -> WeightUpdate:
    probe = Probe(token_ids=(), logprobs=(), tolerance=1.0)
    return WeightUpdate(policy_version=1, transport=transport, payload=payload, probe=probe)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("transport", ["shared_files", "nccl"])
def test_other_shapes_than_those_of_the_engines_model_are_refused(
    tmp_path: Path, transport: str
) -> None:
    (tmp_path / "model").mkdir()
    save_file(MODEL, tmp_path / "model" / "model.safetensors")

    def payload(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        if transport == "shared_files":
            return write_weights(tensors.items(), tmp_path / "pushes", 1, torch.bfloat16)
        return {"names": list(tensors), "shapes": [list(t.shape) for t in tensors.values()]}

    engine = str(tmp_path / "model")
    check_shapes(make_update(payload(MODEL), transport), engine)
    check_shapes(make_update(payload(MODEL | {"renamed": torch.ones(1)}), transport), engine)
    check_shapes(make_update(payload(LARGER), transport), "owner/name")
    with pytest.raises(
        WeightTransferError,
        match=r"embed_tokens\.weight.*\(100, 8\).*\(104, 8\)",
    ):
        check_shapes(make_update(payload(LARGER), transport), engine)


def test_tensors_without_checksums_and_checksums_without_tensors_are_named(tmp_path: Path) -> None:
    whole = write_weights(MODEL.items(), tmp_path, 1, torch.bfloat16)
    check_tensor_names(make_update(whole, "shared_files"))
    sums = whole["checksums"]
    for changed in ({k: sums[k] for k in list(sums)[1:]}, sums | {"added": sums[next(iter(sums))]}):
        with pytest.raises(WeightTransferError, match=r"embed_tokens\.weight|added"):
            check_tensor_names(make_update({**whole, "checksums": changed}, "shared_files"))
