"""verl: data, lengths, sampling, batches, staleness and placement; its objective is in `verl_objective`."""

import math
import re
from pathlib import PurePath
from typing import Any

from raylearner.convert import verl_episode, verl_learner, verl_objective
from raylearner.convert.draft import Draft
from raylearner.convert.rows import count_rows, has_text
from raylearner.convert.settings import Settings
from raylearner.convert.verl_learner import (
    ACTOR,
    ASYNC,
    MODEL,
    ROLLOUT,
    V1,
    is_fully_async,
    is_one_step_off,
)

SYNCHRONOUS = (
    "0 trains on fresh episodes only, as before. To train asynchronously, set 2, loss"
    " {kind: decoupled_ppo}, and separate GPUs for learner and engines (docs/migration.md)."
)
COMPOSED = frozenset(
    [
        "ppo_trainer",
        "ppo_megatron_trainer",
        "fully_async_ppo_trainer",
        "fully_async_ppo_megatron_trainer",
        "one_step_off_ppo_trainer",
        "one_step_off_ppo_megatron_trainer",
        "actor",
        "critic",
        "data",
        "dp_actor",
        "dp_critic",
        "dp_ref",
        "dp_reward_loop",
        "dp_reward_model",
        "fsdp",
        "hf_model",
        "legacy_data",
        "legacy_reward_impl",
        "megatron",
        "megatron_actor",
        "megatron_critic",
        "megatron_ref",
        "profiler",
        "ref",
        "reward",
        "reward_manager",
        "reward_model",
        "rollout",
        "rollout_correction",
        "distillation",
        "transfer_queue",
        "dp",
    ]
)
"""Names of verl's own files in `defaults`, whose values the table has."""


def convert(settings: Settings) -> Draft:
    """Return the configuration that trains as these settings of verl do."""
    draft = Draft()
    _batches(settings, draft)
    run(settings, draft)
    data(settings, draft)
    verl_episode.environment(settings, draft)
    lengths(settings, draft)
    sampling(settings, draft)
    verl_episode.rewards(settings, draft)
    verl_learner.engine(settings, draft)
    verl_learner.placement(settings, draft)
    verl_objective.objective(settings, draft)
    verl_learner.optimizer(settings, draft)
    observability(settings, draft)
    return draft


def _batches(s: Settings, draft: Draft) -> None:
    """Set groups, updates per step, staleness and pushes."""
    mini = s.whole(f"{ACTOR}.ppo_mini_batch_size")
    mini_key = f"{ACTOR}.ppo_mini_batch_size"
    if is_fully_async(s):
        batches, every = (
            s.whole(f"{ASYNC}.require_batches"),
            s.whole(f"{ASYNC}.trigger_parameter_sync_step"),
        )
        threshold = s.number(f"{ASYNC}.staleness_threshold")
        s.value("data.train_batch_size")
        s.value("data.gen_batch_size")
        groups(s, draft, size=batches * mini, origin=f"{ASYNC}.require_batches * {mini_key}")
        draft.set("learner.num_mini_batches", batches, f"{ASYNC}.require_batches")
        staleness = max(0, math.ceil(round((1 + threshold) * every, 6)) - 1)
        draft.set("replay.max_staleness", staleness, f"{ASYNC}.staleness_threshold")
        draft.set("weights.every_steps", every, f"{ASYNC}.trigger_parameter_sync_step")
        draft.set(
            "replay.on_stale",
            "train",
            decide="verl trains tokens of any age; `mask` leaves out those beyond max_staleness.",
        )
        return
    batch = s.whole("data.train_batch_size")
    groups(s, draft, size=batch, origin="data.train_batch_size")
    set_updates(draft, math.ceil(batch / max(mini, 1)), f"data.train_batch_size / {mini_key}")
    if batch % max(mini, 1) and batch > mini:
        draft.decide("learner.num_mini_batches", f"{batch} prompts are not a multiple of {mini}.")
    staleness_of_synchronous(s, draft)


def groups(
    s: Settings, draft: Draft, *, size: int, origin: str, group_key: str = f"{ROLLOUT}.n"
) -> None:
    """Set the number of groups of a step and of episodes of a group."""
    group_size = s.whole(group_key)
    draft.set("replay.groups_per_step", max(size, 1), origin)
    draft.set("replay.group_size", group_size, group_key)
    if group_size < 2:
        draft.set("replay.partial_groups", "drop")


def set_updates(draft: Draft, count: int, origin: str) -> None:
    episodes = draft.get("replay.groups_per_step") * draft.get("replay.group_size")
    draft.set("learner.num_mini_batches", max(1, min(count, episodes)), origin)


