// The metric against one axis of a sweep: trials as dots, means with their 95% intervals. Means of numbers are
// joined by a line, those of categories are not.
import {line} from "./colours.js";
import {append, h, number, show, svg} from "./dom.js";
import {isLog, trialTip} from "./parallel.js";
import {extent, linear, logTicks, logarithmic, niceTicks} from "./scale.js";
import {groupBy, meanOf, measured} from "./statistics.js";

const HEIGHT = 255, MARGIN = {left: 48, right: 14, top: 10, bottom: 34};

export class Marginal {
  constructor(axis) {
    this.axis = axis;
    this.plot = h("div.plot");
    this.element = h("figure.chart", {}, h("figcaption", {}, h("code", {}, axis.key)), this.plot);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
  }

  // `split` is the axis whose values get a colour each, or null.
  update(sweep, trials, split, colours) {
    Object.assign(this, {sweep, trials: trials.filter(trial => trial.values[this.axis.key] !== undefined && trial.value !== null), split: split?.key === this.axis.key ? null : split, colours});
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth, {axis, trials, split} = this;
    if (!width || !trials) return;
    if (!trials.length) return show(this.plot, h("div.empty-chart", {style: {height: HEIGHT + "px"}}, "no values yet"));
    const x = this.places(width), bottom = HEIGHT - MARGIN.bottom;
    const series = [...groupBy(trials, trial => split ? trial.values[split.key] ?? "not set" : "")];
    const offset = i => axis.is_number ? (i - (series.length - 1) / 2) * 4 : (i - (series.length - 1) / 2) * Math.min(16, x.room * 0.6 / series.length);
    const points = series.map(([name, members], i) => [name, i, [...groupBy(members, trial => trial.values[axis.key])].map(([label, found]) => ({x: x.of(found[0], label) + offset(i), found, ...meanOf(measured(found))})).sort((a, b) => a.x - b.x)]);
    const span = extent([...trials.map(trial => trial.value), ...points.flatMap(([, , list]) => list.flatMap(one => one.half === null ? [] : [one.mean - one.half, one.mean + one.half]))]);
    const shown = [Math.max(span[0], Math.min(...trials.map(t => t.value)) - (span[1] - span[0])), span[1]], y = linear(shown, [bottom, MARGIN.top]);
    const picture = svg("svg", {width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`});
    for (const tick of niceTicks(...shown)) append(picture, [svg("line.grid", {x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick)}), svg("text.tick", {x: MARGIN.left - 6, y: y(tick) + 3.5, "text-anchor": "end"}, number(tick, 6))]);
    for (const [place, label] of x.ticks) picture.append(svg("text.tick", {x: place, y: HEIGHT - 16, "text-anchor": "middle"}, label));
    for (const [name, i, list] of points) {
      const colour = split ? this.colours(name) : line(0);
      if (axis.is_number && list.length > 1) picture.append(svg("path.line", {d: list.map((one, k) => `${k ? "L" : "M"}${one.x.toFixed(1)} ${y(one.mean).toFixed(1)}`).join(""), stroke: colour}));
      for (const one of list) {
        append(picture, one.found.map((trial, k) => svg("circle.dot", {cx: one.x + (k - (one.found.length - 1) / 2) * 2.5, cy: y(trial.value), r: 3, fill: colour, tip: () => trialTip(this.sweep, trial)})));
        if (one.half !== null) picture.append(svg("path.interval", {d: `M${one.x} ${y(one.mean - one.half)}V${y(one.mean + one.half)}M${one.x - 4} ${y(one.mean - one.half)}h8M${one.x - 4} ${y(one.mean + one.half)}h8`, stroke: colour}));
        picture.append(svg("circle", {cx: one.x, cy: y(one.mean), r: 4.5, fill: colour, stroke: "var(--card)", tip: `${name ? name + ": " : ""}mean ${number(one.mean)}${one.half === null ? "" : " ± " + number(one.half, 2)} over ${one.n}`}));
      }
    }
    show(this.plot, picture);
  }

  places(width) {
    const {axis, trials} = this, range = [MARGIN.left + 18, width - MARGIN.right - 18];
    if (axis.is_number) {
      const numbers = trials.map(trial => trial.numbers[axis.key]), log = isLog(numbers), span = extent(numbers, log ? 0 : 0.02);
      const scale = log ? logarithmic([Math.min(...numbers), Math.max(...numbers)], range) : linear(span, range);
      const few = [...new Set(numbers)].sort((a, b) => a - b);
      return {of: trial => scale(trial.numbers[axis.key]), room: 40, ticks: (few.length <= 7 ? few : log ? logTicks(few[0], few.at(-1)) : niceTicks(...span)).map(tick => [scale(tick), number(tick, 3)])};
    }
    const room = (range[1] - range[0]) / axis.labels.length, of = label => range[0] + room * (axis.labels.indexOf(label) + 0.5);
    const most = Math.max(4, Math.floor(room / 6.5));
    return {of: (_, label) => of(label), room, ticks: axis.labels.map(label => [of(label), label.length > most ? label.slice(0, most - 1) + "…" : label])};
  }
}
