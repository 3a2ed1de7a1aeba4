// Parallel coordinates: one line for each trial through its value on each axis. Dragging along an axis keeps
// the trials in that range; a double click shows all again.
import {GRADIENT, reward} from "./colours.js";
import {append, h, number, show, svg} from "./dom.js";
import {extent, linear, logTicks, logarithmic, niceTicks} from "./scale.js";

const LOG_FROM = 5;
const HEIGHT = 320, TOP = 34, BOTTOM = 18, MISSING = 22;

export const isLog = numbers => Math.min(...numbers) > 0 && Math.max(...numbers) / Math.min(...numbers) >= LOG_FROM;

export class Parallel {
  constructor({ontrial, onselect}) {
    Object.assign(this, {ontrial, onselect, ranges: new Map()});
    this.element = h("figure.chart.parallel");
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
  }

  update(sweep, colourOf) {
    Object.assign(this, {sweep, colourOf});
    this.draw();
  }

  // Axes of the sweep, then the metric; categories share their axis evenly, each with room for its trials.
  axes() {
    const {sweep} = this, range = [HEIGHT - BOTTOM - MISSING, TOP], trials = sweep.trials;
    const axes = sweep.axes.map(axis => {
      const numbers = trials.map(trial => trial.numbers[axis.key]).filter(value => value !== undefined);
      if (axis.is_number && numbers.length) {
        const log = isLog(numbers), span = log ? [Math.min(...numbers), Math.max(...numbers)] : extent(numbers, 0);
        const scale = log ? logarithmic(span, range) : linear(span, range);
        const few = [...new Set(numbers)].sort((a, b) => a - b);
        return {name: axis.key, at: trial => trial.numbers[axis.key] === undefined ? null : scale(trial.numbers[axis.key]),
          ticks: (few.length <= 8 ? few : log ? logTicks(...span) : niceTicks(...span)).map(tick => [scale(tick), number(tick)])};
      }
      const room = (range[0] - range[1]) / axis.labels.length, places = new Map();
      for (const label of axis.labels) {
        const members = trials.filter(trial => trial.values[axis.key] === label).sort((a, b) => (a.value ?? 0) - (b.value ?? 0));
        const middle = range[0] - room * (axis.labels.indexOf(label) + 0.5), spread = Math.min(room * 0.55, members.length * 4);
        members.forEach((trial, i) => places.set(trial.number, middle + spread / 2 - (members.length > 1 ? spread * i / (members.length - 1) : spread / 2)));
      }
      return {name: axis.key, at: trial => places.get(trial.number) ?? null, ticks: axis.labels.map((label, i) => [range[0] - room * (i + 0.5), label]), isCategory: true, room};
    });
    const values = trials.map(trial => trial.value).filter(value => value !== null);
    const span = extent(values, 0.02) ?? [0, 1], scale = linear(span, range);
    axes.push({name: sweep.metric.key, isMetric: true, at: trial => trial.value === null ? null : scale(trial.value), ticks: niceTicks(...span).map(tick => [scale(tick), number(tick)])});
    return axes;
  }

  isKept(trial, axes) {
    return axes.every(axis => { const range = this.ranges.get(axis.name), y = axis.at(trial); return !range || (y !== null && y >= range[0] && y <= range[1]); });
  }

