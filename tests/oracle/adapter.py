"""Runs a case of the oracle through our functions: names, shapes and autograd, nothing else.

The one public function is `run_case`. It dispatches by the case's function and parameters, never by
its name, so fresh vectors of the same functions run through it unchanged. A padded `[B, T]` array
becomes `B * T` flat tokens in `B` rows; padding is just tokens off the mask.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylearner.learner.batch import metric
from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective import (
    advantages,
    aggregation,
    corrections,
    critic_loss,
    diagnostics,
    kl,
    losses,
    masked,
    returns,
    sequence_losses,
)
from raylearner.learner.objective.policy_loss import LossInputs, LossOutput

Arrays = dict[str, np.ndarray]
Outputs = dict[str, Tensor | float]


class Deviation(Exception):
    """Our choice differs from the package's and no option of ours reproduces it; says why."""


@dataclass(frozen=True)
class _Case:
    """A case's parameters and its inputs as tensors, padded and flat."""

    params: dict[str, Any]
    padded: dict[str, Tensor]
    outputs: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        return name in self.padded

    def __getitem__(self, name: str) -> Tensor:
        """An input as given."""
        return self.padded[name]

    def flat(self, name: str) -> Tensor:
        """A `[B, T]` input as `[B * T]` tokens."""
        return self.padded[name].reshape(-1)

    def mask(self, name: str = "response_mask") -> Tensor:
        return self.flat(name) > 0

    def rows(self, name: str = "response_mask") -> Rows:
        num_rows, width = self.padded[name].shape
        return Rows.from_lengths([width] * num_rows)

    def option(self, name: str, default: Any) -> Any:
        value = self.params.get(name)
        return default if value is None else value


def run_case(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our outputs for one case of the index, under the index's names."""
    function = case["function"].split(" (")[0].split(":")[-1].split(".")[-1]
    if function == "update":
        function = case["function"].split(".")[-2]
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    request = _Case(case.get("params") or {}, tensors, tuple(case["outputs"]))
    if "RLOOTrainer" in case["function"]:
        function = f"rloo_{function}"
    if "GMPOTrainer" in case["function"]:
        function = f"gmpo_{function}"
    outputs = _FUNCTIONS[function](request)
    return {
        name: _array(value, case["outputs"][name]["shape"])
        for name, value in outputs.items()
        if name in case["outputs"]
    }


def _array(value: Tensor | float, shape: list[int]) -> np.ndarray:
    array = value.detach().numpy() if isinstance(value, Tensor) else value
    return np.asarray(array).reshape(shape)


def _refuse_nan_rewards(rewards: Tensor) -> None:
    if rewards.isnan().any():
        raise Deviation("a NaN reward is left out of its group; verl spreads it over the group")


def _outcome(function: Callable[..., Tensor], **fixed: Any) -> Callable[[_Case], Outputs]:
    """An estimator of verl that gives each row one number."""

    def run(case: _Case) -> Outputs:
        mask, rows = case.mask(), case.rows()
        scores = case["token_level_rewards"].sum(-1)
        _refuse_nan_rewards(scores)
        options = dict(fixed)
        if "epsilon" in case.params and "epsilon" in fixed:
            options["epsilon"] = case.params["epsilon"]
        if "norm_adv_by_std_in_grpo" in case.params and "scale" in fixed:
            options["scale"] = "group" if case.params["norm_adv_by_std_in_grpo"] else "none"
        if "f_norm" in case.params:
            options["divisor"] = case.params["f_norm"]
        if "num_tokens" in fixed:
            options["num_tokens"] = rows.count(mask)
        values = rows.spread(function(scores, case["index"], **options))
        values = torch.where(mask, values, 0.0)
        return {"advantages": values, "returns": values}

    return run


def _gdpo(case: _Case) -> Outputs:
    mask, rows = case.mask(), case.rows()
    names = sorted(name for name in case.padded if re.fullmatch(r"r\d+", name))
    if names:
        rewards = torch.stack([case[name] for name in names], dim=1)
    else:
        rewards = case["token_level_rewards"].sum(-1, keepdim=True)
    _refuse_nan_rewards(rewards)
    weights = case.option("weights", None)
    values = advantages.gdpo(
        rewards,
        case["index"],
        weights=None if weights is None else torch.tensor(weights, dtype=rewards.dtype),
        num_tokens=rows.count(mask),
        scale="group" if case.option("norm_adv_by_std_in_grpo", True) else "none",
        epsilon=case.option("epsilon", 1e-6),
        group_of_one="raw",
    )
    values = torch.where(mask, rows.spread(values), 0.0)
    return {"advantages": values, "returns": values}


def _reinforce_plus_plus(case: _Case) -> Outputs:
    values, returned = returns.reinforce_plus_plus(
        case.flat("token_level_rewards"),
        case.mask(),
        case.rows(),
        gamma=case.option("gamma", 1.0),
    )
    return {"advantages": values, "returns": returned}


def _remax(case: _Case) -> Outputs:
    values, returned = returns.remax(
        case.flat("token_level_rewards"),
        case["reward_baselines"],
        case.mask(),
        case.rows(),
        off_mask="return",
    )
    return {"advantages": values, "returns": returned}


def _gae(case: _Case) -> Outputs:
    values, returned = returns.gae(
        case.flat("token_level_rewards"),
        case.flat("values"),
        case.mask(),
        case.rows(),
        gamma=case.option("gamma", 1.0),
        lam=case.option("lam", 1.0),
        normalize=True,
    )
    return {"advantages": values, "returns": returned}


def _otb(align: str) -> Callable[[_Case], Outputs]:
    def run(case: _Case) -> Outputs:
        values, returned = returns.otb(
            case.flat("token_level_rewards"),
            case.flat("old_log_probs"),
            case.flat("sum_pi_squared"),
            case.mask(),
            case.rows(),
            case["index"],
            weights=case.flat("rollout_is_weights") if "rollout_is_weights" in case else None,
            align="token" if align == "token" else "position",
            zero_tail=case.option("handle_zero_tail", True),
            epsilon=case.option("epsilon", 1e-8),
            group_of_one="raw",
            count_empty_rows=align == "position",
        )
        return {"advantages": values, "returns": returned}

    return run


def _pf_ppo(case: _Case) -> Outputs:
    kinds = {"pow": "power", "max_min": "max_min", "max_random": "max_random"}
    weights = advantages.pf_ppo_weights(
        case["token_level_scores"].sum(-1),
        kind=kinds[case.option("reweight_method", "pow")],
        power=case.option("weight_pow", 2.0),
    )
    return {"multinomial_weights": weights}


def _vtrace(case: _Case) -> Outputs:
    values, targets = returns.vtrace(
        case.flat("log_pi") - case.flat("log_mu"),
        case.flat("rewards"),
        case.flat("values"),
        case.mask("mask"),
        case.rows("mask"),
        gamma=case.option("gamma", 1.0),
        lam=case.option("lam", 1.0),
        rho_bar=case.option("rho_bar", 1.0),
        c_bar=case.option("c_bar", 1.0),
    )
    return {"advantages": values, "value_targets": targets}


def _masked_mean(case: _Case) -> Outputs:
    if case.option("axis", None) is not None:
        return {"result": case.rows("mask").mean(case.flat("values"), case.mask("mask"))}
    return {"result": masked.masked_mean(case.flat("values"), case.mask("mask"))}


def _masked_var(case: _Case) -> Outputs:
    try:
        return {"result": masked.masked_var(case.flat("values"), case.mask("mask"))}
    except ValueError:
        return {"raises_value_error": 1}


def _masked_whiten(case: _Case) -> Outputs:
    return {"result": masked.whiten(case.flat("values"), case.mask("mask"))}


def _nanstd(case: _Case) -> Outputs:
    return {
        "std": masked.nan_std(case["x"], case.option("dim", None)),
        "std_all": masked.nan_std(case["x"]),
    }


_KL_KINDS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def _with_gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value, leaf)[0]


