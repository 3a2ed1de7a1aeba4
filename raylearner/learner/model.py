"""The policy: a transformers causal language model that reads packed sequences, sharded with FSDP2.

Legend: `T` packed tokens, `R` sequences, `N` scored tokens, `V` vocab, `H` hidden width.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from raylearner.errors import ConfigError
from raylearner.learner import attention, optimizer
from raylearner.learner.attention import Backend
from raylearner.learner.gather import gathered
from raylearner.learner.logprobs import chunked_logprobs, chunked_squared_probs

log = logging.getLogger(__name__)

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model")
"""What is fetched of a hub repository."""

RANDOM_WIDTH = 0.02
"""Standard deviation of weights that are drawn."""

MAX_RECOMPILATIONS = 64
"""Blocks share their code, and each counts as a recompilation of the first."""

KEPT_OPERATIONS: list[Any] = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What selective activation checkpointing does not recompute."""

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config keys of models whose logits are more than hidden states times the head."""


class Scores(NamedTuple):
    """What a forward pass says of its tokens. Log-probabilities and entropy are 0 where not scored."""

    logprobs: Tensor  # [T] of the token given its prefix
    entropy: Tensor  # [T] of the distribution that it comes from
    state_values: Tensor | None = None  # [T] of the state after the token, with a value head
    squared_probs: Tensor | None = None  # [T] sum of squares of that distribution, where asked for


class PackedModel(nn.Module):
    """Owns the causal language model; promises log-probabilities of one sequence at a time.

    The head belongs to this module's own FSDP unit, so that its weight is whole in `forward`.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        chunk_tokens: int,
        is_head_exact: bool = True,
        should_compile: bool = False,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm.eval()
        self.chunk_tokens = chunk_tokens
        self._is_head_exact, self._should_compile = is_head_exact, should_compile
        names = set(causal_lm._no_split_modules or ())
        # A tuple, which torch does not take for submodules.
        self.blocks = tuple(m for m in causal_lm.modules() if type(m).__name__ in names)
        """The transformer blocks, outermost first."""
        self.value_head: nn.Linear | None = None

    def add_value_head(self) -> None:
        """One more output on the same trunk. It starts at 0 everywhere, on every rank."""
        self.value_head = value_head(self.causal_lm)

    def forward(
        self,
        input_ids: Tensor,  # [T]
        position_ids: Tensor,  # [T] from 0 in each sequence
        cu_seqlens: Tensor,  # [R + 1] int32
        max_length: int,
        scored: Tensor,  # [N] int64 places in T, never the first of a sequence
        temperature: float = 1.0,
        *,
        needs_squared_probs: bool = False,
    ) -> Scores:
        """The scored tokens under the distribution at `temperature`."""
        states = hidden_states(self.causal_lm, input_ids, position_ids, cu_seqlens, max_length)
        head = self.causal_lm.get_output_embeddings()
        assert head is not None
        logprobs, entropy = chunked_logprobs(
            states[scored - 1],
            head.weight,
            input_ids[scored],
            bias=getattr(head, "bias", None),
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            is_exact=self._is_head_exact,
            should_compile=self._should_compile,
        )
        zeros = logprobs.new_zeros(len(input_ids))
        squared_probs = None
        if needs_squared_probs:
            squares = chunked_squared_probs(
                states[scored - 1],
                head.weight,
                bias=getattr(head, "bias", None),
                temperature=temperature,
                chunk_tokens=self.chunk_tokens,
            )
            squared_probs = zeros.index_copy(0, scored, squares)
        return Scores(
            logprobs=zeros.index_copy(0, scored, logprobs),
            entropy=zeros.index_copy(0, scored, entropy),
            state_values=None
            if self.value_head is None
            else self.value_head(states).sum(1).to(zeros.dtype),  # no view, which FSDP warns of
            squared_probs=squared_probs,
        )

    def reshard(self) -> None:
        """Free gathered parameters, as a backward would: they must not outlive an update."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def prepare_blocks(self, options: "ModelOptions") -> None:
        """Compile blocks and let them recompute in the backward; before they are sharded.

        What the compiler fuses it recomputes by itself, so that `selective` adds nothing to it.
        """
        kind = options.activation_checkpointing
        for block in self.blocks:
            forward = block.forward
            if options.should_compile:
                torch._dynamo.config.recompile_limit = MAX_RECOMPILATIONS
                forward = torch.compile(forward)
            if kind == "full" or (kind == "selective" and not options.should_compile):
                context = _keep_products if kind == "selective" else noop_context_fn
                forward = partial(
                    checkpoint,
                    forward,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=context,
                )
            block.forward = forward

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by their transformers names, gathered by the layer; a tied head is left out.

        Every rank must iterate to the end. What is yielded may share storage with the masters.
        """
        return gathered(self.causal_lm.named_parameters(), dtype)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters, by their transformers names; those of a value head as `value_head.*`."""
        parameters = dict(self.causal_lm.named_parameters())
        if self.value_head is not None:
            named = self.value_head.named_parameters()
            parameters |= {f"value_head.{name}": parameter for name, parameter in named}
        return parameters

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and full shapes of what `named_weights` yields, in its order."""
        return [(name, tuple(p.shape)) for name, p in self.causal_lm.named_parameters()]


