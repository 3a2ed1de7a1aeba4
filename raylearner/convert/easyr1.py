"""EasyR1: a configuration file with overrides over it."""

import math
import re
from pathlib import Path
from typing import Any

from raylearner.config.problems import Where
from raylearner.convert import verl, verl_learner
from raylearner.convert.draft import Draft
from raylearner.convert.files import is_file, read_text
from raylearner.convert.settings import Settings
from raylearner.convert.verl_objective import ADVANTAGES, IN_GROUP, set_kl

ACTOR, ROLLOUT, MODEL = "worker.actor", "worker.rollout", "worker.actor.model"
EASYR1_SCORE = "raylearner.rewards.foreign:easyr1_score"
LOSSES = {"default": "ppo", "gspo": "gspo", "gspo_token": "gspo", "cispo": "cispo", "sapo": "sapo"}
AGGREGATIONS = {"token": "token_mean", "seq": "sequence_mean_of_means"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def convert(s: Settings) -> Draft:
    """Return the configuration that trains as these settings of EasyR1 do."""
    draft = Draft()
    batch, mini = s.whole("data.rollout_batch_size"), s.whole(f"{ACTOR}.global_batch_size")
    verl.groups(s, draft, size=batch, origin="data.rollout_batch_size", group_key=f"{ROLLOUT}.n")
    updates = math.ceil(batch / max(mini, 1))
    verl.set_updates(draft, updates, f"data.rollout_batch_size / {ACTOR}.global_batch_size")
    draft.set("replay.max_staleness", 0, decide=verl.SYNCHRONOUS)
    _data(s, draft)
    _run(s, draft)
    draft.set("environment.kind", "single_turn")
    prompt, response = s.whole("data.max_prompt_length"), s.whole("data.max_response_length")
    draft.set("renderer.max_prompt_tokens", prompt, "data.max_prompt_length")
    draft.set("renderer.max_response_tokens", response, "data.max_response_length")
    draft.set("sampling.max_turn_tokens", response, "data.max_response_length")
    if s.whole(f"{ROLLOUT}.limit_images") > 0:
        key = f"{ROLLOUT}.limit_images"
        draft.copy("renderer.images.max_images", s.whole, key)
    _sampling(s, draft)
    _rewards(s, draft)
    _engine(s, draft)
    _objective(s, draft)
    _optimizer(s, draft)
    if "wandb" in s.listed("trainer.logger"):
        draft.copy("observability.wandb.project", s.text, "trainer.project_name")
    return draft


def _sources(s: Settings, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for entry in s.listed(key):
        path, _, split = str(entry).partition("@")
        if path.endswith((".parquet", ".jsonl", ".json")):
            kind = "parquet" if path.endswith(".parquet") else "jsonl"
            source: dict[str, Any] = {"kind": kind, "path": path}
        else:
            source = {"kind": "hub", "path": path, "split": split or "train"}
        for name, column, default in (
            ("prompt_column", s.text("data.prompt_key"), "prompt"),
            ("answer_column", s.text("data.answer_key"), "answer"),
        ):
            if column != default:
                source[name] = column
        if re.search(r"[-_]vl|vision|llava", str(s.value(f"{MODEL}.model_path") or "").lower()):
            source["image_column"] = s.text("data.image_key")
        found.append(source)
    return found


def _data(s: Settings, draft: Draft) -> None:
    draft.set("model.kind", "pretrained")
    key = f"{MODEL}.model_path"
    if s.has(key):
        draft.copy("model.path", s.text, key)
    else:
        draft.set("model.path", "MODEL", decide="name the model: a directory or a hub id.")
    train = _sources(s, "data.train_files")
    if train:
        draft.set("data.train", train, "data.train_files")
    else:
        draft.set(
            "data.train", [{"kind": "parquet", "path": "train.parquet"}], decide="name the prompts."
        )
    evaluation = _sources(s, "data.val_files")
    if evaluation:
        draft.set("data.evaluation", evaluation, "data.val_files")
        draft.set("evaluation.every_steps", max(s.whole("trainer.val_freq"), 0), "trainer.val_freq")
        if not s.flag("trainer.val_before_train"):
            draft.set("evaluation.before_first_step", False, "trainer.val_before_train")
        draft.set(
            "evaluation.num_prompts",
            1000,
            decide="all rows were evaluated; set the number that you need.",
        )
    else:
        draft.set("evaluation", None)
    if s.flag("data.filter_overlong_prompts"):
        draft.set("data.long_prompts", "drop", "data.filter_overlong_prompts")
    if s.has("data.format_prompt"):
        _format_prompt(s, draft)


def _format_prompt(s: Settings, draft: Draft) -> None:
    """Set the instructions of a template around each prompt as a system prompt."""
    name = s.text("data.format_prompt")
    files = [Path(folder) / name for folder in s.facts.get("folders", ["."])]
    text: str | None = None
    for file in files:
        if is_file(file) and isinstance(content := read_text(file, Where(0, 0, name)), str):
            text = re.sub(r"\{\{.*?\}\}|\{#.*?#\}", "", content, flags=re.DOTALL).strip()
            break
    is_plain = text is not None and "{%" not in text
    draft.set(
        "data.system_prompt",
        text if is_plain else None,
        "data.format_prompt",
        decide=f"{name} was applied to each prompt, in the user's message."
        + ("" if is_plain else " Write its instructions here, or apply it to the file beforehand."),
    )


def _run(s: Settings, draft: Draft) -> None:
    draft.set(
        "run.name", verl.run_name(s.text("trainer.experiment_name")), "trainer.experiment_name"
    )
    if s.has("trainer.max_steps"):
        draft.copy("run.num_steps", s.whole, "trainer.max_steps")
    else:
        epochs = s.whole("trainer.total_epochs")
        verl.set_epochs(draft, epochs, _sources(s, "data.train_files"), "trainer.total_epochs")
    draft.set(
        "run.checkpoint_every_steps", max(s.whole("trainer.save_freq"), 0), "trainer.save_freq"
    )
    if s.whole("trainer.save_limit") > 0:
        draft.copy("run.keep_last", s.whole, "trainer.save_limit")


def _sampling(s: Settings, draft: Draft) -> None:
    draft.copy("sampling.temperature", s.number, f"{ROLLOUT}.temperature")
    verl.set_truncation(s, draft, ROLLOUT, "sampling")
    if s.flag(f"{ROLLOUT}.ignore_eos"):
        draft.set("sampling.extra_arguments", {"ignore_eos": True}, f"{ROLLOUT}.ignore_eos")
    if draft.get("data.evaluation") is None:
        return
    key = f"{ROLLOUT}.val_override_config"
    temperature = s.number(f"{key}.temperature") if s.has(f"{key}.temperature") else None
    if temperature is None:
        temperature = s.number(f"{ROLLOUT}.temperature")
    draft.set("evaluation.sampling.temperature", temperature, f"{key}.temperature")
    if s.has(f"{key}.top_p"):
        draft.copy("evaluation.sampling.top_p", s.number, f"{key}.top_p")
    if s.has(f"{key}.top_k"):
        draft.set("evaluation.sampling.top_k", max(s.whole(f"{key}.top_k"), 0), f"{key}.top_k")
    verl.set_samples(s, draft, f"{key}.n", is_greedy=not temperature)


def _rewards(s: Settings, draft: Draft) -> None:
    key = "worker.reward.reward_function"
    if not s.has(key):
        draft.set(
            "rewards.functions",
            [{"kind": "exact_answer"}],
            decide="no reward function is named; set one.",
        )
        return
    path, colon, name = s.text(key).rpartition(":")
    arguments: dict[str, Any] = (
        {"path": path, "name": name} if colon else {"path": name, "name": "main"}
    )
    options = s.below("worker.reward.reward_function_kwargs")
    if options:
        arguments["options"] = options
    draft.set(
        "rewards.functions",
        [{"kind": EASYR1_SCORE, "name": "overall", "arguments": arguments}],
        key,
    )


def _engine(s: Settings, draft: Draft) -> None:
    length = s.whole(f"{ROLLOUT}.max_model_len") if s.has(f"{ROLLOUT}.max_model_len") else 0
    longest = draft.get("renderer.max_prompt_tokens") + draft.get("renderer.max_response_tokens")
    dtype = s.text(f"{ROLLOUT}.dtype")
    draft.set("actors.engine.kind", "vllm")
    draft.set("actors.engine.dtype", DTYPES.get(dtype, dtype), f"{ROLLOUT}.dtype")
    draft.set("actors.engine.max_model_tokens", max(length, longest), f"{ROLLOUT}.max_model_len")
    draft.set("actors.engine.max_sequences", 256)
    draft.set("actors.max_concurrent_episodes", 256)
    if s.flag(f"{ROLLOUT}.enforce_eager"):
        draft.set("actors.engine.eager", True, f"{ROLLOUT}.enforce_eager")
    if s.has(f"{ROLLOUT}.max_num_batched_tokens"):
        extra = {"max_num_batched_tokens": s.whole(f"{ROLLOUT}.max_num_batched_tokens")}
        verl_learner.set_engine_arguments(draft, extra, f"{ROLLOUT}.max_num_batched_tokens")
    key = f"{ROLLOUT}.tensor_parallel_size"
    tensor = s.whole(key) if s.has(key) else 1
    gpus = s.whole("trainer.nnodes") * s.whole("trainer.n_gpus_per_node")
    uses_lora = s.whole(f"{MODEL}.lora.rank") > 0
    verl_learner.place(
        draft, gpus, tensor, "trainer.nnodes * trainer.n_gpus_per_node", needs_own=uses_lora
    )


def _objective(s: Settings, draft: Draft) -> None:
    key = "algorithm.adv_estimator"
    kind = ADVANTAGES.get(s.text(key))
    draft.set("learner.advantage.kind", kind or "grpo", key)
    if kind is None:
        draft.decide("learner.advantage.kind", f"{s.text(key)!r} is not known here.")
    if kind in IN_GROUP and draft.get("replay.group_size") == 1:
        draft.set("learner.advantage.group_of_one", "raw")
    if kind in ("gae", "reinforce_plus_plus"):
        draft.copy("learner.advantage.gamma", s.number, "algorithm.gamma")
    if kind == "remax":
        draft.set("replay.play_greedy", True)
    if kind == "gae":
        draft.copy("learner.advantage.lam", s.number, "algorithm.lam")
        _critic(s, draft)
    _loss(s, draft)
    mode = s.text(f"{ACTOR}.loss_avg_mode")
    draft.set("learner.aggregation", AGGREGATIONS.get(mode, "token_mean"), f"{ACTOR}.loss_avg_mode")
    draft.copy("learner.num_epochs", s.whole, f"{ACTOR}.ppo_epochs")
    if not s.flag("algorithm.disable_kl"):
        place = "loss" if s.flag("algorithm.use_kl_loss") else "reward"
        uses_lora = s.whole(f"{MODEL}.lora.rank") > 0
        coefficient = s.number("algorithm.kl_coef")
        set_kl(
            draft,
            place,
            s.text("algorithm.kl_penalty"),
            coefficient,
            "algorithm.kl_coef",
            uses_lora,
        )
        if s.text("algorithm.kl_type") == "adaptive" and place == "reward" and coefficient:
            draft.set("learner.kl.controller.kind", "adaptive", "algorithm.kl_type")
            draft.copy("learner.kl.controller.target", s.number, "algorithm.kl_target")
            horizon = s.number("algorithm.kl_horizon")
            draft.set("learner.kl.controller.horizon", horizon, "algorithm.kl_horizon")
    if s.flag("algorithm.online_filtering"):
        text = (
            "groups were dropped by their mean score; here those whose rewards are all equal are."
        )
        draft.set("replay.drop_zero_variance", True, "algorithm.online_filtering", decide=text)
        tries = s.whole("trainer.max_try_make_batch")
        if tries > 0:
            groups = tries * draft.get("replay.groups_per_step")
            draft.set("replay.max_filtered_groups", groups, "trainer.max_try_make_batch")


def _critic(s: Settings, draft: Draft) -> None:
    for name, key in (
        ("learning_rate", "optim.lr"),
        ("weight_decay", "optim.weight_decay"),
        ("clip", "cliprange_value"),
        ("max_grad_norm", "max_grad_norm"),
    ):
        draft.set(
            f"learner.critic.{name}", s.number(f"worker.critic.{key}"), f"worker.critic.{key}"
        )
    path = s.value("worker.critic.model.model_path")
    if path is not None and path != s.value(f"{MODEL}.model_path"):
        draft.set("learner.critic.path", str(path), "worker.critic.model.model_path")
    if s.whole("trainer.critic_warmup") > 0:
        draft.copy("learner.critic.warmup_steps", s.whole, "trainer.critic_warmup")


def _loss(s: Settings, draft: Draft) -> None:
    key = f"{ACTOR}.loss_type"
    kind = LOSSES.get(s.text(key))
    draft.set("learner.loss.kind", kind or "ppo", key)
    if kind is None:
        draft.decide(
            "learner.loss.kind", f"{s.text(key)!r} is not known here; see docs/algorithms.md."
        )
    low, high = s.number(f"{ACTOR}.clip_ratio_low"), s.number(f"{ACTOR}.clip_ratio_high")
    match kind:
        case "cispo":
            draft.set(
                "learner.loss.ratio_min", max(0.0, round(1 - low, 9)), f"1 - {ACTOR}.clip_ratio_low"
            )
            draft.set("learner.loss.ratio_max", round(1 + high, 9), f"1 + {ACTOR}.clip_ratio_high")
        case "sapo":
            draft.copy("learner.loss.tau_positive", s.number, f"{ACTOR}.tau_positive")
            draft.copy("learner.loss.tau_negative", s.number, f"{ACTOR}.tau_negative")
        case _:
            draft.set("learner.loss.clip_low", low, f"{ACTOR}.clip_ratio_low")
            draft.set("learner.loss.clip_high", high, f"{ACTOR}.clip_ratio_high")
    if kind in ("ppo", None):
        key = f"{ACTOR}.clip_ratio_dual"
        draft.copy("learner.loss.dual_clip", s.number, key)


def _optimizer(s: Settings, draft: Draft) -> None:
    optim = f"{ACTOR}.optim"
    draft.copy("learner.learning_rate", s.number, f"{optim}.lr")
    updates = draft.get("learner.num_mini_batches") * s.whole(f"{ACTOR}.ppo_epochs")
    key = f"{optim}.lr_warmup_steps"
    steps = s.whole(key) if s.has(key) else 0
    if not s.has(key):
        key = f"{optim}.lr_warmup_ratio"
        steps = int(s.number(key) * draft.get("run.num_steps"))
    if steps:
        draft.set("learner.warmup_steps", steps * updates, f"{key}, in updates")
    if s.text(f"{optim}.lr_scheduler_type") == "cosine":
        draft.set("learner.schedule", "cosine", f"{optim}.lr_scheduler_type")
    draft.copy("learner.weight_decay", s.number, f"{optim}.weight_decay")
    draft.copy("learner.max_grad_norm", s.number, f"{ACTOR}.max_grad_norm")
    if s.flag(f"{MODEL}.enable_gradient_checkpointing"):
        key = f"{MODEL}.enable_gradient_checkpointing"
        draft.set("learner.activation_checkpointing", "full", key)
    verl_learner.set_context(draft, s.whole(f"{ACTOR}.ulysses_size"), f"{ACTOR}.ulysses_size")
    shard = s.whole(f"{ACTOR}.fsdp.fsdp_size")
    if 0 < shard < draft.get("learner.num_ranks"):
        draft.set("learner.shard_size", shard, f"{ACTOR}.fsdp.fsdp_size")
    if s.flag(f"{MODEL}.freeze_vision_tower"):
        draft.set("learner.vision_tower", "frozen", f"{MODEL}.freeze_vision_tower")
    if s.whole(f"{MODEL}.lora.rank") > 0:
        draft.copy("learner.lora.rank", s.whole, f"{MODEL}.lora.rank")
        draft.copy("learner.lora.alpha", s.number, f"{MODEL}.lora.alpha")
        modules = s.text(f"{MODEL}.lora.target_modules")
        value = (
            modules if modules == "all-linear" else [part.strip() for part in modules.split(",")]
        )
        draft.set("learner.lora.target_modules", value, f"{MODEL}.lora.target_modules")