def _kl_penalty(case: _Case) -> Outputs:
    name = case.params["kl_penalty"]
    logprobs = case.flat("logprob").requires_grad_()
    value = kl.kl_estimate(
        logprobs,
        case.flat("ref_logprob"),
        kind=_KL_KINDS[name.removesuffix("+")],
        straight_through=name.endswith("+"),
    )
    outputs: Outputs = {"kl": value}
    if "grad_logprob" in case.outputs:
        total = torch.where(case.mask("mask_for_grad"), value, 0.0).sum()
        outputs["grad_logprob"] = _with_gradient(total, logprobs)
    return outputs


def _controller(case: _Case) -> kl.FixedController:
    if case.option("ctrl", "fixed") == "fixed" and "target_kl" not in case.params:
        return kl.FixedController(case.option("kl_coef", 0.001))
    if case.params.get("ctrl") == "fixed":
        return kl.FixedController(case.params["kl_coef"])
    coefficient = case.params["init_kl_coef" if "init_kl_coef" in case.params else "kl_coef"]
    return kl.AdaptiveController(
        coefficient, target=case.params["target_kl"], horizon=case.params["horizon"]
    )


def _adaptive_controller(case: _Case) -> Outputs:
    controller = _controller(case)
    values = [controller.coefficient]
    for current, num_steps in zip(case["current_kl"], case["n_steps"], strict=True):
        controller.update(float(current), int(num_steps))
        values.append(controller.coefficient)
    return {"values": torch.tensor(values, dtype=torch.float64)}


def _fixed_controller(case: _Case) -> Outputs:
    controller = _controller(case)
    values: list[float] = []
    for current, num_steps in zip(case["current_kl"], case["n_steps"], strict=True):
        controller.update(float(current), int(num_steps))
        values.append(controller.coefficient)
    return {"values": torch.tensor(values, dtype=torch.float64)}


def _compute_rewards(case: _Case) -> Outputs:
    rewards, _ = kl.kl_in_reward(
        case.flat("token_level_scores"),
        case.flat("old_log_prob"),
        case.flat("ref_log_prob"),
        torch.ones_like(case.flat("old_log_prob"), dtype=torch.bool),
        case.rows("old_log_prob"),
        coefficient=case.params["kl_ratio"],
    )
    return {"token_level_rewards": rewards}


def _apply_kl_penalty(case: _Case) -> Outputs:
    controller = _controller(case)
    coefficient = controller.coefficient
    rows = case.rows()
    rewards, metrics = kl.kl_in_reward(
        case.flat("token_level_scores"),
        case.flat("old_log_probs"),
        case.flat("ref_log_prob"),
        case.mask(),
        rows,
        coefficient=coefficient,
        kind=_KL_KINDS[case.params["kl_penalty"]],
        count_empty_rows=True,
    )
    current = metrics["reward_kl"].value()
    controller.update(current, rows.num_rows)
    return {
        "token_level_rewards": rewards,
        "coef_after": controller.coefficient,
        "metric:actor/reward_kl_penalty": current,
        "metric:actor/reward_kl_penalty_coeff": coefficient,
    }


_MODES = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_of_sums",
    "seq-mean-token-mean": "sequence_mean_of_means",
    "seq-mean-token-sum-norm": "sequence_mean_of_sums_scaled",
}


def _counts(
    case: _Case, mask: Tensor, rows: Rows, *, width: int, default: str = "token-mean"
) -> dict[str, Any]:
    """verl's aggregation parameters as the options of `aggregate`."""
    num_tokens, num_rows = aggregation.trained_counts(mask, rows)
    return {
        "mode": _MODES[case.option("loss_agg_mode", default)],
        "num_tokens": case.option("batch_num_tokens", int(num_tokens)),
        "num_rows": case.option("global_batch_size", int(num_rows)),
        "scale": case.option("loss_scale_factor", width),
        "num_ranks": case.option("dp_size", 1),
    }


