// A panel: its title and unit, a legend that toggles lines, and a chart. It fetches data once it is in view.
import { Chart } from "viewer/curves/chart";
import { short } from "viewer/quantities";
import { colourOf } from "viewer/runs";
import { h } from "viewer/dom";

const DASHES = [undefined, [7, 3], [2, 3], [9, 3, 2, 3]];

export class Panel {
  /** `spec`: a panel of `grouped`; `shared`: {store, runs, view, cursor, hidden: Set of run ids, bundles: see `bundles` of the runs, or null}. */
  constructor(spec, shared) {
    this.spec = spec;
    this.shared = shared;
    this.lines = [];
    this.off = new Set(); // labels that the legend has switched off
    this.turn = 0;
    this.seen = false;
    this.stale = true;
    this.value = h("span", { class: "value" });
    this.note = h("span", { class: "unit" }, spec.unit ?? "");
    this.legend = h("div", { class: "entries" });
    this.holder = h("div", { class: "chart", tabindex: "0", role: "img" });
    this.expand = h("button", { type: "button", class: "quiet expand", "aria-label": `Enlarge ${spec.title}`, "aria-pressed": "false", onclick: () => this.#enlarge() }, "⤢");
    this.element = h("section", { class: "card panel", "aria-label": spec.title, "aria-busy": "true" },
      h("header", {}, h("h3", { title: spec.title }, spec.title), spec.help ? h("button", { type: "button", class: "quiet help", "aria-label": `What is ${spec.title}? ${spec.help}`, data: { help: spec.help } }, "?") : null,
        this.note, h("span", { class: "spring" }), this.expand, this.value),
      this.legend, this.holder);
    // Reserves the room of the legend, so that nothing moves when the curves arrive.
    if (spec.curves.length < 4) this.legend.append(...spec.curves.map(({ label }) => h("span", { class: "entry" }, label, h("b", {}))));
  }

  /** Called when the panel comes into view and when it leaves it. */
  see(seen) {
    this.seen = seen;
    if (seen && this.stale) this.load();
  }

  /** Notes that other data is needed. Loads it at once if the panel is in view. */
  outdate() {
    this.stale = true;
    if (this.seen) this.load();
  }

  async load() {
    const turn = ++this.turn;
    const { runs } = this.shared;
    this.stale = false;
    try {
      const lines = await Promise.all(runs.filter(run => !this.spec.kind || this.spec.kind === kindOf(run)).flatMap(run => this.spec.curves.map(curve => this.#line(run, curve))));
      const times = this.shared.view.x === "time" && runs.length ? await this.shared.store.times(runs[0].id) : null;
      if (turn !== this.turn) return;
      this.times = times;
      this.lines = telling(lines.filter(Boolean), this.spec.curves.length);
      this.#colour();
      this.draw();
    } catch (error) {
      if (turn !== this.turn) return;
      this.holder.replaceChildren(h("p", { class: "empty bad" }, error.message));
    }
    this.element.setAttribute("aria-busy", "false");
  }

  /** Draws the loaded data in the style of the view. */
  draw() {
    const { view, hidden, cursor, bundles } = this.shared;
    const seen = this.lines.filter(line => !this.off.has(line.name) && !hidden.has(line.run));
    const shown = bundles ? averaged(seen, bundles.filter(({ name }) => !hidden.has(name))) : seen;
    this.chart ??= new Chart(this.holder, {
      zoom: (from, to) => view.set({ from, to }), choose: x => cursor.choose(this.#step(x)),
      cursor: x => { this.#read(x); if (this.chart?.hovered) cursor.hover(x === null ? null : this.#step(x)); },
    });
    this.mark();
    this.chart.draw(shown.toReversed(), view); // the first on top
    this.note.textContent = [this.spec.unit, view.log && !this.chart.log ? "linear: has values ≤ 0" : view.log ? "log" : ""].filter(Boolean).join(" · ");
    this.#showLegend();
    this.#read(null);
    this.holder.setAttribute("aria-label", this.#inWords(shown));
  }

  /** Draws a line at the chosen step. */
  mark() {
    const { chosen } = this.shared.cursor;
    this.chart?.mark(chosen === null ? null : this.times ? this.times.at(chosen) : chosen);
  }

  recolour() {
    this.chart?.recolour();
  }

  close() {
    this.turn += 1;
    this.chart?.close();
  }

  /** The drawn data in numbers: [{run, metric, label, x, values, smoothed, low, high}]. */
  data() {
    return (this.chart?.lines ?? []).map(({ run, metric, label, x, y, smoothed, low, high }) => ({ run, metric, label, x, values: y, smoothed, low, high }));
  }

  #step(x) {
    return this.times ? this.times.step(x) : x;
  }

  /** A single run has a colour for each curve. Several runs have one colour each, and dashes distinguish their curves. */
  #colour() {
    const { runs } = this.shared;
    const labels = [...new Set(this.lines.map(line => line.name))];
    for (const line of this.lines) {
      const run = runs.find(one => one.id === line.run);
      const place = labels.indexOf(line.name);
      line.colour = colourOf(run, runs.length === 1 ? place : 0);
      line.dash = DASHES[(runs.length === 1 ? Math.floor(place / 8) : place) % DASHES.length];
    }
  }

  async #line(run, { name, label }) {
    const { store, runs, view } = this.shared;
    let curve = await store.curve(run.id, name);
    if (!curve || !curve.values.some(value => value !== null)) return null;
    const times = view.x === "time" ? await store.times(run.id) : null;
    if (view.x === "time" && !times) return null;
    if (view.zoomed && curve.low) {
      const [from, to] = times ? [times.step(view.from), times.step(view.to)] : [view.from, view.to];
      curve = (await store.curve(run.id, name, { from: Math.floor(from), to: Math.ceil(to) })) ?? curve;
    }
    const alone = runs.length === 1;
    return {
      run: run.id, metric: name, name: label, label: alone ? label : this.spec.curves.length > 1 ? `${run.name} · ${label}` : run.name,
      dots: name.startsWith("validation/"), x: times ? curve.steps.map(step => times.at(step)) : curve.steps, y: curve.values,
      low: curve.low, high: curve.high,
    };
  }

  #showLegend() {
    const alone = this.shared.runs.length === 1;
    const names = this.spec.curves.map(({ label }) => label).filter(label => this.lines.some(line => line.name === label));
    const key = JSON.stringify([names, [...this.off]]);
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.entries = new Map();
    if (names.length < 2) return this.legend.replaceChildren(h("span", { class: "alone" }, this.#alone(names[0])));
    this.legend.replaceChildren(...names.map(label => {
      const line = this.lines.find(one => one.name === label);
      const value = h("b", {});
      if (alone) this.entries.set(label, value);
      const dash = DASHES.indexOf(line.dash);
      return h("button", { type: "button", "aria-pressed": String(!this.off.has(label)), class: "entry", style: { "--run": alone ? line.colour : "var(--soft)" }, data: { dash: Math.max(dash, 0) }, onclick: () => this.#toggle(label) }, label, alone ? value : null);
    }));
  }

  /** Label of a panel with one curve: its metric, unless that is the title already. */
  #alone(label) {
    const metric = this.lines.find(line => line.name === label)?.metric ?? this.spec.curves[0].name;
    return metric === this.spec.title ? "" : metric;
  }

  /** The values at x, or the last values in view. */
  #read(x) {
    const to = this.shared.view.to ?? Infinity;
    const last = line => line.y.findLast((y, i) => y !== null && line.x[i] <= to);
    const found = x === null ? (this.chart?.lines ?? []).map(line => ({ line, y: last(line) })) : this.chart.at(x);
    this.entries?.forEach((element, label) => {
      const one = found.find(({ line }) => line.name === label);
      element.textContent = one ? short(one.y) : "";
    });
    this.value.textContent = found.length === 1 ? short(found[0].y) : "";
  }

  #toggle(label) {
    if (!this.off.delete(label)) this.off.add(label);
    this.draw();
    [...this.legend.querySelectorAll("button")].find(one => one.firstChild.textContent === label)?.focus();
  }

  #enlarge() {
    const wide = this.element.classList.toggle("wide");
    this.expand.setAttribute("aria-pressed", String(wide));
  }

  #inWords(lines) {
    if (!lines.length) return `${this.spec.title}: nothing to show`;
    const parts = lines.slice(0, 6).map(({ label, y }) => {
      const values = y.filter(value => value !== null);
      return `${label}: last ${short(values.at(-1))}, from ${short(Math.min(...values))} to ${short(Math.max(...values))}`;
    });
    return `${this.spec.title}. ${parts.join("; ")}. Arrow keys read single points.`;
  }
}

/** Kind of a run for panels. Losses of supervised training are comparable only with each other. */
export function kindOf(run) {
  return run.kind === "sft" ? "sft" : "rl";
}

/** A line for each bundle of runs and each curve: at each x the mean, the lowest and the highest value of its runs. `bundles`: [{name, colour, ids}]. */
export function averaged(lines, bundles) {
  const names = [...new Set(lines.map(line => line.name))];
  return bundles.flatMap(({ name: bundle, colour, ids }) => names.flatMap(name => {
    const among = lines.filter(line => line.name === name && ids.has(line.run));
    if (!among.length) return [];
    const at = new Map();
    for (const { x, y } of among) x.forEach((one, i) => y[i] !== null && at.set(one, [...(at.get(one) ?? []), y[i]]));
    const points = [...at].sort(([a], [b]) => a - b);
    const of = by => points.map(([, values]) => by(values));
    return [{
      ...among[0], run: among.map(line => line.run).join(), colour, label: names.length > 1 ? `${bundle} · ${name}` : `${bundle}, mean of ${among.length}`,
      x: points.map(([x]) => x), y: of(values => values.reduce((sum, one) => sum + one, 0) / values.length),
      low: among.length > 1 ? of(values => Math.min(...values)) : undefined, high: among.length > 1 ? of(values => Math.max(...values)) : undefined,
    }];
  }));
}

/** Leaves out curves that are zero throughout, if the panel has many and some are not zero. */
function telling(lines, curves) {
  const some = lines.filter(line => line.y.some(y => y));
  return curves > 3 && some.length ? some : lines;
}
