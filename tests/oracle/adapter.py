"""Runs a case of the oracle through our objectives, with sections as a YAML makes them.

`run_case` dispatches by the case's function and parameters, never by its name. A padded `[B, T]` array
becomes `B * T` flat tokens in `B` rows. Metrics are not compared: unit tests have their formulas.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import objectives
import torch
from objectives import correct, correction_inputs, episode_advantages, section_of
from torch import Tensor

from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective import corrections, episodes, importance, kl, value_loss
from raylearner.learner.objective.aggregation import aggregate
from raylearner.learner.objective.importance import log_ratios
from raylearner.learner.objective.loss import LossInputs

Outputs = dict[str, Any]


@dataclass(frozen=True)
class _Case:
    params: dict[str, Any]
    inputs: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name]

    def flat(self, *names: str) -> Tensor:
        """The first of these `[B, T]` inputs that the case has, as `[B * T]` tokens."""
        return next(self.inputs[name] for name in names if name in self.inputs).reshape(-1)

    def mask_rows(self, name: str = "response_mask") -> tuple[Tensor, Rows]:
        num_rows, width = self.inputs[name].shape
        return self.flat(name) > 0, Rows.from_lengths([width] * num_rows)

    def option(self, name: str, default: Any) -> Any:
        """A parameter, which may be among those of verl's policy loss."""
        value = {**self.params, **self.params.get("policy_loss", {})}.get(name)
        return default if value is None else value