def _agg_loss(case: _Case) -> Outputs:
    mask, rows = case.mask("loss_mask"), case.rows("loss_mask")
    values = case.flat("loss_mat").requires_grad_()
    counts = _counts(case, mask, rows, width=case["loss_mask"].shape[1])
    mode = counts["mode"]
    if not mask.any() and mode != "token_sum":
        raise Deviation("a batch without a trained token has loss 0; verl divides 0 by 0")
    if mode.startswith("sequence") and not values[~mask].isfinite().all():
        raise Deviation("masked by selection; verl's sequence modes multiply, so NaN leaks in")
    loss = aggregation.aggregate(values, mask, rows, **counts)
    outputs: Outputs = {"loss": loss}
    if "grad_loss_mat" in case.outputs:
        outputs["grad_loss_mat"] = _with_gradient(loss, values)
    return outputs


def _clip_range(case: _Case) -> dict[str, float]:
    default = case.option("clip_ratio", 0.2)
    return {
        "clip_low": case.option("clip_ratio_low", default),
        "clip_high": case.option("clip_ratio_high", default),
    }


def _bounds(case: _Case, low: str, high: str, offset: float = 0.0) -> dict[str, float]:
    clip = _clip_range(case)
    return {
        low: offset - clip["clip_low"] if offset else clip["clip_low"],
        high: offset + clip["clip_high"],
    }


def _policy_loss(
    kind: str, options: Callable[[_Case], dict[str, Any]], metrics: dict[str, str | float]
) -> Callable[[_Case], Outputs]:
    """A policy loss of verl: options by name, then its aggregation, gradient and metrics."""

    def run(case: _Case) -> Outputs:
        inputs = _verl_inputs(case, case.mask())
        output = losses.POLICY_LOSSES[kind](inputs, **options(case))
        outputs = _finished(case, inputs, output)
        values = metric.values(output.metrics)
        for name, key in metrics.items():
            outputs[f"metric:actor/{name}"] = values[key] if isinstance(key, str) else key
        return outputs

    return run


def _verl_inputs(case: _Case, mask: Tensor) -> LossInputs:
    old = case.flat("old_log_prob")
    behavior = case.flat("rollout_log_prob") if "rollout_log_prob" in case else old
    return LossInputs(
        logprobs=case.flat("log_prob").requires_grad_(),
        proximal_logprobs=old,
        behavior_logprobs=behavior,
        advantages=case.flat("advantages"),
        mask=mask,
        rows=case.rows(),
        weights=case.flat("rollout_is_weights") if "rollout_is_weights" in case else None,
    )


_FIXED_MODES = {  # losses of verl that ignore the mode they are given
    "sapo": "seq-mean-token-mean",
}


def _finished(case: _Case, inputs: LossInputs, output: LossOutput) -> Outputs:
    """The aggregated loss of a verl case and its gradient."""
    fixed = _FIXED_MODES.get(case.params.get("loss_mode", ""))
    if fixed:
        case = replace(case, params={**case.params, "loss_agg_mode": fixed})
    width = case["response_mask"].shape[1]
    counts = _counts(case, inputs.mask, inputs.rows, width=width)
    if output.level == "row":
        counts["num_rows"] = inputs.rows.num_rows
    loss = output.aggregate(inputs, **counts)
    outputs: Outputs = {"loss": loss}
    if "grad_log_prob" in case.outputs:
        outputs["grad_log_prob"] = _with_gradient(loss, inputs.logprobs)
    return outputs


def _policy_option(case: _Case, name: str, default: float) -> float:
    value = case.params.get("policy_loss", {}).get(name)
    return default if value is None else value


def _ppo_options(case: _Case) -> dict[str, Any]:
    return {**_clip_range(case), "dual_clip": case.option("clip_ratio_c", 3.0)}


def _cispo_options(case: _Case) -> dict[str, Any]:
    return _bounds(case, "ratio_min", "ratio_max", offset=1.0)


def _dppo_options(case: _Case) -> dict[str, Any]:
    return {
        **_bounds(case, "divergence_low", "divergence_high"),
        "ratio_cap": case.option("clip_ratio_c", 3.0),
    }


def _sapo_options(case: _Case) -> dict[str, Any]:
    return {
        "tau_positive": case.option("tau_pos", 1.0),
        "tau_negative": case.option("tau_neg", 1.05),
    }


def _clip_cov_options(case: _Case) -> dict[str, Any]:
    return {
        **_clip_range(case),
        "drop_ratio": _policy_option(case, "clip_cov_ratio", 0.0002),
        "covariance_low": _policy_option(case, "clip_cov_lb", 1.0),
        "covariance_high": _policy_option(case, "clip_cov_ub", 5.0),
    }


def _kl_cov_options(case: _Case) -> dict[str, Any]:
    return {
        "top_ratio": _policy_option(case, "kl_cov_ratio", 0.0002),
        "kl_coefficient": _policy_option(case, "ppo_kl_coef", 1.0),
    }


def _dro_options(case: _Case) -> dict[str, Any]:
    return {"beta": _policy_option(case, "dro_beta", 0.05)}


_PPO_METRICS: dict[str, str | float] = {
    "pg_clipfrac": "clip_fraction",
    "ppo_kl": "approx_kl",
    "pg_clipfrac_lower": "clip_fraction_dual",
}


def _off_policy(case: _Case, proximal: Tensor, behavior: Tensor, mask: Tensor) -> Outputs:
    measured = metric.values(
        diagnostics.off_policy(
            proximal,
            behavior,
            mask,
            case.rows(),
            k3_log_ratio_limit=float("inf"),
            count_empty_rows=True,
        )
    )
    names = {
        "training_ppl": "perplexity/proximal",
        "training_log_ppl": "log_perplexity/proximal",
        "rollout_ppl": "perplexity/behavior",
        "rollout_log_ppl": "log_perplexity/behavior",
        "log_ppl_diff": "perplexity_gap/mean",
        "log_ppl_abs_diff": "perplexity_gap/abs_mean",
        "log_ppl_diff_max": "perplexity_gap/max",
        "log_ppl_diff_min": "perplexity_gap/min",
        "ppl_ratio": "perplexity_gap/ratio",
        "kl": "off_policy_kl",
        "k3_kl": "off_policy_kl_k3",
        "chi2_token": "chi2/token",
        "chi2_seq": "chi2/row",
    }
    return {name: measured[key] for name, key in names.items()}


