"""All metrics: their keys, units and meanings; docs/metrics.md has a copy."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

# fmt: off
TABLE: tuple[tuple[str, str, str], ...] = (
    # The step.
    ("step", "steps", "Number of learner steps committed, including this one."),
    ("policy_version", "versions", "Version of the policy after the step; skipped steps create no version."),
    ("time_s", "s", "Time that the run has been active, without pauses before resumes."),
    ("observability/non_finite", "values", "Number of NaN or infinite values in this row, which are written as null."),
    # Rollouts.
    ("rollout/reward/mean", "reward", "Mean reward of the step's episodes; a failed episode counts as `rewards.failed_reward`, or as the step's lowest reward if that is lower."),
    ("rollout/reward/mean_without_failed", "reward", "Mean reward of the episodes that did not fail."),
    ("rollout/reward/std", "reward", "Standard deviation of the rewards of episodes that did not fail."),
    ("rollout/reward/max", "reward", "Maximum reward of the step."),
    ("rollout/reward/min", "reward", "Minimum reward of the step."),
    ("rollout/reward/<part>/mean", "reward", "Mean of one reward function over the episodes that it applied to, unweighted."),
    ("rollout/reward/<part>/std", "reward", "Standard deviation of one reward function over those episodes."),
    ("rollout/source/<source>/reward/mean", "reward", "Mean reward of the episodes of one data source, with failed episodes counted as in `rollout/reward/mean`."),
    ("rollout/source/<source>/group_fraction", "fraction", "Share of the step's groups from this data source."),
    ("rollout/source/<source>/episodes", "episodes", "Number of finished episodes of one data source since the run began."),
    ("rollout/source/<source>/errors", "episodes", "Number of those that failed while they were played."),
    ("rollout/turns/mean", "turns", "Mean number of turns per episode."),
    ("rollout/segments/mean", "trajectories", "Mean number of trajectories per episode; a program that rewrites its history starts another trajectory."),
    ("rollout/turns/max", "turns", "Maximum number of turns of an episode."),
    ("rollout/response_tokens/mean", "tokens", "Mean number of tokens after the prompt, including observations."),
    ("rollout/response_tokens/max", "tokens", "Maximum number of tokens after the prompt."),
    ("rollout/sampled_tokens/mean", "tokens", "Mean number of tokens sampled by the policy per episode."),
    ("rollout/images/mean", "images", "Mean number of images per episode of a vision-language model, including the prompt's."),
    ("rollout/images/max", "images", "Maximum number of images in an episode."),
    ("rollout/image_tokens/mean", "tokens", "Mean number of image placeholder tokens per episode."),
    ("rollout/tokens_per_s", "tokens/s", "Tokens sampled by all actors since the last step, per second."),
    ("rollout/episodes_per_s", "episodes/s", "Episodes finished by all actors since the last step, per second."),
    ("rollout/idle_fraction", "fraction", "Share of the actors' time in which no episode was running."),
    ("rollout/stop/<reason>", "fraction", "Share of the step's episodes with this stop reason."),
    ("rollout/errors/<kind>", "episodes", "Number of episodes that failed with this kind of error since the run began."),
    ("rollout/invalid_actions/mean", "turns", "Mean number of turns per episode with neither a valid tool call nor a valid answer, without truncated turns."),
    ("rollout/valid_actions/mean", "turns", "Mean number of turns per episode with a valid tool call or answer."),
    ("rollout/foreign_calls/mean", "turns", "Mean number of turns per episode with a tool call in another format than the configured one; they are invalid actions."),
    ("rollout/cut_turns/mean", "turns", "Mean number of turns per episode truncated by the token limit before a tool call or an answer; neither valid nor invalid."),
    ("rollout/valid_tool_calls/mean", "calls", "Mean number of successful tool calls per episode."),
    ("rollout/active/<turn>", "fraction", "Share of the step's episodes that reached this turn, counted from 1."),
    ("rollout/finish_fraction", "fraction", "Share of the step's episodes that ended normally, not at a limit or with an error."),
    ("rollout/tool_calls/mean", "calls", "Mean number of tool calls per episode."),
    ("rollout/episode_s/mean", "s", "Mean duration of an episode."),
    ("rollout/episode_s/max", "s", "Maximum duration of an episode."),
    ("rollout/logged/<key>/mean", "", "Mean over episodes of a number logged by the environment or by a reward function, whose keys are `<function>/<name>`."),
    ("rollout/logged/calls/<tool>/mean", "calls", "Mean number of calls of a tool, over the episodes that called it."),
    ("rollout/logged/failures/<tool>/mean", "calls", "Mean number of calls that failed in the tool or its service, over the same episodes, including failures shown to the policy."),
    ("rollout/logged_non_finite", "values", "Number of logged values that are NaN or infinite; they are left out of the means."),
    ("rollout/actors", "actors", "Number of rollout actors that are playing at the end of the step."),
    ("rollout/restarts", "actors", "Number of rollout actors replaced since this process began."),
    # The replay buffer.
    ("buffer/size", "trajectories", "Number of trajectories in the buffer, of complete and running groups."),
    ("buffer/images", "images", "Number of distinct images in the buffer."),
    ("buffer/groups/<state>", "groups", "Number of groups that are running, held (complete; awaiting_scores counts those at group reward functions) or leased (taken, not yet committed); groups admitted and trained since the run began."),
    ("buffer/samples/<event>", "samples", "Number of samples claimed, and claimed again after their actor died, since the run began."),
    ("buffer/staleness/mean", "versions", "Mean staleness of the taken trajectories: learner version minus the oldest version of a trained token."),
    ("buffer/staleness/max", "versions", "Maximum staleness of the taken trajectories."),
    ("buffer/dropped/<why>", "groups", "Number of groups dropped for this reason since the run began; for late, duplicate, refused and rolled_back: episodes."),
    ("buffer/masked_tokens", "tokens", "Number of tokens beyond `max_staleness` in this take that are masked from training."),
    ("buffer/masked_fraction", "fraction", "Share of this take's trainable tokens that are masked since they are beyond `max_staleness`: the beginnings of long episodes."),
    ("buffer/over_stale_trained", "tokens", "Number of tokens beyond `max_staleness` in this take that are trained nevertheless."),
    ("buffer/mixed_version_fraction", "fraction", "Share of taken trajectories with tokens of more than one policy version."),
    ("buffer/started/count", "episodes", "Number of running episodes."),
    ("buffer/started/age_s/<aggregate>", "s", "Ages of the running episodes: mean, p50, p95."),
    ("buffer/finished/tokens/<aggregate>", "tokens", "Lengths of finished episodes whose groups recently trained or were dropped, late ones included: mean, p50, p95."),
    ("buffer/trained/tokens/<aggregate>", "tokens", "Lengths of those that trained."),
    ("buffer/trained_to_finished_length", "", "Mean of `buffer/trained/tokens` over that of `buffer/finished/tokens`; below 1 means that long episodes are being dropped."),
    ("buffer/wait_s", "s", "Time the learner waited for this take."),
    # Training.
    ("learner/loss", "", "Objective after aggregation, including bonuses and penalties; mean over the step's updates."),
    ("learner/grad_norm", "", "Global gradient norm before clipping, mean over the step's updates."),
    ("learner/learning_rate", "", "Learning rate of the step's last update."),
    ("learner/vision_learning_rate", "", "Learning rate of the vision tower, if it differs."),
    ("learner/num_updates", "updates", "Number of optimizer updates in the step."),
    ("learner/skipped_updates", "updates", "Number of updates skipped because the loss or the gradient was not finite."),
    ("learner/skipped_steps", "steps", "Number of steps of the run without an update."),
    ("learner/stopped_early", "", "1 if `max_kl` ended the reuse of the take early, otherwise 0."),
    ("learner/value_loss", "", "Loss of a separate critic, mean over the step's updates."),
    ("learner/critic_grad_norm", "", "Global gradient norm of the critic before clipping."),
    ("learner/clip_fraction", "fraction", "Share of trained tokens (of sequences, for sequence-level losses) whose ratio was clipped."),
    ("learner/clip_fraction_<part>", "fraction", "The same by side of the clip range or by sign of the advantage, for the dual clip, and for the least and most clipped sequences."),
    ("learner/row_clip_fraction_<part>", "fraction", "Share of sequences whose sequence-level ratio is outside the clip range, by side, for token-level losses."),
    ("learner/row_ratio_<aggregate>", "", "Maximum and minimum of the sequence-level ratios."),
    ("learner/ratio_<aggregate>", "", "Maximum and minimum of the ratio current/proximal over trained tokens."),
    ("learner/ratio_cap_fraction", "fraction", "Share of trained tokens whose ratio was capped."),
    ("learner/penalized_fraction", "fraction", "Share of trained tokens with the covariance penalty."),
    ("learner/tapered_fraction", "fraction", "Share of trained tokens whose weight was tapered."),
    ("learner/taper_max", "", "Maximum taper."),
    ("learner/row_phi", "", "Mean factor of a sequence in the variational sequence loss."),
    ("learner/entropy", "nats", "Mean entropy of the policy over trained tokens."),
    ("learner/entropy_<aggregate>", "nats", "Maximum and minimum entropy over trained tokens."),
    ("learner/approx_kl", "nats", "Estimate of KL(proximal || current) over trained tokens."),
    ("learner/approx_kl_<form>", "nats", "Other estimates of the same KL: k3, and the mean absolute log-ratio."),
    ("learner/kl", "nats", "Estimate of KL(current || reference) over trained tokens."),
    ("learner/reward_kl", "nats", "KL to the reference that was subtracted from the reward."),
    ("learner/kl_coefficient", "", "Coefficient of the KL penalty in the step."),
    ("learner/logprob_gap/mean", "nats", "Mean |learner - engine| log-probability of sampled tokens at the start of the step; includes the effect of staleness."),
    ("learner/logprob_gap/<aggregate>", "nats", "Maximum and standard deviation of |learner - engine| log-probability."),
    ("learner/on_policy_gap/<aggregate>", "nats", "The same over tokens of the learner's own version, where only learner and engine can differ, and keys and values that are kept at a push (`weights.cache`): mean, max."),
    ("learner/on_policy_fraction", "fraction", "Share of sampled tokens that are of the learner's own version."),
    ("learner/probability_gap/<aggregate>", "", "|learner - engine| probability of sampled tokens: mean, max, std."),
    ("learner/behavior_unknown_fraction", "fraction", "Share of sampled tokens without a finite behavior log-probability."),
    ("learner/importance_weight/ess", "fraction", "Effective sample size divided by the number of importance weights; 1 when all are equal."),
    ("learner/importance_weight/share_<bin>", "fraction", "Share of trained tokens whose weight proximal/behavior is in this bin; the bin edges are 0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25 and 2."),
    ("learner/importance_weight/<aggregate>", "", "Importance weights proximal/behavior, by token and by sequence: before truncation, except for std."),
    ("learner/behavior_weight/<aggregate>", "", "Importance weights proximal/behavior as applied in the loss."),
    ("learner/importance_ratio/<aggregate>", "", "Ratios used by a rejection rule, by token and by sequence."),
    ("learner/rejection_<rule>/<aggregate>", "", "Statistic bounded by a rejection rule, by token and by sequence, and the shares of tokens and sequences rejected."),
    ("learner/opsm/<aggregate>", "fraction", "Shares of tokens and sequences rejected by the off-policy sequence mask."),
    ("learner/veto/token_fraction", "fraction", "Share of tokens so improbable under the learner that their sequence is rejected."),
    ("learner/veto/<aggregate>", "fraction", "Shares of tokens and sequences rejected by the veto."),
    ("learner/m2po/<aggregate>", "fraction", "Shares of tokens and sequences rejected by the second-moment bound."),
    ("learner/corrections/<aggregate>", "fraction", "Shares of tokens and sequences rejected by any correction."),
    ("learner/perplexity/<policy>", "", "Mean perplexity of a sequence under the proximal and the behavior policy."),
    ("learner/log_perplexity/<policy>", "nats", "Mean log-perplexity of a sequence under the proximal and the behavior policy."),
    ("learner/perplexity_gap/<aggregate>", "nats", "Proximal minus behavior log-perplexity of a sequence; `ratio` is its exponential."),
    ("learner/off_policy_kl", "nats", "k1 estimate of KL(behavior || proximal) over trained tokens."),
    ("learner/off_policy_kl_k3", "nats", "k3 estimate of KL(behavior || proximal) over trained tokens."),
    ("learner/chi2/<level>", "", "Chi-square divergence of proximal from behavior, by token and by sequence."),
    ("learner/token_staleness/<aggregate>", "versions", "Number of versions since the trained tokens were sampled."),
    ("learner/staleness_fraction/<age>", "fraction", "Share of trained tokens with this staleness."),
    ("learner/version_span/<aggregate>", "versions", "Number of versions between the oldest and newest token of a sequence."),
    ("learner/reward/<aggregate>", "reward", "Rewards from which the advantages are computed."),
    ("learner/advantage/<aggregate>", "", "Advantages of the step's trained tokens."),
    ("learner/zero_variance_fraction", "fraction", "Share of groups with equal rewards."),
    ("learner/single_group_fraction", "fraction", "Share of groups with at most one reward, which have no baseline."),
    ("learner/unscorable_fraction", "fraction", "Share of episodes without a reward."),
    ("learner/masked_fraction/<rule>", "fraction", "Share of sampled tokens masked from training by this rule."),
    ("learner/gradient_power/<part>", "", "Estimate of a sequence's squared gradient norm from its logits, with its factors, and the step's signal and noise."),
    ("learner/value_clip_fraction", "fraction", "Share of tokens whose value was clipped in the critic's loss."),
    ("learner/explained_variance", "fraction", "Share of the returns' variance explained by the critic."),
    ("learner/value/<aggregate>", "", "Values predicted by the critic over trained tokens: mean, max, min."),
    ("learner/return/<aggregate>", "", "Returns that the critic is trained to predict: mean, max, min."),
    ("learner/tokens", "tokens", "Number of tokens in the step, including the prompt of each row."),
    ("learner/shared_prefix_fraction", "fraction", "Share of these tokens that are not computed, because another row of the micro-batch has the same prefix."),
    ("learner/trained_tokens", "tokens", "Number of trained tokens in the step."),
    ("learner/tokens_per_s", "tokens/s", "Computed tokens of the step per second of step time, over all ranks: a shared prefix counts once in a micro-batch."),
    ("learner/rank_tokens/<aggregate>", "tokens", "Computed tokens per rank in the step: mean, max; a large difference means unbalanced ranks."),
    ("learner/padding_fraction", "fraction", "Share of tokens that only pad ranks to equal numbers of micro-batches."),
    ("learner/tokens_per_s_per_rank", "tokens/s", "`learner/tokens_per_s` divided by the number of ranks."),
    ("learner/mfu", "fraction", "Model FLOPs utilization: floating-point operations of the model per second, relative to the GPU's bfloat16 peak; recomputation and scoring passes are not counted (formula in learner/recording.py)."),
    ("learner/peak_memory_gib", "GiB", "Peak GPU memory of tensors on the first rank during the step."),
    ("learner/idle_fraction", "fraction", "Share of the time since the last step in which the learner waited for groups."),
    ("learner/step_s", "s", "Duration of the learner step."),
    ("learner/pixel_wait_s", "s", "Longest time a rank of a vision-language model waited for pixel values, which are prepared while the previous micro-batch computes."),
    # Weight pushes: the last one that finished.
    ("weights/publish_s", "s", "Time from the start of a push until every engine acknowledged it."),
    ("weights/write_s", "s", "Part of it in which the learner wrote the weights or prepared to send them."),
    ("weights/stage_s", "s", "Longest time the tensors took to arrive at an engine while it generated; about 0 where they arrive in the pause."),
    ("weights/pause_s", "s", "Longest pause of an engine's generation, from the wait for the step in flight on."),
    ("weights/update_s", "s", "Part of it in which the parameters were written."),
    ("weights/recomputed_tokens", "tokens", "Tokens of running requests whose keys and values were dropped by the push, to be computed again, over all engines: prompts and outputs so far, a prefix that requests share once for each; 0 with `weights.cache: keep`."),
    ("weights/connect_s", "s", "Time the learner took to form a new process group with the engines."),
    ("weights/send_s", "s", "Time the learner took to gather and broadcast the weights."),
    ("weights/verify_s", "s", "Longest time an engine took to compare the checksums of its parameters."),
    ("weights/verify_tensors", "tensors", "Number of tensors whose checksum matches in every engine."),
    ("weights/probe_s", "s", "Longest time an engine took to score the probe prompts."),
    ("weights/logprob_error", "nats", "Largest |learner - engine| log-probability on the probe prompts."),
    ("weights/num_engines", "engines", "Number of engines that acknowledged the push."),
    # Checkpoints, in the row after theirs.
    ("checkpoint/stall_s", "s", "Time that training paused for a checkpoint: to complete the previous one and copy the state."),
    ("checkpoint/write_s", "s", "Time to write a checkpoint, in parallel to training."),
    # Tools, since the last step, over all rollout actors.
    ("tools/<name>/calls", "calls", "Number of calls of one tool, including calls with invalid arguments."),
    ("tools/<name>/errors", "calls", "Number of calls that failed after their last retry; invalid arguments are errors of the policy, not of the tool."),
    ("tools/<name>/retries", "requests", "Number of requests that were retried."),
    ("tools/<name>/bad_pages", "pages", "Number of page images that could not be shown; the policy got a note in their place."),
    ("tools/<name>/latency_s/<aggregate>", "s", "Latency of a call: p50, p90, p99 of the slowest actor."),
    # Evaluations.
    ("evaluation/<key>", "", "Numbers of eval.jsonl as shown in TensorBoard, such as `evaluation/reward/mean`, in which failed episodes count as not solved: see the table of docs/evaluation.md."),
)
"""Key or pattern, unit and meaning, in the order of the documentation. Patterns follow the keys they would cover."""
# fmt: on


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Meaning and unit of one key, or of every key of one pattern."""

    description: str
    unit: str = ""


