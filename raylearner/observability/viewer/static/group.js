// The trajectories of a group beside each other.
import {get, link, setQuery} from "./api.js";
import {reward} from "./colours.js";
import {count, h, number, show} from "./dom.js";
import {place} from "./list.js";
import {chip} from "./parts.js";
import {term} from "./terms.js";
import {MODES, legend} from "./tokens.js";
import {partsOf} from "./trajectory.js";

const MAX_BESIDE = 32;

export async function groupPage(main, {id, step, group, query, signal, setKeys}) {
  const kind = query.get("kind") === "evaluation" ? "evaluation" : "training";
  const found = await get("group", {run: id, step, group, kind}, signal);
  const rewards = found.members.map(member => member.reward).filter(value => value !== null);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const largest = Math.max(...found.members.map(member => Math.abs(member.advantage ?? 0)), 1e-9);
  const view = {mode: query.get("colour") in MODES ? query.get("colour") : "mask", markup: false};
  const columns = h("div.columns"), question = h("div.parts.question-parts"), key = h("span.legend");
  const colour = h("select", {"aria-label": "Colour of tokens"}, Object.entries(MODES).map(([name, text]) => h("option", {value: name, selected: name === view.mode}, text)));
  const members = found.members.slice(0, MAX_BESIDE);
  show(main, h("h1", {}, found.question || "(no text)"),
    h("div.facts", {}, h("span", {}, term("mean"), " ", h("b", {}, number(found.mean, 3))), h("span", {}, term("spread"), " ", h("b", {}, number(found.spread, 3))), h("span", {}, count(found.members.length, "trajectory", "trajectories")), h("span", {}, term("source"), " ", h("b", {}, found.source)),
      h("a", {href: link(["run", id, "trajectories"], {step, kind: kind === "training" ? "" : kind})}, `step ${step}`)),
    h("div.bar.sticky", {}, h("label", {}, "colour ", colour), key), h("details.question", {}, h("summary", {}, "Whole prompt"), question), columns,
    found.members.length > MAX_BESIDE ? h("div.notice", {}, `The first ${MAX_BESIDE} of ${found.members.length} are shown.`) : null);
  const whole = await Promise.all(members.map(member => get("trajectory", {run: id, step, line: member.line, kind}, signal)));
  const draw = () => {
    show(key, whole.length ? legend(whole[0], view.mode) : null);
    show(columns, whole.map((t, i) => {
      Object.assign(t, {run: id, kind, largest_advantage: largest});
      const member = members[i];
      return h("section.column", {}, h("header", {style: {"--reward": reward(member.reward, low, high)}}, h("a", {href: place(id, kind, step, member.line)}, `sample ${member.sample}`), member.segment ? chip(`segment ${member.segment}`) : null,
        h("b", {}, number(member.reward, 3)), h("span.dim", {}, `advantage ${number(member.advantage, 3)}`), member.error ? chip("failed", "bad", member.error) : member.stop && member.stop !== "answer" ? chip(member.stop, "warn") : null),
      partsOf(t, view, {withPrompt: false}), t.error ? h("pre.error", {}, t.error) : null);
    }));
    if (whole.length) show(question, partsOf({...whole[0], parts: whole[0].parts.filter(part => part.turn === null), texts: whole[0].texts?.filter(part => part.turn === null)}, view));
  };
  colour.onchange = () => { view.mode = colour.value; setQuery({colour: view.mode === "mask" ? "" : view.mode}); draw(); };
  draw();
  const modes = Object.keys(MODES);
  setKeys({c: ["next colour", () => { colour.value = modes[(modes.indexOf(view.mode) + 1) % modes.length]; colour.onchange(); }],
    j: ["next trajectory", () => columns.scrollBy({left: 360, behavior: "smooth"})], k: ["previous trajectory", () => columns.scrollBy({left: -360, behavior: "smooth"})],
    u: ["all trajectories of the step", () => { location.hash = link(["run", id, "trajectories"], {step}); }]});
}