def _offpolicy_metrics(case: _Case) -> Outputs:
    measured = _off_policy(
        case, case.flat("old_log_prob"), case.flat("rollout_log_prob"), case.mask()
    )
    return {f"metric:{name}": value for name, value in measured.items()}


def _verl_weights(
    params: dict[str, Any], log_ratio: Tensor, mask: Tensor, rows: Rows
) -> tuple[corrections.Correction, Outputs]:
    """compute_rollout_correction_weights, with its metrics."""
    level = params["rollout_is"]
    threshold = str(params.get("rollout_is_threshold", 2.0))
    bounds = [float(bound) for bound in threshold.split("_")]
    is_icepop = len(bounds) == 2
    correction = corrections.importance_weights(
        log_ratio,
        mask,
        rows,
        level=level,
        mode="mask" if is_icepop else "truncate",
        low=bounds[0] if is_icepop else None,
        high=bounds[-1],
        count_empty_rows=True,
    )
    source = "importance_weight" if level == "token" else "importance_ratio"
    names = {
        "mean": "importance_weight/mean",
        "std": "importance_weight/std",
        "max": f"{source}/max",
        "min": f"{source}/min",
        "eff_sample_size": "importance_weight/ess",
        "ratio_fraction_high": "importance_ratio/fraction_high",
        "ratio_fraction_low": "importance_ratio/fraction_low",
        "seq_mean": "importance_weight/row_mean",
        "seq_std": "importance_weight/row_std",
        "seq_max": "importance_weight/row_max",
        "seq_min": "importance_weight/row_min",
        "seq_max_deviation": "importance_weight/row_deviation_max",
        "seq_fraction_high": "importance_ratio/row_fraction_high",
        "seq_fraction_low": "importance_ratio/row_fraction_low",
    }
    if is_icepop:
        names["oob_ratio"] = "importance_weight/rejected_fraction"
    if params.get("rollout_is_batch_normalize"):
        mean = corrections.weight_mean(
            correction.weights, mask, rows, level="token" if level == "token" else "row"
        )
        correction = corrections.normalize_weights(correction, mean.value())
        names["batch_norm_factor"] = "importance_weight/batch_mean"
    measured = metric.values(correction.metrics)
    return correction, {f"rollout_is_{name}": measured[key] for name, key in names.items()}


_REJECTION_LEVELS = {
    "token": "token",
    "seq_sum": "sequence_sum",
    "seq_mean": "sequence_mean",
    "seq_max": "sequence_max",
}


def _verl_rejection(
    params: dict[str, Any], log_ratio: Tensor, mask: Tensor, rows: Rows
) -> tuple[Tensor, Outputs]:
    """compute_rollout_rejection_mask, with its metrics."""
    options = [option.strip() for option in params["rollout_rs"].split(",")]
    thresholds = [part.strip() for part in str(params["rollout_rs_threshold"]).split(",")]
    if len(thresholds) == 1:
        thresholds = thresholds * len(options)
    applied: list[corrections.Correction] = []
    outputs: Outputs = {}
    for option, threshold in zip(options, thresholds, strict=True):
        level, estimator = option.rsplit("_", 1)
        bounds = [float(bound) for bound in threshold.split("_")]
        correction = corrections.rejection_mask(
            log_ratio,
            mask,
            rows,
            level=_REJECTION_LEVELS[level],
            estimator=estimator,
            low=bounds[0] if len(bounds) == 2 else None,
            high=bounds[-1],
            k1_bounds="inverse",
        )
        measured = metric.values(correction.metrics)
        prefix = f"rejection_{_REJECTION_LEVELS[level]}_{estimator}"
        names = {
            "mean": "mean",
            "max": "max",
            "min": "min",
            "std": "std",
            "fraction_high": "fraction_high",
            "fraction_low": "fraction_low",
            "seq_mean": "row_mean",
            "seq_std": "row_std",
            "seq_max": "row_max",
            "seq_min": "row_min",
            "seq_max_deviation": "row_deviation_max",
            "seq_fraction_high": "row_fraction_high",
            "masked_fraction": "rejected_fraction",
            "seq_masked_fraction": "row_rejected_fraction",
        }
        if estimator == "k1":
            names["seq_fraction_low"] = "row_fraction_low"
        for name, key in names.items():
            outputs[f"rollout_rs_{option}_{name}"] = measured[f"{prefix}/{key}"]
        applied.append(correction)
    combined = corrections.combine_corrections(applied, mask, rows, count_empty_rows=True)
    measured = metric.values(combined.metrics)
    outputs["rollout_rs_masked_fraction"] = measured["corrections/rejected_fraction"]
    outputs["rollout_rs_seq_masked_fraction"] = measured["corrections/row_rejected_fraction"]
    return combined.keep, outputs


def _correction_weights(case: _Case) -> Outputs:
    correction, measured = _verl_weights(
        case.params, case.flat("log_ratio"), case.mask(), case.rows()
    )
    named: Outputs = {f"metric:{name}": value for name, value in measured.items()}
    return {"weights": correction.weights, **named}


def _correction_rejection(case: _Case) -> Outputs:
    keep, measured = _verl_rejection(case.params, case.flat("log_ratio"), case.mask(), case.rows())
    named: Outputs = {f"metric:{name}": value for name, value in measured.items()}
    return {"mask": keep.double(), **named}


def _correct(
    case: _Case, params: dict[str, Any], proximal: Tensor, behavior: Tensor
) -> tuple[Tensor | None, Tensor, Outputs]:
    """Weights, mask and metrics of verl's whole correction."""
    mask, rows = case.mask(), case.rows()
    log_ratio = corrections.log_ratios(proximal, behavior, mask)
    measured: Outputs = {}
    weights, keep = None, mask
    if params.get("rollout_is") is not None:
        correction, found = _verl_weights(params, log_ratio, mask, rows)
        weights = correction.weights
        measured.update(found)
    if params.get("rollout_rs") is not None:
        keep, found = _verl_rejection(params, log_ratio, mask, rows)
        measured.update(found)
    measured.update(_off_policy(case, proximal.detach(), behavior, mask))
    named: Outputs = {f"metric:rollout_corr/{name}": value for name, value in measured.items()}
    return weights, keep, named