def run_case(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our outputs for one case of the index, under the index's names."""
    function = case["function"].split(" (")[0].split(".")[-1]
    if "RLOOTrainer" in case["function"]:
        function = f"rloo_{function}"
    inputs = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    found = _FUNCTIONS[function](_Case(case["params"] or {}, inputs))
    return {
        name: np.asarray(torch.as_tensor(found[name]).detach()).reshape(entry["shape"])
        for name, entry in case["outputs"].items()
    }


def _by_episode(case: _Case, kind: str, **keys: Any) -> Outputs:
    mask, rows = case.mask_rows()
    parts = [case[name] for name in sorted(case.inputs) if re.fullmatch(r"r\d+", name)]
    parts = torch.stack(parts or [case["token_level_rewards"].sum(-1)], dim=1)
    if "norm_adv_by_std_in_grpo" in case.params:
        keys["normalize"] = "group" if case.params["norm_adv_by_std_in_grpo"] else "none"
    weights = parts.new_tensor(case.option("weights", [1.0] * parts.shape[1]))
    table = {"num_tokens": rows.count(mask), "parts": parts, "part_weights": weights}
    found = episode_advantages(kind, parts[:, 0], case["index"], table, **keys)
    return dict.fromkeys(("advantages", "returns"), torch.where(mask, rows.spread(found), 0.0))


_TOKEN_INPUTS = {
    "values": "values",
    "logprobs": "old_log_probs",
    "squared_probs": "sum_pi_squared",
    "weights": "rollout_is_weights",
}


def _by_token(case: _Case, kind: str, mask_name: str = "response_mask", **keys: Any) -> Outputs:
    mask, rows = case.mask_rows(mask_name)
    names = ("gamma", "lam", "rho_bar", "c_bar")
    keys |= {name: case.params[name] for name in names if name in case.params}
    table = objectives.make_table(
        torch.zeros(rows.num_rows),
        case.inputs.get("index"),
        greedy_rewards=case.inputs.get("reward_baselines"),
    )
    inputs = {n: case.flat(theirs) for n, theirs in _TOKEN_INPUTS.items() if theirs in case.inputs}
    if kind == "vtrace":
        inputs["log_ratio"] = case.flat("log_pi") - case.flat("log_mu")
    rewards = case.flat("token_level_rewards", "rewards")
    found, returns = objectives.token_advantages(
        kind, rewards, mask, rows, inputs=inputs, table=table, **keys
    )
    if kind == "remax":  # verl leaves the return where nothing was sampled
        found = torch.where(mask, found, returns)
    return {"advantages": found, "returns": returns, "value_targets": returns}


def _resampling(case: _Case) -> Outputs:
    kind = case.params["reweight_method"].replace("pow", "power")
    config = episodes.ResamplingSection(kind=kind, power=case.params["weight_pow"])
    rewards = case["token_level_scores"].sum(-1)
    return {"multinomial_weights": episodes.resampling_weights(rewards, config)}


def _trl_rewards(case: _Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed rewards, groups and rewards by function."""
    parts = case["rewards_per_func"]
    weights = case["reward_weights"].to(parts.dtype)
    total = torch.where(parts.isnan().all(1), torch.nan, torch.nansum(parts * weights, dim=1))
    groups = torch.arange(len(parts)) // case.params["num_generations"]
    return total, groups, {"parts": parts, "part_weights": weights}


def _rloo_advantages(case: _Case) -> Outputs:
    mask, rows = case.mask_rows("completion_mask")
    (rewards, groups, _), old = _trl_rewards(case), case.flat("old_per_token_logps")
    low, high = case.option("reward_clip_range", (None, None))
    shaping = episodes.RewardShaping(clip_low=low, clip_high=high)
    rewards = episodes.Shaper.of(rewards, shaping).shape(rewards)
    if case.params["beta"]:
        reference, config = case.flat("ref_per_token_logps"), kl.KlSection(estimator="k1")
        penalty, _ = kl.kl_in_reward(old, reference, mask, rows, config)
        rewards = rewards - case.params["beta"] * rows.sum(penalty)
    normalize = case.params["normalize_advantages"]
    return {"advantages": episode_advantages("rloo", rewards, groups, normalize=normalize)}


def _grpo_advantages(case: _Case) -> Outputs:
    total, groups, table = _trl_rewards(case)
    kind, keys = "grpo", {"normalize": case.params["scale_rewards"]}
    if case.params["multi_objective_aggregation"] == "normalize_then_sum":
        kind, keys = "gdpo", {"statistics": "episodes"}
    return {"advantages": episode_advantages(kind, total, groups, table, epsilon=1e-4, **keys)}


_MODES = {
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_of_sums",
    "seq-mean-token-mean": "sequence_mean_of_means",
    "seq-mean-token-sum-norm": "sequence_mean_of_sums_scaled",
    "grpo": "sequence_mean_of_means",
    "sapo": "sequence_mean_of_means",
    "dr_grpo": "sequence_mean_of_sums_scaled",
}


def _counts(case: _Case, mask: Tensor, rows: Rows) -> dict[str, Any]:
    """The packages' aggregation parameters as the options of `aggregate`."""
    is_trl = "loss_type" in case.params
    name = case.option("loss_type", case.option("loss_agg_mode", "token-mean"))
    if case.params.get("loss_mode") == "sapo":  # verl ignores the mode that it is given
        name = "sapo"
    filled = int((rows.count(mask) > 0).sum())
    return {
        "mode": _MODES.get(name, "token_mean"),
        "num_tokens": case.option("batch_num_tokens", int(mask.sum())),
        "num_rows": case.option("global_batch_size", rows.num_rows if is_trl else filled),
        "scale": case.params.get(
            "max_completion_length", case.option("loss_scale_factor", len(mask) // rows.num_rows)
        ),
    }


def _with_gradient(name: str, loss: Tensor, leaf: Tensor) -> Outputs:
    return {"loss": loss, name: torch.autograd.grad(loss, leaf)[0]}


def _agg_loss(case: _Case) -> Outputs:
    mask, rows = case.mask_rows("loss_mask")
    values, counts = case.flat("loss_mat").requires_grad_(), _counts(case, mask, rows)
    loss = aggregate(values, mask, rows, **counts) * case.option("dp_size", 1)
    return _with_gradient("grad_loss_mat", loss, values)


def _value_loss(case: _Case) -> Outputs:
    mask, rows = case.mask_rows()
    values = case.flat("vpreds").requires_grad_()
    config = value_loss.CriticSection(clip=case.params["cliprange_value"])
    old, returns = case.flat("values"), case.flat("returns")
    found, metrics = value_loss.value_loss(values, old, returns, mask, config)
    loss = aggregate(found, mask, rows, **_counts(case, mask, rows)) * case.option("dp_size", 1)
    clipped = metrics["value_clip_fraction"].value()
    return _with_gradient("grad_vpreds", loss, values) | {"clipfrac": clipped}


def _loss(case: _Case, mask: Tensor, rows: Rows, kind: str, **keys: Any) -> Outputs:
    """The loss and its gradient; weights of the case stand for those of corrections."""
    logprobs = case.flat("log_prob", "per_token_logps").requires_grad_()
    old = case.flat("old_log_prob", "old_per_token_logps")
    behavior = case.flat(
        "rollout_log_prob", "sampling_per_token_logps", "old_log_prob", "old_per_token_logps"
    )
    advantages = case["advantages"]
    is_by_row = advantages.numel() == rows.num_rows
    flat = rows.spread(advantages.reshape(-1)) if is_by_row else advantages.reshape(-1)
    weights = None
    for name in ("rollout_is_weights", "importance_sampling_ratio"):
        if name in case.inputs:
            weights = case[name].expand(rows.num_rows, -1).expand(-1, len(mask) // rows.num_rows)
            weights = weights.reshape(-1)
    threshold = case.option("off_policy_mask_threshold", None)
    if threshold is not None:
        ratio = log_ratios(logprobs, behavior, mask)
        inputs = correction_inputs(ratio, mask, rows, advantages=flat)
        kept = correct("opsm", inputs, threshold=threshold).weights
        weights = kept if weights is None else kept * weights
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=old,
        behavior_logprobs=behavior,
        advantages=flat,
        mask=mask,
        rows=rows,
        rewards=flat.new_zeros(rows.num_rows),
        weights=weights,
    )
    output, counts = objectives.loss_of(inputs, kind, **keys), _counts(case, mask, rows)
    row_counts = counts | {"num_rows": rows.num_rows} if output.level == "row" else counts
    loss = objectives.aggregate_output(output, inputs, **row_counts)
    if beta := case.option("beta", 0.0):
        reference, config = (
            case.flat("ref_per_token_logps"),
            kl.KlSection(weighted=True, value_limit=None),
        )
        values, _ = kl.kl_loss(logprobs, reference, mask, config, proximal_logprobs=old)
        loss = loss + beta * aggregate(values, mask, rows, **counts)
    name = "grad_log_prob" if "log_prob" in case.inputs else "grad_per_token_logps"
    return _with_gradient(name, loss, logprobs)


_CLIP = {"clip_low": ("clip_ratio_low", 0.2), "clip_high": ("clip_ratio_high", 0.2)}
_DPPO = {
    "divergence_low": ("clip_ratio_low", 0.2),
    "divergence_high": ("clip_ratio_high", 0.2),
    "ratio_cap": ("clip_ratio_c", 3.0),
}
_BOUNDS = {"covariance_low": ("clip_cov_lb", 1.0), "covariance_high": ("clip_cov_ub", 5.0)}
_VERL_LOSSES: dict[str, tuple[str, dict[str, tuple[str, float]]]] = {
    "vanilla": ("ppo", {**_CLIP, "dual_clip": ("clip_ratio_c", 3.0)}),
    "gspo": ("gspo", _CLIP),
    "sapo": ("sapo", {}),
    "gpg": ("gpg", {}),
    "geo_mean": ("gmpo", _CLIP),
    "cispo": (
        "cispo",
        {"ratio_min": ("clip_ratio_low", 0.2), "ratio_max": ("clip_ratio_high", 0.2)},
    ),
    "dppo_tv": ("dppo_tv", _DPPO),
    "dppo_kl": ("dppo_kl", _DPPO),
    "clip_cov": ("clip_cov", {**_CLIP, **_BOUNDS, "drop_ratio": ("clip_cov_ratio", 2e-4)}),
    "kl_cov": ("kl_cov", {"top_ratio": ("kl_cov_ratio", 2e-4)}),
    "dro": ("dro", {"beta": ("dro_beta", 0.05)}),
}
"""By verl's name: our kind, and our keys with verl's and its default."""


def _verl_loss(case: _Case, name: str) -> Outputs:
    kind, names = _VERL_LOSSES[name]
    keys = {ours: case.option(*theirs) for ours, theirs in names.items()}
    if kind == "cispo":  # verl's are distances from 1
        keys = {"ratio_min": 1 - keys["ratio_min"], "ratio_max": 1 + keys["ratio_max"]}
    return _loss(case, *case.mask_rows(), kind, **keys)


def _bypass_mode(case: _Case) -> Outputs:
    """The rollout policy as proximal; PPO or REINFORCE on what rejection left."""
    params, (mask, rows) = case.params["policy_loss"]["rollout_correction"], case.mask_rows()
    ratio = log_ratios(case.flat("log_prob"), case.flat("old_log_prob"), mask)
    if params.get("rollout_rs"):
        mask = _rejected(params, ratio, mask, rows)
    if params.get("loss_type", "ppo_clip") == "ppo_clip":
        return _loss(case, mask, rows, "ppo", dual_clip=case.option("clip_ratio_c", 3.0))
    cap = float(params["rollout_is_threshold"])
    return _loss(case, mask, rows, "reinforce", level=params["rollout_is"], ratio_cap=cap)


def _trl_loss(case: _Case, kind: str = "", mask_name: str = "mask") -> Outputs:
    keys = {"clip_low": case.params["epsilon_low"], "clip_high": case.params["epsilon_high"]}
    chosen = kind or case.params["loss_type"]
    is_by_row = case.option("importance_sampling_level", "token") == "sequence"
    if chosen in ("cispo", "sapo", "vespo"):
        keys = {"ratio_max": keys["clip_high"]} if chosen == "cispo" else {}
    elif not kind and not (chosen == "luspo" and is_by_row):
        chosen = "gspo" if is_by_row else "ppo"
        keys |= {} if is_by_row else {"dual_clip": None, "delta": case.params["delta"]}
    return _loss(case, *case.mask_rows(mask_name), chosen, **keys)


def _weights(params: dict[str, Any], ratio: Tensor, mask: Tensor, rows: Rows) -> Tensor:
    bounds = [float(bound) for bound in str(params["rollout_is_threshold"]).split("_")]
    kind, level = "icepop" if len(bounds) == 2 else "tis", params["rollout_is"]
    keys = {"level": level, "low": bounds[0] if kind == "icepop" else None, "high": bounds[-1]}
    weights = correct(kind, correction_inputs(ratio, mask, rows), **keys).weights
    if not params.get("rollout_is_batch_normalize"):
        return weights
    mean = importance.weight_mean(
        weights, mask, rows, level="token" if level == "token" else "row"
    ).value()
    inputs = correction_inputs(ratio, mask, rows, batch_value=mean)
    return correct(kind, inputs, **keys).weights


def _rejected(params: dict[str, Any], ratio: Tensor, mask: Tensor, rows: Rows) -> Tensor:
    names = params["rollout_rs"].split(",")
    thresholds = str(params["rollout_rs_threshold"]).split(",")
    sections: list[Any] = []
    for name, threshold in zip(names, thresholds, strict=True):
        level, estimator = name.strip().rsplit("_", 1)
        bounds = [float(bound) for bound in threshold.split("_")]
        keys: dict[str, Any] = {"high": bounds[0]}
        if estimator == "k1":  # verl's bounds are on behavior / proximal
            keys = {"low": 1 / bounds[-1], "high": 1 / bounds[0]}
        level = level.replace("seq_", "sequence_")
        sections.append(
            section_of("correction", "rejection", level=level, estimator=estimator, **keys)
        )
    inputs = correction_inputs(ratio, mask, rows)
    found = corrections.correct(sections, inputs, [None] * len(sections))
    assert found is not None
    return found.keep


def _correction(case: _Case) -> Outputs:
    mask, rows = case.mask_rows()
    ratio = case.inputs.get("log_ratio", case.inputs.get("old_log_prob")).reshape(-1)
    if "rollout_log_prob" in case.inputs:
        ratio = log_ratios(ratio, case.flat("rollout_log_prob"), mask)
    outputs: Outputs = {"mask": mask.double()}
    if case.params.get("rollout_is"):
        outputs["weights"] = _weights(case.params, ratio, mask, rows)
    if case.params.get("rollout_rs"):
        outputs["mask"] = _rejected(case.params, ratio, mask, rows).double()
    return outputs


def _kl_section(name: str) -> kl.KlSection:
    estimator: Any = name.removesuffix("+")
    estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(estimator, estimator)
    return kl.KlSection(estimator=estimator, straight_through=name.endswith("+"))


def _kl_penalty(case: _Case) -> Outputs:
    logprobs = case.flat("logprob").requires_grad_()
    config = _kl_section(case.params["kl_penalty"])
    value = kl.kl_estimate(logprobs, case.flat("ref_logprob"), config)
    total = torch.where(case.flat("mask_for_grad") > 0, value, 0.0).sum()
    return {"kl": value} | _with_gradient("grad_logprob", total, logprobs)


def _kl_in_reward(case: _Case) -> Outputs:
    params, (mask, rows) = case.params, case.mask_rows()
    reference, config = case.flat("ref_log_prob"), _kl_section(params["kl_penalty"])
    controller: dict[str, Any] = {"kind": params["ctrl"]}
    if params["ctrl"] == "adaptive":
        controller |= {"target": params["target_kl"], "horizon": params["horizon"]}
    keys = {"coefficient": params["kl_coef"], "controller": controller}
    found = kl.KlController(kl.KlSection.model_validate(keys))
    penalty, measured = kl.kl_in_reward(case.flat("old_log_probs"), reference, mask, rows, config)
    rewards = case.flat("token_level_scores") - found.coefficient * penalty
    # verl counts rows without a trained token as 0.
    filled = float((rows.count(mask) > 0).double().mean())
    found.update(measured["reward_kl"].value() * filled, rows.num_rows)
    return {"token_level_rewards": rewards, "coef_after": found.coefficient}


_RAW = {"group_of_one": "raw"}
_FUNCTIONS: dict[str, Callable[[_Case], Outputs]] = {
    **{
        f"compute_{kind}_outcome_advantage": partial(_by_episode, kind=kind, **_RAW)
        for kind in ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo")
    },
    "compute_grpo_vectorized_outcome_advantage": partial(_by_episode, kind="grpo", **_RAW),
    "compute_grpo_passk_outcome_advantage": partial(_by_episode, kind="pass_at_k"),
    "compute_rloo_vectorized_outcome_advantage": partial(_by_episode, kind="rloo"),
    "compute_reinforce_plus_plus_outcome_advantage": partial(_by_token, kind="reinforce_plus_plus"),
    "compute_remax_outcome_advantage": partial(_by_token, kind="remax"),
    "compute_gae_advantage_return": partial(_by_token, kind="gae", normalize=True),
    "compute_optimal_token_baseline_advantage": partial(_by_token, kind="otb", **_RAW),
    "compute_multi_turn_optimal_token_baseline_advantage": partial(
        _by_token, kind="tir_otb", **_RAW
    ),
    "vtrace_advantage_estimate": partial(_by_token, kind="vtrace", mask_name="mask"),
    "compute_pf_ppo_reweight_data": _resampling,
    "kl_penalty": _kl_penalty,
    "apply_kl_penalty": _kl_in_reward,
    "agg_loss": _agg_loss,
    **{f"compute_policy_loss_{name}": partial(_verl_loss, name=name) for name in _VERL_LOSSES},
    "compute_policy_loss_bypass_mode": _bypass_mode,
    "compute_value_loss": _value_loss,
    "compute_rollout_correction_weights": _correction,
    "compute_rollout_rejection_mask": _correction,
    "compute_rollout_correction_and_rejection_mask": _correction,
    "rloo__generate_and_score_completions": _rloo_advantages,
    "rloo__compute_loss": partial(_trl_loss, kind="sequence_ratio", mask_name="completion_mask"),
    "_generate_and_score_completions": _grpo_advantages,
    "_compute_loss": _trl_loss,
}