METRICS: dict[str, MetricSpec] = {
    key: MetricSpec(description, unit) for key, unit, description in TABLE
}
"""Specs by key. `<kind>` in a key stands for any one part, `<key>` for one or more."""


@lru_cache(maxsize=4096)
def entry_of(key: str) -> tuple[str, dict[str, str]] | None:
    """Return the key or pattern of the table that matches `key`, with the values of its placeholders.

    `tools/search/calls` matches `tools/<name>/calls` with `{"name": "search"}`; None for an
    undocumented key.
    """
    if key in METRICS:
        return key, {}
    for entry, pattern in _patterns().items():
        if match := pattern.fullmatch(key):
            return entry, match.groupdict()
    return None


def spec_of(key: str) -> MetricSpec | None:
    """Return the spec that matches `key`; None for an undocumented key."""
    entry = entry_of(key)
    return METRICS[entry[0]] if entry is not None else None


def placeholders(entry: str) -> tuple[str, ...]:
    """Return the names of a pattern's placeholders, in order."""
    return tuple(re.findall(r"<([a-z_]+)>", entry))


def undocumented(keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if spec_of(key) is None)


@lru_cache(maxsize=1)
def gauge_names() -> dict[str, str]:
    """Return the name of each entry's Ray metric, which Prometheus prefixes with `ray_`.

    If dropping a placeholder leaves the name of another entry, its tag stays in the name.
    """
    bare = {entry: _spelled(re.sub(r"<[a-z_]+>", "", entry)) for entry in METRICS}
    taken = {name for entry, name in bare.items() if not placeholders(entry)}
    return {
        entry: f"{name}_by_{'_'.join(placeholders(entry))}"
        if placeholders(entry) and name in taken
        else name
        for entry, name in bare.items()
    }


def _spelled(key: str) -> str:
    return "raylearner_" + re.sub(r"[^a-z0-9]+", "_", key).strip("_")


@lru_cache(maxsize=1)
def _patterns() -> dict[str, re.Pattern[str]]:
    return {key: re.compile(_expression(key)) for key in METRICS if "<" in key}


def _expression(key: str) -> str:
    parts = re.split(r"(<[a-z_]+>)", key)
    any_of = {"<key>": ".+"}
    return "".join(
        f"(?P{part}{any_of.get(part, '[^/]+')})" if part.startswith("<") else re.escape(part)
        for part in parts
    )


def markdown() -> str:
    """Return the table for docs/metrics.md."""
    rows = [
        f"| `{key}` | {unit or '-'} | {description.replace('|', '&#124;')} |"
        for key, unit, description in TABLE
    ]
    return "\n".join(["| key | unit | meaning |", "|---|---|---|", *rows]) + "\n"
