"""The policy: a transformers causal language model that reads packed sequences, sharded with FSDP2.

Legend: `T` packed tokens, `R` sequences, `N` scored tokens, `V` vocab, `H` hidden width; `C` computed
tokens, fewer than `T` where rows share prefixes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel

from raylearner.config.memory import Kept
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model import attention, lora
from raylearner.learner.model.attention import Backend
from raylearner.learner.model.gather import gather, gather_checksums
from raylearner.learner.model.images import PackedImages, vision_tower
from raylearner.learner.model.logprobs import chunked_logprobs, chunked_squared_probs
from raylearner.learner.model.mesh import ContextGroup
from raylearner.tokenization.vision import deal_out
from raylearner.types import BAN_BIAS
from raylearner.weights.checksums import Checksum, Checksums

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

MAX_RECOMPILATIONS = 64
"""Maximum recompilations: blocks share code, and each counts as a recompilation of the first."""


class Scores(NamedTuple):
    """Results of a forward pass. Log-probabilities and entropy are 0 where not scored."""

    logprobs: Tensor  # [T] of the token given its prefix
    entropy: Tensor  # [T] of the token's distribution
    state_values: Tensor | None = None  # [T] of the state after the token, with a value head
    squared_probs: Tensor | None = None  # [T] sum of squared probabilities, if requested


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the model's computation; results are the same with all of them."""

    chunk_tokens: int = 1024
    attention: Literal["auto"] | Backend = "auto"
    is_head_exact: bool = True
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    should_compile: bool = False
    kept: Kept = field(default_factory=Kept)
    should_offload: bool = False
    """Whether shards live in host memory, with their gradients and optimizer state."""
    is_tower_frozen: bool = False
    """Whether the vision tower of a vision-language model is frozen."""
    context: ContextGroup | None = None
    """Ranks that call the model with the same tokens and share the work."""
    may_share_prefixes: bool = False
    """Whether to find out, at load, if rows may share prefixes."""


