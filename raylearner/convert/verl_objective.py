"""verl: advantages, policy losses, KL penalties, corrections and the critic."""

from typing import Any

from raylearner.convert.draft import Draft
from raylearner.convert.settings import Settings

ACTOR, ALGORITHM, MODEL = "actor_rollout_ref.actor", "algorithm", "actor_rollout_ref.model"
CORRECTION = f"{ALGORITHM}.rollout_correction"
ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "grpo_passk": "pass_at_k",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "optimal_token_baseline": "otb",
    "tir_optimal_token_baseline": "tir_otb",
}
IN_GROUP = ("grpo", "rloo", "opo", "gpg", "gdpo", "otb", "tir_otb", "reinforce_plus_plus_baseline")
"""Advantages that need other episodes of the prompt; with one of them, verl takes the raw reward."""
AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_of_sums",
    "seq-mean-token-mean": "sequence_mean_of_means",
    "seq-mean-token-sum-norm": "sequence_mean_of_sums_scaled",
}
ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
OLD_LEVELS: dict[str, str] = {
    "token": "token_k1",
    "sequence": "seq_sum_k1",
    "geometric": "seq_mean_k1",
}
"""Older names of rejection rules."""
LOSSES = {
    "vanilla": "ppo",
    "geo_mean": "gmpo",
    "gspo": "gspo",
    "sapo": "sapo",
    "cispo": "cispo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "bypass_mode": "ppo",
}


def objective(s: Settings, draft: Draft) -> None:
    """Set all of the objective."""
    advantage(s, draft)
    loss(s, draft)
    aggregation(s, draft)
    proximal(s, draft)
    kl(s, draft)
    draft.copy("learner.num_epochs", s.whole, f"{ACTOR}.ppo_epochs")
    if s.number(f"{ACTOR}.entropy_coeff"):
        key = f"{ACTOR}.entropy_coeff"
        draft.copy("learner.entropy_coefficient", s.number, key)
    if s.flag(f"{ALGORITHM}.filter_groups.enable"):
        draft.set("replay.drop_zero_variance", True, f"{ALGORITHM}.filter_groups.enable")
        batches = s.whole(f"{ALGORITHM}.filter_groups.max_num_gen_batches")
        size = s.whole("data.gen_batch_size") if s.has("data.gen_batch_size") else 0
        if batches > 0:
            size = size or draft.get("replay.groups_per_step")
            key = f"{ALGORITHM}.filter_groups.max_num_gen_batches"
            draft.set("replay.max_filtered_groups", batches * size, key)
    if s.flag(f"{ALGORITHM}.use_pf_ppo"):
        method = s.text(f"{ALGORITHM}.pf_ppo.reweight_method")
        kind = "power" if method == "pow" else method
        draft.set("learner.resampling.kind", kind, f"{ALGORITHM}.pf_ppo.reweight_method")
        draft.set("learner.resampling.power", s.number(f"{ALGORITHM}.pf_ppo.weight_pow"))
        if draft.get("learner.num_mini_batches", 1) > 1:
            draft.decide("learner.resampling.kind", "needs learner.num_mini_batches 1.")


def advantage(s: Settings, draft: Draft) -> None:
    """Set the estimator of advantages, and the critic that it needs."""
    key = f"{ALGORITHM}.adv_estimator"
    name = s.text(key)
    kind = ADVANTAGES.get(name)
    if kind is None:
        text = (
            f"{name!r} is not known here; `custom` takes a function of yours (docs/algorithms.md)."
        )
        draft.set("learner.advantage.kind", "grpo", key, decide=text)
        return
    draft.set("learner.advantage.kind", kind, key)
    if kind == "grpo" and not s.flag(f"{ALGORITHM}.norm_adv_by_std_in_grpo"):
        draft.set("learner.advantage.normalize", "none", f"{ALGORITHM}.norm_adv_by_std_in_grpo")
    if kind in ("gae", "reinforce_plus_plus"):
        draft.copy("learner.advantage.gamma", s.number, f"{ALGORITHM}.gamma")
    if kind in IN_GROUP and draft.get("replay.group_size") == 1:
        draft.set("learner.advantage.group_of_one", "raw")
    if kind == "remax":
        draft.set("replay.play_greedy", True)
    if kind == "gdpo" and len(draft.get("rewards.functions", [])) < 2:
        draft.decide("learner.advantage.kind", "needs two reward functions or more.")
    if kind == "gae":
        draft.copy("learner.advantage.lam", s.number, f"{ALGORITHM}.lam")
        critic(s, draft)


