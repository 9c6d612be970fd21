// Verdicts: whether the run learns, why not, and a line for each of its tasks.
import { h, svg } from "viewer/dom";
import { link } from "viewer/links";
import { isOfStep } from "viewer/overview/parts";
import { percent } from "viewer/quantities";

const MARKS = { good: "✓", warn: "!", bad: "✗", "": "…" };

/** A card with the verdicts on a run, each with its link. Of several runs, a line each, with the signs against it. Null without verdicts. */
export function verdicts(runs, summaries) {
  const several = runs.length > 1;
  const judged = runs.map((run, i) => ({ run, all: summaries[i].verdicts ?? [] })).filter(({ all }) => all.length);
  if (!judged.length) return null;
  const item = (run, { tone, title, text, link: to }) => h("li", { class: `verdict ${tone}` },
    h("span", { class: "mark", "aria-hidden": "true" }, MARKS[tone] ?? "…"),
    h("div", {}, several ? h("span", { class: "dotted soft", style: { "--run": run.colour } }, run.name) : null, several ? " " : null, h("b", {}, title), text ? h("p", {}, text) : null),
    to && link(to.label, to.tab, { ...to.values, ...(several && to.tab === "rollouts" ? { "rollouts.run": run.id } : {}) }, { class: "see" }));
  const title = several ? "Are they learning?" : "Is it learning?";
  const others = judged.flatMap(({ run, all }) => all.slice(1).map(verdict => item(run, verdict)));
  const warningsOfSteps = runs.flatMap((run, i) => (summaries[i].verdicts?.length ? (summaries[i].warnings ?? []).filter(isOfStep) : []).map(text => (several ? `${run.name}, ${text}` : text)));
  const learns = judged.every(({ all }) => all[0].tone === "good");
  return h("section", { class: `card verdicts${several ? " several" : ""}`, "aria-label": title }, h("h2", {}, title), h("ul", {}, judged.map(({ run, all }) => item(run, all[0]))),
    others.length ? h("h2", {}, learns ? "What to look at" : "Why not") : null, others.length ? h("ul", {}, others) : null,
    warningsOfSteps.length ? h("details", { open: true }, h("summary", { class: "soft" }, "Warnings of the run"), warningsOfSteps.map(text => h("p", { class: "soft" }, text))) : null);
}

/** A table with a line for each task of each run; null if no run has several tasks. `curves`: rewards by run and task, "run/task". */
export function taskTable(runs, summaries, curves) {
  const several = runs.length > 1;
  const lines = runs.flatMap((run, i) => (summaries[i].tasks ?? []).map(task => ({ run, task })));
  if (!lines.length) return null;
  const change = one => one ? `${one.before.toFixed(3)} → ${one.after.toFixed(3)}` : "–";
  const row = ({ run, task }) => h("tr", {}, h("th", { scope: "row" }, link(task.name, "rollouts", { "rollouts.task": task.name, ...(several ? { "rollouts.run": run.id } : {}) })),
    several ? h("td", {}, h("span", { class: "dotted", style: { "--run": run.colour } }, run.name)) : null,
    h("td", {}, h("span", { class: `tone ${task.tone}` }, task.title)), h("td", {}, change(task.held_out)), h("td", {}, change(task.earned)),
    h("td", {}, task.now === null ? "–" : task.now.toFixed(3)), h("td", {}, task.share === null ? "–" : percent(task.share)), h("td", {}, task.faults == null ? "–" : percent(task.faults)), h("td", {}, sparkline(curves.get(`${run.id}/${task.name}`))));
  const heads = ["Task", ...(several ? ["Run"] : []), "Verdict", "Held out", "In training", "Now", "Share of groups", "Lost to faults", "Reward by step"];
  lines.sort((a, b) => a.task.name.localeCompare(b.task.name, "en", { numeric: true }));
  return h("section", { class: "card tasks", "aria-label": "Tasks" }, h("h2", {}, "Tasks"),
    h("div", { class: "comparison", tabindex: "0", role: "region", "aria-label": "Tasks, a line each" }, h("table", {},
      h("thead", {}, h("tr", {}, heads.map(label => h("th", { scope: "col" }, label)))), h("tbody", {}, lines.map(row)))));
}

function sparkline(curve) {
  const points = (curve?.steps ?? []).map((step, i) => [step, curve.values[i]]).filter(([, value]) => value !== null);
  if (points.length < 3) return null; // a line between two points would look like steady progress
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [low, high] = [Math.min(0, ...ys), Math.max(1e-9, ...ys)];
  const at = ([x, y]) => `${(96 * (x - xs[0]) / (xs.at(-1) - xs[0] || 1) + 2).toFixed(1)} ${(20 - 18 * (y - low) / (high - low || 1)).toFixed(1)}`;
  return svg("svg", { viewBox: "0 0 100 22", width: "100", height: "22", "aria-hidden": "true", class: "sparkline" }, svg("polyline", { points: points.map(at).join(" "), fill: "none" }));
}