def hidden_states(
    causal_lm: PreTrainedModel,
    input_ids: Tensor,  # [T]
    position_ids: Tensor,  # [T]
    cu_seqlens: Tensor,  # [R + 1]
    max_length: int,
) -> Tensor:  # [T, H]
    """What the trunk makes of packed sequences."""
    return causal_lm.base_model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        cu_seq_lens_q=cu_seqlens,
        cu_seq_lens_k=cu_seqlens,
        max_length_q=max_length,
        max_length_k=max_length,
        use_cache=False,
    ).last_hidden_state[0]


def value_head(causal_lm: PreTrainedModel) -> nn.Linear:
    """One output for each hidden state, 0 at the start."""
    weight = causal_lm.get_input_embeddings().get_parameter("weight")
    head = nn.Linear(weight.shape[1], 1, dtype=weight.dtype, device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _keep_products() -> Any:
    """Selective recomputation: results of matrix products and attention are kept."""
    return create_selective_checkpoint_contexts(KEPT_OPERATIONS)


def model_directory(path: str, *, needs_weights: bool = True) -> Path:
    """The local directory of a model given as one or as a hub id; ConfigError where there is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        looks_local = folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
        if looks_local or folder.exists():
            raise ConfigError(f"model.path: no such directory: {path!r}")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(path, allow_patterns=list(MODEL_FILES)))
        except Exception as error:
            raise ConfigError(
                f"model.path: {path!r} is no directory, and not to be had as a hub id either: {error}"
            ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {folder} has no config.json")
    if needs_weights and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path: {folder} has no *.safetensors file")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How the model computes; what it computes is the same with all of them."""

    chunk_tokens: int = 1024
    attention: Literal["auto"] | Backend = "auto"
    is_head_exact: bool = True
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    should_compile: bool = False


def load_model(path: str, *, dtype: torch.dtype, chunk_tokens: int = 1024) -> PackedModel:
    """A causal language model on the CPU with weights in `dtype`, packed attention, dropout off."""
    folder = model_directory(path)
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=_attention_name("cpu", dtype, "auto")
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {folder} is no causal language model: {error}") from error
    _refuse_logit_changes(causal_lm, folder)
    return PackedModel(causal_lm, chunk_tokens=chunk_tokens)


def load_sharded(
    path: str,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    options: ModelOptions,
    has_value_head: bool = False,
    random_seed: int | None = None,
) -> PackedModel:
    """The same, sharded over the mesh: each rank reads its own rows of the files and no others.

    Masters are in `dtype`. With `random_seed` weights are drawn, and only `config.json` is read.
    """
    folder = model_directory(path, needs_weights=random_seed is None)
    name = _attention_name(mesh.device_type, compute_dtype, options.attention)
    try:
        with _parameters_on_meta():
            causal_lm = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation=name
            )
        causal_lm.tie_weights()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {folder} is no causal language model: {error}") from error
    reader = None if random_seed is not None else TensorReader(folder)
    unknown = [] if reader is None else reader.missing(n for n, _ in causal_lm.named_parameters())
    if unknown:
        # Checkpoints whose tensors transformers renames or merges: it must load them whole.
        log.warning("%s is loaded whole by every rank: it has no %s", folder, unknown[0])
        causal_lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=name
        )
    _refuse_logit_changes(causal_lm, folder)
    model = PackedModel(
        causal_lm,
        chunk_tokens=options.chunk_tokens,
        is_head_exact=options.is_head_exact,
        should_compile=options.should_compile,
    )
    if has_value_head:
        model.add_value_head()
    model.prepare_blocks(options)
    shard(model, mesh, compute_dtype=compute_dtype, wanted_attention=options.attention)
    if not unknown:
        device = torch.device(mesh.device_type)
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
        _fill(model.causal_lm, reader, random_seed)
        if model.value_head is not None:
            for parameter in model.value_head.parameters():
                optimizer.local(parameter.detach()).zero_()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without storage, and buffers with their true values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def _fill(causal_lm: nn.Module, reader: "TensorReader | None", random_seed: int | None) -> None:
    """Each rank's rows, from the files or, as initial weights of that width, from a generator."""
    for index, (name, parameter) in enumerate(causal_lm.named_parameters()):
        local, start = optimizer.local(parameter), 0
        if isinstance(parameter, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start = offset[0] if offset else 0
        if not local.numel():
            continue
        if reader is not None:
            local.copy_(reader.rows(name, start, len(local), tuple(parameter.shape)))
        elif parameter.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            assert random_seed is not None
            generator = torch.Generator(local.device).manual_seed(
                random_seed + 1_000_003 * index + start
            )
            local.normal_(0.0, RANDOM_WIDTH, generator=generator)


class TensorReader:
    """Rows of the tensors in a directory's safetensors files; nothing else of them is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self._files]

    def rows(self, name: str, start: int, count: int, shape: tuple[int, ...]) -> Tensor:
        with safe_open(self._files[name], "pt") as file:
            view = file.get_slice(name)
            found = tuple(view.get_shape())
            if found != shape:
                raise ConfigError(
                    f"model.path: {self._files[name]}: {name} is {found}, config.json makes it {shape}"
                )
            return view[start : start + count]


def _attention_name(device_type: str, dtype: torch.dtype, wanted: Literal["auto"] | Backend) -> str:
    """Registers the kernel that fits with transformers."""
    disable_progress_bar()
    backend = attention.choose_backend(device_type, dtype, wanted)
    name = attention.implementation(backend)
    ALL_ATTENTION_FUNCTIONS.register(name, partial(attention.packed_attention, backend=backend))
    return name


def _refuse_logit_changes(causal_lm: PreTrainedModel, folder: Path) -> None:
    changes = [
        key for key in LOGIT_CHANGES if getattr(causal_lm.config, key, None) not in (None, 1)
    ]
    if changes:
        raise ConfigError(f"model.path: {folder}: {', '.join(changes)} is not supported")


ModelT = TypeVar("ModelT", bound=PackedModel)


def shard(
    model: ModelT,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    wanted_attention: Literal["auto"] | Backend = "auto",
) -> ModelT:
    """FSDP2 over the mesh, one unit per block and one for the rest; gradients are summed, not averaged."""
    name = _attention_name(mesh.device_type, compute_dtype, wanted_attention)
    model.causal_lm.set_attn_implementation(name)
    master_dtype = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master_dtype else compute_dtype,
        reduce_dtype=master_dtype,
    )
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return model
