// Positions of numbers on an axis, and its ticks.
export function niceTicks(low, high, wanted = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(x => x * power).reduce((a, b) => Math.abs(Math.log(b / rough)) < Math.abs(Math.log(a / rough)) ? b : a);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

export function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 3]) {
      const tick = Number((factor * 10 ** power).toPrecision(3));
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks.length ? ticks : [low, high];
}

// Smallest and largest of the numbers, with a margin; one value gets an interval around it.
export function extent(values, margin = 0.06) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return null;
  const room = high > low ? (high - low) * margin : Math.abs(high) * 0.05 || 0.5;
  return [low - room, high + room];
}

export function linear([low, high], [from, to]) {
  return value => from + (to - from) * (high > low ? (value - low) / (high - low) : 0.5);
}

export function logarithmic([low, high], range) {
  const inner = linear([Math.log(low), Math.log(high)], range);
  return value => inner(Math.log(value));
}

// Moving average that gives each value the weight 1 - `weight`, without a bias at the start.
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map(value => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
