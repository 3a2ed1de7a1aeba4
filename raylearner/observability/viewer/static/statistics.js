// Means over seeds with their 95% intervals, and trials grouped by their values.
// The quantiles of `jobs/sweep/results.py`, so that page and report agree.
const T_95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042], T_95_OF_MANY = 2;

// Returns the mean, the half width of its 95% interval (null for fewer than two values) and their number.
export function meanOf(values) {
  const n = values.length;
  if (!n) return {mean: null, half: null, n};
  const mean = values.reduce((a, b) => a + b, 0) / n;
  if (n < 2) return {mean, half: null, n};
  const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1);
  return {mean, half: (T_95[n - 2] ?? T_95_OF_MANY) * Math.sqrt(variance / n), n};
}

export function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) {
    const name = key(item);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(item);
  }
  return groups;
}

// Values that count: of trials that completed, or of all if none of them did.
export function measured(trials) {
  const found = trials.filter(trial => trial.value !== null && trial.value !== undefined);
  const done = found.filter(trial => trial.status === "done");
  return (done.length ? done : found).map(trial => trial.value);
}

// The mean of several curves at the steps of the longest one, with its interval; a curve that has
// ended no longer counts.
export function meanCurve(curves) {
  const longest = curves.reduce((a, b) => (b[0].at(-1) ?? -1) > (a[0].at(-1) ?? -1) ? b : a, [[], []]);
  const places = curves.map(() => 0), means = [], low = [], high = [];
  for (const step of longest[0]) {
    const values = [];
    curves.forEach(([xs, ys], c) => {
      while (places[c] < xs.length - 1 && xs[places[c] + 1] <= step) places[c]++;
      if (xs.length && xs[places[c]] <= step && step <= xs.at(-1)) values.push(ys[places[c]]);
    });
    const {mean, half} = meanOf(values);
    means.push(mean);
    low.push(mean - (half ?? 0));
    high.push(mean + (half ?? 0));
  }
  return {xs: longest[0], ys: means, band: curves.length > 1 ? [low, high] : undefined};
}
