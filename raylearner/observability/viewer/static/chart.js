// Line charts over steps. Moving over one shows the values of that step in all charts of the page.
import {append, h, number, show, svg} from "./dom.js";
import {extent, linear, niceTicks, smooth} from "./scale.js";

const charts = new Set();
const MARGIN = {left: 46, right: 12, top: 8, bottom: 20};

// A series has a name, a colour, steps `xs` and values `ys`; `label` is its name in the legend if that
// differs, `isQuiet` leaves it out there, `dots` draws its points, `band` is a pair of lists around `ys`.
export class Chart {
  constructor({title, unit = "", hint = "", height = 170, onpick = undefined, floor = undefined}) {
    this.options = {height, onpick, floor};
    this.series = [];
    this.smoothing = 0;
    this.marked = null;
    this.plot = h("div.plot");
    this.legend = h("div.chart-legend");
    this.element = h("figure.chart", {}, h("figcaption", {},
      h("span.term", {tip: hint, tabindex: hint ? "0" : undefined}, title), unit && unit !== "-" && unit !== title ? h("span.unit", {}, unit) : null, this.legend), this.plot);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
    charts.add(this);
    this.plot.addEventListener("mousemove", event => this.hover(event));
    this.plot.addEventListener("mouseleave", () => charts.forEach(chart => chart.point(null)));
    this.plot.addEventListener("click", event => onpick && this.series.length && onpick(this.nearest(this.stepAt(event))));
  }

  update(series, {smoothing = this.smoothing, marked = this.marked} = {}) {
    Object.assign(this, {series: series.filter(one => one.xs.length), smoothing, marked});
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth, {height} = this.options;
    if (!width || !this.element.isConnected) return;
    if (!this.series.length) return show(this.plot, h("div.empty-chart", {style: {height: height + "px"}}, "no values yet"));
    const drawn = this.series.map(one => ({...one, line: one.dots ? one.ys : smooth(one.ys, this.smoothing)}));
    // With smoothing, single outliers must not flatten the line: the range is that of the line, widened a bit.
    const values = drawn.flatMap(one => [...one.line, ...(this.smoothing ? quantiles(one.ys) : one.ys), ...(one.band?.flat() ?? [])]);
    const [low, high] = extent(values) ?? [0, 1];
    const {floor} = this.options, isFlat = values.every(value => value === floor);
    const span = floor === undefined ? [low, high] : isFlat ? [floor, floor + 1] : [Math.min(floor, extent(values, 0)[0]), high];
    const steps = extent(drawn.flatMap(one => [one.xs[0], one.xs.at(-1)]), 0);
    const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    const x = linear(steps, [MARGIN.left, right]), y = linear(span, [bottom, MARGIN.top]);
    this.place = {x, y, steps, width, bottom};
    const picture = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img"});
    for (const tick of niceTicks(...span)) append(picture, [
      svg("line.grid", {x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick)}),
      svg("text.tick", {x: MARGIN.left - 6, y: y(tick) + 3.5, "text-anchor": "end"}, number(tick, 6))]);
    for (const tick of niceTicks(...steps, Math.max(2, width / 90)).filter(Number.isInteger)) append(picture, [
      svg("text.tick", {x: x(tick), y: height - 5, "text-anchor": "middle"}, number(tick))]);
    if (this.marked !== null) picture.append(svg("line.marked", {x1: x(this.marked), x2: x(this.marked), y1: MARGIN.top, y2: bottom}));
    for (const one of drawn) {
      const clamp = value => Math.max(MARGIN.top - 2, Math.min(bottom + 2, y(value)));
      const path = list => list.map((value, i) => `${i ? "L" : "M"}${x(one.xs[i]).toFixed(1)} ${clamp(value).toFixed(1)}`).join("");
      if (one.band) picture.append(svg("path", {class: "band", fill: one.colour,
        d: path(one.band[1]) + one.band[0].map((value, i) => `L${x(one.xs[i]).toFixed(1)} ${clamp(value).toFixed(1)}`).reverse().join("") + "Z"}));
      if (this.smoothing && !one.dots) picture.append(svg("path.raw", {d: path(one.ys), stroke: one.colour}));
      picture.append(svg("path.line" + (one.dots ? ".dotted" : ""), {d: path(one.line), stroke: one.colour}));
      if (one.dots || one.xs.length === 1) one.xs.forEach((step, i) => picture.append(svg("circle", {cx: x(step), cy: clamp(one.line[i]), r: 3, fill: one.colour})));
    }
    this.cursor = svg("g", {});
    picture.append(this.cursor);
    this.drawn = drawn;
    show(this.plot, picture);
    this.showLegend();
  }

  showLegend(step = null) {
    const shown = (this.drawn ?? []).filter(one => !one.isQuiet);
    show(this.legend, ...(shown.length > 8 && step === null ? [h("span.dim", {}, `${shown.length} lines`)] : shown.slice(0, 12).map(one => {
      const at = step === null ? one.xs.length - 1 : nearestIndex(one.xs, step);
      return h("span.key", {title: one.name}, shown.length > 1 ? h("i", {style: {background: one.colour}}) : null,
        shown.length > 1 && one.label !== "" ? h("span.key-name", {}, one.label ?? one.name) : null, h("b", {}, number(one.ys[at], 3)));
    })), step === null ? null : h("span.dim", {}, `step ${number(step)}`));
  }

  stepAt(event) {
    const {steps, width} = this.place, box = this.plot.getBoundingClientRect();
    return steps[0] + (event.clientX - box.left - MARGIN.left) / (width - MARGIN.left - MARGIN.right) * (steps[1] - steps[0]);
  }

  nearest(step) {
    const all = this.series.map(one => one.xs[nearestIndex(one.xs, step)]);
    return all.reduce((best, x) => Math.abs(x - step) < Math.abs(best - step) ? x : best);
  }

  hover(event) {
    if (!this.place || !this.series.length) return;
    const step = this.nearest(this.stepAt(event));
    for (const chart of charts) chart.element.isConnected ? chart.point(step) : charts.delete(chart);
  }

  point(step) {
    if (!this.cursor || !this.drawn) return;
    this.cursor.replaceChildren();
    this.showLegend(step);
    if (step === null) return;
    const {x, y, steps, bottom} = this.place;
    if (step < steps[0] || step > steps[1]) return;
    append(this.cursor, [svg("line.cursor", {x1: x(step), x2: x(step), y1: MARGIN.top, y2: bottom}),
      this.drawn.map(one => { const at = nearestIndex(one.xs, step); return svg("circle", {cx: x(one.xs[at]), cy: y(one.line[at]), r: 3.2, fill: one.colour}); })]);
  }
}

export function nearestIndex(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; sorted[middle] <= value ? low = middle : high = middle; }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}

function quantiles(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted.length ? [sorted[Math.floor(sorted.length * 0.02)], sorted[Math.ceil(sorted.length * 0.98) - 1]] : [];
}

export function sparkline(values, colour, width = 110, height = 24) {
  const picture = svg("svg.spark", {width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true"});
  const range = extent(values, 0.05);
  if (!range || values.length < 2) return picture;
  const x = linear([0, values.length - 1], [2, width - 3]), y = linear(range, [height - 2, 2]);
  append(picture, [svg("path.line", {d: values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join(""), stroke: colour}),
    svg("circle", {cx: x(values.length - 1), cy: y(values.at(-1)), r: 2, fill: colour})]);
  return picture;
}
