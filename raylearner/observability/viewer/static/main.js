// The address decides which page is shown; keys and theme are the same on all of them.
import {get, here, link} from "./api.js";
import {firstPlace} from "./file.js";
import {h, show, startTips} from "./dom.js";
import {TERMS} from "./terms.js";
import {runsPage} from "./runs.js";
import {comparePage, runPage} from "./run.js";
import {listPage} from "./list.js";
import {groupPage} from "./group.js";
import {trajectoryPage} from "./trajectory.js";
import {sweepPage} from "./sweep.js";

const main = document.getElementById("main"), trail = document.getElementById("trail"), help = document.getElementById("help");
let leave = new AbortController();
let keys = {};

function choose({parts, query}) {
  const [kind, id, page, ...rest] = parts;
  if (!kind) return [runsPage, {}, []];
  if (kind === "compare") return [comparePage, {runs: query.getAll("run")}, [["compare", null]]];
  if (kind === "sweep" && id) return [sweepPage, {id}, [[id, null]]];
  if (kind !== "run" || !id) return null;
  const step = Number(rest[0]), run = [id, link(["run", id])];
  const list = ["trajectories", link(["run", id, "trajectories"])];
  const steps = [`step ${step}`, link(["run", id, "trajectories"], {step, kind: query.get("kind")})];
  if (page === "trajectories") return [listPage, {id}, [run, ["trajectories", null]]];
  if (page === "step" && rest.length === 2) return [trajectoryPage, {id, step, line: Number(rest[1])}, [run, list, steps, [`trajectory ${rest[1]}`, null]]];
  if (page === "group" && rest.length === 2) return [groupPage, {id, step, group: rest[1]}, [run, list, steps, [`group ${rest[1]}`, null]]];
  return [runPage, {id, tab: page ?? "charts"}, [[id, null]]];
}

async function open() {
  leave.abort();
  leave = new AbortController();
  const signal = leave.signal, place = here(), chosen = choose(place);
  keys = {};
  const crumbs = chosen?.[2] ?? [];
  show(trail, crumbs.map(([text, href]) => [h("span.sep", {}, "/"), href ? h("a", {href}, text) : h("span", {}, text)]));
  document.title = [...crumbs.map(([text]) => text).reverse(), "raylearner"].join(" · ");
  if (!chosen) return fail(new Error("There is no such page."));
  const [page, options] = chosen;
  try {
    await page(main, {...options, query: place.query, signal, setKeys: found => { if (!signal.aborted) keys = found; }});
  } catch (error) {
    if (error.name !== "AbortError" && !signal.aborted) fail(error);
  }
}

function fail(error) {
  console.warn(error);
  show(main, h("div.notice.bad", {}, error.message), h("p", {}, h("a", {href: "#/"}, "All runs")));
}

const COMMON = {
  "?": ["this help", showHelp],
  d: ["dark or light", changeTheme],
  g: ["all runs", () => { location.hash = "#/"; }],
};

function showHelp() {
  const rows = Object.entries({...keys, ...COMMON}).map(([key, [meaning]]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, meaning)));
  show(help, h("div.bar", {}, h("h2", {}, "Keys"), h("span.push"), h("button", {type: "button", onclick: () => help.close()}, "Close")), h("table.keys", {}, rows), h("h2", {}, "Terms"),
    h("dl.terms", {}, Object.entries(TERMS).map(([name, meaning]) => [h("dt", {}, name), h("dd", {}, meaning)])));
  help.showModal();
}

function changeTheme() {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--is-dark").trim() === "1";
  setTheme(dark ? "light" : "dark");
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("theme", name); } catch { /* storage may be disabled */ }
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches?.("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const found = keys[event.key] ?? COMMON[event.key];
  if (found) { event.preventDefault(); found[1](event); }
});

try { const saved = localStorage.getItem("theme"); if (saved) setTheme(saved); } catch { /* storage may be disabled */ }
document.getElementById("help-button").onclick = showHelp;
document.getElementById("theme-button").onclick = changeTheme;
help.addEventListener("click", event => { if (event.target === help) help.close(); });
startTips(document.getElementById("tip"));
addEventListener("hashchange", open);
if (firstPlace && !here().parts.length) location.replace(firstPlace);
else if (!here().parts.length) {
  // With a single run there is nothing to choose from.
  get("runs").then(found => {
    if (found.total === 1 && !found.sweeps.length) location.replace(link(["run", found.runs[0].id]));
    else open();
  }, open);
} else open();
