// Elements made from values; text from models and files only ever becomes text, with its control
// characters spelled out.
const CONTROLS = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/gu;

export function visible(value) {
  return String(value).replace(CONTROLS, found => {
    const code = found.charCodeAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}

// h("a.link", {href: "#/"}, "text", child): an element with classes, properties and children.
export function h(kind, properties, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  return fill(element, properties, children);
}

export function svg(kind, attributes, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  return fill(element, attributes, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) element.style.setProperty(key, item);
    else if (name === "tip") setTip(element, value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : visible(child));
  }
}

export function show(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

const tips = new WeakMap();
// A hint shown on hover and on focus: text, or a function that returns text or an element.
export function setTip(element, hint) {
  if (!hint) return;
  tips.set(element, hint);
  element.setAttribute("data-tip", "");
}

export function startTips(box) {
  let shown = null;
  const hide = () => { shown = null; box.hidden = true; };
  const reveal = event => {
    const element = event.target.closest?.("[data-tip]");
    if (!element) return hide();
    if (element !== shown) {
      const hint = tips.get(element);
      show(box, typeof hint === "function" ? hint() : hint);
      shown = element;
    }
    box.hidden = false;
    const place = element.getBoundingClientRect();
    const [x, y] = event.clientX !== undefined && event.type !== "focusin" ? [event.clientX, event.clientY] : [place.left, place.bottom];
    const left = Math.min(x + 14, innerWidth - box.offsetWidth - 8);
    const below = y + 18 + box.offsetHeight < innerHeight;
    box.style.left = Math.max(8, left) + "px";
    box.style.top = Math.max(8, below ? y + 18 : y - box.offsetHeight - 10) + "px";
  };
  document.addEventListener("mousemove", reveal);
  document.addEventListener("focusin", event => event.target.matches?.(":focus-visible") ? reveal(event) : hide());
  document.addEventListener("mouseleave", hide);
  addEventListener("hashchange", hide);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e6) return value.toExponential(2).replace("e+", "e");
  if (size && size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function count(value, one, many = one + "s") {
  return `${value.toLocaleString("en")} ${value === 1 ? one : many}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${number(seconds, 2)} s`;
  const s = Math.round(seconds), hours = Math.floor(s / 3600), minutes = Math.floor(s / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${s % 60} s` : `${s} s`;
}

export function ago(seconds) {
  const s = Date.now() / 1000 - seconds;
  if (s < 60) return "now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86400)} d ago`;
}