def _correction_and_rejection(case: _Case) -> Outputs:
    weights, keep, measured = _correct(
        case, case.params, case.flat("old_log_prob"), case.flat("rollout_log_prob")
    )
    outputs: Outputs = {"mask": keep.double(), **measured}
    if weights is not None:
        outputs["weights"] = weights
    return outputs


def _bypass_mode(case: _Case) -> Outputs:
    """The rollout policy as proximal; PPO or REINFORCE with weights, on what rejection left."""
    params = case.params["policy_loss"]["rollout_correction"]
    behavior = case.flat("old_log_prob")
    weights, keep, measured = _correct(case, params, case.flat("log_prob"), behavior)
    inputs = _verl_inputs(case, keep)
    if params.get("loss_type", "ppo_clip") == "ppo_clip":
        output = losses.ppo(inputs, **_ppo_options(case))
        names = _PPO_METRICS
    else:
        names: dict[str, str | float] = {"ppo_kl": "approx_kl"}
        is_plain = "_" not in str(params.get("rollout_is_threshold", 2.0))
        is_whole = not re.search(r"\btoken_", params.get("rollout_rs") or "")
        level = params.get("rollout_is")
        is_normalized = params.get("rollout_is_batch_normalize")
        if level and not is_normalized and (level == "token" or is_whole):
            bounds = [float(part) for part in str(params["rollout_is_threshold"]).split("_")]
            output = losses.POLICY_LOSSES["reinforce"](
                inputs,
                level=level,
                mode="truncate" if is_plain else "mask",
                ratio_low=None if is_plain else bounds[0],
                ratio_cap=bounds[-1],
            )
        else:
            inputs = replace(inputs, weights=weights)
            output = losses.POLICY_LOSSES["gpg"](inputs)
    outputs = _finished(case, inputs, output)
    values = metric.values(output.metrics)
    for name, key in names.items():
        outputs[f"metric:actor/{name}"] = values[str(key)]
    return {**outputs, **measured}


def _value_loss(case: _Case) -> Outputs:
    mask, rows = case.mask(), case.rows()
    values = case.flat("vpreds").requires_grad_()
    value_losses, metrics = critic_loss.value_loss(
        values,
        case.flat("values"),
        case.flat("returns"),
        mask,
        clip=case.params["cliprange_value"],
    )
    counts = _counts(case, mask, rows, width=case["response_mask"].shape[1])
    loss = aggregation.aggregate(value_losses, mask, rows, **counts)
    outputs: Outputs = {"loss": loss, "clipfrac": metrics["value_clip_fraction"].value()}
    if "grad_vpreds" in case.outputs:
        outputs["grad_vpreds"] = _with_gradient(loss, values)
    return outputs


def _entropy_loss(case: _Case) -> Outputs:
    logits = case["logits"].requires_grad_()
    mask, rows = case.mask(), case.rows()
    entropy = masked.categorical_entropy(logits).reshape(-1)
    counts = _counts(case, mask, rows, width=case["response_mask"].shape[1])
    loss = aggregation.aggregate(entropy, mask, rows, **counts)
    outputs: Outputs = {"entropy": loss, "token_entropy": entropy}
    if "grad_logits" in case.outputs:
        outputs["grad_logits"] = _with_gradient(loss, logits)
    return outputs


def _debug_metrics(case: _Case) -> Outputs:
    measured = diagnostics.logprob_gap(
        case.flat("old_log_probs"), case.flat("rollout_log_probs"), case.mask()
    )
    values = metric.values(measured)
    return {
        "metric:training/rollout_probs_diff_valid": float(case.mask().any()),
        "metric:training/rollout_probs_diff_max": values["probability_gap/max"],
        "metric:training/rollout_probs_diff_mean": values["probability_gap/mean"],
        "metric:training/rollout_probs_diff_std": values["probability_gap/std"],
        "metric:training/rollout_actor_probs_pearson_corr": values["probability_gap/correlation"],
    }


def _data_metrics(case: _Case) -> Outputs:
    mask = case.mask()
    width = case["response_mask"].shape[1]
    answered = case["attention_mask"][:, -width:].sum(-1) > 0
    outputs: Outputs = {}
    scalars = {
        "score": (case["token_level_scores"].sum(-1), answered),
        "rewards": (case["token_level_rewards"].sum(-1), answered),
        "advantages": (case.flat("advantages"), mask),
        "returns": (case.flat("returns"), mask),
        "values": (case.flat("values"), mask),
    }
    for name, (values, chosen) in scalars.items():
        for key, value in metric.values(metric.summary(name, values, chosen)).items():
            outputs[f"metric:critic/{key}"] = value
    explained = metric.ExplainedVariance.of(case.flat("returns"), case.flat("values"), mask)
    outputs["metric:critic/vf_explained_var"] = explained.value()
    return outputs


def _variance_proxy(case: _Case) -> Outputs:
    rows = case.rows()
    measured = metric.values(
        diagnostics.gradient_power(
            case.flat("advantages"),
            case.flat("old_log_probs"),
            case.flat("sum_pi_squared"),
            case.mask(),
            rows,
            weights=case.flat("rollout_is_weights") if "rollout_is_weights" in case else None,
            count_empty_rows=True,
        )
    )
    noise = diagnostics.gradient_noise(
        measured["gradient_power/total"], case.params["gradient_norm"], rows.num_rows
    )
    return {
        "metric:variance_proxy/proxy1_signal_strength": noise["gradient_power/signal"],
        "metric:variance_proxy/proxy2_total_power": measured["gradient_power/total"],
        "metric:variance_proxy/proxy3_pure_noise": noise["gradient_power/noise"],
        "metric:variance_proxy/expected_a_squared": measured["gradient_power/advantage_squared"],
        "metric:variance_proxy/expected_w": measured["gradient_power/score"],
    }