  draw() {
    const width = this.element.clientWidth - 24;
    if (width < 50 || !this.sweep) return;
    const axes = this.axes(), x = linear([0, axes.length - 1], [70, width - 90]);
    const picture = svg("svg", {width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`}), lines = svg("g", {});
    picture.append(lines);
    axes.forEach((axis, i) => {
      append(picture, [svg("line.axis", {x1: x(i), x2: x(i), y1: TOP - 4, y2: HEIGHT - BOTTOM - MISSING + 4}),
        svg("text.axis-name" + (axis.isMetric ? ".metric" : ""), {x: x(i), y: 16, "text-anchor": i ? i === axes.length - 1 ? "end" : "middle" : "start", dx: i ? i === axes.length - 1 ? 80 : 0 : -60}, axis.name),
        axis.ticks.map(([y, label]) => [svg("line.tick-mark", {x1: x(i) - 3, x2: x(i) + 3, y1: y, y2: y}), svg("text.tick.halo", {x: x(i) + 8, y: y + 3.5}, label)])]);
      if (this.sweep.trials.some(trial => axis.at(trial) === null)) picture.append(svg("text.tick", {x: x(i) + 8, y: HEIGHT - BOTTOM + 3}, axis.isMetric ? "no value" : "not set"));
      this.addBrush(picture, axis, x(i));
    });
    const kept = this.sweep.trials.filter(trial => this.isKept(trial, axes)), keptSet = new Set(kept);
    for (const trial of [...this.sweep.trials].sort((a, b) => keptSet.has(a) - keptSet.has(b) || (a.value ?? -1e9) - (b.value ?? -1e9))) {
      const d = axes.map((axis, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${(axis.at(trial) ?? HEIGHT - BOTTOM).toFixed(1)}`).join("");
      lines.append(svg("path.trial" + (keptSet.has(trial) ? "" : ".out"), {d, stroke: this.colourOf(trial.value), tip: () => trialTip(this.sweep, trial), onclick: () => this.ontrial(trial)}));
    }
    show(this.element, h("figcaption", {}, h("span", {}, "Trials"), h("span.dim", {}, this.ranges.size ? `${kept.length} of ${this.sweep.trials.length} kept` : "Drag along an axis to keep a range."),
      this.ranges.size ? h("button", {type: "button", onclick: () => this.clear()}, "Show all") : null, h("span.push"), h("span.scale", {}, h("span.dim", {}, "low"), h("i", {style: {background: GRADIENT}}), h("span.dim", {}, "high"))), picture);
  }

  clear() {
    this.ranges.clear();
    this.select();
  }

  select() {
    const axes = this.axes();
    this.onselect(this.ranges.size ? new Set(this.sweep.trials.filter(trial => this.isKept(trial, axes)).map(trial => trial.number)) : null);
    this.draw();
  }

  addBrush(picture, axis, x) {
    const range = this.ranges.get(axis.name);
    const chosen = svg("rect.brush", {x: x - 9, width: 18, y: range?.[0] ?? 0, height: range ? range[1] - range[0] : 0});
    const area = svg("rect.brush-area", {x: x - 11, width: 22, y: TOP - 8, height: HEIGHT - TOP - BOTTOM - MISSING + 16});
    area.addEventListener("pointerdown", event => {
      area.setPointerCapture(event.pointerId);
      const from = event.offsetY;
      const move = now => { const [a, b] = [Math.min(from, now.offsetY), Math.max(from, now.offsetY)]; chosen.setAttribute("y", a); chosen.setAttribute("height", b - a); };
      area.addEventListener("pointermove", move);
      area.addEventListener("pointerup", up => {
        area.removeEventListener("pointermove", move);
        const found = [Math.min(from, up.offsetY) - 2, Math.max(from, up.offsetY) + 2];
        found[1] - found[0] < 8 ? this.ranges.delete(axis.name) : this.ranges.set(axis.name, found);
        this.select();
      }, {once: true});
    });
    area.addEventListener("dblclick", () => this.clear());
    append(picture, [chosen, area]);
  }
}

export function trialTip(sweep, trial) {
  return h("div", {}, h("b", {}, `trial ${trial.number}, seed ${trial.seed}`), h("table", {}, sweep.axes.map(axis => h("tr", {}, h("th", {}, axis.key), h("td", {}, trial.values[axis.key] ?? "not set"))),
    h("tr", {}, h("th", {}, sweep.metric.key), h("td", {}, number(trial.value))), h("tr", {}, h("th", {}, "status"), h("td", {}, `${trial.status}, step ${number(trial.step)}`))), trial.error ? h("div.bad", {}, trial.error.slice(0, 300)) : null);
}

export const colourScale = trials => {
  const values = trials.map(trial => trial.value).filter(value => value !== null);
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  return value => reward(value, low, high);
};
