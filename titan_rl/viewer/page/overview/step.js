// One step, that of the cursor: its figures, how its time was spent, and its best, median and worst rollout.
import { h, settled } from "viewer/dom";
import { link } from "viewer/links";
import { isJudged, seconds, short, whole } from "viewer/quantities";
import { oneLine } from "viewer/rollouts/visible_text";

const FIGURES = [["league/win_rate", "win rate"], ["rollout/finished_reward_mean", "reward"], ["rollout/finished_fault_fraction", "lost to faults"], ["validation/reward_mean", "held-out reward"], ["train/loss", "loss"], ["rollout/zero_variance_groups", "groups that teach nothing"], ["rollout/completion_tokens_mean", "tokens a rollout"], ["train/entropy", "entropy"], ["train/staleness_mean", "staleness"]];
const STAGES = [["time/wait_for_rollouts_s", "waiting for rollouts", "--plane-scheduler"], ["time/samples_s", "building samples", "--plane-environment"], ["time/train_s", "training", "--plane-trainer"], ["sync/wait_for_pull_s", "waiting for the pull", "--plane-sync"], ["sync/begin_publish_s", "publishing", "--plane-sync"], ["time/validation_s", "validation", "--plane-validation"], ["time/checkpoint_s", "checkpoint", "--plane-checkpoint"]];
const ROLLOUTS = 200;

export class StepCard {
  constructor({ source, store, cursor }) {
    Object.assign(this, { source, store, cursor });
    this.request = null;
    this.head = h("header", {});
    this.stages = h("div", { class: "stages" });
    this.rows = h("ul", { class: "step-rollouts" });
    this.element = h("section", { class: "card step", "aria-label": "The step at the cursor", hidden: true }, this.head, this.stages, this.rows);
    this.moved = () => { this.#figures(); this.later(); };
    this.later = settled(() => this.#rollouts(), 150);
    cursor.addEventListener("change", this.moved);
  }

  /** Shows the step of a run at the cursor, or else the last step. Resolves when it is shown. */
  async show(run, several) {
    Object.assign(this, { run, several });
    await Promise.all([this.#figures(), this.#rollouts()]);
  }

  close() {
    this.closed = true;
    this.cursor.removeEventListener("change", this.moved);
  }

  #step() {
    return this.cursor.step ?? this.run.steps;
  }

  async #figures() {
    if (!this.run) return;
    const step = this.#step();
    const curves = await Promise.all([...FIGURES, ...STAGES].map(([name]) => this.store.curve(this.run.id, name).catch(() => null)));
    if (this.closed || step !== this.#step()) return;
    const values = curves.map(curve => valueAt(curve, step));
    const figures = FIGURES.map(([name, label], i) => [label, values[i], name]).filter(([, value, name], _, all) => value !== null && !(name === "train/loss" && all.some(([label, one]) => label === "reward" && one !== null)));
    const stages = STAGES.map(([, label, colour], i) => ({ label, colour, value: values[FIGURES.length + i] ?? 0 })).filter(({ value }) => value > 0);
    const total = stages.reduce((sum, { value }) => sum + value, 0);
    this.element.hidden = !figures.length && !total;
    const which = this.cursor.step === null ? `Step ${whole(step)}, the last` : `Step ${whole(step)}`;
    this.head.replaceChildren(h("h2", {}, this.several ? `${which}, of ${this.run.name}` : which),
      ...figures.map(([label, value]) => h("span", {}, h("span", { class: "soft" }, `${label} `), h("b", {}, short(value)))), h("span", { class: "spring" }),
      total ? link("timeline", "timeline", { at: step, "timeline.steps": `${step}-${step}`, ...(this.several ? { "timeline.run": this.run.id } : {}) }) : "");
    this.stages.hidden = !total;
    this.stages.replaceChildren(...stages.map(({ label, colour, value }) =>
      h("span", { style: { "flex-grow": String(value / total), background: `var(${colour})` }, title: `${label}: ${seconds(value)}` }, value / total > 0.12 ? `${label} ${seconds(value)}` : "")));
    this.stages.setAttribute("aria-label", stages.map(({ label, value }) => `${label} ${seconds(value)}`).join(", "));
  }

  async #rollouts() {
    if (!this.run) return;
    const request = this.request = {};
    const step = this.#step();
    const answer = await this.source.rollouts(this.run.id, { phase: "train", step_min: step, step_max: step, sort: "reward", descending: true, limit: ROLLOUTS }).catch(() => null);
    if (request !== this.request || this.closed) return;
    const scored = (answer?.rows ?? []).filter(isJudged);
    const chosen = scored.length < 3 ? scored.map(row => ["", row]) : [["best", scored[0]], ["median", scored[scored.length >> 1]], ["worst", scored.at(-1)]];
    const more = this.several ? { "rollouts.run": this.run.id } : {};
    this.rows.hidden = !answer?.total;
    this.rows.replaceChildren(...chosen.map(([label, row]) => h("li", {}, h("span", { class: "soft" }, label), h("b", {}, short(row.reward, 3)),
      link(oneLine(row.preview || "(no text)"), "rollouts", { "rollouts.index": row.index, at: step, ...more }), row.status === "completed" ? null : h("span", { class: "bad" }, String(row.status).replaceAll("_", " ")))),
    ...(answer?.total ? [h("li", {}, link(`all ${answer.total.toLocaleString("en")} rollouts of step ${whole(step)}`, "rollouts", { "rollouts.step_min": step, "rollouts.step_max": step, at: step, ...more }))] : []));
  }
}

/** The value of a curve at a step, or at the last point before it if the curve has fewer points than steps. */
function valueAt(curve, step) {
  if (!curve) return null;
  const at = curve.steps.findLastIndex(one => one <= step);
  const thinned = Boolean(curve.low);
  return at >= 0 && (thinned || curve.steps[at] === step) ? curve.values[at] : null;
}
