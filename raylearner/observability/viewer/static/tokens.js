// The tokens of a part of a trajectory, coloured by one of their values.
import {MASK, advantageShade, gapShade, logprobShade, versionShade} from "./colours.js";
import {append, h, number, setTip} from "./dom.js";

const CHUNK = 2000;
export const MODES = {none: "no colour", mask: "mask", version: "policy version", gap: "log-probability gap", logprob: "log-probability", advantage: "advantage"};
export const MODE_TERMS = {mask: "mask", version: "policy version", gap: "gap", logprob: "log-probability", advantage: "advantage"};

export const gapOf = (t, i) => {
  const learner = t.learner_logprobs?.[i], engine = t.behavior_logprobs[i];
  return learner === null || learner === undefined || engine === null ? null : Math.abs(learner - engine);
};

const versionsOf = t => t.versions ??= [...new Set(t.policy_versions.filter(version => version >= 0))].sort((a, b) => a - b);

function colour(t, i, mode) {
  if (!t.loss_mask[i]) return "";
  switch (mode) {
    case "mask": return t.train_mask[i] ? MASK.trains : MASK.sampled;
    case "version": return versionShade(t.policy_versions[i], versionsOf(t));
    case "gap": { const gap = gapOf(t, i); return gap === null ? "" : gapShade(gap); }
    case "logprob": return t.behavior_logprobs[i] === null ? "" : logprobShade(t.behavior_logprobs[i]);
    case "advantage": return t.train_mask[i] && t.advantage !== null && t.advantage !== undefined ? advantageShade(t.advantage, t.largest_advantage) : "";
    default: return "";
  }
}

export function legend(t, mode) {
  const item = (text, background) => h("span.key", {}, h("i", {style: {background}}), text);
  switch (mode) {
    case "mask": return [item("trains", MASK.trains), item("sampled, does not train", MASK.sampled), item("not sampled", "var(--none)")];
    case "version": { const found = versionsOf(t); return found.length > 8 ? [item(`version ${found[0]}`, versionShade(found[0], found)), "…", item(`${found.at(-1)}`, versionShade(found.at(-1), found))] : found.map(version => item(`version ${version}`, versionShade(version, found))); }
    case "gap": return t.learner_logprobs ? [0.001, 0.01, 0.1, 1].map(gap => item(gap === 1 ? "1 nat" : String(gap), gapShade(gap))) : ["The learner's log-probabilities are not recorded."];
    case "logprob": return [item("likely", logprobShade(-0.1)), item("-2.5", logprobShade(-2.5)), item("-5 nats", logprobShade(-5))];
    case "advantage": return t.advantage === null || t.advantage === undefined ? ["This trajectory has no advantage."] : [item(`${number(t.advantage)} for all tokens that train`, advantageShade(t.advantage, t.largest_advantage)), item("negative", advantageShade(-1, 1)), item("positive", advantageShade(1, 1))];
    default: return [];
  }
}

function values(t, i) {
  const rows = [["token", `#${i}, id ${t.token_ids[i]}`]];
  if (!t.loss_mask[i]) rows.push(["", t.markup[i] ? "chat template" : "not sampled"]);
  else rows.push(["", t.train_mask[i] ? "trains" : "sampled, does not train"], ["policy version", t.policy_versions[i]],
    ["engine", `${number(t.behavior_logprobs[i])} (p = ${number(t.behavior_logprobs[i] === null ? null : Math.exp(t.behavior_logprobs[i]), 3)})`],
    ["learner", number(t.learner_logprobs?.[i] ?? null)], ["gap", number(gapOf(t, i))], ["advantage", t.train_mask[i] ? number(t.advantage) : "–"]);
  return h("table", {}, rows.map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, value))));
}

// The tokens from `from` to `to`; long parts show more on request. `image(i, end)` draws placeholders.
export function tokens(t, from, to, {mode, image}) {
  const box = h("div.tokens." + mode);
  more(box, t, from, to, {mode, image});
  return box;
}

function more(box, t, from, to, options) {
  const end = Math.min(to, from + CHUNK);
  let i = from;
  for (; i < end; i++) {
    if (isPlace(t, i)) {
      let last = i;
      while (last < to && isPlace(t, last)) last++;
      box.append(options.image(i, last));
      i = last - 1;
      continue;
    }
    const span = document.createElement("span"), token = i;
    const piece = t.pieces[i] || "·";
    append(span, [t.loss_mask[i] ? piece.replaceAll("\n", "↵\n") : piece]);
    span.className = t.markup[i] ? "markup" : t.loss_mask[i] ? (t.train_mask[i] ? "trains" : "sampled") : "given";
    const background = colour(t, i, options.mode);
    if (background) span.style.background = background;
    setTip(span, () => values(t, token));
    box.append(span);
  }
  if (i >= to) return;
  const button = h("button", {type: "button", onclick: () => { button.remove(); more(box, t, i, to, options); }}, `${number(to - i)} more tokens`);
  box.append(button);
}

export const isPlace = (t, i) => t.image_token_id !== null && t.image_token_id !== undefined && t.token_ids[i] === t.image_token_id;
