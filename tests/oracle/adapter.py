"""Runs a case of the oracle through our objectives, with sections as a YAML makes them.

The one public function is `run_case`. It dispatches by the case's function and parameters, never by
its name. A padded `[B, T]` array becomes `B * T` flat tokens in `B` rows; padding is tokens off the
mask. Values, gradients, weights and masks are compared; unit tests hold metrics to plain formulas.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from objectives import (
    aggregate_output,
    correct,
    correction_inputs,
    loss_of,
    make_table,
    section_of,
)
from torch import Tensor

from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective import corrections, kl
from raylearner.learner.objective.aggregation import aggregate
from raylearner.learner.objective.episodes import (
    EpisodeTable,
    ResamplingSection,
    RewardShaping,
    Shaper,
    resampling_weights,
)
from raylearner.learner.objective.estimate import EPISODE_ADVANTAGES, token_result
from raylearner.learner.objective.importance import log_ratios, weight_mean
from raylearner.learner.objective.loss import LossInputs
from raylearner.learner.objective.returns import TokenInputs
from raylearner.learner.objective.value_loss import CriticSection, value_loss

Outputs = dict[str, Any]


class Deviation(Exception):
    """Our choice differs from the package's and no key of ours reproduces it; gives the reason."""


@dataclass(frozen=True)
class _Case:
    params: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]

    def __getitem__(self, name: str) -> Tensor:
        """An input as given."""
        return self.inputs[name]

    def flat(self, *names: str) -> Tensor:
        """The first of these `[B, T]` inputs that the case has, as `[B * T]` tokens."""
        return next(self.inputs[name] for name in names if name in self.inputs).reshape(-1)

    def maybe(self, name: str) -> Tensor | None:
        return self.flat(name) if name in self.inputs else None

    def mask_rows(self, name: str = "response_mask") -> tuple[Tensor, Rows]:
        num_rows, width = self.inputs[name].shape
        return self.flat(name) > 0, Rows.from_lengths([width] * num_rows)

    def option(self, name: str, default: Any) -> Any:
        """A parameter, which may be among those of verl's policy loss."""
        value = {**self.params, **self.params.get("policy_loss", {})}.get(name)
        return default if value is None else value


