// The answers in a page that was written to a file: one step of one run, without filters.
const block = document.getElementById("answers");
export const isFile = block !== null;
const data = isFile ? JSON.parse(block.textContent) : null;
if (isFile) document.body.classList.add("is-file");

export const firstPlace = isFile ? `#/run/${encodeURIComponent(data.run.id)}/trajectories?step=${data.step}` : null;

const ORDER = {
  groups: {step: row => row.step, reward: row => row.mean, spread: row => row.spread, tokens: row => largest(row, "sampled"), turns: row => largest(row, "turns"), staleness: row => largest(row, "staleness"), gap: row => largest(row, "gap")},
  trajectories: {tokens: row => row.sampled},
};
const largest = (row, name) => Math.max(...row.members.map(member => member[name] ?? -Infinity));

function page(by, {sort, descending, offset, limit}) {
  const found = data[by], value = ORDER[by][sort] ?? (row => row[sort]), sign = String(descending) === "true" ? -1 : 1;
  const rows = [...found.rows].sort((a, b) => sign * ((value(a) ?? -Infinity) - (value(b) ?? -Infinity)) || 0);
  return {...found, rows: rows.slice(offset, offset + limit)};
}

export function answer(path, parameters) {
  switch (path) {
    case "run": return data.run;
    case "keys": return data.keys;
    case "configuration": return data.configuration;
    case "metrics": return {stamp: "file", is_unchanged: parameters.stamp === "file", curves: {[data.run.id]: Object.fromEntries([parameters.key].flat().map(key => [key, data.curves[key] ?? [[], []]]))}};
    case "trajectories": return page(parameters.by ?? "groups", parameters);
    case "group": { const found = data.groups.rows.find(row => row.group_key === parameters.group); if (found) return found; break; }
    case "trajectory": { const found = document.getElementById(`trajectory-${parameters.line}`); if (found) return JSON.parse(found.textContent); break; }
  }
  throw new Error("This file holds one step of one run; `raylearner view` shows the rest.");
}

export function imageSource(run, kind, name) {
  return isFile ? data.images[name] ?? "" : `api/image?${new URLSearchParams({run, name, kind})}`;
}
