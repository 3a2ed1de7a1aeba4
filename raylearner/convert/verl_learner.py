"""verl: engines, placement on GPUs, optimizer and memory of the learner."""

import math
from typing import Any

from raylearner.config.engine_checks import argument_problems
from raylearner.convert.draft import Draft
from raylearner.convert.settings import Settings

ACTOR, ROLLOUT, MODEL = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
)
ASYNC, V1 = "async_training", "trainer.v1"


def is_fully_async(s: Settings) -> bool:
    return any(key.startswith(f"{ASYNC}.") for key in s.given)


def is_one_step_off(s: Settings) -> bool:
    return not is_fully_async(s) and any(key.startswith("rollout.") for key in s.given)


def is_separate(s: Settings) -> bool:
    """Return whether verl itself gives engines and learner their own GPUs."""
    is_v1 = s.has(f"{V1}.trainer_mode") and s.text(f"{V1}.trainer_mode") == "separate_async"
    return is_fully_async(s) or is_one_step_off(s) or is_v1


def engine(s: Settings, draft: Draft) -> None:
    """Set the engine of an actor."""
    prompt, response = (
        draft.get("renderer.max_prompt_tokens"),
        draft.get("renderer.max_response_tokens"),
    )
    length = s.whole(f"{ROLLOUT}.max_model_len") if s.has(f"{ROLLOUT}.max_model_len") else 0
    draft.set("actors.engine.kind", "vllm")
    draft.copy("actors.engine.dtype", s.text, f"{ROLLOUT}.dtype")
    draft.set(
        "actors.engine.max_model_tokens", max(length, prompt + response), f"{ROLLOUT}.max_model_len"
    )
    sequences = s.whole(f"{ROLLOUT}.max_num_seqs")
    draft.set("actors.engine.max_sequences", sequences, f"{ROLLOUT}.max_num_seqs")
    draft.set("actors.max_concurrent_episodes", sequences, f"{ROLLOUT}.max_num_seqs")
    if s.has(f"{ROLLOUT}.enforce_eager") and s.flag(f"{ROLLOUT}.enforce_eager"):
        draft.set("actors.engine.eager", True, f"{ROLLOUT}.enforce_eager")
    extra = s.below(f"{ROLLOUT}.engine_kwargs.vllm")
    if s.has(f"{ROLLOUT}.max_num_batched_tokens"):
        extra["max_num_batched_tokens"] = s.whole(f"{ROLLOUT}.max_num_batched_tokens")
    origin = s.where(f"{ROLLOUT}.max_num_batched_tokens") or f"{ROLLOUT}.engine_kwargs.vllm"
    set_engine_arguments(draft, extra, origin)


def set_engine_arguments(draft: Draft, extra: dict[str, Any], origin: str) -> None:
    """Set further arguments of vLLM that are permitted, and list the others."""
    refused = dict(argument_problems(extra))
    for name, reason in refused.items():
        draft.lost.append(f"{origin}.{name}: {reason}")
    allowed = {name: value for name, value in extra.items() if name not in refused}
    if allowed:
        draft.set("actors.engine.extra_arguments", allowed, origin)


def placement(s: Settings, draft: Draft) -> None:
    """Set the GPUs of learner and engines."""
    tensor = s.whole(f"{ROLLOUT}.tensor_model_parallel_size")
    gpus = s.whole("trainer.nnodes") * s.whole("trainer.n_gpus_per_node")
    origin = "trainer.nnodes * trainer.n_gpus_per_node"
    if is_separate(s):
        prefix = "rollout" if any(key.startswith("rollout.") for key in s.given) else ROLLOUT
        engines = (
            max(s.whole(f"{prefix}.nnodes"), 1)
            * s.whole(f"{prefix}.n_gpus_per_node")
            // max(tensor, 1)
        )
        draft.set("learner.num_ranks", gpus, origin)
        draft.set(
            "actors.num_actors", max(engines, 1), f"{prefix}.nnodes * {prefix}.n_gpus_per_node"
        )
        draft.set(
            "actors.engine.tensor_parallel_size", tensor, f"{ROLLOUT}.tensor_model_parallel_size"
        )
        memory = f"{ROLLOUT}.gpu_memory_utilization"
        if s.has(memory):
            draft.copy("actors.engine.memory_fraction", s.number, memory)
        return
    is_given = s.has(f"{ROLLOUT}.tensor_model_parallel_size")
    uses_lora = s.whole(f"{MODEL}.lora_rank") > 0
    place(draft, gpus, tensor if is_given else 1, origin, needs_own=uses_lora)


