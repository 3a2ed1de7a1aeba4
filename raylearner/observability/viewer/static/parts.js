// Pieces of several pages.
import {link} from "./api.js";
import {h, number} from "./dom.js";

export function pager({offset, limit, total, words: [one, many], go}) {
  if (!total) return h("span.dim", {}, `No ${many}.`);
  const button = (text, to, title) => h("button", {type: "button", disabled: to < 0 || to >= total, title, onclick: () => go(to)}, text);
  return [h("span", {}, `${number(offset + 1)}–${number(Math.min(total, offset + limit))} of ${number(total)} ${total === 1 ? one : many}`),
    total > limit ? [button("«", offset ? 0 : -1, "First page"), button("‹", offset - limit, "Previous page"), button("›", offset + limit, "Next page"),
      button("»", offset + limit < total ? Math.floor((total - 1) / limit) * limit : total, "Last page")] : null];
}

// Moves the focus to the next or previous link of a list.
export function moveIn(box, by) {
  const links = [...box.querySelectorAll("a[data-run], a[data-row]")];
  const at = links.indexOf(document.activeElement);
  const next = links[at < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(links.length - 1, Math.max(0, at + by))];
  next?.focus();
  next?.scrollIntoView({block: "nearest"});
}

export const chip = (text, kind = "", tip = "") => h("span.chip" + (kind ? "." + kind : ""), {tip}, text);

export function runTabs(run, chosen) {
  const to = (...rest) => link(["run", run.id, ...rest]);
  return tabs([["charts", "Charts", to()], ["training", "Trajectories", to("trajectories")],
    ["evaluation", `Evaluations (${run.steps.evaluation.length})`, link(["run", run.id, "trajectories"], {kind: "evaluation"})],
    ["configuration", "Configuration", to("configuration")], ["failures", `Failures (${run.failures.length})`, to("failures")]], chosen);
}

function tabs(list, chosen) {
  return h("nav.tabs", {}, list.map(([name, text, href]) => h("a" + (name === chosen ? ".on" : ""), {href, "aria-current": name === chosen ? "page" : undefined}, text)));
}
