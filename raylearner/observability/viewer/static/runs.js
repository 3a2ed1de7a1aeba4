// The list of runs and sweeps.
import {follow, get, link, setQuery} from "./api.js";
import {ago, count, duration, h, number, show} from "./dom.js";
import {sparkline} from "./chart.js";
import {term} from "./terms.js";
import {moveIn, pager} from "./parts.js";

const PAGE = 50;

export async function runsPage(main, {query, signal, setKeys}) {
  const chosen = new Set();
  let offset = Number(query.get("offset") ?? 0);
  const search = h("input.search", {type: "search", placeholder: "Filter by name", value: query.get("text") ?? "", "aria-label": "Filter by name"});
  const state = h("select", {"aria-label": "State"}, ["", "running", "complete", "stopped"].map(name => h("option", {value: name}, name || "all states")));
  state.value = query.get("state") ?? "";
  const compare = h("button.primary", {type: "button", onclick: () => { location.hash = link(["compare"], {run: [...chosen]}); }}, "Compare");
  const body = h("tbody"), pages = h("div.pages"), sweeps = h("div");
  const mark = () => { compare.disabled = chosen.size < 2; compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare"; };

  async function load() {
    const found = await get("runs", {text: search.value, state: state.value, offset, limit: PAGE}, signal);
    const focused = document.activeElement?.dataset?.run;
    show(body, found.runs.map(run => row(run, chosen, mark)));
    if (!found.runs.length) show(body, h("tr", {}, h("td", {colspan: 9}, "No run matches.")));
    if (focused) body.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
    show(pages, pager({offset, limit: PAGE, total: found.total, words: ["run", "runs"], go: to => { offset = to; setQuery({offset: to || ""}); load(); }}));
    show(sweeps, found.sweeps.length ? [h("h2", {}, term("sweep", "Sweeps")), h("ul.sweeps", {}, found.sweeps.map(sweepRow))] : null);
  }
  const change = () => { offset = 0; setQuery({text: search.value, state: state.value, offset: ""}); load(); };
  search.oninput = change;
  state.onchange = change;
  show(main, sweeps, h("div.bar", {}, h("h1", {}, "Runs"), search, state, compare),
    h("table.runs", {}, h("thead", {}, h("tr", {}, h("th"), h("th", {}, term("run")), h("th", {}, term("state")), h("th", {}, term("step")),
      h("th", {}, term("reward", "reward, first to last tenth")), h("th", {}, "course"), h("th", {}, term("held-out")), h("th", {}, "time"), h("th", {}, "written"))), body), pages);
  mark();
  await load();
  setKeys({"/": ["search", () => search.focus()], j: ["next run", () => moveIn(body, 1)], k: ["previous run", () => moveIn(body, -1)],
    x: ["choose for comparison", () => document.activeElement?.closest("tr")?.querySelector("input")?.click()],
    c: ["compare the chosen runs", () => compare.click()]});
  follow(load, signal);
}

function row(run, chosen, mark) {
  const box = h("input", {type: "checkbox", checked: chosen.has(run.id), tabindex: "-1", "aria-label": `Choose ${run.id}`,
    onchange: () => { box.checked ? chosen.add(run.id) : chosen.delete(run.id); mark(); }});
  const rewards = run.reward_last === null ? "–" : [number(run.reward_first, 3), " → ", h("b", {}, number(run.reward_last, 3))];
  return h("tr", {}, h("td", {}, box), h("td", {}, h("a", {href: link(["run", run.id]), "data-run": run.id}, run.id)),
    h("td", {}, h(`span.state.${run.state}`, {}, run.state)), h("td.number", {}, number(run.step), h("span.dim", {}, run.num_steps ? ` / ${number(run.num_steps)}` : "")),
    h("td.number", {}, rewards), h("td", {}, sparkline(run.curve, "var(--accent)")), h("td.number", {}, number(run.evaluation, 3)),
    h("td", {}, duration(run.time_s)), h("td.dim", {}, ago(run.modified_s)));
}

function sweepRow(sweep) {
  const states = Object.entries(sweep.statuses).map(([name, n]) => `${n} ${name}`).join(", ");
  const total = Object.values(sweep.statuses).reduce((a, b) => a + b, 0);
  return h("li", {}, h("a", {href: link(["sweep", sweep.id])}, sweep.id), h("span.dim", {}, ` ${count(total, "trial")}: ${states || "its record cannot be read"}`));
}
