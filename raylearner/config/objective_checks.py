"""Objectives that are incomplete, count a ratio twice or have settings without effect."""

from collections.abc import Iterator

from raylearner.config.problems import Finding
from raylearner.config.schema import RunConfig
from raylearner.learner.objective.behavior_losses import DecoupledPpo
from raylearner.learner.objective.covariance_losses import ClipCov
from raylearner.learner.objective.custom import check_custom
from raylearner.learner.objective.estimate import CustomAdvantage
from raylearner.learner.objective.importance import ImportanceWeights
from raylearner.learner.objective.kl import (
    AdapterOffReference,
    AdaptiveCoefficient,
    FrozenReference,
    RefreshedReference,
)
from raylearner.learner.objective.ratio_losses import Cispo, Ppo
from raylearner.learner.objective.rejection import Rejection
from raylearner.learner.objective.returns import VtraceAdvantage


def check_objective(config: RunConfig) -> Iterator[Finding]:
    """Find all conflicts within the objective, and between it and the rest of a run."""
    yield from _custom(config)
    yield from _baselines(config)
    yield from _critic(config)
    yield from _kl(config)
    yield from _corrections(config)
    yield from _proximal(config)
    yield from _bounds(config)
    yield from _aggregation(config)


def objective_warnings(config: RunConfig) -> Iterator[str]:
    """Return warnings about an objective that is allowed."""
    learner = config.learner
    num_updates = learner.num_epochs * learner.num_mini_batches
    if learner.loss.kind == "gpg" and num_updates > 1:
        yield (
            f"learner.loss: 'gpg' has no ratio, but a batch is used for {num_updates} updates, of "
            "which all but the first are off-policy; 'ppo' or 'reinforce' correct for that"
        )
    if learner.max_kl is not None and num_updates == 1:
        yield "learner.max_kl: has no effect with a single update per batch"
    if learner.loss.is_row_loss and learner.aggregation != "token_mean":
        yield (
            f"learner.aggregation: learner.loss.kind {learner.loss.kind!r} is a loss by row, always "
            "aggregated by its mean; the choice acts on entropy and KL terms alone"
        )
    kl = learner.kl
    if (
        kl is not None
        and learner.lora is not None
        and learner.lora.path is None
        and isinstance(kl.reference, FrozenReference)
        and kl.reference.path is None
    ):
        yield (
            "learner.kl.reference: 'frozen' loads a second copy of the base model; 'adapter_off' "
            "gives the same numbers without it"
        )
    if kl is not None and kl.place == "loss" and kl.estimator == "k1" and not kl.straight_through:
        yield (
            "learner.kl.estimator: the gradient of 'k1' is 0 in expectation; "
            "set straight_through, or use 'k3'"
        )


def _custom(config: RunConfig) -> Iterator[Finding]:
    learner = config.learner
    yield from check_custom(learner.loss, "learner.loss")
    yield from check_custom(learner.advantage, "learner.advantage")
    for index, section in enumerate(learner.corrections):
        yield from check_custom(section, f"learner.corrections.{index}")


def _baselines(config: RunConfig) -> Iterator[Finding]:
    replay, advantage = config.replay, config.learner.advantage
    keeps_raw = getattr(advantage, "group_of_one", "zero") == "raw"
    if replay.group_size < 2 and advantage.compares_in_group and not keeps_raw:
        yield Finding(
            "replay.group_size",
            f"must be >= 2 with learner.advantage.kind {advantage.kind!r}, got "
            f"{replay.group_size}: its baseline is the group's other episodes; 'reinforce_plus_plus' "
            "and 'gae' need none",
        )
    num_functions = len(config.rewards.functions)
    if advantage.kind == "gdpo" and num_functions < 2:
        yield Finding(
            "learner.advantage.kind",
            "'gdpo' normalizes each reward function separately, but rewards.functions has "
            f"{num_functions}; with one, use 'grpo'",
        )
    if advantage.kind == "gdpo" and config.rewards.clip is not None:
        yield Finding(
            "rewards.clip",
            "bounds the weighted sum, and learner.advantage.kind 'gdpo' normalizes each reward "
            "function separately; remove it, and bound their rewards by learner.reward.clip_low "
            "and clip_high",
        )
    if advantage.kind == "remax" and not replay.play_greedy:
        yield Finding(
            "learner.advantage.kind",
            "'remax' subtracts the reward of a greedy episode, but none is played; set "
            "replay.play_greedy to true, or use 'rloo'",
        )
    if replay.play_greedy and advantage.kind != "remax":
        yield Finding(
            "replay.play_greedy",
            f"plays episodes that learner.advantage.kind {advantage.kind!r} does not use; "
            "set it to false, or use 'remax'",
        )
    if config.learner.resampling is not None and config.learner.num_mini_batches > 1:
        yield Finding(
            "learner.resampling",
            f"draws from a whole batch, and a part of {config.learner.num_mini_batches} may be left "
            "without an episode; set learner.num_mini_batches to 1 and learner.num_epochs higher",
        )


