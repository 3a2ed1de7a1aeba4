// The charts of a run, by what they answer. A key may be missing in a run; a chart without any
// is left out. `first` draws only the first key that exists, `floor` is always in the range, `labels` name the keys.
export const SECTIONS = [
  ["Does it learn?", [
    {title: "reward", keys: ["rollout/reward/mean"], labels: ["training"], evaluation: "evaluation/reward/mean"},
    {title: "reward spread", keys: ["rollout/reward/std"]},
    {title: "groups without signal", keys: ["learner/zero_variance_fraction"], floor: 0},
    {title: "entropy", keys: ["learner/entropy"]},
  ]],
  ["Is training stable?", [
    {title: "loss", keys: ["learner/loss"]},
    {title: "gradient norm", keys: ["learner/grad_norm"], floor: 0},
    {title: "KL to the start of the step", keys: ["learner/approx_kl_k3", "learner/approx_kl"], first: true, floor: 0},
    {title: "KL to the reference", keys: ["learner/kl"]},
    {title: "clip fraction", keys: ["learner/clip_fraction"], floor: 0},
    {title: "learning rate", keys: ["learner/learning_rate"], floor: 0},
  ]],
  ["How far off-policy?", [
    {title: "staleness", keys: ["buffer/staleness/mean", "buffer/staleness/max"], labels: ["mean", "max"], floor: 0},
    {title: "tokens masked as stale", keys: ["buffer/masked_fraction"], floor: 0},
    {title: "log-probability gap", keys: ["learner/logprob_gap/mean"], floor: 0},
    {title: "effective sample size", keys: ["learner/importance_weight/ess"]},
    {title: "gap on own version", keys: ["learner/on_policy_gap/mean"], floor: 0},
  ]],
  ["What do episodes look like?", [
    {title: "turns", keys: ["rollout/turns/mean"]},
    {title: "sampled tokens", keys: ["rollout/sampled_tokens/mean"]},
    {title: "ended normally", keys: ["rollout/finish_fraction"]},
    {title: "tool calls", keys: ["rollout/tool_calls/mean", "rollout/valid_tool_calls/mean"], labels: ["all", "valid"]},
    {title: "invalid actions", keys: ["rollout/invalid_actions/mean"], floor: 0},
    {title: "trained to finished length", keys: ["buffer/trained_to_finished_length"]},
  ]],
  ["How fast?", [
    {title: "sampled tokens per second", keys: ["rollout/tokens_per_s"], floor: 0},
    {title: "trained tokens per second", keys: ["learner/tokens_per_s"], floor: 0},
    {title: "idle", keys: ["learner/idle_fraction", "rollout/idle_fraction"], labels: ["learner", "actors"], floor: 0},
    {title: "step", keys: ["learner/step_s", "buffer/wait_s"], labels: ["computes", "waits"], floor: 0},
    {title: "weight push", keys: ["weights/publish_s", "weights/pause_s"], labels: ["push", "pause"], floor: 0},
    {title: "memory", keys: ["learner/peak_memory_gib"]},
  ]],
];