def _contiguous_groups(num_rows: int, size: int) -> Tensor:
    return torch.arange(num_rows) // size


def _rloo_advantages(case: _Case) -> Outputs:
    mask, rows = case.mask("completion_mask"), case.rows("completion_mask")
    if case.option("mask_truncated_completions", False):
        lost = case["completion_mask"].new_zeros(rows.num_rows).bool()
        lost[::3] = True  # the stub cuts every third row off before its end of sequence
        mask = mask & ~rows.spread(lost)
    old = case.flat("old_per_token_logps")
    rewards = advantages.combine_rewards(
        case["rewards_per_func"], case["reward_weights"].to(case["rewards_per_func"].dtype)
    )
    beta = case.params["beta"]
    penalty = None
    if beta:
        penalty = kl.sequence_kl_penalty(
            old, case.flat("ref_per_token_logps"), mask, rows, coefficient=beta
        )
    clip = case.option("reward_clip_range", (None, None))
    values = advantages.rloo(
        rewards,
        _contiguous_groups(rows.num_rows, case.params["num_generations"]),
        kl_penalty=penalty,
        clip_low=clip[0],
        clip_high=clip[1],
        normalize=case.params["normalize_advantages"],
    )
    return {
        "advantages": values,
        "old_logps": rows.sum(old, mask),
        "effective_completion_mask": mask.double(),
    }


def _trl_inputs(case: _Case, mask_name: str) -> LossInputs:
    mask, rows = case.mask(mask_name), case.rows(mask_name)
    old = case.flat("old_per_token_logps")
    weights = None
    if "importance_sampling_ratio" in case:
        ratio = case["importance_sampling_ratio"]
        weights = ratio.expand(case[mask_name].shape).reshape(-1)
    return LossInputs(
        logprobs=case.flat("per_token_logps").requires_grad_(),
        proximal_logprobs=old,
        behavior_logprobs=(
            case.flat("sampling_per_token_logps") if "sampling_per_token_logps" in case else old
        ),
        advantages=rows.spread(case["advantages"].reshape(-1)),
        mask=mask,
        rows=rows,
        weights=weights,
        entropy=_entropy(case),
    )


def _entropy(case: _Case) -> Tensor:
    """Entropies where the case has them; TRL's stub returns zeros elsewhere."""
    if "entropies" in case:
        return case.flat("entropies")
    return torch.zeros_like(case.flat("per_token_logps"))


def _clip_ratio_metrics(values: dict[str, float], prefix: str = "") -> Outputs:
    names = {
        "low_mean": "clip_fraction_low",
        "low_min": "clip_fraction_low_min",
        "high_mean": "clip_fraction_high",
        "high_max": "clip_fraction_high_max",
        "region_mean": "clip_fraction_region",
    }
    return {f"metric:clip_ratio/{name}": values[prefix + key] for name, key in names.items()}


def _refuse_empty_rows(case: _Case, inputs: LossInputs) -> None:
    is_empty = inputs.rows.count(inputs.mask) == 0
    if (is_empty & (case["advantages"].reshape(-1) != 0)).any():
        raise Deviation("a row without a trained token has no loss; TRL adds -A for it, gradient 0")


def _refuse_weights_off_mask(case: _Case) -> None:
    ratio = case["importance_sampling_ratio"]
    if (ratio != 1).logical_and(case["mask"] == 0).any():
        raise Deviation("weights off the mask are not part of a row's ratio; TRL sums them in")


def _rloo_loss(case: _Case) -> Outputs:
    inputs = _trl_inputs(case, "completion_mask")
    _refuse_empty_rows(case, inputs)
    output = losses.POLICY_LOSSES["sequence_ratio"](
        inputs,
        clip_low=case.params["epsilon_low"],
        clip_high=case.params["epsilon_high"],
        log_ratio_limit=float("inf"),
        count_empty_rows=True,
    )
    loss = output.aggregate(inputs, mode="token_mean", num_tokens=0, num_rows=inputs.rows.num_rows)
    values = metric.values(output.metrics)
    _, measured = losses.entropy_bonus(_entropy(case), inputs.mask)
    return {
        "loss": loss,
        "grad_per_token_logps": _with_gradient(loss, inputs.logprobs),
        "metric:entropy": measured["entropy"].value(),
        **_clip_ratio_metrics(values),
    }


def _grpo_advantages(case: _Case) -> Outputs:
    rewards = case["rewards_per_func"]
    reward_weights = case["reward_weights"].to(rewards.dtype)
    groups = _contiguous_groups(len(rewards), case.params["num_generations"])
    scale = case.params["scale_rewards"]
    if case.option("multi_objective_aggregation", "") == "normalize_then_sum":
        values = advantages.gdpo(rewards, groups, weights=reward_weights, epsilon=1e-4)
    else:
        total = advantages.combine_rewards(rewards, reward_weights)
        values = advantages.grpo(total, groups, scale=scale, epsilon=1e-4)
    mask, rows = case.mask("completion_mask"), case.rows("completion_mask")
    outputs: Outputs = {"advantages": values}
    if "tool_mask" in case:
        mask = mask & case.mask("tool_mask")
    num_tokens, _ = aggregation.trained_counts(mask, rows)
    outputs["num_items_in_batch"] = int(num_tokens)
    name = case.option("vllm_importance_sampling_mode", None)
    if name is None:
        return outputs
    level, mode = name.split("_")
    old, sampled = case.flat("old_per_token_logps"), case.flat("sampling_per_token_logps")
    log_ratio = corrections.log_ratios(old, sampled, mask)
    every = torch.ones_like(mask)  # TRL's ratio is 1 off the mask
    options: dict[str, Any] = {
        "level": level,
        "mode": mode,
        "low": case.option("clip_min", None),
        "high": case.option("clip_max", None),
        "count_empty_rows": True,
    }
    correction = corrections.importance_weights(log_ratio, every, rows, **options)
    measured = corrections.importance_weights(log_ratio, mask, rows, **options).metrics
    gap = diagnostics.logprob_gap(old, sampled, mask)
    weights = correction.weights
    if level == "sequence":
        weights = rows.mean(weights, every)
        measured = correction.metrics
    source = "importance_weight/row_" if level == "sequence" else "importance_weight/"
    return {
        **outputs,
        "importance_sampling_ratio": weights,
        "metric:sampling/sampling_logp_difference/mean": gap["logprob_gap/mean"].value(),
        "metric:sampling/sampling_logp_difference/max": gap["logprob_gap/max"].value(),
        "metric:sampling/importance_sampling_ratio/min": measured[f"{source}min"].value(),
        "metric:sampling/importance_sampling_ratio/mean": measured[f"{source}mean"].value(),
        "metric:sampling/importance_sampling_ratio/max": measured[f"{source}max"].value(),
    }


