// What there is to know of a run at a glance: how far it is, whether it learns, what it costs, where it waits, what it says.
import { Chart } from "viewer/curves/chart";
import { CurveStore } from "viewer/curves/store";
import { failure, headline, hosts, learned, table, tiles, waiting, waits, warnings } from "viewer/overview/parts";
import { h } from "viewer/dom";
import { colourOf } from "viewer/runs";
import { findPair, pair } from "viewer/overview/pair";

const REWARDS = ["rollout/finished_reward_mean", "rollout/reward_mean"];
const HELD_OUT = "validation/reward_mean";
const LOSSES = ["train/loss"]; // of runs without rewards
const HELD_OUT_LOSS = "validation/loss";
const VIEW = { smoothing: 0.6, log: false, x: "step", from: null, to: null };

export function open(container, { source, runs, state }) {
  const overview = new Overview(container, { source, runs, state });
  overview.opened = overview.update({ changed: [] });
  return overview;
}

class Overview {
  constructor(container, { source, runs, state }) {
    Object.assign(this, { container, source, runs, state });
    this.store = new CurveStore(source);
    this.closed = false;
    this.top = h("div", { class: "overview-top" });
    this.chartBox = h("div", { class: "chart", role: "img", tabindex: "0" });
    this.learned = h("div", { class: "learned" });
    this.tiles = h("div", { class: "tiles" });
    this.waits = h("div", { class: "waits" });
    this.hosts = h("div", { class: "waits" });
    this.top.append(h("p", { class: "empty" }, "Reading the run …"));
    this.pair = h("section", { class: "pair", hidden: true });
    this.legend = h("div", { class: "hero-legend" });
    container.append(h("div", { class: "overview" }, this.top,
      h("section", { class: "card hero", "aria-label": "Reward" }, this.learned, h("div", { class: "hero-chart" }, this.legend, this.chartBox)),
      this.tiles, this.waits, this.hosts, this.pair));
  }

  async refresh() {
    try {
      const summaries = await Promise.all(this.runs.map(run => this.source.summary(run.id)));
      if (this.closed) return;
      this.summaries = summaries;
      this.#tell();
      await Promise.all([this.#curves(), this.#pair()]);
    } catch (error) {
      if (!this.closed) this.top.replaceChildren(h("p", { class: "empty bad", role: "alert" }, `The run could not be read: ${error.message}`));
    }
  }

  async update({ theme, changed, runs }) {
    if (theme) this.chart?.recolour();
    if (runs) this.runs = runs;
    if (!changed) return;
    this.outdated = true;
    this.refreshing ??= this.#catchUp().finally(() => (this.refreshing = null));
    await this.refreshing;
  }

  close() {
    this.closed = true;
    this.chart?.close();
  }

  /** What changes while answers are under way is asked for again. */
  async #catchUp() {
    while (this.outdated && !this.closed) {
      this.outdated = false;
      this.runs.forEach(run => this.store.forget(run.id));
      await this.refresh();
    }
  }

  #tell() {
    const { runs, summaries } = this;
    const alone = runs.length === 1;
    const each = make => runs.map((run, i) => make(summaries[i], run, alone)).filter(Boolean);
    this.top.replaceChildren(...(alone ? [headline(runs[0], summaries[0])] : [h("h1", {}, `${runs.length} runs`)]), ...each(failure), ...each(waiting), ...each(warnings), ...(alone ? [] : [table(runs, summaries)]));
    this.learned.replaceChildren(...each(learned));
    this.tiles.replaceChildren(...(alone ? tiles(summaries[0]) : []));
    this.tiles.hidden = !this.tiles.childElementCount;
    this.waits.replaceChildren(waits(runs, summaries) ?? "");
    this.hosts.replaceChildren(...each(hosts));
  }

  async #curves() {
    const found = await Promise.all(this.runs.map(run => this.#reward(run)));
    if (this.closed) return;
    const lines = found.flat();
    const alone = this.runs.length === 1;
    this.chart ??= new Chart(this.chartBox, { sync: false });
    this.chart.draw(lines, VIEW);
    this.chartBox.setAttribute("aria-label", lines.length ? `Reward by step: ${lines.map(({ label, y }) => `${label}, last ${y.at(-1)}`).join("; ")}` : "There is no curve yet");
    const entry = ({ label, colour, dots }) => h("span", { class: dots ? "dots" : "", style: { "--run": colour } }, label);
    const entries = alone ? lines : [...this.runs.map(({ name: label, colour }) => ({ label, colour })), { label: "held out", colour: "var(--soft)", dots: true }];
    this.legend.replaceChildren(h("h2", {}, lines[0]?.title ?? "Reward"), ...entries.map(entry));
    if (!lines.length) this.legend.replaceChildren("There is no curve yet.");
  }

  async #reward(run) {
    const alone = this.runs.length === 1;
    let title = "Reward";
    let [train, heldOut] = await this.#first(run, REWARDS, HELD_OUT);
    if (!train && !heldOut) {
      title = "Loss";
      [train, heldOut] = await this.#first(run, LOSSES, HELD_OUT_LOSS);
    }
    const line = (curve, label, more) => ({ title, label: alone ? label : `${run.name}, ${label}`, colour: run.colour, x: curve.steps, y: curve.values, low: curve.low, high: curve.high, ...more });
    return [train && line(train, "in training", {}), heldOut && line(heldOut, "held out", { dots: true, dash: [4, 4], colour: colourOf(run, alone ? 1 : 0) })].filter(Boolean);
  }

  /** The first curve that the run has of those named, and one more. */
  async #first(run, names, other) {
    const [last, ...found] = await Promise.all([other, ...names].map(name => this.store.curve(run.id, name)));
    return [found.find(Boolean) ?? null, last];
  }

  async #pair() {
    const [run] = this.runs;
    const indices = await findPair(this.source, run.id);
    const key = indices && `${indices.first}-${indices.last}`;
    if (!indices || key === this.pairKey) return;
    const [first, last] = await Promise.all([indices.first, indices.last].map(index => this.source.rollout(run.id, index)));
    if (this.closed) return;
    this.pairKey = key;
    this.pair.hidden = false;
    this.pair.replaceChildren(...pair(first, last, this.runs.length > 1 ? run.name : ""));
  }
}
