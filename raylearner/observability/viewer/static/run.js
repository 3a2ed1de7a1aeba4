// A run: its charts, configuration and failures; or several runs in the same charts.
import {follow, get, link, setQuery} from "./api.js";
import {Chart} from "./chart.js";
import {line} from "./colours.js";
import {append, count, duration, h, number, show} from "./dom.js";
import {runTabs} from "./parts.js";
import {SECTIONS} from "./sections.js";
import {term} from "./terms.js";

export async function runPage(main, {id, tab, query, signal, setKeys}) {
  const run = await get("run", {run: id}, signal);
  const head = h("div.run-head"), content = h("div");
  show(main, head, content);
  const draw = found => show(head, runHead(found), runTabs(found, tab));
  draw(run);
  follow(async () => draw(await get("run", {run: id}, signal)), signal, 8);
  const open = (key, text, href) => [key, [text, () => { location.hash = href; }]];
  setKeys(Object.fromEntries([open("t", "trajectories", link(["run", id, "trajectories"])), open("e", "evaluations", link(["run", id, "trajectories"], {kind: "evaluation"}))]));
  if (tab === "configuration") return configuration(content, [id], signal);
  if (tab === "failures") return failures(content, run);
  const pick = run.steps.training.length ? step => {
    const nearest = run.steps.training.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a);
    location.hash = link(["run", id, "trajectories"], {step: nearest});
  } : undefined;
  if (run.empty) content.append(h("div.notice", {}, run.empty));
  return charts(content, [id], {query, signal, pick});
}

function runHead(run) {
  const facts = [["step", `${number(run.step)}${run.num_steps ? " of " + number(run.num_steps) : ""}`],
    ["reward", run.reward_last === null ? "–" : `${number(run.reward_first, 3)} → ${number(run.reward_last, 3)}`],
    ["held-out", number(run.evaluation, 3)], ["time", duration(run.time_s)]];
  return [h("h1", {}, run.id, h(`span.state.${run.state}`, {}, run.state)),
    h("div.facts", {}, facts.map(([name, value]) => h("span", {}, term(name), " ", h("b", {}, value))), h("span.dim.path", {title: run.path}, run.path)),
    run.num_damaged ? h("div.notice", {}, `${count(run.num_damaged, "line")} of metrics.jsonl could not be read and ${run.num_damaged === 1 ? "is" : "are"} left out.`) : null];
}

export async function comparePage(main, {runs, query, signal}) {
  if (!runs.length) throw new Error("No runs are chosen; choose some in the list of runs.");
  const content = h("div"), differences = h("div");
  show(main, h("h1", {}, `${count(runs.length, "run")} side by side`),
    h("div.run-keys", {}, runs.map((id, i) => h("a", {href: link(["run", id])}, h("i", {style: {background: line(i)}}), id))), content, differences);
  await charts(content, runs, {query, signal});
  await configuration(differences, runs, signal);
}

