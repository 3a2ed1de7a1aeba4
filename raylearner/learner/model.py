"""The policy: a transformers causal language model that reads packed sequences, sharded with FSDP2.

Legend: `T` packed tokens, `R` sequences, `N` scored tokens, `V` vocab, `H` hidden width.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from raylearner.errors import ConfigError
from raylearner.learner import attention
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

    def __init__(self, causal_lm: PreTrainedModel, *, chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm.eval()
        self.chunk_tokens = chunk_tokens
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
            else self.value_head(states).squeeze(1).to(zeros.dtype),
            squared_probs=squared_probs,
        )

    def reshard(self) -> None:
        """Free gathered parameters, as a backward would: they must not outlive an update."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, outermost first."""
        names = set(self.causal_lm._no_split_modules or ())
        return [module for module in self.causal_lm.modules() if type(module).__name__ in names]

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters, by their transformers names; those of a value head as `value_head.*`."""
        parameters = dict(self.causal_lm.named_parameters())
        if self.value_head is not None:
            named = self.value_head.named_parameters()
            parameters |= {f"value_head.{name}": parameter for name, parameter in named}
        return parameters

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by their transformers names, gathered one by one; a tied head is left out.

        Every rank must iterate to the end. What is yielded may share storage with the masters.
        """
        for name, parameter in self.causal_lm.named_parameters():
            tensor = parameter.detach().to(dtype)
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
    weight = causal_lm.get_input_embeddings().weight
    head = nn.Linear(weight.shape[1], 1, dtype=weight.dtype, device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def model_directory(path: str) -> Path:
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
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path: {folder} has no *.safetensors file")
    return folder


def load_model(path: str, *, dtype: torch.dtype, chunk_tokens: int = 1024) -> PackedModel:
    """A causal language model with weights in `dtype`, packed attention, dropout off."""
    folder = model_directory(path)
    disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention.NAME
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {folder} is no causal language model: {error}") from error
    changes = [
        key for key in LOGIT_CHANGES if getattr(causal_lm.config, key, None) not in (None, 1)
    ]
    if changes:
        raise ConfigError(f"model.path: {folder}: {', '.join(changes)} is not supported")
    return PackedModel(causal_lm, chunk_tokens=chunk_tokens)


def shard(model: PackedModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> PackedModel:
    """FSDP2 over the mesh, one unit per block and one for the rest; gradients are summed, not averaged."""
    master_dtype = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master_dtype else compute_dtype,
        reduce_dtype=master_dtype,
    )
    for module in (*model.blocks(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return model
