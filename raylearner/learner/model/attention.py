"""Attention over packed sequences: memory linear in tokens, no mask, none across sequences.

Equals attention one sequence at a time. Text is causal; patches of an image, or of a window of it, all
attend to each other.
Legend: `T` packed tokens, `R` sequences, `H` query heads, `G` key-value heads, `D` head width.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from raylearner.config.devices import HOPPER, Kernel, attention_kernel
from raylearner.errors import ConfigError
from raylearner.learner.batch.sharing import SharedKeys
from raylearner.learner.model.images import vision_tower
from raylearner.learner.model.mesh import ContextGroup
from raylearner.learner.model.shared_attention import attend_sdpa, attend_varlen

log = logging.getLogger(__name__)

Backend = Kernel

FLASH_3 = "flash_attn_interface"
"""Module of FlashAttention-3."""

HALF = (torch.bfloat16, torch.float16)


def register_backend(
    device_type: str, dtype: torch.dtype, wanted: Literal["auto"] | Backend = "auto"
) -> Backend:
    """Choose a kernel and register it with transformers.

    On GPUs this is torch's varlen kernel with FlashAttention-3, else flash-attn if installed, else torch's
    own varlen kernel, all for half precision only; SDPA otherwise. Raises `ConfigError` if the wanted kernel cannot run.
    """
    has_kernels = device_type == "cuda" and dtype in HALF
    backend = wanted
    if backend == "auto":
        has_older = has_kernels and not uses_flash_3() and has_flash_attn()
        backend = attention_kernel(
            _capability(device_type), is_half=dtype in HALF, has_flash_attn=has_older
        )
    if backend != "sdpa" and not has_kernels:
        raise ConfigError(
            f"learner.attention: {backend!r} runs on GPUs in half precision, not on {device_type} "
            f"in {dtype}; use sdpa or auto"
        )
    if backend == "flash_attn" and not has_flash_attn():
        raise ConfigError(
            "learner.attention: flash-attn is not installed or does not import; use varlen or auto"
        )
    version = " with FlashAttention-3" if backend == "varlen" and uses_flash_3() else ""
    log.info("packed attention on %s in %s: %s%s", device_type, dtype, backend, version)
    disable_progress_bar()
    for name, attend in (
        (_text_name(backend), packed_attention),
        (_image_name(backend), image_attention),
    ):
        ALL_ATTENTION_FUNCTIONS.register(name, partial(attend, backend=backend))
    return backend


@cache
def uses_flash_3() -> bool:
    """Return whether torch's varlen kernel is FlashAttention-3, which is put in its place where it can be.

    It needs a Hopper GPU and the package of `flash_attn_interface`; attention is then about twice as fast.
    """
    if not torch.cuda.is_available() or find_spec(FLASH_3) is None:
        return False
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return False
    try:
        activate_flash_3()
    except Exception as error:  # a build for another torch raises errors of any type
        restore_flash_attention_impl(_raise_warn=False)
        log.warning(
            "FlashAttention-3 is installed but does not work with this torch, and attention takes about"
            " twice as long without it: %s: %s; reinstall it for this torch, or uninstall it",
            type(error).__name__,
            next(iter(str(error).splitlines()), ""),  # further ones list declarations
        )
        return False
    return True


def activate_flash_3() -> None:
    """Put FlashAttention-3 in place of torch's varlen kernel. Raises what it raises in this torch."""
    activate_flash_attention_impl("FA3")
    _try_varlen("cuda")


