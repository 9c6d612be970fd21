// Whether the run learns, why not, and a line for each of its tasks.
import { h, svg } from "viewer/dom";
import { link } from "viewer/links";
import { percent } from "viewer/quantities";

const MARKS = { good: "✓", warn: "!", bad: "✗", "": "…" };

/** A card with what is said of a run, each with what shows it; null where nothing is. `runs`: whether there are several. */
export function verdicts(run, { verdicts: all = [] }, several) {
  if (!all.length) return null;
  const item = ({ tone, title, text, link: to }) => h("li", { class: `verdict ${tone}` },
    h("span", { class: "mark", "aria-hidden": "true" }, MARKS[tone] ?? "…"),
    h("div", {}, h("b", {}, title), text ? h("p", {}, text) : null),
    to && link(to.label, to.tab, { ...to.values, ...(several && to.tab === "rollouts" ? { "rollouts.run": run.id } : {}) }, { class: "see" }));
  const [first, ...others] = all;
  const name = several ? `Does ${run.name} learn?` : "Does it learn?";
  return h("section", { class: "card verdicts", "aria-label": name }, h("h2", {}, several ? h("span", { class: "dotted", style: { "--run": run.colour } }, name) : name),
    h("ul", {}, item(first)), others.length ? h("h2", {}, first.tone === "good" ? "What to look at" : "Why not") : null, others.length ? h("ul", {}, others.map(item)) : null);
}

/** A table with a line for each task; null for one task. `curves`: by the task's name, of what it earned. */
export function taskTable(run, { tasks = [] }, several, curves) {
  if (!tasks.length) return null;
  const change = one => one ? `${one.before.toFixed(3)} → ${one.after.toFixed(3)}` : "–";
  const row = task => h("tr", {}, h("th", { scope: "row" }, link(task.name, "rollouts", { "rollouts.task": task.name, ...(several ? { "rollouts.run": run.id } : {}) })),
    h("td", {}, h("span", { class: `tone ${task.tone}` }, task.title)), h("td", {}, change(task.held_out)), h("td", {}, change(task.earned)),
    h("td", {}, task.now === null ? "–" : task.now.toFixed(3)), h("td", {}, task.share === null ? "–" : percent(task.share)), h("td", {}, sparkline(curves.get(task.name))));
  const name = several ? `Tasks of ${run.name}` : "Tasks";
  return h("section", { class: "card tasks", "aria-label": name }, h("h2", {}, name),
    h("div", { class: "comparison", tabindex: "0", role: "region", "aria-label": `${name}, a line each` }, h("table", {},
      h("thead", {}, h("tr", {}, ["Task", "Verdict", "Held out", "In training", "Now", "Share of groups", "Reward by step"].map(label => h("th", { scope: "col" }, label)))),
      h("tbody", {}, tasks.map(row)))));
}

function sparkline(curve) {
  const points = (curve?.steps ?? []).map((step, i) => [step, curve.values[i]]).filter(([, value]) => value !== null);
  if (points.length < 2) return null;
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [low, high] = [Math.min(0, ...ys), Math.max(1e-9, ...ys)];
  const at = ([x, y]) => `${(96 * (x - xs[0]) / (xs.at(-1) - xs[0] || 1) + 2).toFixed(1)} ${(20 - 18 * (y - low) / (high - low || 1)).toFixed(1)}`;
  return svg("svg", { viewBox: "0 0 100 22", width: "100", height: "22", "aria-hidden": "true", class: "sparkline" }, svg("polyline", { points: points.map(at).join(" "), fill: "none" }));
}
