// Colours of values. Reward runs from orange over yellow to teal, which differ for all kinds of sight.
export const LINES = ["#3b7dd8", "#e07b39", "#2a9d8f", "#c44e9a", "#8f7ae5", "#b0892e", "#d1495b", "#5b8c5a", "#4aa3c7", "#8c6d5a"];
const REWARD = [[214, 93, 52], [235, 196, 92], [28, 152, 131]];

export const line = index => LINES[index % LINES.length];

function between(stops, share) {
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at));
  const mixed = stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (at - low)));
  return `rgb(${mixed.join(",")})`;
}

export function reward(value, low, high) {
  if (value === null || value === undefined) return "var(--none)";
  return between(REWARD, high > low ? (value - low) / (high - low) : value > 0 ? 1 : 0);
}

export const GRADIENT = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(x => between(REWARD, x)).join(",")})`;

const shade = (share, rgb) => `rgba(${rgb},${Math.min(0.85, Math.max(0, share) * 0.85).toFixed(3)})`;
export const gapShade = gap => shade(Math.log10(1 + gap * 1e3) / 3, "226,62,40");
export const logprobShade = logprob => shade(-logprob / 5, "52,120,226");
export const advantageShade = (advantage, largest) =>
  shade(Math.abs(advantage) / (largest || 1), advantage < 0 ? "224,110,40" : "28,140,160");
export function versionShade(version, versions) {
  const place = versions.length > 1 ? versions.indexOf(version) / (versions.length - 1) : 0;
  return `hsla(${Math.round(205 + 150 * place)},72%,${Math.round(58 - 6 * place)}%,.45)`;
}
export const MASK = {trains: "rgba(46,160,90,.38)", sampled: "rgba(236,170,40,.5)"};