def staleness_of_synchronous(s: Settings, draft: Draft) -> None:
    """Set the staleness of a trainer that waits for each batch, or lets it lag by a batch."""
    if is_one_step_off(s):
        draft.set("replay.max_staleness", 1, "one step off policy")
    elif s.has(f"{V1}.trainer_mode") and s.text(f"{V1}.trainer_mode") != "sync":
        _staleness_of_v1(s, draft)
    else:
        draft.set("replay.max_staleness", 0, decide=SYNCHRONOUS)


def _staleness_of_v1(s: Settings, draft: Draft) -> None:
    every = 1
    if s.text(f"{V1}.trainer_mode") == "separate_async":
        every = s.whole(f"{V1}.separate_async.parameter_sync_step")
        draft.set("weights.every_steps", every, f"{V1}.separate_async.parameter_sync_step")
    bound = s.whole(f"{V1}.sampler.max_off_policy_threshold") * every
    draft.set(
        "replay.max_staleness", max(bound, every - 1), f"{V1}.sampler.max_off_policy_threshold"
    )
    rule = s.text(f"{V1}.sampler.max_off_policy_strategy")
    draft.set(
        "replay.on_stale",
        "wait" if rule == "wait" else "drop",
        f"{V1}.sampler.max_off_policy_strategy",
    )


def run(s: Settings, draft: Draft) -> None:
    """Set name, length and checkpoints of the run."""
    draft.set("run.name", run_name(s.text("trainer.experiment_name")), "trainer.experiment_name")
    every = draft.get("weights.every_steps", 1) if is_fully_async(s) else 1
    _length(s, draft)
    save = s.whole("trainer.save_freq")
    draft.set("run.checkpoint_every_steps", max(save, 0) * every, "trainer.save_freq")
    if s.has("trainer.max_actor_ckpt_to_keep"):
        draft.copy("run.keep_last", s.whole, "trainer.max_actor_ckpt_to_keep")