def _critic(config: RunConfig) -> Iterator[Finding]:
    critic, advantage = config.learner.critic, config.learner.advantage
    if advantage.needs_values and critic is None:
        yield Finding(
            "learner.critic",
            f"required with learner.advantage.kind {advantage.kind!r}, which needs values; "
            "add `critic: {}`, or use 'reinforce_plus_plus', which needs none",
        )
    if critic is None:
        return
    may_use_values = isinstance(advantage, CustomAdvantage) and advantage.is_per_token
    if not advantage.needs_values and not may_use_values:
        yield Finding(
            "learner.critic",
            f"learner.advantage.kind {advantage.kind!r} does not use values; "
            "remove the section, or use 'gae'",
        )
    if critic.trunk == "shared" and critic.warmup_steps > 0:
        yield Finding(
            "learner.critic.warmup_steps",
            f"must be 0 with trunk 'shared', got {critic.warmup_steps}: a value loss alone would "
            "change the policy through it; use trunk 'own'",
        )
    if critic.trunk == "shared" and critic.path is not None:
        yield Finding(
            "learner.critic.path",
            "has no effect with trunk 'shared', which is the policy's; remove it, or use 'own'",
        )
    if critic.warmup_steps >= config.run.num_steps:
        yield Finding(
            "learner.critic.warmup_steps",
            f"must be < run.num_steps = {config.run.num_steps}, got {critic.warmup_steps}: "
            "the policy would never train",
        )


def _kl(config: RunConfig) -> Iterator[Finding]:
    kl, advantage = config.learner.kl, config.learner.advantage
    if kl is None:
        return
    if kl.coefficient > 0 and kl.reference is None:
        yield Finding(
            "learner.kl.reference",
            f"required with learner.kl.coefficient {kl.coefficient:g}: a KL penalty needs a "
            "reference policy; use `reference: {kind: frozen}`",
        )
    if isinstance(kl.reference, AdapterOffReference) and config.learner.lora is None:
        yield Finding(
            "learner.kl.reference.kind",
            "'adapter_off' is the policy without its LoRA adapter, and the learner trains all "
            "weights; use 'frozen', or add `learner.lora: {}`",
        )
    if isinstance(kl.reference, RefreshedReference) and config.learner.lora is not None:
        yield Finding(
            "learner.kl.reference.kind",
            "'refreshed' averages weights, but the average of two LoRA adapters is not the "
            "average of their policies; with learner.lora use 'adapter_off' or 'frozen'",
        )
    if isinstance(kl.controller, AdaptiveCoefficient) and kl.coefficient == 0:
        yield Finding(
            "learner.kl.coefficient",
            "must be > 0 with an adaptive controller, which multiplies it, got 0; 0.001 is a "
            "usual value",
        )
    if kl.place == "reward":
        for key, value in (
            ("straight_through", kl.straight_through),
            ("weighted", kl.weighted),
        ):
            if value:
                yield Finding(
                    f"learner.kl.{key}",
                    "affects gradients only, and a penalty in the reward has no gradient; set it "
                    "to false, or learner.kl.place to 'loss'",
                )
        if advantage.kind in ("gdpo", "gigpo"):
            yield Finding(
                "learner.kl.place",
                f"must be 'loss' with learner.advantage.kind {advantage.kind!r}, got 'reward': "
                "it has no single reward to take a penalty from",
            )


def _corrections(config: RunConfig) -> Iterator[Finding]:
    learner = config.learner
    weighing = [(i, c.kind) for i, c in enumerate(learner.corrections) if c.weighs]
    rejecting = "use 'rejection', which only rejects, or remove it"
    for number, (index, kind) in enumerate(weighing):
        key = f"learner.corrections.{index}"
        if number:
            yield Finding(
                key,
                f"{kind!r} applies the ratio that {weighing[0][1]!r} already applies; {rejecting}",
            )
        elif learner.loss.weighs_by_behavior:
            yield Finding(
                key,
                f"{kind!r} would apply the ratio of learner to behavior probability twice, since "
                f"learner.loss.kind {learner.loss.kind!r} does so itself; {rejecting}, or set "
                "learner.loss.kind to 'ppo' or 'gpg'",
            )
        elif learner.advantage.kind == "vtrace":
            yield Finding(
                key,
                f"{kind!r} would apply the ratio twice, since V-trace's advantage contains "
                f"it; {rejecting}",
            )
        elif learner.proximal == "behavior" and learner.loss.uses_proximal:
            yield Finding(
                key,
                f"{kind!r} would apply the ratio twice, since with learner.proximal 'behavior' "
                f"the ratio of learner.loss.kind {learner.loss.kind!r} is that weight; {rejecting}",
            )
    for index, section in enumerate(learner.corrections):
        if isinstance(section, ImportanceWeights) and section.normalize != "none":
            yield from _needs_recomputed(config, f"learner.corrections.{index}.normalize")
    if not learner.count_rejected and learner.corrections:
        yield from _needs_recomputed(config, "learner.count_rejected")
    if learner.advantage.kind == "vtrace" and learner.loss.weighs_by_behavior:
        yield Finding(
            "learner.loss.kind",
            f"{learner.loss.kind!r} applies the ratio of learner to behavior probability, which "
            "V-trace's advantage already contains; use 'gpg', or 'ppo' for several updates per "
            "batch",
        )


