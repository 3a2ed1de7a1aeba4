// The trajectories of a run, by group or one by one, filtered and paged by the server.
import {follow, get, link, setQuery} from "./api.js";
import {Chart} from "./chart.js";
import {GRADIENT, reward} from "./colours.js";
import {count, h, number, show} from "./dom.js";
import {chip, moveIn, pager, runTabs} from "./parts.js";
import {term} from "./terms.js";

const PAGE = 100;
const RANGES = ["reward", "tokens", "turns", "staleness"];
export const FILTERS = ["kind", "step", "text", "stop", "source", "tool", "error", ...RANGES.flatMap(name => [`${name}_min`, `${name}_max`])];
const SORTS = {groups: ["step", "reward", "spread", "tokens", "turns", "staleness", "gap"], trajectories: ["step", "reward", "advantage", "tokens", "turns", "staleness", "gap"]};

export async function listPage(main, {id, query, signal, setKeys}) {
  const run = await get("run", {run: id}, signal);
  const values = Object.fromEntries(FILTERS.map(name => [name, query.get(name) ?? ""]));
  const view = {by: query.get("by") ?? "groups", sort: query.get("sort") ?? "step", descending: query.get("descending") ?? "true", offset: Number(query.get("offset") ?? 0)};
  const kind = values.kind || "training";
  const steps = run.steps[kind] ?? [];
  const rows = h("div.rows"), pages = h("div.pages"), pages2 = h("div.pages"), note = h("div"), side = h("aside.filters"), head = h("div.row.head");
  const search = h("input.search.wide", {type: "search", value: values.text, placeholder: "Search prompts, completions, replies and errors", "aria-label": "Search"});
  const chart = new Chart({title: "reward", hint: "Click to read the trajectories of a step.", height: 84, onpick: step => choose({step: nearest(steps, step)})});
  let facets = null;

  const choose = changes => {
    Object.assign(values, changes);
    view.offset = 0;
    setQuery({...changes, offset: ""});
    drawSide();
    load().catch(failed);
  };
  const arrange = changes => { Object.assign(view, {offset: 0}, changes); setQuery({...changes, offset: changes.offset || ""}); load().catch(failed); };
  const failed = error => { if (error.name !== "AbortError") show(note, h("div.notice.bad", {}, error.message)); };

  let running = new AbortController();
  async function load() {
    running.abort();
    running = new AbortController();
    signal.addEventListener("abort", () => running.abort());
    const found = await get("trajectories", {run: id, ...values, ...view, limit: PAGE}, running.signal);
    const isFirst = !facets || JSON.stringify(facets) !== JSON.stringify(found.facets);
    facets = found.facets;
    if (isFirst) drawSide();
    const range = [facets.reward_min ?? 0, facets.reward_max ?? 1];
    show(head, view.by === "groups" ? groupHead() : trajectoryHead());
    const focused = document.activeElement?.dataset?.row;
    show(rows, found.rows.map(row => view.by === "groups" ? groupRow(id, kind, row, range) : trajectoryRow(id, kind, row, range)));
    if (focused) rows.querySelector(`[data-row="${CSS.escape(focused)}"]`)?.focus();
    for (const box of [pages, pages2]) show(box, pager({offset: view.offset, limit: PAGE, total: found.total, words: view.by === "groups" ? ["group", "groups"] : ["trajectory", "trajectories"], go: offset => { arrange({offset}); main.scrollIntoView(); }}));
    const {read, total} = found.files;
    show(note, read < total && !values.step ? h("div.notice", {}, `Reading ${number(read)} of ${number(total)} files; the list grows until all are read.`) : null,
      !total ? h("div.notice", {}, kind === "training" ? run.empty || "The run has no trajectories." : "The run has no evaluation transcripts: it has not evaluated yet, it was made by an older version, or observability.trajectories_every_steps is 0.") : null,
      total && !found.total && (read === total || values.step !== "") ? h("div.notice", {}, "No trajectory passes these filters. ", h("button", {type: "button", onclick: reset}, "Clear filters")) : null,
      found.problems.length ? h("details.notice", {}, h("summary", {}, `${count(found.problems.length, "line")} could not be shown`), found.problems.map(text => h("div", {}, text))) : null);
    if (read < total && !values.step) setTimeout(() => !signal.aborted && load().catch(failed), 700);
  }
  const reset = () => choose(Object.fromEntries(FILTERS.filter(name => name !== "kind").map(name => [name, ""])));

  function drawSide() {
    const active = document.activeElement?.name;
    const menu = (name, label, found, extra = []) => h("label", {}, term(label), h("select", {name, onchange: event => choose({[name]: event.target.value})},
      [["", "any"], ...extra, ...found.map(([value, n]) => [value, `${value} (${number(n)})`])].map(([value, text]) => h("option", {value, selected: values[name] === value}, text))));
    const range = name => h("label", {}, term(name), h("span.range", {}, ["min", "max"].map(end => h("input", {type: "number", step: "any", name: `${name}_${end}`, value: values[`${name}_${end}`],
      placeholder: number(facets?.[`${name}_${end}`] ?? null, 3), "aria-label": `${name} ${end}`, onchange: event => choose({[`${name}_${end}`]: event.target.value})}))));
    const position = steps.indexOf(Number(values.step));
    const move = by => choose({step: steps[Math.max(0, Math.min(steps.length - 1, values.step === "" ? steps.length - 1 : position + by))]});
    show(side, h("label", {}, term("step"), h("span.range", {}, h("button", {type: "button", title: "Previous step ([)", onclick: () => move(-1)}, "‹"),
      h("select", {name: "step", onchange: event => choose({step: event.target.value})}, h("option", {value: ""}, `all ${number(steps.length)}`), steps.toReversed().map(step => h("option", {value: step, selected: String(step) === String(values.step)}, step))),
      h("button", {type: "button", title: "Next step (])", onclick: () => move(1)}, "›"))),
      range("reward"), h("div.gradient", {style: {background: GRADIENT}, tip: "Colours of rewards, from the lowest to the highest shown."}), range("tokens"), range("turns"), kind === "training" ? range("staleness") : null,
      menu("stop", "stop reason", facets?.stop ?? []), menu("source", "source", facets?.source ?? []), menu("tool", "tool", facets?.tools ?? []),
      menu("error", "error", facets?.error_kind ?? [], [["none", "not failed"], ["any", "failed"]]), h("button", {type: "button", onclick: reset}, "Clear filters"));
    if (active) side.querySelector(`[name="${active}"]`)?.focus();
    chart.update(chart.series, {marked: values.step === "" ? null : Number(values.step)});
    return move;
  }

  const by = h("span.switch", {}, ["groups", "trajectories"].map(name => h("button", {type: "button", "data-by": name, onclick: () => { arrange({by: name, sort: "step"}); drawBar(); }}, name)));
  const sort = h("select", {"aria-label": "Sort", onchange: () => arrange({sort: sort.value})});
  const direction = h("button", {type: "button", title: "Turn the order round", onclick: () => { arrange({descending: view.descending === "true" ? "false" : "true"}); drawBar(); }});
  function drawBar() {
    by.querySelectorAll("button").forEach(button => button.classList.toggle("on", button.dataset.by === view.by));
    show(sort, SORTS[view.by].map(name => h("option", {value: name, selected: name === view.sort}, name)));
    direction.textContent = view.descending === "true" ? "↓" : "↑";
  }
  let typing;
  search.oninput = () => { clearTimeout(typing); typing = setTimeout(() => choose({text: search.value}), 200); };
  show(main, runTabs(run, kind),
    h("div.with-side", {}, side, h("div.list", {}, chart.element, h("div.bar", {}, search, by, h("label", {}, "sort ", sort), direction, pages), note, head, rows, pages2)));
  drawBar();
  drawSide();
  setKeys({"/": ["search", () => search.focus()], j: ["next row", () => moveIn(rows, 1)], k: ["previous row", () => moveIn(rows, -1)],
    "[": ["previous step", () => drawSide()(-1)], "]": ["next step", () => drawSide()(1)], b: ["groups or trajectories", () => by.querySelector(":not(.on)").click()]});
  const curve = async () => {
    const key = kind === "training" ? "rollout/reward/mean" : "evaluation/reward/mean";
    const {curves} = await get("metrics", {run: id, key}, signal);
    const [xs, ys] = curves[id][key];
    chart.update([{name: "reward", colour: "var(--accent)", xs, ys, dots: kind !== "training"}]);
  };
  await Promise.all([load(), curve()]);
  follow(async () => {  // New steps of a live run appear on the first page alone, so that rows do not move while they are read.
    const now = await get("run", {run: id}, signal);
    const found = now.steps[kind] ?? [];
    if (found.length === steps.length && found.at(-1) === steps.at(-1)) return;
    steps.splice(0, steps.length, ...found);
    drawSide();
    await curve();
    if (!view.offset && !values.step) await load();
  }, signal, 4);
}

