"""Search-R1: verl's settings of its time, with turns of search."""

import math

from raylearner.convert import verl, verl_learner
from raylearner.convert.draft import Draft
from raylearner.convert.settings import Settings
from raylearner.convert.verl_episode import search_tool
from raylearner.convert.verl_objective import objective, set_kl

ACTOR, ROLLOUT = verl_learner.ACTOR, verl_learner.ROLLOUT


def convert(s: Settings) -> Draft:
    """Return the configuration that trains as these settings of Search-R1 do."""
    draft = Draft()
    _batches(s, draft)
    verl.run(s, draft)
    verl.data(s, draft)
    _limits_of_data(s, draft)
    _environment(s, draft)
    verl.sampling(s, draft)
    draft.set("rewards.functions", [{"kind": "exact_match"}], "the score of exact matches")
    verl_learner.engine(s, draft)
    verl_learner.placement(s, draft)
    objective(s, draft)
    if not s.flag(f"{ACTOR}.use_kl_loss"):
        key = "algorithm.kl_ctrl.kl_coef"
        set_kl(draft, "reward", s.text("algorithm.kl_penalty"), s.number(key), key, uses_lora=False)
    verl_learner.optimizer(s, draft)
    verl.observability(s, draft)
    return draft


def _batches(s: Settings, draft: Draft) -> None:
    """Mini-batches count trajectories: they are not multiplied by `n_agent`, as verl does by `n`."""
    batch, agents, n = (
        s.whole("data.train_batch_size"),
        s.whole(f"{ROLLOUT}.n_agent"),
        s.whole(f"{ROLLOUT}.n"),
    )
    verl.groups(
        s, draft, size=batch, origin="data.train_batch_size", group_key=f"{ROLLOUT}.n_agent"
    )
    draft.set("replay.group_size", agents * n, f"{ROLLOUT}.n_agent")
    if agents * n > 1:
        draft.entries.pop("replay.partial_groups", None)
    mini = max(s.whole(f"{ACTOR}.ppo_mini_batch_size") * n, 1)
    updates = math.ceil(batch * agents * n / mini)
    verl.set_updates(
        draft, updates, f"data.train_batch_size * n_agent / {ACTOR}.ppo_mini_batch_size"
    )
    draft.set("replay.max_staleness", 0, decide=verl.SYNCHRONOUS)


def _limits_of_data(s: Settings, draft: Draft) -> None:
    if s.has("data.train_data_num"):
        for source in draft.get("data.train"):
            source["max_prompts"] = s.whole("data.train_data_num")
    if s.has("data.val_data_num") and draft.get("data.evaluation"):
        draft.copy("evaluation.num_prompts", s.whole, "data.val_data_num")


def _environment(s: Settings, draft: Draft) -> None:
    turn, seen = s.whole("data.max_response_length"), s.whole("data.max_obs_length")
    prompt = s.whole("data.max_start_length")
    draft.set("renderer.max_prompt_tokens", prompt, "data.max_start_length")
    draft.set("sampling.max_turn_tokens", turn, "data.max_response_length")
    if not s.flag("do_search"):
        draft.set("environment.kind", "single_turn", "do_search")
        draft.set("renderer.max_response_tokens", turn, "data.max_response_length")
        return
    turns = s.whole("max_turns")
    tool = search_tool(s.text("retriever.url"), s.whole("retriever.topk"))
    draft.set("environment.kind", "tool_use")
    draft.set("environment.tools", [tool], "retriever.url, retriever.topk")
    draft.set("environment.dialect", {"kind": "tags", "match": "first", "answer_tag": "answer"})
    draft.set("environment.max_turns", turns, "max_turns")
    draft.set("environment.observation_tag", "information")
    draft.set("renderer.observation_role", "inline")
    draft.set("renderer.max_observation_tokens", seen, "data.max_obs_length")
    draft.set(
        "renderer.max_response_tokens",
        turn * (turns + 1) + seen * turns,
        "max_response_length * (max_turns + 1) + max_obs_length * max_turns",
    )
    context = s.whole("data.max_prompt_length")
    draft.set("renderer.max_context_tokens", max(context, prompt), "data.max_prompt_length")