class PackedModel(nn.Module):
    """Owns the causal language model; guarantees log-probabilities equal to one sequence at a time.

    The head belongs to this module's own FSDP unit, so that its weight is complete in `forward`.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        chunk_tokens: int,
        is_head_exact: bool = True,
        should_compile: bool = False,
        banned_token_ids: Sequence[int] = (),
        context: ContextGroup | None = None,
        kept: Kept | None = None,
    ) -> None:
        """`banned_token_ids` are the tokens that engines must not sample."""
        super().__init__()
        self.banned_token_ids = tuple(banned_token_ids)
        self._bans: Tensor | None = None
        self._is_scoring = False
        self._context, self._kept = context, kept or Kept()
        self.causal_lm = causal_lm.eval()
        self.chunk_tokens = chunk_tokens
        self._is_head_exact, self._should_compile = is_head_exact, should_compile
        names = set(causal_lm._no_split_modules or ())
        # A tuple, because torch would register a list's modules as submodules.
        self.blocks = tuple(m for m in causal_lm.modules() if type(m).__name__ in names)
        """The transformer blocks, outermost first."""
        self.value_head: nn.Linear | None = None
        self.shares_prefixes = False
        """Whether rows may share prefixes: measured at load."""
        self.has_adapters = lora.has_adapters(causal_lm)

    def add_value_head(self, dtype: torch.dtype) -> None:
        """Add one more output on the same trunk, initialised to 0."""
        self.value_head = value_head(self.causal_lm, dtype)

    def forward(
        self,
        tokens: PackedTokens,
        temperature: float = 1.0,
        *,
        has_bans: bool = True,
        needs_squared_probs: bool = False,
        is_plain: bool = False,
    ) -> Scores:
        """Score tokens under the distribution at `temperature` that engines sample from.

        Without `has_bans` no token is banned. Every rank of a context group gets the full result.
        `is_plain` scores a single sequence by the model's own forward, logits included.
        """
        if is_plain:
            return self._plain(tokens)
        context, scored = self._context, tokens.scored
        states = hidden_states(self.causal_lm, tokens, context)  # [t, H] of a context group's rank
        sources = places = tokens.places(scored - 1)
        targets = tokens.input_ids[tokens.places(scored)]
        if context is not None:
            is_own = places // len(states) == context.rank
            places, targets = places[is_own] - context.rank * len(states), targets[is_own]
        head = self.causal_lm.get_output_embeddings()
        assert head is not None
        bias = self._bias(head, has_bans=has_bans)
        logprobs, entropy = chunked_logprobs(
            states[places],
            head.weight,
            targets,
            bias=bias,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            is_exact=self._is_head_exact,
            should_compile=self._should_compile,
        )
        zeros = logprobs.new_zeros(tokens.num_tokens)

        def whole(values: Tensor) -> Tensor:  # [T] from those at `places`
            if context is not None:
                own = zeros.new_zeros(len(states)).index_copy(0, places, values)
                values = context.gather(own)[sources]
            return zeros.index_copy(0, scored, values)

        squared_probs = state_values = None
        if needs_squared_probs:
            squares = chunked_squared_probs(
                states[places],
                head.weight,
                bias=bias,
                temperature=temperature,
                chunk_tokens=self.chunk_tokens,
            )
            squared_probs = whole(squares)
        if self.value_head is not None:
            state_values = self.value_head(states).sum(1).to(zeros.dtype)  # no view: FSDP warns
            if context is not None:
                state_values = context.gather(state_values)[: len(tokens.input_ids)]
            state_values = tokens.spread(state_values)
        return Scores(
            logprobs=whole(logprobs),
            entropy=whole(entropy),
            state_values=state_values,
            squared_probs=squared_probs,
        )

    def _plain(self, tokens: PackedTokens) -> Scores:
        logits = self.causal_lm(input_ids=tokens.input_ids[None], use_cache=False).logits[0]
        scores = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        logprobs = scores.gather(1, tokens.input_ids[1:, None])[:, 0]
        return Scores(logprobs=F.pad(logprobs, (1, 0)), entropy=logprobs.new_zeros(len(logits)))

    @torch.no_grad()
    def score(self, tokens: PackedTokens, temperature: float = 1.0, **options: bool) -> Scores:
        """Run `forward` without gradients, and free gathered parameters afterwards."""
        scores = self(tokens, temperature, **options)
        if not self._is_scoring:
            self.reshard_all()
        return scores

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Free gathered parameters after this context, and not after every `score` in it."""
        self._is_scoring = True
        try:
            yield
        finally:
            self._is_scoring = False
            self.reshard_all()

    def backward(self, share: Tensor, *, is_last: bool = True) -> None:
        """Add a micro-batch's gradients to those of its update; with the last one, all are reduced.

        Every rank must call it as often. Between the calls of an update, weights must not change.
        """
        if isinstance(self, FSDPModule):
            self.set_reshard_after_backward(is_last or not self._kept.weights)
            is_reduced = is_last or not self._kept.gradients
            self.set_requires_gradient_sync(is_reduced)
            self.set_is_last_backward(is_reduced)
        share.backward()

    def discard_gradients(self) -> None:
        """Forget an update that was broken off, with gradients that were not reduced yet."""
        if isinstance(self, FSDPModule):
            self.reset_iter_state()
        for group in (g for m in self._units() for g in m._get_fsdp_state()._fsdp_param_groups):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None
        self.zero_grad()

    def _units(self) -> Iterator[FSDPModule]:
        return (module for module in self.modules() if isinstance(module, FSDPModule))

    def _bias(self, head: nn.Module, *, has_bans: bool) -> Tensor | None:  # [V]
        bias: Tensor | None = getattr(head, "bias", None)
        if not self.banned_token_ids or not has_bans:
            return bias
        weight = head.get_parameter("weight")
        is_same = self._bans is not None and self._bans.device == weight.device
        if self._bans is None or not is_same or self._bans.dtype != weight.dtype:
            banned = torch.tensor(self.banned_token_ids)
            bans = torch.zeros(len(weight)).index_fill_(0, banned[banned < len(weight)], BAN_BIAS)
            self._bans = bans.to(weight.device, weight.dtype)
        return self._bans if bias is None else bias + self._bans

    def reshard_all(self) -> None:
        """Free gathered parameters, as a backward would; they must not survive an update."""
        for unit in self._units():
            unit.reshard()

    @contextmanager
    def plain_blocks(self) -> Iterator[None]:
        """Disable compilation and recomputation of blocks in this context, for passes of unusual sizes."""
        saved = {block: block.__dict__.pop("forward", None) for block in self.blocks}
        try:
            yield
        finally:
            for block, forward in saved.items():
                if forward is not None:
                    block.forward = forward

    def prepare_blocks(self, options: ModelOptions) -> None:
        """Set up compilation and recomputation of blocks, before they are sharded.

        The compiler recomputes what it fuses, so `selective` adds nothing to it. A vision tower is not
        compiled, because its blocks would be recompiled for each number of images.
        """
        kind = options.activation_checkpointing
        context = keep_products() if kind == "selective" else noop_context_fn
        tower = vision_tower(self.causal_lm)
        tower_modules = set() if tower is None else set(tower.modules())
        for block in self.blocks:
            forward = block.forward
            should_compile = options.should_compile and block not in tower_modules
            if should_compile:
                torch._dynamo.config.recompile_limit = MAX_RECOMPILATIONS
                forward = torch.compile(forward)
            if kind == "full" or (kind == "selective" and not should_compile):
                forward = partial(
                    checkpoint,
                    forward,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=context,
                )
            block.forward = forward

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors by their transformers names, adapters merged, without a tied head.

        Every rank must iterate to the end. The tensors may share storage with the masters.
        """
        if self.has_adapters:
            return lora.merge(self.causal_lm, dtype)
        return gather(self.causal_lm.named_parameters(), dtype)

    def weight_checksums(self, dtype: torch.dtype) -> dict[str, Checksum]:
        """Return checksums of what `named_weights` yields. Every rank must call it and gets the same."""
        if self.has_adapters:
            sums = Checksums()
            for name, tensor in lora.merge(self.causal_lm, dtype):
                sums.add(name, tensor)
            return sums.result()
        return gather_checksums(self.causal_lm.named_parameters(), dtype)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their transformers names; those of a value head are
        `value_head.*`."""
        parameters = {
            name: parameter
            for name, parameter in self.causal_lm.named_parameters()
            if parameter.requires_grad
        }
        if self.value_head is not None:
            named = self.value_head.named_parameters()
            parameters |= {f"value_head.{name}": parameter for name, parameter in named}
        return parameters

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and full shapes of what `named_weights` yields, in its order."""
        if self.has_adapters:
            return lora.merge_shapes(self.causal_lm)
        return [(name, tuple(p.shape)) for name, p in self.causal_lm.named_parameters()]


def hidden_states(
    causal_lm: PreTrainedModel, tokens: PackedTokens, context: ContextGroup | None = None
) -> Tensor:  # [C, H]
    """Return the trunk's last hidden states for packed sequences and their images.

    With a context group these are for this rank's slice: `[t, H]`.
    """
    images = tokens.images
    image_inputs: dict[str, Any] = {}
    input_ids, position_ids, shared = tokens.input_ids, tokens.position_ids, {}
    if context is not None:
        tokens = tokens.pad(context.size)
        input_ids, position_ids = map(context.slice, (tokens.input_ids, tokens.position_ids))
        shared["context_group"] = context
    keys = None if tokens.sharing is None else tokens.sharing.keys
    if keys is not None:
        shared["shared_keys"] = keys
    features = None if images is None else _features(causal_lm, images)
    if images is not None and images.order:
        image_inputs["mm_encoder_outputs"] = {"image": features}
    states = causal_lm.base_model(
        input_ids=input_ids[None],
        position_ids=position_ids[..., None, :],
        cu_seq_lens_q=tokens.cu_seqlens,
        cu_seq_lens_k=tokens.cu_seqlens if keys is None else keys.cu_seqlens,
        max_length_q=tokens.max_length,
        max_length_k=tokens.max_length if keys is None else keys.max_length,
        use_cache=False,
        **image_inputs,
        **shared,
    ).last_hidden_state[0]
    if features is not None and not image_inputs:
        # A dummy image with weight 0: all ranks must gather and reduce the tower's shards together.
        layers = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
        states = states + 0.0 * sum(feature.sum() for layer in layers for feature in layer)
    return states


def _features(causal_lm: PreTrainedModel, images: PackedImages) -> Any:
    """Return features of the distinct images, repeated for each run of placeholders."""
    trunk: Any = causal_lm.base_model
    features = trunk.get_image_features(images.pixels(), images.grids, return_dict=True)
    if images.order:
        deal_out(features, images.order)
    return features


def value_head(causal_lm: PreTrainedModel, dtype: torch.dtype) -> nn.Linear:
    """Return a head with one output for each hidden state, initialised to 0."""
    weight = causal_lm.get_input_embeddings().get_parameter("weight")
    head = nn.Linear(weight.shape[1], 1, dtype=dtype, device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def keep_products() -> Callable[[], Any]:
    """Return contexts of selective recomputation, which keep results of matrix products and attention."""
    products: list[Any] = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    return partial(create_selective_checkpoint_contexts, products + attention.kernels())