const nearest = (steps, step) => steps.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a, steps[0]);
export const place = (id, kind, step, line) => link(["run", id, "step", step, line], {kind: kind === "training" ? "" : kind});
const stopChip = row => row.error ? chip("failed", "bad", row.error) : row.stop && row.stop !== "answer" ? chip(row.stop, "warn", "Stop reason") : null;

const groupHead = () => [term("step"), h("span", {}, "question"), term("reward", "mean ± spread"), term("episodes"), term("turns"), term("tokens"), term("staleness", "stale"), h("span")];

function groupRow(id, kind, group, [low, high]) {
  const {members} = group, average = pick => members.length ? members.reduce((sum, member) => sum + (member[pick] ?? 0), 0) / members.length : null;
  const stops = [...new Set(members.map(member => member.error ? "failed" : member.stop))].filter(stop => stop && stop !== "answer");
  const href = link(["run", id, "group", group.step, group.group_key], {kind: kind === "training" ? "" : kind});
  return h("div.row", {}, h("span.dim", {}, number(group.step)), h("a.question", {href, "data-row": `${group.step} ${group.group_key}`, title: group.question}, group.question || "(no text)"),
    h("span.number", {}, h("b", {style: {"--reward": reward(group.mean, low, high)}}, number(group.mean, 3)), h("span.dim", {}, group.spread === null || members.length < 2 ? "" : ` ± ${number(group.spread, 2)}`)),
    h("span.squares", {}, members.map(member => h("a.square" + (member.error ? ".failed" : ""), {href: place(id, kind, group.step, member.line), tabindex: "-1", "aria-label": `sample ${member.sample}, reward ${number(member.reward)}`,
      style: {background: reward(member.reward, low, high)}, tip: () => memberTip(member)}))),
    h("span.number", {}, number(average("turns"), 2)), h("span.number", {}, number(average("sampled"), 3)), h("span.number", {}, number(Math.max(...members.map(m => m.staleness ?? -1)) < 0 ? null : Math.max(...members.map(m => m.staleness ?? 0)))),
    h("span.chips", {}, stops.slice(0, 2).map(stop => chip(stop, stop === "failed" ? "bad" : "warn", "Stop reason of an episode of the group"))));
}

