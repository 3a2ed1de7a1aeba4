"""Between the first forward and the last backward of an update the host only queues work.

Whatever reads a tensor's value would make a GPU run dry: recorded here on the CPU.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import make_groups, make_learner, one_batch, with_prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raylearner.learner.batch.pack import LearnerBatch
from raylearner.learner.learner import Learner
from raylearner.learner.model import attention

CONFIG: dict[str, Any] = {"compute_dtype": "float32", "learning_rate": 1e-2}
METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select")
COPIES = ("lift_fresh",)
"""Of `torch.tensor`: a copy from the host's pageable memory waits for the device as well."""
UNIQUE = ("unique", "_unique", "repeat_interleave.Tensor")


class Reads(TorchDispatchMode):
    """Operations whose result, or the size of it, depends on values, with where they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.is_open = False
        self.num_opened = 0

    def note(self, name: str) -> None:
        if self.is_open:
            frames = traceback.extract_stack()
            ours = [f for f in frames if "/raylearner/" in f.filename]
            self.found.add(f"{name} in {ours[-1].filename}:{ours[-1].lineno}" if ours else name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        if name.split(".")[0] in READS + COPIES or name.startswith(UNIQUE):
            self.note(name)
        if name.startswith(("index.", "index_put")) and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        ):
            self.note(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


def attend_without_reading(
    query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> Tensor:  # [T, H, D]
    """A stand-in for kernels that take lengths on the device; the one for CPUs reads them."""
    repeats = len(query) // len(key)
    mixed = query + (key + value).repeat_interleave(repeats, 0)
    return mixed.transpose(0, 1)


def attend_shared_without_reading(
    query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> Tensor:  # [C, H, D]
    """The same over gathered keys."""
    *_, keys = options
    of_keys, of_values = (keys.gather(part.transpose(0, 1)) for part in (key, value))
    return attend_without_reading(query, key, value) + (of_keys * of_values).mean()


@contextmanager
def recorded(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    reads, models = Reads(), learner.models

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.note(name)
            return method(self, *args, **kwargs)

        return call

    def opens(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            reads.is_open = torch.is_grad_enabled()
            reads.num_opened += reads.is_open
            return forward(*args, **kwargs)

        return call

    def closes(backward: Callable[..., Any]) -> Callable[..., Any]:
        def call(share: Tensor, *, is_last: bool) -> None:
            backward(share, is_last=is_last)
            reads.is_open = not is_last

        return call

    with monkeypatch.context() as patch:
        for name in METHODS:
            patch.setattr(Tensor, name, noted(name, getattr(Tensor, name)))
        patch.setitem(attention.BACKENDS, "sdpa", attend_without_reading)
        patch.setattr(attention, "attend_sdpa", attend_shared_without_reading)
        patch.setattr(models.policy, "forward", opens(models.policy.forward))
        patch.setattr(models.policy, "backward", closes(models.policy.backward))
        if models.critic is not None:
            patch.setattr(models.critic, "state_values", opens(models.critic.state_values))
            patch.setattr(models.critic, "backward", closes(models.critic.backward))
        with reads:
            yield reads


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_epochs": 2, "max_kl": 10.0, "entropy_coefficient": 0.1},
        {"aggregation": "sequence_mean_of_means", "loss": {"kind": "gspo"}},
        {"kl": {"coefficient": 0.1, "reference": {"kind": "frozen"}}},
        {"advantage": {"kind": "gae"}, "critic": {}},
        {"advantage": {"kind": "gae"}, "critic": {"trunk": "shared"}},
        {"lora": {"rank": 4, "alpha": 8}},
    ],
    ids=["grpo", "epochs", "gspo", "kl", "critic", "shared_critic", "lora"],
)
def test_an_update_waits_for_no_value(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    batches = [one_batch(make_groups(n, policy_version=n), policy_version=n) for n in range(2)]
    assert_no_value_is_read(tiny_folder, changes, batches, monkeypatch)


@pytest.mark.parametrize("changes", [{}, {"advantage": {"kind": "gae"}, "critic": {}}])
def test_an_update_with_shared_prompts_waits_for_no_value(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    options = {"max_tokens_per_micro_batch": 90, "shares_prefixes": True}
    batches = [
        one_batch(with_prompts(make_groups(n, policy_version=n)), policy_version=n, **options)
        for n in range(2)
    ]
    assert batches[1].num_computed_tokens < batches[1].num_tokens
    assert_no_value_is_read(tiny_folder, changes, batches, monkeypatch)


def assert_no_value_is_read(
    folder: Path,
    changes: dict[str, Any],
    batches: list[LearnerBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the second of two steps; the first fills caches."""
    learner = make_learner(folder, CONFIG | changes)
    first, batch = batches
    assert len(first.mini_batches[0].micro_batches) > 2
    learner.step(first)
    with recorded(learner, monkeypatch) as reads:
        output = learner.step(batch)
        assert not reads.is_open
        assert reads.num_opened >= len(batch.mini_batches[0].micro_batches)
    assert reads.found == set()
    assert not output.is_skipped
    assert len(output.logprobs) == batch.num_rows


def test_the_recorder_sees_what_would_wait(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(tiny_folder, CONFIG)
    with recorded(learner, monkeypatch) as reads:
        reads.is_open = True
        values = torch.ones(3)
        for read in (
            lambda: values[0].item(),
            values.tolist,
            values.cpu,
            lambda: bool(values[0]),
            values.nonzero,
            lambda: values[values > 0],
            lambda: values.equal(values),
            lambda: torch.tensor([1.0]),
            lambda: values.new_tensor(1.0),
        ):
            reads.found.clear()
            read()
            assert reads.found, read