def critic(s: Settings, draft: Draft) -> None:
    """Set the value function."""
    draft.copy("learner.critic.learning_rate", s.number, "critic.optim.lr")
    draft.copy("learner.critic.weight_decay", s.number, "critic.optim.weight_decay")
    draft.copy("learner.critic.clip", s.number, "critic.cliprange_value")
    draft.copy("learner.critic.max_grad_norm", s.number, "critic.grad_clip")
    path = s.value("critic.model.path")
    if path is not None and path != s.value(f"{MODEL}.path"):
        draft.set("learner.critic.path", str(path), "critic.model.path")
    if s.whole("trainer.critic_warmup") > 0:
        steps = s.whole("trainer.critic_warmup")
        draft.set("learner.critic.warmup_steps", steps, "trainer.critic_warmup")


def loss(s: Settings, draft: Draft) -> None:
    """Set the policy loss and its bounds."""
    policy = f"{ACTOR}.policy_loss"
    key = f"{policy}.loss_mode"
    name = s.text(key)
    kind = LOSSES.get(name)
    if kind is None:
        draft.set(
            "learner.loss.kind",
            "ppo",
            key,
            decide=f"{name!r} is not known here; see docs/algorithms.md.",
        )
        kind = "ppo"
    elif s.flag(f"{CORRECTION}.bypass_mode") and s.text(f"{CORRECTION}.loss_type") == "reinforce":
        draft.set("learner.loss.kind", "reinforce", f"{CORRECTION}.loss_type")
        cap = _bounds(s.value(f"{CORRECTION}.rollout_is_threshold"))[1]
        is_on = s.has(f"{CORRECTION}.rollout_is")
        draft.set(
            "learner.loss.ratio_cap", cap if is_on else None, f"{CORRECTION}.rollout_is_threshold"
        )
        if is_on and s.text(f"{CORRECTION}.rollout_is") == "sequence":
            draft.set("learner.loss.level", "sequence", f"{CORRECTION}.rollout_is")
        return
    else:
        draft.set("learner.loss.kind", kind, s.where(key))
    low, high, low_key, high_key = clips(s)
    match kind:
        case "ppo" | "gspo" | "gmpo" | "clip_cov":
            draft.set("learner.loss.clip_low", low, low_key)
            draft.set("learner.loss.clip_high", high, high_key)
        case "cispo":
            draft.set("learner.loss.ratio_min", max(0.0, round(1 - low, 9)), f"1 - {low_key}")
            draft.set("learner.loss.ratio_max", round(1 + high, 9), f"1 + {high_key}")
        case "dppo_tv" | "dppo_kl":
            draft.set("learner.loss.divergence_low", low, low_key)
            draft.set("learner.loss.divergence_high", high, high_key)
            draft.copy("learner.loss.ratio_cap", s.number, f"{ACTOR}.clip_ratio_c")
        case "sapo":
            draft.copy("learner.loss.tau_positive", s.number, f"{ACTOR}.tau_pos")
            draft.copy("learner.loss.tau_negative", s.number, f"{ACTOR}.tau_neg")
        case "kl_cov":
            draft.copy("learner.loss.top_ratio", s.number, f"{policy}.kl_cov_ratio")
            draft.copy("learner.loss.kl_coefficient", s.number, f"{policy}.ppo_kl_coef")
        case _:
            pass
    if kind == "clip_cov":
        draft.copy("learner.loss.drop_ratio", s.number, f"{policy}.clip_cov_ratio")
        draft.copy("learner.loss.covariance_low", s.number, f"{policy}.clip_cov_lb")
        draft.copy("learner.loss.covariance_high", s.number, f"{policy}.clip_cov_ub")
    if kind == "ppo":
        dual = s.value(f"{ACTOR}.clip_ratio_c")
        value = None if dual is None else s.number(f"{ACTOR}.clip_ratio_c")
        draft.set("learner.loss.dual_clip", value, f"{ACTOR}.clip_ratio_c")