async function charts(box, runs, {query, signal, pick}) {
  let known = await get("keys", {run: runs}, signal);
  let smoothing = Number(query.get("smoothing") ?? 0), text = query.get("metrics") ?? "";
  const slider = h("input", {type: "range", min: "0", max: "0.95", step: "0.05", value: smoothing, "aria-label": "Smoothing"});
  const search = h("input.search", {type: "search", placeholder: "Find a metric: clip", value: text, "aria-label": "Metrics by name"});
  const area = h("div"), more = h("div");
  box.append(h("div.bar", {}, search, h("label", {}, term("smoothing"), slider), pick ? h("span.dim", {}, "Click a chart to read the trajectories of that step.") : null), area, more);
  let drawn = [], stamp = "";

  const build = () => {
    drawn = [];
    const chart = spec => {
      const present = spec.keys.filter(key => known[key]);
      const keys = spec.first ? present.slice(0, 1) : present;
      if (!keys.length) return null;
      const first = known[keys[0]];
      const made = new Chart({title: spec.title, unit: first.unit, floor: spec.floor, onpick: pick, hint: keys.map(key => h("p", {}, h("code", {}, key), h("br"), known[key].meaning || "Not documented."))});
      drawn.push({made, keys: runs.length > 1 ? keys.slice(0, 1) : keys, labels: spec.labels, evaluation: known[spec.evaluation] ? spec.evaluation : null});
      return made.element;
    };
    const sections = text ? [["Metrics", Object.keys(known).filter(key => text.toLowerCase().split(/\s+/).every(word => key.includes(word))).slice(0, 60).map(key => ({title: key, keys: [key]}))]] : SECTIONS;
    show(area, sections.map(([title, list]) => { const made = list.map(chart).filter(Boolean); return made.length ? h("section", {}, h("h2", {}, title), h("div.charts", {}, made)) : null; }));
    if (!drawn.length) show(area, h("div.notice", {}, text ? "No metric has this name." : "No metrics yet: the run has not completed a step."));
  };

  const load = async () => {
    const keys = [...new Set(drawn.flatMap(one => [...one.keys, one.evaluation].filter(Boolean)))];
    if (!keys.length) {  // A run that starts has no keys yet.
      known = await get("keys", {run: runs}, signal);
      if (!Object.keys(known).length) return;
      build();
      return load();
    }
    const found = await get("metrics", {run: runs, key: keys, stamp}, signal);
    if (found.is_unchanged) return;
    stamp = found.stamp;
    for (const {made, keys: wanted, labels, evaluation} of drawn) {
      const series = runs.flatMap((id, r) => wanted.map((key, k) => {
        const [xs, ys] = found.curves[id][key];
        return {name: runs.length > 1 ? id : labels?.[k] ?? key.split("/").slice(1).join("/"), label: runs.length > 1 ? "" : undefined, colour: line(runs.length > 1 ? r : k), xs, ys};
      }));
      if (evaluation) runs.forEach((id, r) => { const [xs, ys] = found.curves[id][evaluation];
        series.push({name: runs.length > 1 ? `${id}, held-out` : "held-out", isQuiet: runs.length > 1,
          colour: runs.length > 1 ? line(r) : line(1), xs, ys, dots: true}); });
      made.update(series, {smoothing});
    }
  };
  slider.oninput = () => { smoothing = Number(slider.value); setQuery({smoothing: smoothing || ""}); drawn.forEach(one => one.made.update(one.made.series, {smoothing})); };
  search.oninput = () => { text = search.value.trim(); setQuery({metrics: text}); stamp = ""; build(); load(); };
  build();
  await load();
  follow(load, signal, 3);
}

async function configuration(box, runs, signal) {
  const {rows} = await get("configuration", {run: runs}, signal);
  const several = runs.length > 1;
  const shown = several ? rows.filter(row => new Set(row.values).size > 1) : rows;
  const search = h("input.search", {type: "search", placeholder: "Keys by name", "aria-label": "Keys by name"});
  const body = h("tbody");
  const draw = () => show(body, shown.filter(row => row.key.includes(search.value.trim())).map(row => h("tr", {}, h("td", {}, h("code", {}, row.key)), row.values.map(value => h("td", {}, value ?? "–")))));
  search.oninput = draw;
  box.append(h("h2", {}, several ? "Different keys" : "Configuration"), rows.length ? search : h("div.notice", {}, "The run has no config.yaml."),
    h("div.wide", {}, h("table.configuration", {}, several ? h("thead", {}, h("tr", {}, h("th", {}, "key"), runs.map((id, i) => h("th", {}, h("i.swatch", {style: {background: line(i)}}), id)))) : null, body)));
  if (rows.length && !shown.length) box.append(h("p", {}, "The configurations are equal."));
  draw();
}

function failures(box, run) {
  if (!run.failures.length) return box.append(h("p.dim", {}, "No episode has failed."));
  append(box, [h("p.dim", {}, "The first failed episode of each kind."), run.failures.map(failure => h("details", {},
    h("summary", {}, `step ${failure.step ?? "?"}: ${failure.error.split("\n")[0]}`), h("pre", {}, failure.error)))]);
}
