// A source that answers from JSON in the page, in the same form as the server.
//
// The JSON: {"runs": [...], "left_out": [note on missing data, ...], "of": {run id: {
//   "summary": answer, "metrics": answer, "timeline": answer or null,
//   "curves": {name: {steps, values, low, high}},
//   "prompts": answer,
//   "rollouts": {"rows": [row, ...], "records": {index: record}}}}}
// An answer has the form of the server's answer, and a row is a row of /rollouts.

import { filtered } from "viewer/source/rows";

export class EmbeddedSource {
  live = false;

  constructor(data) {
    this.data = data;
    this.leftOut = data.left_out ?? [];
  }

  async runs() {
    return { runs: this.data.runs };
  }

  async settings() {
    return { settings: Object.fromEntries(Object.entries(this.data.of).map(([run, { summary }]) => [run, summary?.settings ?? {}])) };
  }

  async summary(run) {
    return this.#of(run).summary;
  }

  async metrics(run) {
    return this.#of(run).metrics;
  }

  async curves(run, { names, from, to }) {
    const all = this.#of(run).curves;
    const found = names.filter(name => Object.hasOwn(all, name));
    return { curves: Object.fromEntries(found.map(name => [name, between(all[name], from, to)])) };
  }

  async rollouts(run, filters = {}) {
    return filtered(this.#of(run).rollouts.rows, filters);
  }

  async rollout(run, index) {
    const { records } = this.#of(run).rollouts;
    if (!Object.hasOwn(records, index)) throw new Error("This rollout is not in the report: `titan-rl view` shows all of them.");
    return records[index];
  }

  async prompts(run) {
    return this.#of(run).prompts ?? { same: false, prompts: [], median: null };
  }

  async timeline(run) {
    return this.#of(run).timeline;
  }

  traceUrl() {
    return null;
  }

  listen() {
    return () => {};
  }

  #of(run) {
    if (!Object.hasOwn(this.data.of, run)) throw new Error(`The report has no run ${run}.`);
    return this.data.of[run];
  }
}

function between(curve, from, to) {
  if (from == null && to == null) return curve;
  const kept = curve.steps.map((step, i) => (step >= (from ?? -Infinity) && step <= (to ?? Infinity) ? i : -1)).filter(i => i >= 0);
  return Object.fromEntries(Object.entries(curve).map(([key, all]) => [key, Array.isArray(all) ? kept.map(i => all[i]) : all]));
}