_TRL_MODES = {
    "grpo": "sequence_mean_of_means",
    "sapo": "sequence_mean_of_means",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "dr_grpo": "sequence_mean_of_sums_scaled",
    "luspo": "sequence_mean_of_sums",
}


def _grpo_kind(case: _Case) -> tuple[str, dict[str, Any], str]:
    """Our kind, its options and the prefix of its clip metrics for a loss of TRL's GRPO trainer."""
    kind = case.params["loss_type"]
    clip = {"clip_low": case.params["epsilon_low"], "clip_high": case.params["epsilon_high"]}
    delta = case.option("delta", None)
    is_sequence = case.option("importance_sampling_level", "token") == "sequence"
    if is_sequence and (kind in ("cispo", "sapo") or delta is not None or case.option("beta", 0.0)):
        raise Deviation("CISPO, SAPO, the two-sided clip and a weighed KL take ratios of tokens")
    if kind == "cispo":
        return "cispo", {"ratio_max": case.params["epsilon_high"]}, ""
    if kind == "sapo":
        taus = {
            "tau_positive": case.option("sapo_temperature_pos", 1.0),
            "tau_negative": case.option("sapo_temperature_neg", 1.05),
        }
        return "sapo", taus, ""
    if kind == "vespo":
        return "vespo", {"count_empty_rows": True}, ""
    if is_sequence and kind == "luspo":
        return "luspo", {**clip, "count_empty_rows": True}, ""
    if is_sequence:
        return "gspo", {**clip, "count_empty_rows": True}, "row_"
    return "ppo", {**clip, "dual_clip": None, "delta": delta}, ""


def _grpo_loss(case: _Case) -> Outputs:
    kind, options, prefix = _grpo_kind(case)
    return _trl_loss(case, kind, options, prefix)


def _gmpo_loss(case: _Case) -> Outputs:
    clip = {"clip_low": case.params["epsilon_low"], "clip_high": case.params["epsilon_high"]}
    return _trl_loss(case, "gmpo", clip, "")


def _trl_loss(case: _Case, kind: str, options: dict[str, Any], prefix: str) -> Outputs:
    inputs = _trl_inputs(case, "mask")
    mask, rows = inputs.mask, inputs.rows
    if kind == "gmpo":
        _refuse_empty_rows(case, inputs)
    if kind == "vespo" and inputs.weights is not None:
        _refuse_weights_off_mask(case)
    chosen: list[corrections.Correction] = []
    if case.option("off_policy_mask_threshold", None) is not None:
        drift = corrections.log_ratios(inputs.logprobs, inputs.behavior_logprobs, mask)
        threshold = case.params["off_policy_mask_threshold"]
        chosen.append(
            corrections.opsm_mask(drift, inputs.advantages, mask, rows, threshold=threshold)
        )
    if case.option("top_entropy_quantile", 1.0) < 1.0:
        fraction = case.params["top_entropy_quantile"]
        chosen.append(
            corrections.high_entropy_mask(_entropy(case), mask, rows, top_fraction=fraction)
        )
    if inputs.weights is not None:
        weights = torch.where(mask, inputs.weights, 0.0)
        chosen.append(corrections.Correction(weights=weights, keep=mask, metrics={}))
    combined = inputs
    if chosen:
        weights = corrections.combine_corrections(chosen, mask, rows).weights
        combined = replace(inputs, weights=weights)
    output = losses.POLICY_LOSSES[kind](combined, **options)
    num_tokens, _ = aggregation.trained_counts(mask, rows)
    counts = {
        "mode": _TRL_MODES[case.params["loss_type"]],
        "num_tokens": case.option("num_items_in_batch", int(num_tokens)),
        "num_rows": rows.num_rows,
        "scale": case.option("max_completion_length", None),
    }
    loss = output.aggregate(combined, **counts)
    values = metric.values(output.metrics)
    _, measured = losses.entropy_bonus(_entropy(case), mask)
    outputs: Outputs = {"metric:entropy": measured["entropy"].value()}
    beta = case.option("beta", 0.0)
    if beta:
        penalties, found = kl.kl_loss(
            inputs.logprobs,
            case.flat("ref_per_token_logps"),
            mask,
            value_limit=None,
            proximal_logprobs=(
                inputs.proximal_logprobs if case.option("use_bias_correction_kl", True) else None
            ),
        )
        loss = loss + beta * aggregation.aggregate(penalties, mask, rows, **counts)
        outputs["metric:kl"] = found["kl"].value()
    outputs["loss"] = loss
    if "grad_per_token_logps" in case.outputs:
        outputs["grad_per_token_logps"] = _with_gradient(loss, inputs.logprobs)
    if kind == "cispo":
        outputs["metric:cispo_clip_ratio"] = values["clip_fraction_high"]
    elif kind == "vespo":
        outputs["metric:vespo/phi_seq_mean"] = values["row_phi"]
    elif kind != "sapo":
        outputs.update(_clip_ratio_metrics(values, prefix))
    return outputs


def _opsm(case: _Case) -> Outputs:
    mask, rows = case.mask("mask"), case.rows("mask")
    drift = corrections.log_ratios(
        case.flat("per_token_logps"), case.flat("sampling_per_token_logps"), mask
    )
    kept = corrections.opsm_rows(
        drift,
        case["advantages"].reshape(-1),
        mask,
        rows,
        threshold=case.params["off_policy_threshold"],
    )
    return {"keep": kept.double()}


