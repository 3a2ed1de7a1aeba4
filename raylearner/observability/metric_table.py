"""The table of metric keys: key or pattern, unit, meaning."""

TABLE: tuple[tuple[str, str, str], ...] = (
    # The step itself.
    ("step", "steps", "Learner steps committed, this one included."),
    (
        "policy_version",
        "versions",
        "Version of the policy after the step; skipped steps make none.",
    ),
    ("time_s", "s", "Running time of the run so far; pauses between resumes are left out."),
    (
        "observability/non_finite",
        "values",
        "Values of this row that were NaN or infinite and became null.",
    ),
    # Playing episodes.
    ("rollout/reward/mean", "reward", "Mean reward of the step's episodes."),
    ("rollout/reward/std", "reward", "Standard deviation of the step's rewards."),
    ("rollout/reward/max", "reward", "Largest reward of the step."),
    ("rollout/reward/min", "reward", "Smallest reward of the step."),
    (
        "rollout/reward/<part>/mean",
        "reward",
        "Mean of one reward function over the step, unweighted.",
    ),
    ("rollout/turns/mean", "turns", "Mean turns of an episode."),
    ("rollout/turns/max", "turns", "Most turns of an episode."),
    (
        "rollout/response_tokens/mean",
        "tokens",
        "Mean tokens after the prompt, observations included.",
    ),
    ("rollout/response_tokens/max", "tokens", "Most tokens after the prompt."),
    ("rollout/sampled_tokens/mean", "tokens", "Mean tokens that the policy sampled in an episode."),
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
        "Share of the step's episodes that ended for this reason.",
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
        "Mean turns of an episode with neither a tool call nor an answer.",
    ),
    ("rollout/tool_calls/mean", "calls", "Mean tool calls of an episode."),
    ("rollout/episode_s/mean", "s", "Mean time from an episode's start to its end."),
    ("rollout/episode_s/max", "s", "Longest episode."),
    ("rollout/restarts", "actors", "Rollout actors replaced since the run began."),
    # Groups between actors and learner.
    ("buffer/size", "groups", "Complete groups that wait to be taken."),
    ("buffer/running", "groups", "Groups being played."),
    ("buffer/leased", "groups", "Groups taken and not yet committed."),
    (
        "buffer/staleness/mean",
        "steps",
        "Mean staleness of the taken trajectories: learner version minus oldest sampled version.",
    ),
    ("buffer/staleness/max", "steps", "Largest staleness taken."),
    (
        "buffer/dropped/<why>",
        "groups",
        "Groups or episodes dropped for this reason since the run began.",
    ),
    ("buffer/masked_tokens", "tokens", "Over-old tokens of this take that left the train mask."),
    (
        "buffer/zero_variance_fraction",
        "fraction",
        "Share of taken groups whose rewards are all equal.",
    ),
    (
        "buffer/started/tokens/<aggregate>",
        "tokens",
        "Lengths of episodes started lately, as far as they got.",
    ),
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
    ("buffer/wait_s", "s", "How long the learner waited for this take."),
    # Training.
    ("learner/loss", "", "The objective after aggregation, bonus and penalty terms included."),
    ("learner/policy_loss", "", "The policy part of the objective."),
    (
        "learner/grad_norm",
        "",
        "Global gradient norm before clipping, mean over the step's updates.",
    ),
    ("learner/learning_rate", "", "Learning rate of the step's last update."),
    (
        "learner/clip_fraction",
        "fraction",
        "Share of trained tokens at which the clipped branch was taken.",
    ),
    (
        "learner/clip_fraction_dual",
        "fraction",
        "Share of trained tokens at which the dual clip was taken.",
    ),
    (
        "learner/fraction_low",
        "fraction",
        "Share of trained tokens whose ratio is below the clip range.",
    ),
    (
        "learner/fraction_high",
        "fraction",
        "Share of trained tokens whose ratio is above the clip range.",
    ),
    ("learner/entropy", "nats", "Mean entropy of the policy at trained tokens."),
    ("learner/approx_kl", "nats", "Estimate of KL(proximal || current) at trained tokens."),
    ("learner/kl", "nats", "Estimate of KL(current || reference) at trained tokens."),
    ("learner/reward_kl", "nats", "KL to the reference that was taken from the reward."),
    ("learner/ratio/<aggregate>", "", "Ratio current/proximal at trained tokens."),
    ("learner/advantage/<aggregate>", "", "Advantages of the step's trained tokens."),
    (
        "learner/logprob_gap/mean",
        "nats",
        "Mean |learner - engine| log-probability of sampled tokens, at the start of the step.",
    ),
    ("learner/logprob_gap/max", "nats", "Largest |learner - engine| log-probability."),
    (
        "learner/logprob_gap/std",
        "nats",
        "Standard deviation of |learner - engine| log-probability.",
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
        "learner/behavior_outside_fraction",
        "fraction",
        "Share of trained tokens whose proximal/behavior weight is outside its range.",
    ),
    ("learner/behavior_weight", "", "Mean importance weight proximal/behavior after truncation."),
    ("learner/behavior_weight_max", "", "Largest importance weight proximal/behavior."),
    (
        "learner/importance_weight/ess",
        "fraction",
        "Effective sample size over count of the importance weights; 1 when all are equal.",
    ),
    (
        "learner/importance_weight/<aggregate>",
        "",
        "Importance weights proximal/behavior before truncation.",
    ),
    (
        "learner/importance_ratio/<aggregate>",
        "",
        "Ratios that a rejection rule looks at, by token and by row.",
    ),
    (
        "learner/veto/token_fraction",
        "fraction",
        "Share of tokens whose behavior probability is so off that their row is rejected.",
    ),
    (
        "learner/value_clip_fraction",
        "fraction",
        "Share of tokens at which the critic's clipped branch was taken.",
    ),
    (
        "learner/tokens_per_s",
        "tokens/s",
        "Tokens trained on per second of step time, over all ranks.",
    ),
    ("learner/tokens", "tokens", "Tokens of the step, prompts included."),
    ("learner/trained_tokens", "tokens", "Tokens of the step that trained."),
    ("learner/micro_batches", "micro-batches", "Micro-batches of one rank in the step."),
    (
        "learner/packing_fraction",
        "fraction",
        "Share of the token budget that the micro-batches fill.",
    ),
    (
        "learner/idle_fraction",
        "fraction",
        "Share of time since the last step that the learner did not train.",
    ),
    ("learner/step_s", "s", "Time of the learner step, from batch to commit."),
    ("learner/skipped", "steps", "Steps skipped for a non-finite loss since the run began."),
    ("learner/restarts", "restarts", "Times the learner was restored since the run began."),
    ("learner/memory_bytes", "bytes", "Peak memory of a rank's device."),
    # Weight pushes.
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
    ("weights/policy_version", "versions", "Newest version that every engine holds."),
    # Evaluations: in eval.jsonl without the prefix, in TensorBoard with it.
    (
        "evaluation/<key>",
        "",
        "Numbers of eval.jsonl as TensorBoard shows them, such as `evaluation/reward/mean`.",
    ),
)
"""Kept in the order of the documentation. Patterns come after the keys they would cover."""


def markdown() -> str:
    """The table as docs/observability.md holds it."""
    rows = [f"| `{key}` | {unit or '-'} | {description} |" for key, unit, description in TABLE]
    return "\n".join(["| key | unit | meaning |", "|---|---|---|", *rows]) + "\n"