def run_name(text: str) -> str:
    """Return a name of a run: letters, digits, dots, dashes and underscores."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")
    return name or "run"


def _length(s: Settings, draft: Draft) -> None:
    size = draft.get("replay.groups_per_step")
    epochs = s.whole("trainer.total_epochs")
    if is_fully_async(s) and s.has("rollout.total_rollout_steps"):
        steps = s.whole("rollout.total_rollout_steps") // size
        draft.set("run.num_steps", max(steps, 1), "rollout.total_rollout_steps / groups_per_step")
    elif s.has("trainer.total_training_steps"):
        draft.copy("run.num_steps", s.whole, "trainer.total_training_steps")
    else:
        set_epochs(draft, epochs, sources(s, "data.train_files"), "trainer.total_epochs")


def set_epochs(draft: Draft, epochs: int, found: list[dict[str, Any]], origin: str) -> None:
    """Set the number of steps from that of epochs, where the rows can be counted."""
    size = draft.get("replay.groups_per_step")
    rows = count_rows(found)
    if rows is None:
        draft.set(
            "run.num_steps",
            100,
            decide=f"{origin} is {epochs}: set {epochs} * rows of the data / {size}; the rows are not known here.",
        )
    else:
        draft.set(
            "run.num_steps", max(1, epochs * rows // size), f"{origin} * {rows} rows / {size}"
        )


def sources(s: Settings, key: str) -> list[dict[str, Any]]:
    """Return the data sources of a list of files."""
    found: list[dict[str, Any]] = []
    for path in s.listed(key):
        kind = "jsonl" if str(path).endswith((".jsonl", ".json")) else "parquet"
        source: dict[str, Any] = {"kind": kind, "path": str(path)}
        if s.text("data.prompt_key") != "prompt":
            source["prompt_column"] = s.text("data.prompt_key")
        column = verl_episode.answer_column(s)
        if not verl_episode.has_own_reward(s) or has_text(source, column):  # it reads the whole row
            source["answer_column"] = column
        if has_images(s):
            source["image_column"] = s.text("data.image_key")
        found.append(source)
    names = [PurePath(source["path"]).stem for source in found]
    for source, name in zip(found, names, strict=True):
        if names.count(name) > 1:
            source["source"] = "-".join(PurePath(source["path"]).with_suffix("").parts[-2:])
    return found


def has_images(s: Settings) -> bool:
    name = str(s.value(f"{MODEL}.path") or "").lower()
    is_named = s.has("data.image_key") and s.text("data.image_key") != "images"
    return is_named or bool(re.search(r"[-_]vl|vision|llava|pixtral", name))


def data(s: Settings, draft: Draft) -> None:
    """Set model, prompts and their limits."""
    draft.set("model.kind", "pretrained")
    if s.has(f"{MODEL}.path"):
        draft.set("model.path", str(s.value(f"{MODEL}.path")), f"{MODEL}.path")
    else:
        draft.set("model.path", "MODEL", decide="name the model: a directory or a hub id.")
    train = sources(s, "data.train_files")
    if s.whole("data.train_max_samples") > 0:
        for source in train:
            source["max_prompts"] = s.whole("data.train_max_samples")
    origin = "data.train_files"
    if train:
        draft.set("data.train", train, origin)
    else:
        draft.set(
            "data.train",
            [{"kind": "parquet", "path": "train.parquet"}],
            decide="name the file of prompts.",
        )
    evaluation = sources(s, "data.val_files")
    if evaluation:
        draft.set("data.evaluation", evaluation, "data.val_files")
    cuts = s.text("data.truncation")
    if s.flag("data.filter_overlong_prompts") or cuts != "error":
        origin = s.where("data.filter_overlong_prompts", "data.truncation")
        draft.set("data.long_prompts", "drop", origin)
        if cuts != "error" and not s.flag("data.filter_overlong_prompts"):
            draft.decide(
                "data.long_prompts", f"`{cuts}` cut long prompts; here such rows are left out."
            )
    _evaluation(s, draft, bool(evaluation))


def _evaluation(s: Settings, draft: Draft, has_data: bool) -> None:
    if not has_data:
        draft.set("evaluation", None)
        return
    test_key, every = "trainer.test_freq", 1
    if is_fully_async(s) and s.has("rollout.test_freq"):
        test_key, every = "rollout.test_freq", draft.get("weights.every_steps", 1)
    draft.set("evaluation.every_steps", max(s.whole(test_key), 0) * every, test_key)
    if not s.flag("trainer.val_before_train"):
        draft.set("evaluation.before_first_step", False, "trainer.val_before_train")
    if s.whole("data.val_max_samples") > 0:
        draft.copy("evaluation.num_prompts", s.whole, "data.val_max_samples")
    else:
        rows = count_rows(sources(s, "data.val_files"))
        text = "all rows were evaluated; set the number that you need."
        draft.set("evaluation.num_prompts", rows or 1000, decide="" if rows else text)


def lengths(s: Settings, draft: Draft) -> None:
    """Set the limits of prompt and response."""
    prompt, response = s.whole("data.max_prompt_length"), s.whole("data.max_response_length")
    draft.set("renderer.max_prompt_tokens", prompt, "data.max_prompt_length")
    draft.set("renderer.max_response_tokens", response, "data.max_response_length")
    draft.set("sampling.max_turn_tokens", response, "data.max_response_length")
    arguments = s.below("data.apply_chat_template_kwargs")
    if arguments:
        draft.set("renderer.chat_template_arguments", arguments, "data.apply_chat_template_kwargs")


def sampling(s: Settings, draft: Draft) -> None:
    """Set temperature and truncation of the distribution, in training and evaluation."""
    draft.copy("sampling.temperature", s.number, f"{ROLLOUT}.temperature")
    set_truncation(s, draft, ROLLOUT, "sampling")
    if s.flag(f"{ROLLOUT}.ignore_eos"):
        draft.set("sampling.extra_arguments", {"ignore_eos": True}, f"{ROLLOUT}.ignore_eos")
    if draft.get("data.evaluation") is None:
        return
    key = f"{ROLLOUT}.val_kwargs"
    if s.flag(f"{key}.do_sample"):
        draft.copy("evaluation.sampling.temperature", s.number, f"{key}.temperature")
        set_truncation(s, draft, key, "evaluation.sampling", is_needed=True)
    set_samples(s, draft, f"{key}.n", is_greedy=not s.flag(f"{key}.do_sample"))


def set_samples(s: Settings, draft: Draft, key: str, *, is_greedy: bool) -> None:
    """Set the number of samples of each held-out prompt, of which greedy sampling needs only one."""
    if s.whole(key) > 1 and not is_greedy:
        draft.copy("evaluation.samples_per_prompt", s.whole, key)


def set_truncation(
    s: Settings, draft: Draft, key: str, target: str, *, is_needed: bool = False
) -> None:
    """Set top_p and top_k where they are not off, or where they differ from those of training."""
    top_p, top_k = s.number(f"{key}.top_p"), max(s.whole(f"{key}.top_k"), 0)
    if top_p < 1 or (is_needed and draft.get("sampling.top_p", 1.0) != top_p):
        draft.set(f"{target}.top_p", top_p, f"{key}.top_p")
    if top_k or (is_needed and draft.get("sampling.top_k", 0) != top_k):
        draft.set(f"{target}.top_k", top_k, f"{key}.top_k")


def observability(s: Settings, draft: Draft) -> None:
    """Set trackers."""
    if s.has("trainer.logger") and "wandb" in s.listed("trainer.logger"):
        draft.copy("observability.wandb.project", s.text, "trainer.project_name")
