// A run at a glance: whether it learns, and why not; the step at the cursor; answers to the same prompts; its cost.
import { CurveStore } from "viewer/curves/store";
import { h } from "viewer/dom";
import { count } from "viewer/quantities";
import { Comparison } from "viewer/overview/compare";
import { Hero, QUANTITIES } from "viewer/overview/hero";
import { cores, failure, headline, hosts, tiles, time, waiting, warnings } from "viewer/overview/parts";
import { Prompts } from "viewer/overview/prompts";
import { StepCard } from "viewer/overview/step";
import { taskTable, verdicts } from "viewer/overview/verdicts";

export function open(container, { source, runs, whole, state, cursor, bundles = null }) {
  const overview = new Overview(container, { source, runs, whole, state, cursor, bundles });
  overview.opened = overview.update({ changed: [] });
  return overview;
}

class Overview {
  constructor(container, { source, runs, whole, state, cursor, bundles }) {
    Object.assign(this, { container, source, runs, whole, state });
    this.store = new CurveStore(source);
    this.closed = false;
    this.top = h("div", { class: "overview-top" }, h("p", { class: "empty" }, "Reading the run …"));
    this.comparison = new Comparison(state, () => this.update({ changed: [] }));
    this.verdicts = h("div", { class: "stack" });
    this.heroes = QUANTITIES.map(quantity => new Hero(quantity, { store: this.store, cursor, bundles }));
    this.noCurve = h("p", { class: "empty", hidden: true }, "There is no curve yet.");
    this.tasks = h("div", { class: "stack" });
    this.step = new StepCard({ source, store: this.store, cursor });
    this.prompts = new Prompts({ source, state, cursor });
    this.tiles = h("div", { class: "tiles" });
    this.waits = h("div", { class: "waits" });
    this.hosts = h("div", { class: "waits" });
    this.ended = new AbortController();
    document.addEventListener("keydown", event => this.#key(event), { signal: this.ended.signal });
    container.append(h("div", { class: "overview" }, this.top, this.verdicts, ...this.heroes.map(({ element }) => element), this.noCurve, this.tasks,
      this.step.element, this.prompts.element, this.waits, this.tiles, this.hosts));
  }

  async refresh() {
    try {
      const [ofWhole, ...summaries] = await Promise.all([this.whole, ...this.runs].map(run => run && this.source.summary(run.id)));
      if (this.closed) return;
      Object.assign(this, { summaries, ofWhole });
      this.#tell();
      const several = this.runs.length > 1;
      const run = this.#foremost();
      await Promise.all([...this.heroes.map(hero => hero.show(this.runs, summaries)), this.#showTasks(), this.step.show(run, several), this.prompts.show(run, several)]);
      this.noCurve.hidden = this.heroes.some(({ element }) => !element.hidden);
    } catch (error) {
      if (!this.closed) this.top.replaceChildren(h("p", { class: "empty bad", role: "alert" }, `The run could not be read: ${error.message}`));
    }
  }

  async update({ theme, changed, runs, whole }) {
    if (theme) this.heroes.forEach(hero => hero.recolour());
    if (runs) this.runs = runs;
    if (whole) this.whole = whole;
    if (!changed) return;
    this.outdated = true;
    this.refreshing ??= this.#catchUp().finally(() => (this.refreshing = null));
    await this.refreshing;
  }

  close() {
    this.closed = true;
    this.ended.abort();
    for (const part of [...this.heroes, this.step, this.prompts]) part.close();
  }

  /** Requests again what has changed while requests were in flight. */
  async #catchUp() {
    while (this.outdated && !this.closed) {
      this.outdated = false;
      this.runs.forEach(run => this.store.forget(run.id));
      await this.refresh();
    }
  }

  #tell() {
    const { runs, summaries, whole, ofWhole } = this;
    const alone = runs.length === 1 && !whole;
    const each = make => [...(whole ? [make(ofWhole, whole, true)] : []), ...runs.map((run, i) => make(summaries[i], run, alone))].filter(Boolean);
    if (!alone) this.comparison.show(runs, summaries);
    const title = alone ? headline(runs[0], summaries[0]) : whole ? headline(whole, ofWhole) : h("h1", {}, `${runs.length} runs`);
    const adapters = whole ? [h("h2", {}, `Its ${count(runs.length, "adapter")}`)] : [];
    this.top.replaceChildren(title, ...each(failure), ...each(waiting), ...each(warnings), ...adapters, ...(alone ? [] : [this.comparison.element]));
    this.verdicts.replaceChildren(verdicts(runs, summaries) ?? "");
    this.tiles.replaceChildren(...(alone ? tiles(summaries[0]) : whole ? tiles(ofWhole) : []));
    this.tiles.hidden = !this.tiles.childElementCount;
    this.waits.replaceChildren(time(runs, summaries) ?? "", ...each(cores));
    this.hosts.replaceChildren(...each(hosts));
  }

  async #showTasks() {
    const { runs, summaries } = this;
    const found = await Promise.all(runs.flatMap((run, i) => (summaries[i].tasks ?? []).map(async ({ name }) =>
      [`${run.id}/${name}`, await this.store.curve(run.id, `task/${name}/finished_reward_mean`) ?? await this.store.curve(run.id, `validation/${name}/reward_mean`)])));
    if (!this.closed) this.tasks.replaceChildren(taskTable(runs, summaries, new Map(found)) ?? "");
  }

  /** The run whose step and prompts are shown: the baseline, or else the first run that has rollouts. */
  #foremost() {
    const baseline = this.runs.find(run => run.id === this.state.get("baseline"));
    return baseline ?? this.runs.find(run => run.kind !== "sft") ?? this.runs[0];
  }

  #key(event) {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    const by = { p: -1, n: 1 }[event.key];
    if (!by || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.prompts.move(by);
  }
}