def _try_varlen(device: str) -> None:
    """Call torch's varlen kernel forward and backward. Raises what a kernel with other parameters raises."""
    heads = torch.ones(3, 1, 16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    query, key, value = heads
    starts = torch.tensor([0, 4, 16], dtype=torch.int32, device=device)
    _varlen(query, key, value, starts, 12, None, None).sum().backward()


def _capability(device_type: str) -> float:
    if device_type != "cuda":
        return 0.0
    major, minor = torch.cuda.get_device_capability()
    return major + minor / 10


@lru_cache(maxsize=1)
def has_flash_attn() -> bool:
    """Return whether flash-attn can be used; warn where it is installed but does not import."""
    if find_spec("flash_attn") is None:
        return False
    try:
        import_module("flash_attn")
    except Exception as error:  # a build for another torch raises errors of any type
        log.warning(
            "flash-attn is installed but does not import (%s), so the learner attends with torch's varlen"
            " kernel, at about the same speed; reinstall or uninstall it",
            error,
        )
        return False
    return True


def is_vision(config: PreTrainedConfig) -> bool:
    """Return whether this is the configuration of a vision-language model."""
    return hasattr(config, "vision_config")


def implementation_of(config: PreTrainedConfig, backend: Backend) -> str | dict[str, str]:
    """Return what to construct a model with; `set_attention` then adds the vision tower's."""
    name = _text_name(backend)
    return {"": name, "text_config": name, "vision_config": "sdpa"} if is_vision(config) else name


def set_attention(causal_lm: PreTrainedModel, backend: Backend) -> None:
    """Use packed attention for text and images."""
    causal_lm.set_attn_implementation(implementation_of(causal_lm.config, backend))
    tower = vision_tower(causal_lm)
    if isinstance(tower, PreTrainedModel):
        # Set directly: transformers refuses the name where it checks.
        tower.config._attn_implementation = _image_name(backend)


@contextmanager
def use_eager(causal_lm: PreTrainedModel, backend: Backend) -> Iterator[None]:
    """Use transformers' eager attention for text in this context."""
    name: Any = "eager"
    if is_vision(causal_lm.config):
        name = {"": name, "text_config": name, "vision_config": "sdpa"}
    causal_lm.set_attn_implementation(name)
    try:
        yield
    finally:
        set_attention(causal_lm, backend)


def _text_name(backend: Backend) -> str:
    """Name an implementation for text; transformers takes names with "flash" for a library's."""
    return f"raylearner_{backend.removeprefix('flash_')}"


def _image_name(backend: Backend) -> str:
    """Name an implementation for vision towers, which pass packing on only to names with "flash" and
    call others once for each image or window."""
    return f"raylearner_flash_images_{backend}"


def image_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    backend: Backend = "sdpa",
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor,  # [R + 1] int32
    max_length_q: int,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute `packed_attention` of images or their windows, in both directions."""
    if attention_mask is not None or dropout:
        raise ValueError("packed attention takes neither a mask nor dropout")
    attend = BACKENDS[backend]
    out = attend(query[0], key[0], value[0], cu_seq_lens_q, max_length_q, scaling, None, False)
    return out.unsqueeze(0), None


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,  # [1, G, T, D]
    attention_mask: Tensor | None,
    *,
    backend: Backend = "sdpa",
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,  # [R + 1] int32
    max_length_q: int | None = None,
    context_group: ContextGroup | None = None,
    shared_keys: SharedKeys | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute attention, with the signature that transformers calls; output `[1, T, H, D]`.

    With a context group `T` is a rank's slice, and `cu_seq_lens_q` describes the whole. With
    `shared_keys` sequences also read the keys of others.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(f"{type(module).__name__} does not pass packing on to its attention")
    if attention_mask is not None or dropout:
        raise ValueError("packed attention takes neither a mask nor dropout")
    unsupported = [
        name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None
    ]
    if unsupported:
        raise ValueError(f"packed attention does not support {', '.join(unsupported)}")
    longest = max_length_q if shared_keys is None else shared_keys.max_length
    window = None if sliding_window is None or sliding_window >= longest else sliding_window
    parts = query[0], key[0], value[0]
    if context_group is not None:
        parts = context_group.to_heads(*parts)
    if shared_keys is None:
        out = BACKENDS[backend](*parts, cu_seq_lens_q, max_length_q, scaling, window)
    else:
        # torch's kernel is flash-attn's, and its backward can be called by itself.
        attend = attend_sdpa if backend == "sdpa" else attend_varlen
        out = attend(*parts, cu_seq_lens_q, max_length_q, scaling, window, shared_keys)
    if context_group is not None:
        out = context_group.to_tokens(out)
    return out.unsqueeze(0), None


def _sdpa(
    query: Tensor,  # [H, T, D]
    key: Tensor,  # [G, T, D]
    value: Tensor,
    cu_seqlens: Tensor,  # [R + 1]
    max_length: int,
    scaling: float | None,
    window: int | None,
    is_causal: bool = True,
) -> Tensor:  # [T, H, D]
    return attend_sdpa(
        query, key, value, cu_seqlens, max_length, scaling, window, None, is_causal=is_causal
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    scaling: float | None,
    window: int | None,
    is_causal: bool = True,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        cu_seqlens,
        cu_seqlens,
        max_length,
        max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0 if is_causal else -1),
        enable_gqa=key.shape[0] != query.shape[0],
    )
    assert isinstance(out, Tensor)
    return out


def _flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    scaling: float | None,
    window: int | None,
    is_causal: bool = True,
) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_length,
        max_seqlen_k=max_length,
        softmax_scale=scaling,
        causal=is_causal,
        window_size=(-1 if window is None else window - 1, 0 if is_causal else -1),
    )


BACKENDS: dict[Backend, Callable[..., Tensor]] = {
    "sdpa": _sdpa,
    "varlen": _varlen,
    "flash_attn": _flash_attn,
}


def kernels() -> list[Any]:
    """Return the attention operations of the installed backends."""
    import torch.nn.attention.varlen  # registers its own

    with suppress(ImportError):
        import_module("flash_attn")  # registers its own
    packets = (
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.torch_attn._varlen_attn,
        torch.ops.raylearner.attend_gathered,
        getattr(torch.ops.flash_attn, "_flash_attn_varlen_forward", None),
    )
    return [packet.default for packet in packets if packet is not None]