export const memberTip = member => h("div", {}, h("b", {}, `sample ${member.sample}: reward ${number(member.reward)}`), h("div", {}, `${member.stop || "?"}, ${count(member.turns, "turn")}, ${count(member.sampled, "token")}`),
  member.answer ? h("div", {}, `answer: ${member.answer.slice(0, 200)}`) : null, member.error ? h("div.bad", {}, member.error.slice(0, 300)) : null);

const trajectoryHead = () => [term("step"), h("span", {}, "question"), term("reward"), term("advantage"), term("turns"), term("tokens"), term("staleness", "stale"), h("span")];

function trajectoryRow(id, kind, row, [low, high]) {
  return h("div.row", {}, h("span.dim", {}, number(row.step)), h("a.question", {href: place(id, kind, row.step, row.line), "data-row": `${row.step} ${row.line}`, title: row.question}, row.question || "(no text)",
    row.answer ? h("span.answer", {}, ` → ${row.answer.slice(0, 120)}`) : null),
    h("span.number", {}, h("b", {style: {"--reward": reward(row.reward, low, high)}}, number(row.reward, 3))), h("span.number", {}, number(row.advantage, 3)),
    h("span.number", {}, number(row.turns)), h("span.number", {}, number(row.sampled)), h("span.number", {}, number(row.staleness)),
    h("span.chips", {}, row.segment ? chip(`segment ${row.segment}`) : null, row.images ? chip(count(row.images, "image")) : null, stopChip(row)));
}
