// One trajectory: its turns with roles and tool calls, its tokens, reward parts, and the rest of its group.
import {get, here, link, setQuery} from "./api.js";
import {imageSource} from "./file.js";
import {reward} from "./colours.js";
import {count, duration, h, number, show} from "./dom.js";
import {memberTip, place} from "./list.js";
import {chip} from "./parts.js";
import {term} from "./terms.js";
import {MODES, MODE_TERMS, gapOf, isPlace, legend, tokens} from "./tokens.js";

export async function trajectoryPage(main, {id, step, line, query, signal, setKeys}) {
  const kind = query.get("kind") === "evaluation" ? "evaluation" : "training";
  const t = await get("trajectory", {run: id, step, line, kind}, signal);
  const group = await get("group", {run: id, step, kind, group: String(kind === "evaluation" ? (t.evaluation_set ? `${t.evaluation_set}/` : "") + t.prompt_id : t.group_id)}, signal);
  t.run = id;
  t.kind = kind;
  t.largest_advantage = Math.max(...group.members.map(member => Math.abs(member.advantage ?? 0)), 1e-9);
  const view = {mode: query.get("colour") in MODES ? query.get("colour") : "mask", markup: query.get("markup") === "1"};
  const colour = h("select", {"aria-label": "Colour of tokens"}, Object.entries(MODES).map(([name, text]) => h("option", {value: name, selected: name === view.mode}, text)));
  const fold = h("input", {type: "checkbox", checked: view.markup});
  const key = h("span.legend"), parts = h("div.parts");
  const draw = () => {
    show(key, MODE_TERMS[view.mode] ? term(MODE_TERMS[view.mode]) : null, legend(t, view.mode));
    show(parts, partsOf(t, view));
  };
  const change = changes => {
    Object.assign(view, changes);
    colour.value = view.mode;
    fold.checked = view.markup;
    setQuery({colour: view.mode === "mask" ? "" : view.mode, markup: view.markup ? "1" : ""});
    draw();
  };
  colour.onchange = () => change({mode: colour.value});
  fold.onchange = () => change({markup: fold.checked});
  const at = group.members.findIndex(member => member.line === line);
  const move = by => { const next = group.members[at + by]; if (next) location.hash = withView(place(id, kind, step, next.line)); };
  const whole = link(["run", id, "group", step, group.group_key], {kind: kind === "training" ? "" : kind});
  show(main, h("div.with-side.right", {}, h("div", {}, h("div.bar.sticky", {}, h("label", {}, "colour ", colour), key, h("span.push"), h("label", {}, fold, " ", term("markup", "template"))), parts),
    h("aside.side", {}, facts(t), members(id, kind, group, line, whole))));
  draw();
  const modes = Object.keys(MODES);
  setKeys({j: ["next of the group", () => move(1)], k: ["previous of the group", () => move(-1)], s: ["group side by side", () => { location.hash = whole; }],
    c: ["next colour", () => change({mode: modes[(modes.indexOf(view.mode) + 1) % modes.length]})], m: ["chat template", () => change({markup: !view.markup})],
    u: ["all trajectories of the step", () => { location.hash = link(["run", id, "trajectories"], {step, kind: kind === "training" ? "" : kind}); }]});
}

const withView = href => {
  const {query} = here(), kept = new URLSearchParams(href.split("?")[1] ?? "");
  for (const name of ["colour", "markup"]) if (query.get(name)) kept.set(name, query.get(name));
  return href.split("?")[0] + (kept.size ? "?" + kept : "");
};

function members(id, kind, group, line, whole) {
  const rewards = group.members.map(member => member.reward).filter(value => value !== null);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  return h("section", {}, h("h3", {}, term("group"), h("a", {href: whole}, "side by side")), h("p", {}, `${number(group.mean, 3)} ± ${number(group.spread, 2)}, ${count(group.members.length, "trajectory", "trajectories")}`),
    h("div.squares.large", {}, group.members.map(member => h("a.square" + (member.line === line ? ".on" : "") + (member.error ? ".failed" : ""), {href: withView(place(id, kind, group.step, member.line)), style: {background: reward(member.reward, low, high)}, tip: () => memberTip(member), "aria-label": `sample ${member.sample}`}, member.sample))));
}

