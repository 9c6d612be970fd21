// Comparison of several runs, a line each: verdict, held-out figures against a baseline, tiles, and the settings that differ.
import { h } from "viewer/dom";
import { link } from "viewer/links";
import { figure, lowerIsBetter } from "viewer/overview/parts";
import { seconds as duration, whole } from "viewer/quantities";
import { rowsOf } from "viewer/settings/tab";

const MOST_SETTINGS = 8;

export class Comparison {
  /** The hash keeps the sort column under "sort", and the run that the others are compared with under "baseline". */
  constructor(state, rebased) {
    Object.assign(this, { state, rebased }); // `rebased` is called when the baseline has changed
    this.element = h("div", { class: "card comparison", tabindex: "0", role: "region", "aria-label": "The runs compared" });
  }

  show(runs, summaries) {
    Object.assign(this, { runs, summaries });
    this.#draw();
  }

  #draw() {
    const columns = this.#columns();
    const [sorted, direction] = this.state.get("sort", "").split(/ (?=asc$|desc$)/);
    const by = columns.find(({ label }) => label === sorted);
    const order = this.runs.map((_, i) => i);
    if (by) order.sort((a, b) => (direction === "asc" ? 1 : -1) * compared(by.of(a), by.of(b)));
    const head = ({ label, title }) => h("th", { scope: "col", "aria-sort": by?.label === label ? (direction === "asc" ? "ascending" : "descending") : null },
      h("button", { type: "button", class: label.includes(".") ? "quiet setting" : "quiet", title: title ?? `Sort by ${label}`, onclick: () => this.#sort(label) }, label.split(/(?<=\.)/).flatMap(part => [part, h("wbr")]), by?.label === label ? (direction === "asc" ? " ▲" : " ▼") : ""));
    this.element.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, columns.map(head))),
      h("tbody", {}, order.map(i => h("tr", {}, columns.map((column, place) => h(place ? "td" : "th", place ? {} : { scope: "row" }, column.show(i))))))));
  }

  #columns() {
    const { runs, summaries } = this;
    const base = Math.max(0, runs.findIndex(run => run.id === this.state.get("baseline")));
    const held = (name, lower) => {
      const trends = summaries.map(({ trend }) => (trend && lowerIsBetter(trend) === lower ? trend : null));
      if (!trends.some(Boolean)) return [];
      const noise = i => 2 * Math.hypot(trends[i]?.error ?? 0, trends[base]?.error ?? 0) / Math.SQRT2; // of one measurement each
      const difference = i => (trends[i] && trends[base] && i !== base ? trends[i].after - trends[base].after : null);
      return [
        { label: name, of: i => trends[i]?.after, show: i => (trends[i] ? `${figure(trends[i].before)} → ${figure(trends[i].after)}` : "–") },
        ...(trends.filter(Boolean).length < 2 ? [] : [{ label: `${name}, to baseline`, of: difference, show: i => (i === base && trends[i] ? h("span", { class: "soft" }, "baseline") : difference(i) === null ? "–"
          : h("span", { class: Math.abs(difference(i)) <= noise(i) ? "soft" : (lower ? -1 : 1) * difference(i) > 0 ? "good" : "bad" }, `${difference(i) < 0 ? "−" : "+"}${figure(Math.abs(difference(i)))}`)) }]),
      ];
    };
    const labels = [...new Set(summaries.flatMap(({ tiles = [] }) => tiles.map(({ label }) => label)))];
    const tile = (i, label) => summaries[i].tiles?.find(one => one.label === label)?.value;
    const settings = rowsOf(summaries.map(({ settings: one }) => one ?? {})).filter(row => row.differs).slice(0, MOST_SETTINGS);
    const verdict = i => summaries[i].verdicts?.[0];
    return [
      { label: "Run", of: i => runs[i].name, show: i => h("button", { type: "button", class: "quiet base", "aria-pressed": String(i === base), title: "Compare the others with this run", onclick: () => this.#rebase(runs[i].id) }, h("span", { class: "dotted", style: { "--run": runs[i].colour } }, runs[i].name)) },
      ...(runs.some(run => run.parent) ? [{ label: "Show", of: i => runs[i].name, show: i => link("alone", this.state.get("tab", "overview"), { runs: runs[i].id }, { "aria-label": `Show ${runs[i].name} alone` }) }] : []),
      { label: "Verdict", of: i => verdict(i)?.title, show: i => (verdict(i) ? h("span", { class: `tone ${verdict(i).tone}`, title: verdict(i).text }, verdict(i).title) : "–") },
      ...held("Held-out reward", false), ...held("Held-out loss", true),
      ...settings.map(({ name, values }) => ({ label: name, title: `Setting ${name}: sort by it`, of: i => numberOf(values[i]), show: i => values[i] })),
      { label: "State", of: i => runs[i].state, show: i => h("span", { class: `pill ${runs[i].state}` }, runs[i].state) },
      { label: "Steps", of: i => runs[i].steps, show: i => whole(runs[i].steps) }, { label: "Time", of: i => runs[i].seconds, show: i => duration(runs[i].seconds) },
      ...labels.map(label => ({ label, of: i => numberOf(tile(i, label)), show: i => tile(i, label) ?? "–" })),
    ];
  }

  #sort(label) {
    const [sorted, direction] = this.state.get("sort", "").split(/ (?=asc$|desc$)/);
    this.state.set({ sort: sorted !== label ? `${label} desc` : direction === "desc" ? `${label} asc` : null });
    this.#draw();
  }

  #rebase(id) {
    this.state.set({ baseline: id });
    this.#draw();
    this.rebased();
  }
}

/** The number at the beginning of a text; the text itself if there is none. */
function numberOf(text) {
  const found = Number.parseFloat(String(text ?? "").replaceAll(",", "").replace("−", "-"));
  return Number.isNaN(found) ? text : found;
}

/** Compares two values. Missing values are the lowest. */
function compared(a, b) {
  if (a == null || b == null) return (a != null) - (b != null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}
