"""TRL: arguments of GRPO and RLOO, from YAML, a command or a script."""

import math
from pathlib import PurePath
from typing import Any

from raylearner.convert import trl_objective, verl, verl_learner
from raylearner.convert.draft import Draft
from raylearner.convert.rows import count_rows
from raylearner.convert.settings import Settings

DEFAULT_TURNS = 8
MAX_SEQUENCES = 256
KNOWN_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "math_verify", "answer_tag": None},
    "reasoning_accuracy_reward": {"kind": "math_verify", "answer_tag": None},
    "accuracy": {"kind": "math_verify", "answer_tag": None},
    "think_format_reward": {"kind": "trl.rewards:think_format_reward"},
}
WITH_SOLUTION = ("accuracy_reward", "reasoning_accuracy_reward", "accuracy")
"""Reward functions that compare with the column `solution`."""
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}


def convert(s: Settings) -> Draft:
    """Return the configuration that trains as these arguments of TRL do."""
    draft = Draft()
    is_rloo = s.facts.get("method") == "rloo" or _has_rloo_keys(s)
    _batches(s, draft, is_rloo)
    _data(s, draft)
    _run(s, draft)
    _environment(s, draft)
    _sampling(s, draft)
    _rewards(s, draft)
    _engine(s, draft)
    trl_objective.objective(s, draft, is_rloo)
    _optimizer(s, draft)
    _observability(s, draft)
    return draft


def _has_rloo_keys(s: Settings) -> bool:
    return s.has("normalize_advantages") or s.has("reward_clip_range")