export function facts(t) {
  const gaps = t.token_ids.map((_, i) => gapOf(t, i)).filter(gap => gap !== null);
  const row = (name, value, label = name) => value === null || value === undefined || value === "" ? null : h("tr", {}, h("th", {}, term(name, label)), h("td", {}, value));
  const parts = Object.entries(t.rewards ?? {}), logged = Object.entries(t.metrics ?? {}), columns = Object.entries(t.columns ?? {});
  return h("section", {}, h("table.facts", {}, row("reward", h("b", {}, number(t.reward))), parts.map(([name, value]) => h("tr.inner", {}, h("th", {}, name), h("td", {}, number(value)))),
    row("advantage", number(t.advantage)), row("stop reason", t.stop_reason), row("answer", t.given_answer), row("reference", t.answer, "reference answer"), row("source", t.source), h("tr", {}, h("th", {}, "prompt"), h("td.wrap", {}, t.prompt_id)),
    row("policy version", t.min_policy_version === t.max_policy_version ? number(t.min_policy_version) : `${t.min_policy_version} to ${t.max_policy_version}`),
    row("tokens", `${number(t.token_ids.length)}, ${number(t.loss_mask.filter(Boolean).length)} sampled${t.kind === "training" ? `, ${number(t.train_mask.filter(Boolean).length)} train` : ""}`),
    gaps.length ? row("gap", `mean ${number(gaps.reduce((a, b) => a + b, 0) / gaps.length, 3)}, largest ${number(gaps.reduce((a, b) => Math.max(a, b)), 3)}`) : null,
    row("duration", t.duration_s === undefined ? null : duration(t.duration_s)), t.segment ? row("segment", t.segment) : null, t.attempt ? row("attempt", t.attempt) : null, t.shown?.length ? row("pages shown", t.shown.join(", ")) : null,
    columns.map(([name, value]) => h("tr", {}, h("th", {}, name), h("td.wrap", {}, value ?? "–")))),
  logged.length ? h("details", {}, h("summary", {}, `${count(logged.length, "logged number")}`), h("table.facts", {}, logged.map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, number(value)))))) : null,
  t.error ? h("pre.error", {}, t.error) : null);
}

// The messages of a trajectory; those of the prompt are left out with `from` > 0.
export function partsOf(t, view, {withPrompt = true} = {}) {
  const image = (start, end) => imageAt(t, start, end);
  if (t.texts) return [h("div.notice", {}, "The run's tokenizer is not at hand, so this is text without values of tokens."), t.texts.filter(part => withPrompt || part.turn !== null).map(part => h(`article.part.${roleClass(part.role)}`, {}, partHead(t, part), h("div.tokens", {}, part.text)))];
  const shown = t.parts.filter(part => (withPrompt || part.turn !== null) && (view.markup || !isFolded(t, part)));
  return shown.map(part => h(`article.part.${part.is_sampled ? "policy" : roleClass(part.role)}`, {}, partHead(t, part),
    h("div" + (view.markup ? "" : ".folded"), {}, tokens(t, part.start, part.end, {mode: view.mode, image}))));
}

// A part without anything but the template's markup.
function isFolded(t, part) {
  if (part.is_sampled) return false;
  for (let i = part.start; i < part.end; i++) if (!t.markup[i] && t.pieces[i].trim()) return false;
  return true;
}

const roleClass = role => ["system", "user", "assistant", "tool", "environment"].includes(role) ? role : "prompt";

function partHead(t, part) {
  const turn = part.turn === null ? null : t.turns[part.turn], isPolicy = part.is_sampled ?? (part.role === "assistant" && turn !== null);
  const chips = [];
  if (turn && isPolicy) {
    if (turn.calls?.length) chips.push(turn.calls.map(call => chip(`calls ${call.name}`, "call", call.arguments)));
    if (turn.is_valid === false) chips.push(chip("invalid", "bad", turn.foreign_form ? `a tool call in another form: ${turn.foreign_form}` : "Neither a valid tool call nor a valid answer."));
    if (turn.stop_reason && !["stop", "stop_string"].includes(turn.stop_reason)) chips.push(chip(turn.stop_reason, "warn", "Why the engine stopped"));
    if (t.error && part.turn === t.turns.length - 1) chips.push(chip("then failed", "bad", t.error));
  }
  return h("header", {}, h("span.role", {}, turn && part.role === "tool" ? `tool ${turn.tool ?? ""}` : part.role), turn && isPolicy ? h("span.dim", {}, `turn ${part.turn + 1}`) : null, chips);
}

function imageAt(t, start, end) {
  let place = -1;
  for (let i = 0; i <= start; i++) if (isPlace(t, i) && !(i && isPlace(t, i - 1))) place++;
  const name = (t.images ?? [])[place];
  if (!name) return h("span.no-image", {}, "[image]");
  const picture = h("img", {src: imageSource(t.run, t.kind, name), alt: `image ${place + 1}`, loading: "lazy", tip: `image ${place + 1}, ${count(end - start, "token")}`});
  picture.onerror = () => picture.replaceWith(h("span.no-image", {}, "[image is missing]"));
  return picture;
}
