"""Packed attention equals one sequence at a time, in values and gradients, and is computed once."""

import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from raylearner.learner.model import attention
from raylearner.learner.model.attention import (
    BACKENDS,
    Backend,
    image_attention,
    implementation_of,
    packed_attention,
    register_backend,
    uses_flash_3,
)
from raylearner.learner.model.policy import keep_products

LENGTHS = (5, 1, 17, 16, 40, 3)


def one_at_a_time(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    *,
    is_causal: bool = True,
) -> Tensor:
    outputs: list[Tensor] = []
    groups = query.shape[1] // key.shape[1]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        part = slice(start, start + length)
        k, v = (x[:, :, part].repeat_interleave(groups, 1) for x in (key, value))
        scores = query[:, :, part] @ k.transpose(2, 3) * 0.3
        distance = torch.arange(length)[:, None] - torch.arange(length)
        allowed = ((distance >= 0) | (not is_causal)) & (distance < (window or length))
        weights = F.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
        outputs.append((weights @ v).transpose(1, 2))
    return torch.cat(outputs, 1)


def assert_same(out: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Of values and of gradients."""
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_packed_equals_separate(num_kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, heads, sum(LENGTHS), 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, num_kv_heads, num_kv_heads)
    ]
    out, _ = packed_attention(
        nn.Identity(),
        *inputs,
        None,
        scaling=0.3,
        sliding_window=window,
        cu_seq_lens_q=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        max_length_q=max(LENGTHS),
    )
    expected = one_at_a_time(*inputs, LENGTHS, window)
    assert_same(out, expected, inputs)


def test_patches_attend_both_ways_within_their_image_and_equal_windows_share_a_call() -> None:
    torch.manual_seed(0)
    lengths = (16, 64, 64, 4, 16, 64)
    inputs = [
        torch.randn(1, 4, sum(lengths), 8, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    with Counts() as counts:
        out, _ = image_attention(
            nn.Identity(),
            *inputs,
            None,
            scaling=0.3,
            cu_seq_lens_q=torch.tensor([0, *lengths]).cumsum(0).int(),
            max_length_q=max(lengths),
        )
    attends = [name for name in counts.calls.elements() if "scaled_dot_product" in name]
    assert len(attends) == 3
    expected = one_at_a_time(*inputs, lengths, None, is_causal=False)
    assert_same(out, expected, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers_does_not_mistake_a_backend_for_its_own_library(backend: Backend) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    name = implementation_of(config, backend)
    assert isinstance(name, str)
    ALL_ATTENTION_FUNCTIONS.register(name, packed_attention)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    assert model.config._attn_implementation == name


@pytest.mark.parametrize(
    ("capability", "installed", "fails_in", "wanted"),
    [
        (9, {"flash_attn_interface", "flash_attn"}, "", "varlen"),
        (9, {"flash_attn_interface", "flash_attn"}, "load", "flash_attn"),
        (9, {"flash_attn_interface", "flash_attn"}, "call", "flash_attn"),
        (9, {"flash_attn_interface"}, "call", "varlen"),
        (9, {"flash_attn"}, "", "flash_attn"),
        (8, {"flash_attn_interface", "flash_attn"}, "", "flash_attn"),
    ],
)
def test_flash_attention_3_is_taken_where_it_is_installed_works_and_the_gpu_is_hopper(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: int,
    installed: set[str],
    fails_in: str,
    wanted: Backend,
) -> None:
    activated: list[str] = []

    def activate(name: str) -> None:
        if fails_in == "load":
            raise ImportError("undefined symbol")
        activated.append(name)

    def attend(device: str) -> None:
        assert activated == ["FA3"]
        if fails_in == "call":
            raise RuntimeError("expected at most 34 arguments\nDeclaration: fwd()")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(attention, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(
        attention, "restore_flash_attention_impl", lambda _raise_warn: activated.clear()
    )
    monkeypatch.setattr(attention, "_try_varlen", attend)
    monkeypatch.setattr(attention, "has_flash_attn", lambda: "flash_attn" in installed)
    uses_flash_3.cache_clear()
    try:
        assert register_backend("cuda", torch.bfloat16) == wanted
        is_taken = wanted == "varlen" and not fails_in
        assert activated == (["FA3"] if is_taken else [])
        warned = [r.getMessage() for r in caplog.records if "FlashAttention-3 is" in r.getMessage()]
        assert len(warned) == (1 if fails_in else 0)
        assert not any("\n" in message for message in warned)
    finally:
        uses_flash_3.cache_clear()


def test_a_model_that_drops_the_packing_is_refused() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="Identity"):
        packed_attention(nn.Identity(), x, x, x, None)


class Counts(TorchDispatchMode):
    """How often each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def flash_attn() -> Iterator[None]:
    """Registers what flash-attn does, without its kernel."""
    if find_spec("flash_attn"):
        pytest.skip("the real one runs on GPUs only")

    @torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.clone()

    forward.register_fake(lambda q, k, v: torch.empty_like(q))
    forward.register_autograd(lambda ctx, grad: (grad, None, None))
    module = ModuleType("flash_attn")
    vars(module)["flash_attn_varlen_func"] = lambda q, k, v, **_: forward(q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", module)
        yield


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("backend", "device", "name"),
    [
        ("sdpa", "cpu", "aten._scaled_dot_product_flash_attention_for_cpu.default"),
        ("varlen", "meta", "torch_attn._varlen_attn.default"),
        ("flash_attn", "meta", "flash_attn._flash_attn_varlen_forward.default"),
    ],
)
def test_selective_checkpointing_recomputes_no_attention(
    backend: Backend, device: str, name: str
) -> None:
    x = torch.ones(2, 10, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    cu_seqlens = torch.tensor([0, 10], dtype=torch.int32, device=device)

    def attend(x: Tensor) -> Tensor:
        y = x.sin()
        return BACKENDS[backend](y, y, y, cu_seqlens, 10, None, None).sin()

    with Counts() as counts:
        checkpoint(attend, x, use_reentrant=False, context_fn=keep_products()).sum().backward()
    assert x.grad is not None
    assert counts.calls["aten.sin.default"] > 2, "the rest is recomputed"
    assert counts.calls[name] == 1


def test_a_broken_flash_attn_is_reported_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise OSError("undefined symbol")

    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    monkeypatch.setattr(attention, "import_module", fail)
    attention.has_flash_attn.cache_clear()
    try:
        assert not attention.has_flash_attn()
        assert "undefined symbol" in caplog.text
    finally:
        attention.has_flash_attn.cache_clear()
