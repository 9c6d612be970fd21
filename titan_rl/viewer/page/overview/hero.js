// The main curve of runs that are measured by the same quantity: rewards by step, or losses.
import { Chart } from "viewer/curves/chart";
import { averaged } from "viewer/curves/panel";
import { h } from "viewer/dom";
import { learned, ofGames } from "viewer/overview/parts";
import { colourOf } from "viewer/runs";

const VIEW = { smoothing: 0.6, log: false, x: "step", from: null, to: null };
const DASH = [4, 4];

export const QUANTITIES = [
  { name: "Reward", trained: ["rollout/finished_reward_mean", "rollout/reward_mean"], heldOut: "validation/reward_mean", ofTask: task => [`task/${task}/finished_reward_mean`, `validation/${task}/reward_mean`] },
  { name: "Loss", trained: ["train/loss"], heldOut: "validation/loss", ofTask: () => [] },
  { name: "Games" }, // what `headline` of the summary names, in place of the reward
];

const EARNED = ["rollout/finished_reward_mean", "rollout/reward_mean", "validation/reward_mean"];

export class Hero {
  constructor(quantity, { store, cursor, bundles }) {
    Object.assign(this, { quantity, store, cursor, bundles });
    this.learned = h("div", { class: "learned" });
    this.legend = h("div", { class: "hero-legend" });
    this.box = h("div", { class: "chart", role: "img", tabindex: "0" });
    this.element = h("section", { class: "card hero", "aria-label": quantity.name, hidden: true }, this.learned, h("div", { class: "hero-chart" }, this.legend, this.box));
    this.moved = () => this.chart?.mark(cursor.chosen);
    cursor.addEventListener("change", this.moved);
  }

  /** Draws the runs that have this quantity, and returns those. */
  async show(runs, summaries) {
    const several = runs.length > 1;
    const found = await Promise.all(runs.map((run, i) => this.#lines(run, summaries[i], several)));
    if (this.closed) return;
    const lines = this.bundles ? averaged(found.flat(), this.bundles) : found.flat();
    const among = runs.filter((_, i) => found[i].length);
    this.element.hidden = !lines.length;
    if (!lines.length) return;
    const title = this.quantity.name === "Games" ? summaries[runs.indexOf(among[0])].headline.title : this.quantity.name;
    this.learned.replaceChildren(...among.map(run => (this.quantity.name === "Games" ? ofGames(summaries[runs.indexOf(run)].headline, found.flat(), run, !several)
      : learned(summaries[runs.indexOf(run)], run, !several, this.quantity.name))));
    this.chart ??= new Chart(this.box, { choose: x => this.cursor.choose(x), cursor: x => this.chart?.hovered && this.cursor.hover(x) });
    this.chart.draw(lines, VIEW);
    this.chart.mark(this.cursor.chosen);
    this.element.setAttribute("aria-label", title);
    this.box.setAttribute("aria-label", `${title} by step: ${lines.map(({ label, y }) => `${label}, last ${y.at(-1)}`).join("; ")}`);
    const entry = ({ label, colour, dots }) => h("span", { class: dots ? "dots" : "", style: { "--run": colour } }, label);
    const heldOut = lines.some(line => line.dots) ? [{ label: "held out", colour: "var(--soft)", dots: true }] : [];
    const entries = several ? [...(this.bundles ?? among).map(({ name: label, colour }) => ({ label, colour })), ...heldOut] : lines.some(line => line.task) ? [...lines.filter(line => !line.dots), ...heldOut] : lines;
    this.legend.replaceChildren(h("h2", {}, title), ...entries.map(entry));
  }

  recolour() {
    this.chart?.recolour();
  }

  close() {
    this.closed = true;
    this.cursor.removeEventListener("change", this.moved);
    this.chart?.close();
  }

  /** The lines of a run: one for each task if a single run has several tasks. A run with rewards has no line for its loss, which does not measure it. */
  async #lines(run, summary, several) {
    const { name } = this.quantity;
    if (name === "Loss" && await this.#first(run, EARNED)) return [];
    if ((name === "Games") !== Boolean(summary.headline)) return [];
    if (name === "Games") return this.#linesOfGames(run, summary.headline.metrics, several);
    const { trained, heldOut, ofTask } = this.quantity;
    const [train, held] = await Promise.all([this.#first(run, trained), this.#first(run, [heldOut])]);
    const line = (curve, label, more) => curve && { run: run.id, name: label, label: several ? `${run.name}, ${label}` : label, colour: run.colour, x: curve.steps, y: curve.values, low: curve.low, high: curve.high, ...more };
    const dots = { dots: true, dash: DASH };
    if (several || !summary.tasks?.length) return [line(train, "in training", {}), line(held, "held out", { ...dots, colour: colourOf(run, several ? 0 : 1) })].filter(Boolean);
    const ofTasks = await Promise.all(summary.tasks.map(async ({ name }, i) => {
      const colour = colourOf(run, i + 1);
      const [earned, validated] = await Promise.all(ofTask(name).map(metric => this.#first(run, [metric])));
      return [line(earned, name, { colour, task: name }), line(validated, `${name}, held out`, { ...dots, colour, task: name })];
    }));
    return [line(train, "all tasks", { dash: [2, 3] }), line(held, "held out", dots), ...ofTasks.flat()].filter(Boolean);
  }

  async #linesOfGames(run, metrics, several) {
    const lines = await Promise.all(Object.entries(metrics).map(async ([metric, label], i) => {
      const curve = await this.#first(run, [metric]);
      return curve && { run: run.id, name: label, label: several ? `${run.name}, ${label}` : label, colour: several ? run.colour : colourOf(run, i), x: curve.steps, y: curve.values, low: curve.low, high: curve.high, ...(metric.startsWith("validation/") ? { dots: true, dash: DASH } : {}) };
    }));
    return lines.filter(Boolean);
  }

  /** The first of the named curves that the run has. */
  async #first(run, names) {
    const found = await Promise.all(names.map(name => this.store.curve(run.id, name)));
    return found.find(curve => curve?.values.some(value => value !== null)) ?? null;
  }
}
