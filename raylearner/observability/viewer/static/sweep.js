// The results of a sweep: parallel coordinates, the metric against each axis, learning curves, settings.
import {follow, get, link, setQuery} from "./api.js";
import {Chart} from "./chart.js";
import {line} from "./colours.js";
import {count, h, number, show} from "./dom.js";
import {Marginal} from "./marginal.js";
import {Parallel, colourScale} from "./parallel.js";
import {chip} from "./parts.js";
import {groupBy, meanCurve, meanOf, measured} from "./statistics.js";
import {term} from "./terms.js";

const MAX_CURVES = 10;

export async function sweepPage(main, {id, query, signal}) {
  let sweep = await get("sweep", {sweep: id}, signal), kept = null, text = "";
  const head = h("div"), table = h("div.wide"), split = h("select", {"aria-label": "Colour by"});
  const open = trial => { if (trial.run) location.hash = link(["run", trial.run]); };
  const parallel = new Parallel({ontrial: open, onselect: found => { kept = found; draw(); drawCurves(); }});
  const marginals = sweep.axes.map(axis => new Marginal(axis));
  const curves = new Chart({title: "learning curves", height: 235, hint: "Mean over the trials of a colour at each step, with its 95% interval."});
  const legend = h("span.legend");
  show(split, h("option", {value: ""}, "nothing"), sweep.axes.map(axis => h("option", {value: axis.key}, axis.key)));
  split.value = query.get("colour") ?? sweep.axes[0]?.key ?? "";
  const chosen = () => sweep.axes.find(axis => axis.key === split.value) ?? null;
  const colours = name => line(Math.max(0, (chosen()?.labels ?? []).indexOf(name)));
  const shown = () => sweep.trials.filter(trial => !kept || kept.has(trial.number));

  function draw() {
    const statuses = [...groupBy(sweep.trials, trial => trial.status)].map(([name, found]) => `${found.length} ${name}`);
    show(head, h("h1", {}, sweep.name), h("div.facts", {}, h("span", {}, "metric ", h("b", {}, h("code", {}, sweep.metric.key)), ` (${sweep.metric.goal === "min" ? "lower" : "higher"} is better)`),
      h("span", {}, term("trial", count(sweep.trials.length, "trial")), ": ", h("b", {}, statuses.join(", "))), h("span", {}, count(new Set(sweep.trials.map(t => t.seed)).size, "seed"))));
    parallel.update(sweep, colourScale(sweep.trials));
    const axis = chosen();
    show(legend, axis ? axis.labels.map(name => h("span.key", {}, h("i", {style: {background: colours(name)}}), name)) : null);
    for (const marginal of marginals) marginal.update(sweep, shown(), axis, colours);
    show(table, settingsTable(sweep, shown(), open));
  }

  async function drawCurves() {
    const trials = shown().filter(trial => trial.run);
    if (!trials.length) return curves.update([]);
    const found = await get("metrics", {run: trials.map(trial => trial.run).slice(0, 300), key: sweep.metric.key, points: 120}, signal);
    const axis = chosen();
    const groups = [...groupBy(trials.filter(trial => found.curves[trial.run]), trial => axis ? trial.values[axis.key] ?? "not set" : "all trials")];
    curves.update(groups.slice(0, MAX_CURVES).map(([name, members]) => ({name, colour: axis ? colours(name) : line(0), ...meanCurve(members.map(trial => found.curves[trial.run][sweep.metric.key]))})));
  }

  split.onchange = () => { setQuery({colour: split.value}); draw(); drawCurves(); };
  show(main, head, parallel.element, h("div.bar", {}, h("h2", {}, "The metric against each axis"), h("label", {}, "colour by ", split), legend, h("span.dim", {}, "Bars: ", term("95% interval"), " over trials.")),
    h("div.charts.sweep-charts", {}, marginals.map(marginal => marginal.element), curves.element), h("h2", {}, "Combinations, best first"), table);
  draw();
  await drawCurves();
  text = JSON.stringify(sweep);
  follow(async () => {
    const now = await get("sweep", {sweep: id}, signal);
    if (JSON.stringify(now) !== text) { sweep = now; text = JSON.stringify(now); draw(); }
    if (now.trials.some(trial => trial.status === "running")) await drawCurves();
  }, signal, 5);
}

function settingsTable(sweep, trials, open) {
  const sign = sweep.metric.goal === "min" ? 1 : -1;
  const settings = [...groupBy(trials, trial => JSON.stringify(sweep.axes.map(axis => trial.values[axis.key] ?? null)))].map(([, found]) => ({found, ...meanOf(measured(found))}));
  settings.sort((a, b) => (a.mean === null) - (b.mean === null) || sign * (a.mean - b.mean));
  return h("table.runs.settings", {}, h("thead", {}, h("tr", {}, sweep.axes.map(axis => h("th", {}, axis.key)), h("th", {}, term("95% interval", "mean ± 95% interval")), h("th", {}, "seeds"), h("th", {}, "trials"))),
    h("tbody", {}, settings.map(({found, mean, half, n}) => h("tr", {}, sweep.axes.map(axis => h("td", {}, found[0].values[axis.key] ?? "–")), h("td.number", {}, h("b", {}, number(mean)), half === null ? "" : h("span.dim", {}, ` ± ${number(half, 2)}`)),
      h("td.number", {}, `${n} of ${found.length}`), h("td", {}, h("span.trial-links", {}, found.map(trial => trialLink(trial, open))))))));
}

function trialLink(trial, open) {
  const kind = trial.status === "failed" ? "bad" : trial.status === "running" ? "call" : "";
  const copy = trial.command && h("button.copy", {type: "button", title: `Copy the command that repeats this trial:\n${trial.command}`, "aria-label": `Copy the command of trial ${trial.number}`,
    onclick: event => { const button = event.currentTarget; navigator.clipboard.writeText(trial.command).then(() => { button.textContent = "✓"; setTimeout(() => { button.textContent = "copy"; }, 1200); }); }}, "copy");
  const name = h("a", {href: trial.run ? link(["run", trial.run]) : undefined, tip: () => h("div", {}, `seed ${trial.seed}: ${number(trial.value)}, ${trial.status} at step ${number(trial.step)}`, trial.error ? h("div.bad", {}, trial.error.slice(0, 300)) : null)}, String(trial.number).padStart(3, "0"));
  return h("span", {}, kind ? [name, " ", chip(trial.status, kind)] : name, copy);
}
