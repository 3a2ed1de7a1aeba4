// Requests to the server, and the address of a place in the page. In a page that was written to a file, the
// answers are in the page.
import {answer, isFile} from "./file.js";

export async function get(path, parameters = {}, signal = undefined) {
  if (isFile) return answer(path, parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== undefined && item !== null && item !== "") query.append(name, item);
    }
  }
  let response;
  try {
    response = await fetch(`api/${path}?${query}`, {signal});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The viewer does not answer. Start it again with `raylearner view`; this page then continues.");
  }
  const found = await response.json().catch(() => ({error: `HTTP ${response.status}`}));
  if (!response.ok) throw new Error(found.error?.message ?? found.error ?? `HTTP ${response.status}`);
  return found;
}

// link(["run", id, "step", 3], {colour: "gap"}) -> "#/run/id/step/3?colour=gap"
export function link(parts, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== undefined && item !== null && item !== "" && item !== false) query.append(name, item);
    }
  }
  const text = query.toString();
  return "#/" + parts.map(encodeURIComponent).join("/") + (text ? "?" + text : "");
}

export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(part => { try { return decodeURIComponent(part); } catch { return part; } });
  return {parts, query: new URLSearchParams(query ?? "")};
}

// Changes parameters of the address without a new page; empty values are removed.
export function setQuery(changes) {
  const {parts, query} = here();
  for (const [name, value] of Object.entries(changes)) {
    if (value === undefined || value === null || value === "" || value === false) query.delete(name);
    else query.set(name, value);
  }
  history.replaceState(null, "", link(parts) + (query.size ? "?" + query : ""));
}

// Calls `work` now and every few seconds while the page is visible, until `signal` aborts.
export function follow(work, signal, seconds = 4) {
  if (isFile) return;
  let timer;
  const turn = async () => {
    if (!document.hidden) await work().catch(error => { if (error.name !== "AbortError") console.warn(error.message); });
    if (!signal.aborted) timer = setTimeout(turn, seconds * 1000);
  };
  timer = setTimeout(turn, seconds * 1000);
  signal.addEventListener("abort", () => clearTimeout(timer));
}