def _batches(s: Settings, draft: Draft, is_rloo: bool) -> None:
    """Set groups and updates per step; TRL's batches count completions."""
    size = s.whole("num_generations") if s.has("num_generations") or not is_rloo else 2
    device, accumulation = (
        s.whole("per_device_train_batch_size"),
        s.whole("gradient_accumulation_steps"),
    )
    processes, is_known = s.facts.get("num_processes", 1), "num_processes" in s.facts
    steps = s.whole("steps_per_generation") if s.has("steps_per_generation") else accumulation
    completions, origin = (
        device * processes * steps,
        "per_device_train_batch_size * processes * steps_per_generation",
    )
    if s.has("generation_batch_size"):
        completions, origin = s.whole("generation_batch_size"), "generation_batch_size"
        steps = max(1, completions // max(device * processes, 1))
    groups = completions / max(size, 1)
    draft.set("replay.groups_per_step", max(1, math.ceil(groups)), f"{origin} / num_generations")
    draft.set("replay.group_size", size, "num_generations")
    if groups != int(groups):
        text = f"{completions} completions are not a multiple of num_generations {size}."
        draft.decide("replay.groups_per_step", text)
    if not is_known and not s.has("generation_batch_size"):
        draft.decide(
            "replay.groups_per_step",
            "the number of processes is not in the file: multiply by that of `accelerate launch`.",
        )
    if size < 2:
        draft.set("replay.partial_groups", "drop")
    origin = "steps_per_generation / gradient_accumulation_steps"
    verl.set_updates(draft, max(1, steps // max(accumulation, 1)), origin)
    draft.copy("learner.num_epochs", s.whole, "num_iterations")
    draft.set("replay.max_staleness", 0, decide=verl.SYNCHRONOUS)


def updates_per_step(draft: Draft) -> int:
    return draft.get("learner.num_mini_batches") * draft.get("learner.num_epochs")


def _sources(s: Settings, split: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    listed = s.listed("datasets")
    if listed:
        for entry in listed:
            if isinstance(entry, dict) and entry.get("path"):
                source = {"kind": "hub", "path": str(entry["path"])}
                source |= {"config": str(entry["name"])} if entry.get("name") else {}
                found.append({**source, "split": str(entry.get("split", "train"))})
    elif s.has("dataset_name"):
        name = s.text("dataset_name")
        if name.endswith((".jsonl", ".parquet")):
            found.append({"kind": name.rpartition(".")[2], "path": name})
        else:
            source = {"kind": "hub", "path": name}
            source |= {"config": s.text("dataset_config")} if s.has("dataset_config") else {}
            found.append({**source, "split": split})
    names = {name.rpartition(".")[2] for name in map(str, s.listed("reward_funcs"))}
    for source in found:
        if s.text("dataset_prompt_column") != "prompt":
            source["prompt_column"] = s.text("dataset_prompt_column")
        if names & set(WITH_SOLUTION):
            source["answer_column"] = "solution"
    return found


def _strategy(s: Settings) -> str:
    key = "evaluation_strategy" if s.has("evaluation_strategy") else "eval_strategy"
    return str(s.value(key))


def _data(s: Settings, draft: Draft) -> None:
    draft.set("model.kind", "pretrained")
    if s.has("model_name_or_path"):
        draft.copy("model.path", s.text, "model_name_or_path")
    else:
        draft.set("model.path", "MODEL", decide="name the model: a directory or a hub id.")
    train = _sources(s, s.text("dataset_train_split"))
    origin = s.where("dataset_name", "datasets")
    if train:
        draft.set("data.train", train, origin)
    else:
        unnamed = [{"kind": "jsonl", "path": "train.jsonl"}]
        draft.set(
            "data.train", unnamed, decide="the dataset is made by code: write its rows to a file."
        )
    if s.facts.get("has_evaluation") or _strategy(s) not in ("no", "False"):
        held_out = _sources(s, s.text("dataset_test_split"))
        if held_out:
            draft.set("data.evaluation", held_out, s.where("dataset_test_split", "eval_strategy"))
            every = s.whole("eval_steps") if s.has("eval_steps") else 0
            draft.set("evaluation.every_steps", every // updates_per_step(draft), "eval_steps")
            if s.has("eval_on_start"):
                draft.copy("evaluation.before_first_step", s.flag, "eval_on_start")
            if s.has("num_generations_eval"):
                samples = s.whole("num_generations_eval")
                draft.set("evaluation.samples_per_prompt", samples, "num_generations_eval")
            draft.set(
                "evaluation.num_prompts",
                1000,
                decide="all rows were evaluated; set the number that you need.",
            )
    if "data.evaluation" not in draft.entries:
        draft.set("evaluation", None, "eval_strategy")


def _run(s: Settings, draft: Draft) -> None:
    key = "run_name" if s.has("run_name") else "output_dir"
    name = PurePath(s.text(key)).name if s.has(key) else "trl"
    draft.set("run.name", verl.run_name(name), s.where(key))
    updates = updates_per_step(draft)
    groups = draft.get("replay.groups_per_step")
    if s.whole("max_steps") > 0:
        draft.set("run.num_steps", max(1, s.whole("max_steps") // updates), "max_steps, in updates")
    else:
        epochs = s.number("num_train_epochs")
        rows = count_rows([x for x in draft.get("data.train") if x["kind"] != "hub"])
        if rows is None:
            text = f"num_train_epochs is {epochs:g}: set {epochs:g} * rows of the data / {groups}."
            draft.set("run.num_steps", 100, decide=text)
        else:
            steps = max(1, int(epochs * rows / groups))
            draft.set("run.num_steps", steps, f"num_train_epochs * {rows} rows / {groups}")
    every = (
        s.whole("save_steps")
        if s.text("save_strategy") == "steps" and s.number("save_steps") >= 1
        else 0
    )
    draft.set(
        "run.checkpoint_every_steps", every // updates, s.where("save_steps", "save_strategy")
    )
    if s.has("save_total_limit"):
        draft.copy("run.keep_last", s.whole, "save_total_limit")


def _environment(s: Settings, draft: Draft) -> None:
    if s.has("environment_factory"):
        name = s.text("environment_factory")
        draft.set("environment.kind", "custom")
        draft.set("environment.path", f"my_environment:{name}", "environment_factory")
        draft.decide(
            "environment.path", "write it as an environment in a module (docs/environments.md)."
        )
    elif s.has("tools"):
        functions = [
            {"kind": "function", "function": f"my_tools:{name}"} for name in s.listed("tools")
        ]
        draft.set("environment.kind", "tool_use")
        draft.set(
            "environment.tools",
            functions,
            "tools",
            decide="move these functions to the module my_tools.",
        )
        draft.set("environment.dialect", {"kind": "json", "answer_tag": None})
        draft.set("environment.observation_tag", None)
        draft.set("renderer.observation_role", "tool")
        key = "max_tool_calling_iterations"
        draft.set(
            "environment.max_turns", s.whole(key) if s.has(key) else DEFAULT_TURNS, s.where(key)
        )
    else:
        draft.set("environment.kind", "single_turn")


def _sampling(s: Settings, draft: Draft) -> None:
    prompt, response = s.whole("max_prompt_length"), s.whole("max_completion_length")
    is_given = s.has("max_prompt_length")
    length = next(
        (s.whole(key) for key in ("vllm_max_model_length", "vllm_max_model_len") if s.has(key)), 0
    )
    if not is_given and length > response:
        prompt = length - response
    text = (
        ""
        if is_given or length > response
        else "prompts had no limit; `check` counts those that do not fit."
    )
    draft.set("renderer.max_prompt_tokens", prompt, s.where("max_prompt_length"), decide=text)
    draft.set("renderer.max_response_tokens", response, "max_completion_length")
    draft.set("sampling.max_turn_tokens", response, "max_completion_length")
    if is_given:
        draft.set("data.long_prompts", "drop", "max_prompt_length")
    arguments = s.below("chat_template_kwargs")
    if arguments:
        draft.set("renderer.chat_template_arguments", arguments, "chat_template_kwargs")
    draft.copy("sampling.temperature", s.number, "temperature")
    for key, off in (("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if s.has(key) and s.number(key) != off:
            draft.set(f"sampling.{key}", s.number(key), key)
    if s.has("top_k") and s.whole("top_k") > 0:
        draft.copy("sampling.top_k", s.whole, "top_k")
    for key in ("vllm_structured_outputs_regex", "vllm_guided_decoding_regex"):
        if s.has(key):
            draft.copy("sampling.regex", s.text, key)
    extra = s.below("generation_kwargs")
    if extra:
        draft.set("sampling.extra_arguments", extra, "generation_kwargs")


def _rewards(s: Settings, draft: Draft) -> None:
    names = [str(name) for name in s.listed("reward_funcs")]
    functions: list[dict[str, Any]] = []
    unplaced: list[str] = []
    if s.has("reward_model_name_or_path"):
        functions.append({"kind": "model", "path": s.text("reward_model_name_or_path"), "gpus": 1})
    for name in names:
        module, dot, function = name.rpartition(".")
        if name in KNOWN_REWARDS or (module.startswith("trl.") and function in KNOWN_REWARDS):
            functions.append(dict(KNOWN_REWARDS[function or name]))
        elif "/" in name:
            functions.append({"kind": "model", "path": name, "gpus": 1})
        elif dot:
            functions.append({"kind": f"{module}:{function}"})
        else:
            unplaced.append(name)
            functions.append({"kind": f"my_rewards:{name}"})
    weights = s.listed("reward_weights")
    for function, weight in zip(functions, weights, strict=False):
        function["weight"] = weight
    text = (
        f"move {', '.join(unplaced)} to the module my_rewards; they are called as in TRL."
        if unplaced
        else ""
    )
    if not functions:
        functions, text = [{"kind": "exact_answer"}], "no reward function is named; set one."
    draft.set(
        "rewards.functions", functions, s.where("reward_funcs", "reward_weights"), decide=text
    )


def _engine(s: Settings, draft: Draft) -> None:
    draft.set("actors.engine.kind", "vllm")
    longest = draft.get("renderer.max_prompt_tokens") + draft.get("renderer.max_response_tokens")
    keys = s.where("vllm_max_model_length", "vllm_max_model_len")
    lengths = [
        s.whole(key) for key in ("vllm_max_model_length", "vllm_max_model_len") if s.has(key)
    ]
    draft.set("actors.engine.max_model_tokens", max([longest, *lengths]), keys)
    episodes = min(
        MAX_SEQUENCES, draft.get("replay.groups_per_step") * draft.get("replay.group_size")
    )
    draft.set("actors.engine.max_sequences", episodes)
    draft.set("actors.max_concurrent_episodes", episodes)
    processes = int(s.facts.get("num_processes", 1))
    tensor = s.whole("vllm_tensor_parallel_size")
    if s.flag("use_vllm") and s.text("vllm_mode") == "server":
        draft.set("learner.num_ranks", processes)
        draft.set("actors.num_actors", "auto", "vllm_mode")
        draft.set("actors.engine.tensor_parallel_size", tensor, "vllm_tensor_parallel_size")
        draft.decide("actors.num_actors", "`auto` fills the GPUs that the learner leaves.")
        return
    verl_learner.place(
        draft, processes, tensor, "processes of the launcher", needs_own=s.flag("use_peft")
    )
    if "num_processes" not in s.facts:
        draft.decide("learner.num_ranks", "set the number of GPUs; it is not in the file.")


def _optimizer(s: Settings, draft: Draft) -> None:
    draft.copy("learner.learning_rate", s.number, "learning_rate")
    updates = updates_per_step(draft) * draft.get("run.num_steps")
    steps, ratio = s.number("warmup_steps"), s.number("warmup_ratio")
    if steps >= 1:
        draft.set("learner.warmup_steps", min(int(steps), updates), "warmup_steps")
    elif steps or ratio:
        count = math.ceil((steps or ratio) * updates)
        draft.set("learner.warmup_steps", count, s.where("warmup_steps", "warmup_ratio"))
    schedule = s.text("lr_scheduler_type")
    draft.set("learner.schedule", SCHEDULES.get(schedule, "cosine"), "lr_scheduler_type")
    if schedule not in SCHEDULES:
        draft.decide(
            "learner.schedule", f"{schedule!r} is not here; constant, linear and cosine are."
        )
    if s.number("weight_decay"):
        draft.copy("learner.weight_decay", s.number, "weight_decay")
    if s.has("adam_beta1") or s.has("adam_beta2"):
        betas = [s.number("adam_beta1"), s.number("adam_beta2")]
        draft.set("learner.betas", betas, s.where("adam_beta1", "adam_beta2"))
    draft.copy("learner.max_grad_norm", s.number, "max_grad_norm")
    if s.flag("gradient_checkpointing"):
        draft.set("learner.activation_checkpointing", "full", "gradient_checkpointing")
    if s.has("bf16") and not s.flag("bf16"):
        draft.set("learner.compute_dtype", "float32", "bf16")
    if s.flag("use_peft"):
        draft.copy("learner.lora.rank", s.whole, "lora_r")
        draft.copy("learner.lora.alpha", s.number, "lora_alpha")
        modules = s.listed("lora_target_modules")
        if modules and modules != ["all-linear"]:
            draft.set("learner.lora.target_modules", modules, "lora_target_modules")


def _observability(s: Settings, draft: Draft) -> None:
    if "wandb" in s.listed("report_to"):
        project = next((s.text(key) for key in ("wandb_project", "project") if s.has(key)), "trl")
        draft.set("observability.wandb.project", project, "report_to")
    if s.flag("log_completions"):
        draft.set("observability.completions.log", True, "log_completions")
        if s.has("num_completions_to_print"):
            count = s.whole("num_completions_to_print")
            draft.set(
                "observability.completions.num_completions", count, "num_completions_to_print"
            )
        if s.flag("log_unique_prompts"):
            draft.set("observability.completions.unique_prompts", True, "log_unique_prompts")
