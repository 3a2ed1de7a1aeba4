// Meanings of the words on the page, shown on hover. Metrics have theirs from the server.
import {h} from "./dom.js";

export const TERMS = {
  run: "One training run: a directory with its configuration, metrics, trajectories and checkpoints.",
  step: "One step of the learner: it takes complete groups, updates the weights and makes the next policy version.",
  state: "running: its process is alive on this machine. complete: it made all steps of its configuration. stopped: anything else.",
  reward: "Sum of the weighted reward functions. Colours run from the lowest reward shown (orange) to the highest (teal).",
  "reward parts": "Value of each reward function, before its weight.",
  answer: "The answer that an agent program gave.",
  reference: "The answer in the data, which reward functions compare with.",
  "held-out": "Mean reward of the last evaluation, on prompts that are not trained on.",
  group: "All episodes of one prompt. Their mean reward is the baseline of each one's advantage.",
  mean: "Mean reward of the group's episodes.",
  spread: "Standard deviation of the rewards in the group. A group with spread 0 gives no learning signal to most objectives.",
  episodes: "One square for each episode of the group, coloured by reward. Click one to read it.",
  turns: "A turn is one completion of the policy and the reply of the environment or tool.",
  tokens: "Number of tokens that the policy sampled in the episode.",
  "stop reason": "How the episode ended: with an answer, at a limit of turns or tokens, or with an error.",
  staleness: "Learner's version when it trained on the trajectory, minus the oldest version of a trained token.",
  "policy version": "Version of the weights that sampled a token. The learner makes a new one in each step, also while episodes are running.",
  advantage: "How much better than its baseline the episode was: mean over trained tokens. Positive raises the probability of its tokens, negative lowers it.",
  source: "Data source that the prompt comes from.",
  error: "Kind of failure: which part of the program could not finish the episode.",
  tool: "Tools that the episode called.",
  mask: "Tokens that train; tokens that the policy sampled but that do not train, for example because they are too stale; all others are prompt, template and replies.",
  gap: "|log-probability by the learner - log-probability by the engine| of a sampled token, at the start of the step. It includes the effect of staleness; large values at staleness 0 mean that engine and learner compute differently.",
  "log-probability": "Natural logarithm of the probability with which the engine sampled the token.",
  markup: "Tokens of the chat template, such as <|im_start|>, which are folded away. They never train.",
  attempt: "Number of earlier attempts at this sample whose actor died.",
  segment: "Part of an episode: an agent program that rewrites its history starts another segment.",
  smoothing: "Exponential moving average over steps; the faint line is the metric itself.",
  evaluation: "Episodes on held-out prompts, all played by one policy version.",
  sweep: "Many runs that differ in a few keys of the configuration, each with several seeds.",
  trial: "One run of a sweep: one combination of values and one seed.",
  "95% interval": "Interval of the mean over seeds by Student's t distribution: repeated with other seeds, 95 of 100 such intervals contain the true mean.",
};

// A word that explains itself on hover.
export const term = (name, text = name) => TERMS[name] ? h("span.term", {tip: TERMS[name], tabindex: "0"}, text) : h("span", {}, text);
