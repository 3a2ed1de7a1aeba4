"""TRL: advantages, policy losses, KL penalties and corrections of GRPO and RLOO."""

from typing import Any

from raylearner.convert.draft import Draft
from raylearner.convert.settings import Settings

EPSILON = 1e-4
"""What TRL adds to standard deviations."""
RLOO_BETA = 0.05
AGGREGATIONS = {
    "grpo": "sequence_mean_of_means",
    "sapo": "sequence_mean_of_means",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "dr_grpo": "sequence_mean_of_sums_scaled",
    "luspo": "token_mean",
}
MODES = {
    "token_truncate": ("tis", "token"),
    "token_mask": ("mis", "token"),
    "sequence_truncate": ("tis", "sequence"),
    "sequence_mask": ("mis", "sequence"),
}


def objective(s: Settings, draft: Draft, is_rloo: bool) -> None:
    """Set all of the objective."""
    if is_rloo:
        _rloo(s, draft)
    else:
        _advantage(s, draft)
        _loss(s, draft)
        _corrections(s, draft)
        if s.number("entropy_coef"):
            draft.copy("learner.entropy_coefficient", s.number, "entropy_coef")
    _kl(s, draft, is_rloo)
    if s.flag("mask_truncated_completions"):
        draft.set("learner.mask_truncated", True, "mask_truncated_completions")


def _rloo(s: Settings, draft: Draft) -> None:
    draft.set("learner.advantage.kind", "rloo")
    draft.copy("learner.advantage.normalize", s.flag, "normalize_advantages")
    draft.set("learner.loss.kind", "sequence_ratio")
    _clips(s, draft)
    if s.has("reward_clip_range"):
        low, high = [*s.listed("reward_clip_range"), None, None][:2]
        draft.set("learner.reward.clip_low", low, "reward_clip_range")
        draft.set("learner.reward.clip_high", high, "reward_clip_range")


def _clips(s: Settings, draft: Draft) -> None:
    low = s.number("epsilon")
    high, key = (
        (s.number("epsilon_high"), "epsilon_high") if s.has("epsilon_high") else (low, "epsilon")
    )
    draft.set("learner.loss.clip_low", low, "epsilon")
    draft.set("learner.loss.clip_high", high, key)


def _advantage(s: Settings, draft: Draft) -> None:
    if s.text("multi_objective_aggregation") == "normalize_then_sum":
        draft.set("learner.advantage.kind", "gdpo", "multi_objective_aggregation")
        draft.set("learner.advantage.statistics", "episodes")
        draft.set("learner.advantage.epsilon", EPSILON)
        return
    scale = {"true": "group", "false": "none"}.get(str(s.value("scale_rewards")).lower())
    scale = scale or str(s.value("scale_rewards"))
    draft.set("learner.advantage.kind", "grpo")
    draft.set("learner.advantage.normalize", scale, "scale_rewards")
    draft.set("learner.advantage.epsilon", EPSILON)


def _loss(s: Settings, draft: Draft) -> None:
    name, by_row = s.text("loss_type"), s.text("importance_sampling_level") == "sequence"
    draft.set("learner.aggregation", AGGREGATIONS.get(name, "token_mean"), "loss_type")
    if name not in AGGREGATIONS:
        draft.decide("learner.aggregation", f"loss_type {name!r} is not known here.")
    match name:
        case "cispo":
            draft.set("learner.loss.kind", "cispo", "loss_type")
            high = s.number("epsilon_high") if s.has("epsilon_high") else s.number("epsilon")
            draft.set("learner.loss.ratio_max", high, "epsilon_high")
        case "sapo":
            draft.set("learner.loss.kind", "sapo", "loss_type")
            draft.copy("learner.loss.tau_positive", s.number, "sapo_temperature_pos")
            draft.copy("learner.loss.tau_negative", s.number, "sapo_temperature_neg")
        case "vespo":
            draft.set("learner.loss.kind", "vespo", "loss_type")
            for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
                target = name.replace("pos", "positive").replace("neg", "negative")
                draft.set(f"learner.loss.{target}", s.number(f"vespo_{name}"), f"vespo_{name}")
        case "luspo":
            draft.set("learner.loss.kind", "luspo", "loss_type")
            _clips(s, draft)
        case _ if by_row:
            draft.set("learner.loss.kind", "gspo", "importance_sampling_level")
            _clips(s, draft)
        case _:
            draft.set("learner.loss.kind", "ppo")
            _clips(s, draft)
            draft.set("learner.loss.dual_clip", None)
            if s.has("delta"):
                draft.copy("learner.loss.delta", s.number, "delta")
    if name == "dr_grpo":
        scale = draft.get("renderer.max_response_tokens")
        draft.set("learner.aggregation_scale", scale, "max_completion_length")


def _corrections(s: Settings, draft: Draft) -> None:
    found: list[dict[str, Any]] = []
    is_on = s.flag("use_vllm") and s.flag("vllm_importance_sampling_correction")
    if is_on and draft.get("learner.loss.kind") != "vespo":
        key = "vllm_importance_sampling_mode"
        kind, level = MODES.get(s.text(key), MODES["sequence_mask"])
        high_key = "vllm_importance_sampling_clip_max"
        if s.has("vllm_importance_sampling_cap"):
            high_key = "vllm_importance_sampling_cap"
        is_null = high_key in s.given and s.given[high_key].value is None
        section: dict[str, Any] = {
            "kind": kind,
            "level": level,
            "high": None if is_null else s.number(high_key),
        }
        if s.has("vllm_importance_sampling_clip_min"):
            section["low"] = s.number("vllm_importance_sampling_clip_min")
        found.append(section)
    if s.has("off_policy_mask_threshold"):
        found.append({"kind": "opsm", "threshold": s.number("off_policy_mask_threshold")})
    if found:
        keys = s.where("vllm_importance_sampling_mode", "off_policy_mask_threshold")
        draft.set("learner.corrections", found, keys or "vllm_importance_sampling_correction")


def _kl(s: Settings, draft: Draft, is_rloo: bool) -> None:
    beta = s.number("beta") if s.has("beta") else RLOO_BETA if is_rloo else 0.0
    if not beta:
        return
    uses_lora = s.flag("use_peft")
    draft.set("learner.kl.place", "reward" if is_rloo else "loss")
    draft.set("learner.kl.estimator", "k1" if is_rloo else "k3")
    if not is_rloo:
        draft.set("learner.kl.value_limit", None)
    draft.set("learner.kl.coefficient", beta, "beta")
    if not is_rloo and s.flag("use_bias_correction_kl"):
        draft.set("learner.kl.weighted", True, "use_bias_correction_kl")
    if not s.flag("sync_ref_model"):
        draft.set("learner.kl.reference.kind", "adapter_off" if uses_lora else "frozen")
        return
    updates = draft.get("learner.num_mini_batches") * draft.get("learner.num_epochs")
    steps = max(1, s.whole("ref_model_sync_steps") // updates)
    draft.set("learner.kl.reference.kind", "refreshed", "sync_ref_model")
    draft.set("learner.kl.reference.every_steps", steps, "ref_model_sync_steps, in updates")
    draft.copy("learner.kl.reference.mix", s.number, "ref_model_mixup_alpha")