def place(draft: Draft, gpus: int, tensor: int, origin: str, *, needs_own: bool) -> None:
    """Place learner and engines on shared GPUs, or on halves where engines need several or LoRA is used."""
    engines = (gpus - gpus // 2) // max(tensor, 1)
    ranks = gpus - engines * tensor
    if (tensor > 1 or (needs_own and gpus > 1)) and engines and ranks > 0:
        draft.set("learner.num_ranks", ranks, origin)
        draft.set("actors.num_actors", engines, origin)
        draft.set("actors.engine.tensor_parallel_size", tensor)
        reason = "engines of several GPUs" if tensor > 1 else "adapters, which are not merged,"
        draft.decide(
            "learner.num_ranks",
            f"all {gpus} GPUs did both; here {reason} need GPUs of their own. Shift GPUs to the side"
            " that is waited for, which the console shows.",
        )
        return
    draft.set("learner.num_ranks", gpus, origin)
    draft.set("actors.num_actors", gpus, origin)
    if needs_own:
        return
    draft.set("actors.engine.sleep", True, "all GPUs do both")
    draft.set("weights.transport", "ipc", "all GPUs do both")


def optimizer(s: Settings, draft: Draft) -> None:
    """Set optimizer, schedule, memory and adapters of the learner."""
    optim, fsdp = f"{ACTOR}.optim", f"{ACTOR}.fsdp_config"
    draft.copy("learner.learning_rate", s.number, f"{optim}.lr")
    _warmup(s, draft, optim)
    for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style"):
        key = f"{optim}.{name}"
        if s.has(key) and s.text(key) in ("cosine", "linear"):
            draft.copy("learner.schedule", s.text, key)
    draft.copy("learner.weight_decay", s.number, f"{optim}.weight_decay")
    if s.has(f"{optim}.betas"):
        draft.copy("learner.betas", s.value, f"{optim}.betas")
    draft.copy("learner.max_grad_norm", s.number, f"{ACTOR}.grad_clip")
    if s.flag(f"{MODEL}.enable_gradient_checkpointing"):
        draft.set(
            "learner.activation_checkpointing", "full", f"{MODEL}.enable_gradient_checkpointing"
        )
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    size = set_context(draft, s.whole(key), key)
    _tokens(s, draft, size)
    shard = s.whole(f"{fsdp}.fsdp_size")
    if 0 < shard < draft.get("learner.num_ranks"):
        draft.set("learner.shard_size", shard, f"{fsdp}.fsdp_size")
    if s.flag(f"{fsdp}.offload_policy"):
        draft.set("learner.offload", True, f"{fsdp}.offload_policy")
    if s.text(f"{fsdp}.dtype") == "float32":
        draft.set("learner.compute_dtype", "float32", f"{fsdp}.dtype")
    if s.flag(f"{ACTOR}.freeze_vision_tower"):
        draft.set("learner.vision_tower", "frozen", f"{ACTOR}.freeze_vision_tower")
    _lora(s, draft)


def set_context(draft: Draft, size: int, origin: str) -> int:
    """Set the number of ranks that share a micro-batch, and return it."""
    ranks = draft.get("learner.num_ranks")
    possible = math.gcd(size, ranks)
    if size > 1:
        draft.set("learner.context_parallel_size", possible, origin)
        if possible != size:
            text = f"it was {size}, which does not divide learner.num_ranks {ranks}."
            draft.decide("learner.context_parallel_size", text)
    return max(possible, 1)


def _warmup(s: Settings, draft: Draft, optim: str) -> None:
    updates = draft.get("learner.num_mini_batches", 1) * s.whole(f"{ACTOR}.ppo_epochs")
    steps, key = s.whole(f"{optim}.lr_warmup_steps"), f"{optim}.lr_warmup_steps"
    if steps < 0:
        key = f"{optim}.lr_warmup_steps_ratio"
        steps = int(s.number(key) * draft.get("run.num_steps"))
    if steps:
        draft.set("learner.warmup_steps", steps * updates, f"{key}, in updates")


def _tokens(s: Settings, draft: Draft, size: int) -> None:
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    if not s.flag(f"{ACTOR}.use_dynamic_bsz"):
        return
    tokens = s.whole(key) * max(size, 1)
    longest = draft.get("renderer.max_prompt_tokens") + draft.get("renderer.max_response_tokens")
    if tokens >= longest:
        draft.set("learner.max_tokens_per_micro_batch", tokens, key)


def _lora(s: Settings, draft: Draft) -> None:
    if s.whole(f"{MODEL}.lora_rank") <= 0:
        return
    if s.has(f"{MODEL}.lora_adapter_path"):
        draft.copy("learner.lora.path", s.text, f"{MODEL}.lora_adapter_path")
        return
    draft.copy("learner.lora.rank", s.whole, f"{MODEL}.lora_rank")
    draft.copy("learner.lora.alpha", s.number, f"{MODEL}.lora_alpha")
    modules = s.value(f"{MODEL}.target_modules")
    draft.set("learner.lora.target_modules", modules, f"{MODEL}.target_modules")