def run_case(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our outputs for one case of the index, under the index's names."""
    path = case["function"].split(" (")[0].split(":")[-1].split(".")
    function = path[-2] if path[-1] == "update" else path[-1]
    for trainer, prefix in (("RLOOTrainer", "rloo_"), ("GMPOTrainer", "gmpo_")):
        function = prefix + function if trainer in case["function"] else function
    inputs = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    found: dict[str, np.ndarray] = {}
    run = _FUNCTIONS[function]
    for name, value in run(_Case(case["params"] or {}, inputs, tuple(case["outputs"]))).items():
        if name in case["outputs"]:
            array = value.detach().numpy() if isinstance(value, Tensor) else value
            found[name] = np.asarray(array).reshape(case["outputs"][name]["shape"])
    return found


# -- advantages --------------------------------------------------------------------------------


def _advantages(kind: str, table: EpisodeTable, **keys: Any) -> Tensor:
    return EPISODE_ADVANTAGES[kind](table, section_of("advantage", kind, **keys))


def _by_episode(kind: str, **keys: Any) -> Callable[[_Case], Outputs]:
    def run(case: _Case) -> Outputs:
        mask, rows = case.mask_rows()
        parts = [case[name] for name in sorted(case.inputs) if re.fullmatch(r"r\d+", name)]
        parts = torch.stack(parts or [case["token_level_rewards"].sum(-1)], dim=1)
        scores, own = parts[:, 0], dict(keys)
        if scores.isnan().any():
            raise Deviation("a NaN reward is left out of its group; verl spreads it over the group")
        if "norm_adv_by_std_in_grpo" in case.params:
            own["normalize"] = "group" if case.params["norm_adv_by_std_in_grpo"] else "none"
        table = make_table(
            scores,
            case["index"],
            num_tokens=rows.count(mask),
            parts=parts,
            part_weights=parts.new_tensor(case.option("weights", [1.0] * parts.shape[1])),
        )
        values = torch.where(mask, rows.spread(_advantages(kind, table, **own)), 0.0)
        return {"advantages": values, "returns": values}

    return run


def _by_token(
    kind: str, mask_name: str = "response_mask", **keys: Any
) -> Callable[[_Case], Outputs]:
    def run(case: _Case) -> Outputs:
        mask, rows = case.mask_rows(mask_name)
        given = {
            n: case.params[n] for n in ("gamma", "lam", "rho_bar", "c_bar") if n in case.params
        }
        rewards, ids = case.flat("token_level_rewards", "rewards"), torch.arange(rows.num_rows)
        table = make_table(
            rewards.new_zeros(rows.num_rows),
            case.inputs.get("index", ids),
            greedy_rewards=case.inputs.get("reward_baselines"),
        )
        inputs = TokenInputs(
            rewards=rewards,
            mask=mask,
            rows=rows,
            episodes=table,
            row_episodes=ids,
            turns=rows.index,
            anchors=rows.index,
            values=case.maybe("values"),
            log_ratio=case.flat("log_pi") - case.flat("log_mu") if kind == "vtrace" else None,
            logprobs=case.maybe("old_log_probs"),
            squared_probs=case.maybe("sum_pi_squared"),
            weights=case.maybe("rollout_is_weights"),
        )
        found, returns = token_result(section_of("advantage", kind, **keys, **given), inputs)
        if kind == "remax":  # verl leaves the return where nothing was sampled
            found = torch.where(mask, found, returns)
        return {"advantages": found, "returns": returns, "value_targets": returns}

    return run


def _resampling(case: _Case) -> Outputs:
    kind = {"pow": "power"}.get(case.params["reweight_method"], case.params["reweight_method"])
    config = ResamplingSection(kind=kind, power=case.params["weight_pow"])
    return {"multinomial_weights": resampling_weights(case["token_level_scores"].sum(-1), config)}


def _trl_table(case: _Case) -> EpisodeTable:
    parts = case["rewards_per_func"]
    weights = case["reward_weights"].to(parts.dtype)
    total = torch.where(parts.isnan().all(1), torch.nan, torch.nansum(parts * weights, dim=1))
    groups = torch.arange(len(parts)) // case.params["num_generations"]
    return make_table(total, groups, parts=parts, part_weights=weights)


def _rloo_advantages(case: _Case) -> Outputs:
    mask, rows = case.mask_rows("completion_mask")
    table, old = _trl_table(case), case.flat("old_per_token_logps")
    low, high = case.option("reward_clip_range", (None, None))
    shaping = RewardShaping(clip_low=low, clip_high=high)
    rewards = Shaper.of(table.rewards, shaping).shape(table.rewards)
    if case.params["beta"]:
        reference, config = case.flat("ref_per_token_logps"), kl.KlSection(estimator="k1")
        penalty, _ = kl.kl_in_reward(old, reference, mask, rows, config)
        rewards = rewards - case.params["beta"] * rows.sum(penalty)
    normalize = case.params["normalize_advantages"]
    return {
        "advantages": _advantages("rloo", make_table(rewards, table.groups), normalize=normalize),
        "old_logps": rows.sum(old, mask),
        "effective_completion_mask": mask.double(),
    }


def _grpo_advantages(case: _Case) -> Outputs:
    mask, table = case.mask_rows("completion_mask")[0], _trl_table(case)
    if "tool_mask" in case.inputs:
        mask = mask & (case.flat("tool_mask") > 0)
    if case.params["multi_objective_aggregation"] == "normalize_then_sum":
        found = _advantages("gdpo", table, epsilon=1e-4, statistics="episodes")
    else:
        found = _advantages("grpo", table, epsilon=1e-4, normalize=case.params["scale_rewards"])
    return {"advantages": found, "num_items_in_batch": int(mask.sum())}


# -- losses ------------------------------------------------------------------------------------

_MODES = {
    "token-mean": "token_mean",
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
    if not mask.any() and counts["mode"] != "token_sum":
        raise Deviation("a batch without a trained token has loss 0; verl divides 0 by 0")
    if counts["mode"].startswith("sequence") and not values[~mask].isfinite().all():
        raise Deviation("masked by selection; verl's sequence modes multiply, so NaN leaks in")
    loss = aggregate(values, mask, rows, **counts) * case.option("dp_size", 1)
    return _with_gradient("grad_loss_mat", loss, values)


def _value_loss(case: _Case) -> Outputs:
    mask, rows = case.mask_rows()
    values = case.flat("vpreds").requires_grad_()
    config = CriticSection(clip=case.params["cliprange_value"])
    found, metrics = value_loss(values, case.flat("values"), case.flat("returns"), mask, config)
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
    empty = rows.count(mask) == 0
    if kind in ("gmpo", "sequence_ratio") and is_by_row and advantages.reshape(-1)[empty].any():
        raise Deviation("a row without a trained token has no loss; TRL adds -A, gradient 0")
    weights = None
    for name in ("rollout_is_weights", "importance_sampling_ratio"):
        if name in case.inputs:
            weights = case[name].expand(rows.num_rows, -1).expand(-1, len(mask) // rows.num_rows)
            weights = weights.reshape(-1)
    if kind == "vespo" and weights is not None and (weights[~mask] != 1).any():
        raise Deviation("weights off the mask are not part of a row's ratio; TRL sums them in")
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
    output, counts = loss_of(inputs, kind, **keys), _counts(case, mask, rows)
    row_counts = counts | {"num_rows": rows.num_rows} if output.level == "row" else counts
    loss = aggregate_output(output, inputs, **row_counts)
    if beta := case.option("beta", 0.0):
        reference, config = case.flat("ref_per_token_logps"), kl.KlSection(weighted=True)
        values, _ = kl.kl_loss(logprobs, reference, mask, config, proximal_logprobs=old)
        loss = loss + beta * aggregate(values, mask, rows, **counts)
    is_verl = "log_prob" in case.inputs
    return _with_gradient("grad_log_prob" if is_verl else "grad_per_token_logps", loss, logprobs)


def _verl_loss(kind: str, low: str = "", high: str = "", offset: float = 0.0, **names: Any) -> Any:
    """A loss of verl: our names of its clip range, and of further keys with theirs and a default."""

    def run(case: _Case) -> Outputs:
        clip = case.option("clip_ratio", 0.2)
        below, above = case.option("clip_ratio_low", clip), case.option("clip_ratio_high", clip)
        keys = {low: abs(offset - below), high: offset + above} if low else {}
        keys |= {ours: case.option(*theirs) for ours, theirs in names.items()}
        return _loss(case, *case.mask_rows(), kind, **keys)

    return run


_CLIP = ("clip_low", "clip_high")
_PPO = {"low": "clip_low", "high": "clip_high", "dual_clip": ("clip_ratio_c", 3.0)}


def _bypass_mode(case: _Case) -> Outputs:
    """The rollout policy as proximal; PPO or REINFORCE on what rejection left."""
    params, (mask, rows) = case.params["policy_loss"]["rollout_correction"], case.mask_rows()
    ratio = log_ratios(case.flat("log_prob"), case.flat("old_log_prob"), mask)
    if params.get("rollout_rs"):
        mask = _rejected(params, ratio, mask, rows)
    if params.get("loss_type", "ppo_clip") == "ppo_clip":
        keys: dict[str, Any] = {"dual_clip": case.option("clip_ratio_c", 3.0)}
        return _loss(case, mask, rows, "ppo", **keys)
    cap = float(params["rollout_is_threshold"])
    return _loss(case, mask, rows, "reinforce", level=params["rollout_is"], ratio_cap=cap)


def _trl_loss(mask_name: str, kind: str = "") -> Callable[[_Case], Outputs]:
    def run(case: _Case) -> Outputs:
        clip = {"clip_low": case.params["epsilon_low"], "clip_high": case.params["epsilon_high"]}
        chosen = kind or case.params["loss_type"]
        is_by_row = case.option("importance_sampling_level", "token") == "sequence"
        if chosen == "cispo":
            keys: dict[str, Any] = {"ratio_max": case.params["epsilon_high"]}
        elif chosen in ("sapo", "vespo"):
            keys = {}
        elif kind or (chosen == "luspo" and is_by_row):
            keys = clip
        else:
            chosen = "gspo" if is_by_row else "ppo"
            keys = clip if is_by_row else clip | {"dual_clip": None, "delta": case.params["delta"]}
        return _loss(case, *case.mask_rows(mask_name), chosen, **keys)

    return run


# -- corrections and KL ------------------------------------------------------------------------


def _weights(params: dict[str, Any], ratio: Tensor, mask: Tensor, rows: Rows) -> Tensor:
    bounds = [float(bound) for bound in str(params["rollout_is_threshold"]).split("_")]
    kind, level = "icepop" if len(bounds) == 2 else "tis", params["rollout_is"]
    keys = {"level": level, "low": bounds[0] if kind == "icepop" else None, "high": bounds[-1]}
    weights = correct(kind, correction_inputs(ratio, mask, rows), **keys).weights
    if not params.get("rollout_is_batch_normalize"):
        return weights
    mean = weight_mean(weights, mask, rows, level="token" if level == "token" else "row").value()
    inputs = correction_inputs(ratio, mask, rows, batch_value=mean)
    return correct(kind, inputs, normalize="token", **keys).weights


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
    found = corrections.correct(
        sections, correction_inputs(ratio, mask, rows), [None] * len(sections)
    )
    assert found is not None
    return found.keep


def _correction(case: _Case) -> Outputs:
    mask, rows = case.mask_rows()
    ratio = case.maybe("log_ratio")
    if ratio is None:
        ratio = log_ratios(case.flat("old_log_prob"), case.flat("rollout_log_prob"), mask)
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


def _controller(params: dict[str, Any]) -> kl.KlController:
    controller = {"kind": "fixed"}
    if params.get("ctrl") != "fixed":
        controller = {"kind": "adaptive"} | {
            "target": params["target_kl"],
            "horizon": params["horizon"],
        }
    keys = {"coefficient": params.get("init_kl_coef", params.get("kl_coef"))}
    return kl.KlController(kl.KlSection.model_validate(keys | {"controller": controller}))


def _adaptive_controller(case: _Case) -> Outputs:
    found = _controller(case.params)
    values = [found.coefficient]
    for current, num_steps in zip(case["current_kl"], case["n_steps"], strict=True):
        found.update(float(current), int(num_steps))
        values.append(found.coefficient)
    return {"values": torch.tensor(values, dtype=torch.float64)}


def _kl_in_reward(case: _Case) -> Outputs:
    (mask, rows), controller = case.mask_rows(), _controller(case.params)
    old, reference = case.flat("old_log_probs"), case.flat("ref_log_prob")
    config, coefficient = _kl_section(case.params["kl_penalty"]), controller.coefficient
    penalty, measured = kl.kl_in_reward(old, reference, mask, rows, config)
    # verl counts rows without a trained token as 0.
    filled = float((rows.count(mask) > 0).double().mean())
    controller.update(measured["reward_kl"].value() * filled, rows.num_rows)
    rewards = case.flat("token_level_scores") - coefficient * penalty
    return {"token_level_rewards": rewards, "coef_after": controller.coefficient}


_FUNCTIONS: dict[str, Callable[[_Case], Outputs]] = {
    "compute_grpo_outcome_advantage": _by_episode("grpo", group_of_one="raw"),
    "compute_grpo_vectorized_outcome_advantage": _by_episode("grpo", group_of_one="raw"),
    "compute_grpo_passk_outcome_advantage": _by_episode("pass_at_k"),
    "compute_rloo_outcome_advantage": _by_episode("rloo", group_of_one="raw"),
    "compute_rloo_vectorized_outcome_advantage": _by_episode("rloo"),
    "compute_opo_outcome_advantage": _by_episode("opo", group_of_one="raw"),
    "compute_gpg_outcome_advantage": _by_episode("gpg", group_of_one="raw"),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": _by_episode(
        "reinforce_plus_plus_baseline", group_of_one="raw"
    ),
    "compute_gdpo_outcome_advantage": _by_episode("gdpo", group_of_one="raw"),
    "compute_reinforce_plus_plus_outcome_advantage": _by_token("reinforce_plus_plus"),
    "compute_remax_outcome_advantage": _by_token("remax"),
    "compute_gae_advantage_return": _by_token("gae"),
    "compute_optimal_token_baseline_advantage": _by_token("otb", group_of_one="raw"),
    "compute_multi_turn_optimal_token_baseline_advantage": _by_token("tir_otb", group_of_one="raw"),
    "vtrace_advantage_estimate": _by_token("vtrace", "mask"),
    "compute_pf_ppo_reweight_data": _resampling,
    "kl_penalty": _kl_penalty,
    "AdaptiveKLController": _adaptive_controller,
    "apply_kl_penalty": _kl_in_reward,
    "agg_loss": _agg_loss,
    "compute_policy_loss_vanilla": _verl_loss("ppo", **_PPO),
    "compute_policy_loss_gspo": _verl_loss("gspo", *_CLIP),
    "compute_policy_loss_sapo": _verl_loss("sapo"),
    "compute_policy_loss_gpg": _verl_loss("gpg"),
    "compute_policy_loss_geo_mean": _verl_loss("gmpo", *_CLIP),
    "compute_policy_loss_cispo": _verl_loss("cispo", "ratio_min", "ratio_max", 1.0),
    "compute_policy_loss_clip_cov": _verl_loss(
        "clip_cov",
        *_CLIP,
        drop_ratio=("clip_cov_ratio", 2e-4),
        covariance_low=("clip_cov_lb", 1.0),
        covariance_high=("clip_cov_ub", 5.0),
    ),
    "compute_policy_loss_kl_cov": _verl_loss("kl_cov", top_ratio=("kl_cov_ratio", 2e-4)),
    "compute_policy_loss_dro": _verl_loss("dro", beta=("dro_beta", 0.05)),
    "compute_policy_loss_bypass_mode": _bypass_mode,
    "compute_value_loss": _value_loss,
    "compute_rollout_correction_weights": _correction,
    "compute_rollout_rejection_mask": _correction,
    "compute_rollout_correction_and_rejection_mask": _correction,
    "rloo__generate_and_score_completions": _rloo_advantages,
    "rloo__compute_loss": _trl_loss("completion_mask", "sequence_ratio"),
    "_generate_and_score_completions": _grpo_advantages,
    "_compute_loss": _trl_loss("mask"),
    "gmpo__compute_loss": _trl_loss("mask", "gmpo"),
}
for _kind in ("dppo_tv", "dppo_kl"):
    _FUNCTIONS[f"compute_policy_loss_{_kind}"] = _verl_loss(
        _kind, "divergence_low", "divergence_high", ratio_cap=("clip_ratio_c", 3.0)
    )
