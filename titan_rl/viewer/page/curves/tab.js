// All curves of the selected runs, in groups of panels. Only panels in view are fetched.
import { CurveStore } from "viewer/curves/store";
import { CurveView } from "viewer/curves/view";
import { Panel, kindOf } from "viewer/curves/panel";
import { grouped, matching } from "viewer/curves/panel_list";
import { h } from "viewer/dom";
import { toolbar } from "viewer/curves/toolbar";

export function open(container, { source, runs, state, cursor, bundles = null }) {
  const tab = new Curves(container, { source, runs, state, cursor, bundles });
  tab.opened = tab.start();
  return tab;
}

class Curves {
  constructor(container, { source, runs, state, cursor, bundles }) {
    Object.assign(this, { source, runs, state, cursor, bundles });
    this.view = new CurveView(state);
    this.lastX = this.view.x;
    this.store = new CurveStore(source);
    this.hidden = new Set();
    this.panels = [];
    this.words = state.get("metrics", "");
    this.closed = false;
    this.seeing = new IntersectionObserver(entries => entries.forEach(entry => entry.target.panel.see(entry.isIntersecting)), { rootMargin: "150px" });
    const chips = bundles ? bundles.map(bundle => ({ ...bundle, id: bundle.name })) : runs;
    this.bar = toolbar(this.view, { runs: chips, words: this.words, hidden: this.hidden }, { search: words => this.search(words), toggleRun: id => this.#toggleRun(id) });
    this.sections = h("div", { class: "sections" });
    this.ended = new AbortController();
    document.addEventListener("keydown", event => this.#key(event), { signal: this.ended.signal });
    this.view.addEventListener("change", ({ what }) => this.#looked(what));
    cursor.addEventListener("change", () => this.panels.forEach(panel => panel.mark()), { signal: this.ended.signal });
    container.append(this.bar.element, this.sections);
  }

  async start() {
    const metrics = await this.#metrics().catch(error => this.#fail(error));
    if (this.closed || !metrics) return;
    this.metrics = metrics;
    this.#build();
  }

  /** Shows the metrics that match all the words; "" shows all metrics in their groups. */
  search(words) {
    this.words = words.trim();
    this.state.set({ metrics: this.words });
    this.#build();
  }

  async update({ theme, changed = [], run }) {
    if (theme) this.panels.forEach(panel => panel.recolour());
    if (!changed.includes("metrics")) return;
    this.store.forget(run);
    this.panels.forEach(panel => panel.outdate());
    const metrics = await this.#metrics().catch(() => null);
    if (this.closed || !metrics || metrics.length === this.metrics?.length) return;
    this.metrics = metrics;
    this.#build();
  }

  close() {
    this.closed = true;
    cancelAnimationFrame(this.drawing);
    this.ended.abort();
    this.seeing.disconnect();
    this.panels.forEach(panel => panel.close());
  }

  async #metrics() {
    const answers = await Promise.all(this.runs.map(run => this.source.metrics(run.id)));
    const found = new Map();
    for (const { metrics } of answers) for (const metric of metrics) if (!found.has(metric.name)) found.set(metric.name, metric);
    return [...found.values()];
  }

  #fail(error) {
    this.sections.replaceChildren(h("p", { class: "empty bad", role: "alert" }, `The metrics could not be read: ${error.message}`));
  }

  #build() {
    if (!this.metrics) return;
    this.seeing.disconnect();
    this.panels.forEach(panel => panel.close());
    this.panels = [];
    const found = this.words ? [{ title: "", panels: matching(this.metrics, this.words) }] : grouped(this.metrics, this.runs.map(kindOf));
    const many = found.some(({ panels }) => panels.length);
    this.sections.replaceChildren(...found.map(group => this.#section(group)));
    if (!many) this.sections.replaceChildren(h("p", { class: "empty" }, this.words ? `No metric has “${this.words}” in its name or description.` : "There are no metrics yet."));
    this.panels.forEach(panel => this.seeing.observe(panel.element));
  }

  #section({ title, panels, more }) {
    const shared = { store: this.store, runs: this.runs, view: this.view, cursor: this.cursor, hidden: this.hidden, bundles: this.bundles };
    const made = panels.map(spec => new Panel(spec, shared));
    for (const panel of made) panel.element.panel = panel;
    this.panels.push(...made);
    const grid = h("div", { class: "panels" }, made.map(panel => panel.element));
    const count = h("span", { class: "count" }, String(panels.length));
    if (this.words) return h("section", {}, h("h2", {}, "Found ", count), grid);
    if (!more) return h("section", {}, h("h2", {}, title), grid);
    return h("details", { class: "more" }, h("summary", {}, h("h2", {}, title, " ", count)), grid);
  }

  #looked(what) {
    this.bar.show();
    if (what === "look") return this.#drawSoon();
    this.store.forgetRanges();
    for (const panel of this.panels) {
      if (panel.chart && panel.seen && this.view.x === this.lastX) panel.draw();
      panel.outdate();
    }
    this.lastX = this.view.x;
  }

  /** Draws once before the next frame, however fast the slider is moved. */
  #drawSoon() {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = null;
      for (const panel of this.panels) {
        if (panel.chart && panel.seen) panel.draw();
        else panel.stale = true;
      }
    });
  }

  #toggleRun(id) {
    if (!this.hidden.delete(id)) this.hidden.add(id);
    this.#looked("look");
  }

  #key(event) {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.bar.search.focus();
      this.bar.search.select();
    } else if (event.key === "Escape" && !typing && this.view.zoomed) this.view.set({ from: null, to: null });
  }
}