def _needs_recomputed(config: RunConfig, key: str) -> Iterator[Finding]:
    if config.learner.proximal != "recomputed":
        yield Finding(
            key,
            "needs all ratios of a batch before its first update, but learner.proximal is "
            f"{config.learner.proximal!r}; set that to 'recomputed'",
        )


def _proximal(config: RunConfig) -> Iterator[Finding]:
    learner = config.learner
    if learner.proximal != "behavior":
        return
    if isinstance(learner.loss, DecoupledPpo):
        yield Finding(
            "learner.proximal",
            "'behavior' leaves 'decoupled_ppo' nothing to decouple; use learner.loss.kind 'ppo', "
            "or set this to 'recomputed'",
        )
    elif learner.advantage.kind == "vtrace" and learner.loss.uses_proximal:
        yield Finding(
            "learner.proximal",
            f"with 'behavior' the ratio of learner.loss.kind {learner.loss.kind!r} is already in "
            "V-trace's advantage; set this to 'recomputed', or use loss 'gpg'",
        )


def _bounds(config: RunConfig) -> Iterator[Finding]:
    """Find pairs of bounds with an empty range."""
    learner = config.learner
    pairs: list[tuple[str, str, float | None, float | None]] = [
        ("learner.reward", "clip", learner.reward.clip_low, learner.reward.clip_high)
    ]
    match learner.loss:
        case Ppo(delta=float(delta), clip_high=clip_high) if delta <= 1 + clip_high:
            yield Finding(
                "learner.loss.delta",
                f"must be > 1 + clip_high = {1 + clip_high:g}, got {delta:g}: it caps ratios that "
                "the clip does not",
            )
        case Cispo(ratio_min=low, ratio_max=high) if low >= high:
            yield _crossed("learner.loss.ratio_min", low, "ratio_max", high)
        case ClipCov(covariance_low=low, covariance_high=high) if low >= high:
            yield _crossed("learner.loss.covariance_low", low, "covariance_high", high)
        case _:
            pass
    advantage = learner.advantage
    if isinstance(advantage, VtraceAdvantage) and advantage.rho_bar < advantage.c_bar:
        yield Finding(
            "learner.advantage.rho_bar",
            f"must be >= c_bar = {advantage.c_bar:g}, got {advantage.rho_bar:g}",
        )
    for index, section in enumerate(learner.corrections):
        key = f"learner.corrections.{index}"
        low, high = getattr(section, "low", None), getattr(section, "high", None)
        pairs.append((key, "", low, high))
        if not isinstance(section, Rejection):
            continue
        if section.estimator == "k1" and section.level == "sequence_max":
            yield Finding(
                f"{key}.estimator",
                "'k1' has no maximum over a row, since it has a sign; use 'k2' or 'k3'",
            )
        if section.estimator != "k1" and section.low is not None:
            yield Finding(
                f"{key}.low",
                f"has no effect with estimator {section.estimator!r}, which is never negative; "
                "remove it, or use 'k1'",
            )
    for key, prefix, low, high in pairs:
        if low is not None and high is not None and low >= high:
            name = f"{prefix}_" if prefix else ""
            yield _crossed(f"{key}.{name}low", low, f"{name}high", high)


def _crossed(key: str, low: float, upper: str, high: float) -> Finding:
    return Finding(key, f"must be < {upper} = {high:g}, got {low:g}: the range is empty")


def _aggregation(config: RunConfig) -> Iterator[Finding]:
    learner = config.learner
    is_scaled = learner.aggregation == "sequence_mean_of_sums_scaled"
    longest = config.renderer.max_response_tokens
    if is_scaled and learner.aggregation_scale is None:
        yield Finding(
            "learner.aggregation_scale",
            f"required with learner.aggregation {learner.aggregation!r}; "
            f"renderer.max_response_tokens = {longest} is the usual choice",
        )
    if not is_scaled and learner.aggregation_scale is not None:
        yield Finding(
            "learner.aggregation_scale",
            f"has no effect with learner.aggregation {learner.aggregation!r}; remove it, or use "
            "'sequence_mean_of_sums_scaled'",
        )