def clips(s: Settings) -> tuple[float, float, str, str]:
    """Return the lower and upper clip range, and the keys that they come from."""
    both, sides = f"{ACTOR}.clip_ratio", (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
    low, high = [side if s.has(side) else both for side in sides]
    return s.number(low), s.number(high), low, high


def aggregation(s: Settings, draft: Draft) -> None:
    """Set how token losses become one number."""
    key = f"{ACTOR}.loss_agg_mode"
    name = s.text(key)
    kind = draft.get("learner.loss.kind")
    if name not in AGGREGATIONS:
        draft.set("learner.aggregation", "token_mean", key, decide=f"{name!r} is not known here.")
        return
    if kind in ("gspo", "sapo") and s.table.name == "verl":  # always the mean of means in verl
        name = "seq-mean-token-mean"
    draft.set("learner.aggregation", AGGREGATIONS[name], key)
    if name == "seq-mean-token-sum-norm":
        scale_key = f"{ACTOR}.loss_scale_factor"
        scale = (
            s.number(scale_key) if s.has(scale_key) else draft.get("renderer.max_response_tokens")
        )
        draft.set(
            "learner.aggregation_scale",
            scale,
            scale_key if s.has(scale_key) else "the response's maximum",
        )


def proximal(s: Settings, draft: Draft) -> None:
    """Set the policy that ratios are taken to, and corrections toward the one that sampled."""
    is_async = any(key.startswith("async_training.") for key in s.given)
    bypass, origin = s.flag(f"{CORRECTION}.bypass_mode"), f"{CORRECTION}.bypass_mode"
    if is_async and not s.has(origin):
        bypass = not s.flag("async_training.compute_prox_log_prob") and s.flag(
            "async_training.use_rollout_log_probs"
        )
        origin = "async_training.use_rollout_log_probs"
        s.value(f"{ACTOR}.use_rollout_log_probs")
    elif any(key.startswith("rollout.") for key in s.given) and not s.has(origin):
        bypass, origin = True, "one step off policy"
    if draft.get("learner.loss.kind") == "reinforce":
        return
    if bypass:
        draft.set("learner.proximal", "behavior", origin)
    found = [] if bypass else corrections(s)
    rejecting = rejections(s)
    if not found and not rejecting:
        return
    keys = s.where(f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs")
    draft.set("learner.corrections", found + rejecting, keys)
    if rejecting and bypass:
        text = "verl leaves rejected tokens out of the loss's denominators; here they count."
        draft.decide("learner.corrections", text)
    elif rejecting:
        draft.set("learner.count_rejected", False, f"{CORRECTION}.rollout_rs")


def corrections(s: Settings) -> list[dict[str, Any]]:
    """Return the importance weights between engine and learner."""
    cap = f"{ACTOR}.tis_imp_ratio_cap"
    if s.has(cap) and s.number(cap) > 0:
        return [{"kind": "tis", "level": "token", "high": s.number(cap)}]
    if not s.has(f"{CORRECTION}.rollout_is"):
        return []
    low, high = _bounds(s.value(f"{CORRECTION}.rollout_is_threshold"))
    level = s.text(f"{CORRECTION}.rollout_is")
    section: dict[str, Any] = {
        "kind": "tis" if low is None else "icepop",
        "level": level,
        "high": high,
    }
    if low is not None:
        section["low"] = low
    if s.flag(f"{CORRECTION}.rollout_is_batch_normalize"):
        section["normalize"] = "token" if level == "token" else "row"
    return [section]


def rejections(s: Settings) -> list[dict[str, Any]]:
    """Return the rules that reject tokens or rows."""
    found: list[dict[str, Any]] = []
    listed = str(s.value(f"{CORRECTION}.rollout_rs") or "").split(",")
    names = [name.strip() for name in listed if name.strip()]
    bounds = str(s.value(f"{CORRECTION}.rollout_rs_threshold") or "2.0").split(",")
    for position, name in enumerate(names):
        level, _, estimator = OLD_LEVELS.get(name, name).rpartition("_")
        low, high = _bounds(bounds[position if position < len(bounds) else 0])
        if low is None and s.has(f"{CORRECTION}.rollout_rs_threshold_lower"):
            low = s.number(f"{CORRECTION}.rollout_rs_threshold_lower")
        section: dict[str, Any] = {
            "kind": "rejection",
            "level": level.replace("seq_", "sequence_"),
            "estimator": estimator,
            "high": high,
        }
        if low is not None and estimator == "k1":
            section["low"] = low
        found.append(section)
    if s.has(f"{CORRECTION}.rollout_token_veto_threshold"):
        threshold = s.number(f"{CORRECTION}.rollout_token_veto_threshold")
        found.append({"kind": "veto", "threshold": threshold})
    return found


def _bounds(value: Any) -> tuple[float | None, float]:
    """Return lower and upper bound of `2.0` or `0.5_2.0`."""
    parts = str(value).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return None, 2.0
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def kl(s: Settings, draft: Draft) -> None:
    """Set the penalty toward the reference, in the loss or in the reward."""
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", f"{ALGORITHM}.use_kl_in_reward"
    uses_lora = s.whole(f"{MODEL}.lora_rank") > 0
    if s.flag(in_loss):
        coefficient = f"{ACTOR}.kl_loss_coef"
        set_kl(
            draft,
            "loss",
            s.text(f"{ACTOR}.kl_loss_type"),
            s.number(coefficient),
            coefficient,
            uses_lora,
        )
        if s.flag(in_reward) and "learner.kl.place" in draft.entries:
            draft.decide(
                "learner.kl.place", "verl also has a penalty in the reward; here there is one."
            )
    elif s.flag(in_reward):
        coefficient = f"{ALGORITHM}.kl_ctrl.kl_coef"
        estimator = s.text(f"{ALGORITHM}.kl_penalty")
        set_kl(draft, "reward", estimator, s.number(coefficient), coefficient, uses_lora)
        if (
            s.text(f"{ALGORITHM}.kl_ctrl.type") == "adaptive"
            and "learner.kl.place" in draft.entries
        ):
            draft.set("learner.kl.controller.kind", "adaptive", f"{ALGORITHM}.kl_ctrl.type")
            for name, key in (("target", "target_kl"), ("horizon", "horizon")):
                key = f"{ALGORITHM}.kl_ctrl.{key}"
                draft.set(f"learner.kl.controller.{name}", s.number(key), key)


def set_kl(
    draft: Draft, place: str, estimator: str, coefficient: float, origin: str, uses_lora: bool
) -> None:
    """Set the section of a penalty with a coefficient above 0."""
    if not coefficient:
        return
    name = estimator.removesuffix("+")
    draft.set("learner.kl.place", place)
    draft.set("learner.kl.estimator", ESTIMATORS.get(name, "k3"))
    if name not in ESTIMATORS:
        draft.decide("learner.kl.estimator", f"{estimator!r} is not known here.")
    if estimator.endswith("+") and place == "loss":
        draft.set("learner.kl.straight_through", True)
    draft.set("learner.kl.coefficient", coefficient, origin)
    draft.set("learner.kl.reference.kind", "adapter_off" if uses_lora else "frozen")