def _gamma_weights(case: _Case) -> Outputs:
    mask, rows = case.mask("mask"), case.rows("mask")
    weights = None
    if "importance_sampling_ratio" in case:
        ratio = case["importance_sampling_ratio"]
        _refuse_weights_off_mask(case)
        weights = ratio.expand(case["mask"].shape).reshape(-1)
    phi = sequence_losses.vespo_weights(
        case.flat("log_ratio_per_token"),
        case["advantages"].reshape(-1),
        mask,
        rows,
        weights=weights,
        k_positive=case.params["k_pos"],
        lambda_positive=case.params["lambda_pos"],
        k_negative=case.params["k_neg"],
        lambda_negative=case.params["lambda_neg"],
    )
    return {"phi": phi}


_CLIP_METRICS: dict[str, str | float] = {
    "pg_clipfrac": "clip_fraction",
    "ppo_kl": "approx_kl",
    "pg_clipfrac_lower": 0.0,
}

_FUNCTIONS: dict[str, Callable[[_Case], Outputs]] = {
    "compute_grpo_outcome_advantage": _outcome(
        advantages.grpo, scale="group", epsilon=1e-6, group_of_one="raw"
    ),
    "compute_grpo_vectorized_outcome_advantage": _outcome(
        advantages.grpo, scale="group", epsilon=1e-6, group_of_one="raw"
    ),
    "compute_grpo_passk_outcome_advantage": _outcome(
        advantages.pass_at_k, scale="group", epsilon=1e-6
    ),
    "compute_rloo_outcome_advantage": _outcome(advantages.rloo, group_of_one="raw"),
    "compute_rloo_vectorized_outcome_advantage": _outcome(advantages.rloo),
    "compute_opo_outcome_advantage": _outcome(advantages.opo, num_tokens=None, group_of_one="raw"),
    "compute_gpg_outcome_advantage": _outcome(advantages.gpg, group_of_one="raw"),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": _outcome(
        advantages.reinforce_plus_plus_baseline, num_tokens=None, group_of_one="raw"
    ),
    "compute_reinforce_plus_plus_outcome_advantage": _reinforce_plus_plus,
    "compute_remax_outcome_advantage": _remax,
    "compute_gae_advantage_return": _gae,
    "compute_optimal_token_baseline_advantage": _otb("position"),
    "compute_multi_turn_optimal_token_baseline_advantage": _otb("token"),
    "compute_gdpo_outcome_advantage": _gdpo,
    "compute_pf_ppo_reweight_data": _pf_ppo,
    "vtrace_advantage_estimate": _vtrace,
    "masked_mean": _masked_mean,
    "masked_var": _masked_var,
    "masked_whiten": _masked_whiten,
    "nanstd": _nanstd,
    "kl_penalty": _kl_penalty,
    "AdaptiveKLController": _adaptive_controller,
    "FixedKLController": _fixed_controller,
    "compute_rewards": _compute_rewards,
    "apply_kl_penalty": _apply_kl_penalty,
    "agg_loss": _agg_loss,
    "compute_policy_loss_vanilla": _policy_loss("ppo", _ppo_options, _PPO_METRICS),
    "compute_policy_loss_gspo": _policy_loss("gspo", _clip_range, _CLIP_METRICS),
    "compute_policy_loss_sapo": _policy_loss(
        "sapo",
        _sapo_options,
        {"pg_clipfrac": 0.0, "ppo_kl": "approx_kl", "pg_clipfrac_lower": 0.0},
    ),
    "compute_policy_loss_gpg": _policy_loss("gpg", lambda case: {}, {}),
    "compute_policy_loss_geo_mean": _policy_loss(
        "gmpo",
        _clip_range,
        {
            "pg_clipfrac": "clip_fraction_positive",
            "ppo_kl": "approx_kl",
            "pg_clipfrac_lower": "clip_fraction_negative",
        },
    ),
    "compute_policy_loss_cispo": _policy_loss("cispo", _cispo_options, _CLIP_METRICS),
    "compute_policy_loss_dppo_tv": _policy_loss(
        "dppo_tv", _dppo_options, {**_CLIP_METRICS, "pg_clipfrac_lower": "ratio_cap_fraction"}
    ),
    "compute_policy_loss_dppo_kl": _policy_loss(
        "dppo_kl", _dppo_options, {**_CLIP_METRICS, "pg_clipfrac_lower": "ratio_cap_fraction"}
    ),
    "compute_policy_loss_clip_cov": _policy_loss(
        "clip_cov", _clip_cov_options, {"pg_clipfrac": "clip_fraction", "ppo_kl": "approx_kl"}
    ),
    "compute_policy_loss_kl_cov": _policy_loss(
        "kl_cov", _kl_cov_options, {"ppo_kl": "approx_kl_abs"}
    ),
    "compute_policy_loss_dro": _policy_loss("dro", _dro_options, {"ppo_kl": "approx_kl"}),
    "compute_policy_loss_bypass_mode": _bypass_mode,
    "compute_value_loss": _value_loss,
    "compute_entropy_loss": _entropy_loss,
    "compute_rollout_correction_weights": _correction_weights,
    "compute_rollout_rejection_mask": _correction_rejection,
    "compute_rollout_correction_and_rejection_mask": _correction_and_rejection,
    "compute_offpolicy_metrics": _offpolicy_metrics,
    "calculate_debug_metrics": _debug_metrics,
    "compute_data_metrics": _data_metrics,
    "compute_variance_proxy_metrics": _variance_proxy,
    "rloo__generate_and_score_completions": _rloo_advantages,
    "rloo__compute_loss": _rloo_loss,
    "_generate_and_score_completions": _grpo_advantages,
    "_compute_loss": _grpo_loss,
    "gmpo__compute_loss": _gmpo_loss,
    "get_off_policy_mask": _opsm,
    "get_gamma_weights": _gamma_weights,
}
