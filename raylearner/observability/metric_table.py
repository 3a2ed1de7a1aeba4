"""The table of metric keys: key or pattern, unit, meaning."""

TABLE: tuple[tuple[str, str, str], ...] = (
    # The step itself.
    ("step", "steps", "Learner steps committed, this one included."),
    (
        "policy_version",
        "versions",
        "Version of the policy after the step; skipped steps make none.",
    ),
    ("time_s", "s", "Running time of the run so far."),
    (
        "observability/non_finite",
        "values",
        "Values of this row that were NaN or infinite and became null.",
    ),
    # Playing episodes.
    ("rollout/reward/mean", "reward", "Mean reward of the step's trajectories."),
    ("rollout/reward/std", "reward", "Standard deviation of the step's rewards."),
    ("rollout/reward/max", "reward", "Largest reward of the step."),
    ("rollout/reward/min", "reward", "Smallest reward of the step."),
    (
        "rollout/reward/<part>/mean",
        "reward",
        "Mean of one reward function over the step, unweighted.",
    ),
    ("rollout/turns/mean", "turns", "Mean turns of a trajectory."),
    ("rollout/turns/max", "turns", "Most turns of a trajectory."),
    (
        "rollout/response_tokens/mean",
        "tokens",
        "Mean tokens after the prompt, observations included.",
    ),
    ("rollout/response_tokens/max", "tokens", "Most tokens after the prompt."),
    (
        "rollout/sampled_tokens/mean",
        "tokens",
        "Mean tokens that the policy sampled in a trajectory.",
    ),
    (
        "rollout/tokens_per_s",
        "tokens/s",
        "Tokens sampled by all actors since the last step, per second.",
    ),
    (
        "rollout/episodes_per_s",
        "episodes/s",
        "Episodes finished by all actors since the last step, per second.",
    ),
    ("rollout/idle_fraction", "fraction", "Share of the actors' time without any episode to play."),
    (
        "rollout/stop/<reason>",
        "fraction",
        "Share of the step's trajectories that ended for this reason.",
    ),
    (
        "rollout/errors/<kind>",
        "episodes",
        "Episodes that failed for this cause since the run began.",
    ),
    (
        "rollout/multi_version_fraction",
        "fraction",
        "Share of trajectories with tokens of two or more policy versions.",
    ),
    (
        "rollout/invalid_actions/mean",
        "turns",
        "Mean turns of a trajectory with neither a tool call nor an answer.",
    ),
    ("rollout/tool_calls/mean", "calls", "Mean tool calls of a trajectory."),
    ("rollout/episode_s/mean", "s", "Mean time from an episode's start to its end."),
    ("rollout/episode_s/max", "s", "Longest episode."),
    # Groups between actors and learner.
    ("buffer/size", "groups", "Complete groups that wait to be taken."),
    (
        "buffer/groups/<state>",
        "groups",
        "Groups now running, held (complete) or leased (taken, not committed); groups admitted and trained since the run began.",
    ),
    (
        "buffer/samples/<event>",
        "samples",
        "Samples claimed, and claimed again after their actor died, since the run began.",
    ),
    (
        "buffer/staleness/mean",
        "versions",
        "Mean staleness of the taken trajectories: learner version minus the oldest version of a trained token.",
    ),
    ("buffer/staleness/max", "versions", "Largest staleness taken."),
    (
        "buffer/dropped/<why>",
        "groups",
        "Groups dropped for this reason since the run began; for late, duplicate, refused and rolled_back: episodes.",
    ),
    ("buffer/masked_tokens", "tokens", "Over-old tokens of this take that left the train mask."),
    (
        "buffer/over_stale_trained",
        "tokens",
        "Over-old tokens of this take that train all the same.",
    ),
    (
        "buffer/mixed_version_fraction",
        "fraction",
        "Share of taken trajectories with tokens of two or more policy versions.",
    ),
    ("buffer/started/count", "episodes", "Episodes that run now."),
    ("buffer/started/age_s/<aggregate>", "s", "Ages of the episodes that run now: mean, p50, p95."),
    (
        "buffer/finished/tokens/<aggregate>",
        "tokens",
        "Lengths of episodes finished lately: mean, p50, p95.",
    ),
    (
        "buffer/trained/tokens/<aggregate>",
        "tokens",
        "Lengths of episodes trained lately; far below `finished` means that what is slow gets lost.",
    ),
    # Training.
    (
        "learner/loss",
        "",
        "The objective after aggregation, bonus and penalty terms included; mean over the step's updates.",
    ),
    (
        "learner/grad_norm",
        "",
        "Global gradient norm before clipping, mean over the step's updates.",
    ),
    ("learner/learning_rate", "", "Learning rate of the step's last update."),
    ("learner/num_updates", "updates", "Optimizer updates of the step."),
    (
        "learner/skipped_updates",
        "updates",
        "Updates of the step that were skipped for a loss or gradient that is not finite.",
    ),
    ("learner/skipped_steps", "steps", "Steps in a row that made no update."),
    (
        "learner/clip_fraction",
        "fraction",
        "Share of trained tokens (of rows, for losses by row) at which the clipped branch was taken.",
    ),
    (
        "learner/clip_fraction_<part>",
        "fraction",
        "The same for the dual clip, or by the sign of the advantage.",
    ),
    ("learner/ratio_cap_fraction", "fraction", "Share of trained tokens whose ratio was capped."),
    (
        "learner/penalized_fraction",
        "fraction",
        "Share of trained tokens that got the covariance penalty.",
    ),
    ("learner/tapered_fraction", "fraction", "Share of trained tokens whose weight was tapered."),
    ("learner/taper_max", "", "Largest taper."),
    ("learner/row_phi", "", "Mean factor of a row in the variational sequence loss."),
    ("learner/entropy", "nats", "Mean entropy of the policy at trained tokens."),
    ("learner/entropy_<aggregate>", "nats", "Largest and smallest entropy at trained tokens."),
    ("learner/approx_kl", "nats", "Estimate of KL(proximal || current) at trained tokens."),
    (
        "learner/approx_kl_<form>",
        "nats",
        "Other estimates of it: k3, and the mean absolute log-ratio.",
    ),
    ("learner/kl", "nats", "Estimate of KL(current || reference) at trained tokens."),
    ("learner/reward_kl", "nats", "KL to the reference that was taken from the reward."),
    ("learner/coefficient", "", "Coefficient of the adaptive KL penalty."),
    (
        "learner/logprob_gap/mean",
        "nats",
        "Mean |learner - engine| log-probability of sampled tokens at the start of the step; staleness is part of it.",
    ),
    ("learner/logprob_gap/<aggregate>", "nats", "Its maximum and standard deviation."),
    (
        "learner/on_policy_gap/<aggregate>",
        "nats",
        "The gap over tokens of the learner's own version, where only engine and learner can differ: mean, max.",
    ),
    (
        "learner/on_policy_fraction",
        "fraction",
        "Share of sampled tokens of the learner's own version.",
    ),
    (
        "learner/probability_gap/<aggregate>",
        "",
        "|learner - engine| probability of sampled tokens: mean, max, std.",
    ),
    (
        "learner/behavior_unknown_fraction",
        "fraction",
        "Share of sampled tokens without a finite behavior log-probability.",
    ),
    (
        "learner/importance_weight/ess",
        "fraction",
        "Effective sample size over count of the importance weights; 1 when all are equal.",
    ),
    (
        "learner/importance_weight/<aggregate>",
        "",
        "Importance weights proximal/behavior, by token and by row: before truncation, but for std.",
    ),
    (
        "learner/importance_ratio/<aggregate>",
        "",
        "Ratios that a rejection rule looks at, by token and by row.",
    ),
    (
        "learner/rejection/<aggregate>",
        "",
        "The statistic that a rejection rule bounds, by token and by row.",
    ),
    (
        "learner/veto/token_fraction",
        "fraction",
        "Share of tokens so unlikely to the learner that their row is rejected.",
    ),
    (
        "learner/perplexity/<policy>",
        "",
        "Mean perplexity of a row under the proximal and the behavior policy.",
    ),
    (
        "learner/log_perplexity/<policy>",
        "nats",
        "Mean log-perplexity of a row under the proximal and the behavior policy.",
    ),
    (
        "learner/perplexity_gap/<aggregate>",
        "nats",
        "Proximal minus behavior log-perplexity of a row; `ratio` is its exponential.",
    ),
    ("learner/off_policy_kl", "nats", "KL(behavior || proximal) at trained tokens, k1."),
    ("learner/off_policy_kl_k3", "nats", "KL(behavior || proximal) at trained tokens, k3."),
    (
        "learner/chi2/<level>",
        "",
        "Chi-square divergence of proximal from behavior, by token and by row.",
    ),
    (
        "learner/token_staleness/<aggregate>",
        "versions",
        "Versions since the trained tokens were sampled.",
    ),
    (
        "learner/staleness_fraction/<age>",
        "fraction",
        "Share of trained tokens sampled so many versions ago.",
    ),
    ("learner/version_span/<aggregate>", "versions", "Versions that a row's tokens span."),
    ("learner/reward/<aggregate>", "reward", "Rewards as the advantages see them."),
    ("learner/advantage/<aggregate>", "", "Advantages of the step's trained tokens."),
    ("learner/zero_variance_fraction", "fraction", "Share of groups whose rewards are all equal."),
    (
        "learner/single_group_fraction",
        "fraction",
        "Share of groups with at most one reward, which nothing can be compared with.",
    ),
    ("learner/unscorable_fraction", "fraction", "Share of episodes without a reward."),
    (
        "learner/masked_fraction/<rule>",
        "fraction",
        "Share of sampled tokens that a rule keeps from training.",
    ),
    (
        "learner/gradient_power/<part>",
        "",
        "Proxy of the squared gradient norm of a row, from the logits' side, and its factors.",
    ),
    ("learner/gradient_noise/<part>", "", "Signal and noise of the step's gradient by that proxy."),
    (
        "learner/value_clip_fraction",
        "fraction",
        "Share of tokens at which the critic's clipped branch was taken.",
    ),
    (
        "learner/explained_variance",
        "fraction",
        "Share of the returns' variance that the critic explains.",
    ),
    ("learner/tokens", "tokens", "Tokens of the step, prompts included."),
    ("learner/trained_tokens", "tokens", "Tokens of the step that trained."),
    (
        "learner/tokens_per_s",
        "tokens/s",
        "Tokens of the step per second of step time, over all ranks.",
    ),
    (
        "learner/rank_tokens/<aggregate>",
        "tokens",
        "Tokens of a rank in the step: mean, max; far apart means unbalanced ranks.",
    ),
    (
        "learner/padding_fraction",
        "fraction",
        "Share of tokens that are there only to keep ranks in step.",
    ),
    ("learner/wait_s", "s", "How long the learner waited for the step's groups."),
    (
        "learner/idle_fraction",
        "fraction",
        "Share of time since the last step that the learner waited for groups.",
    ),
    ("learner/step_s", "s", "Time of the learner step."),
    # Weight pushes: the last one finished.
    ("weights/publish_s", "s", "From the start of a push until every engine acknowledged it."),
    ("weights/write_s", "s", "Part of it in which the learner writes or sends."),
    ("weights/pause_s", "s", "Longest time that an engine's generations stood still."),
    ("weights/update_s", "s", "Longest time in which an engine loaded tensors."),
    ("weights/proof_s", "s", "Longest time that a proof took."),
    (
        "weights/proof_gap",
        "nats",
        "Largest |learner - engine| log-probability on the probe prompts.",
    ),
    ("weights/num_engines", "engines", "Engines that acknowledged the push."),
    # Evaluations.
    (
        "evaluation/<key>",
        "",
        "Numbers of eval.jsonl as TensorBoard shows them, such as `evaluation/reward/mean`.",
    ),
)
"""Kept in the order of the documentation. Patterns come after the keys they would cover."""


def markdown() -> str:
    """The table as docs/observability.md holds it."""
    rows = [
        f"| `{key}` | {unit or '-'} | {description.replace('|', '&#124;')} |"
        for key, unit, description in TABLE
    ]
    return "\n".join(["| key | unit | meaning |", "|---|---|---|", *rows]) + "\n"
