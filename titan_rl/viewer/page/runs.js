// The runs to choose from: a checkbox and a colour each. Which are selected stands in the hash, under "runs".
import { moment, seconds as duration, whole } from "viewer/quantities";
import { h } from "viewer/dom";

const COLOURS = 8;
const MANY = 12; // from so many on they can be searched

export class RunList {
  /** `changed` is called when the reader has selected others. */
  constructor(state, changed) {
    this.state = state;
    this.changed = changed;
    this.runs = [];
    this.chosen = new Set();
    this.missing = []; // ids that are asked for and that there are not
    this.colours = new Map();
    this.items = new Map(); // id -> {element, box, about}
    this.list = h("ul", { id: "run-list" });
    this.title = h("button", { type: "button", class: "quiet", "aria-expanded": "false", "aria-controls": "run-list", onclick: () => this.#fold() }, "Runs");
    this.search = h("input", { type: "search", placeholder: "Search runs", "aria-label": "Search runs", hidden: true, oninput: () => this.#filter() });
    this.element = h("aside", { class: "runs folded", "aria-label": "Runs", hidden: true }, h("h2", {}, this.title), this.search, this.list);
  }

  /** Shows the runs in the order given. A run keeps its colour for as long as the page is open. */
  show(runs) {
    const before = this.runs.map(run => run.id).join();
    this.runs = runs.map(run => ({ ...run, colour: this.#colour(run.id) }));
    if (this.runs.map(run => run.id).join() !== before) {
      this.items = new Map(this.runs.map(run => [run.id, this.#item(run)]));
      this.list.replaceChildren(...[...this.items.values()].map(item => item.element));
      this.search.hidden = this.runs.length < MANY;
      this.readSelection();
      this.#filter();
    }
    for (const run of this.runs) tell(this.items.get(run.id).about, run);
  }

  /** The selected runs, in the order of the list. */
  selected() {
    return this.runs.filter(run => this.chosen.has(run.id));
  }

  /**
   * Selects what the hash says. Where it says nothing, those that were named when the page was made, or else the first;
   * the hash then says that: a link leads to the same runs, and no run that begins later takes their place.
   */
  readSelection() {
    if (this.state.get("runs") === null && this.runs.length) {
      const named = this.runs.filter(run => run.named).slice(0, COLOURS);
      this.state.set({ runs: (named.length ? named : this.runs.slice(0, 1)).map(run => run.id).join(",") });
    }
    const asked = this.state.get("runs", "").split(",");
    const known = new Set(this.runs.map(run => run.id));
    this.chosen = new Set(asked.filter(id => known.has(id)));
    this.missing = asked.filter(id => id && id !== "none" && !known.has(id));
    this.element.hidden = this.runs.length < 2 && (this.chosen.size > 0 || !this.runs.length);
    this.#mark();
  }

  #mark() {
    for (const [id, { box }] of this.items) box.checked = this.chosen.has(id);
    this.title.textContent = `Runs · ${this.chosen.size} of ${this.runs.length}`;
  }

  #colour(id) {
    if (!this.colours.has(id)) this.colours.set(id, `var(--run-${(this.colours.size % COLOURS) + 1})`);
    return this.colours.get(id);
  }

  #item(run) {
    const box = h("input", { type: "checkbox", onchange: () => this.#toggle(run.id, box.checked) });
    const about = h("span", { class: "about" });
    const element = h("li", {}, h("label", { style: { "--run": run.colour } }, box, h("span", { class: "name" }, run.name), about));
    return { element, box, about };
  }

  #toggle(id, on) {
    if (on) this.chosen.add(id);
    else this.chosen.delete(id);
    this.state.set({ runs: this.selected().map(run => run.id).join(",") || "none" });
    this.#mark();
    this.changed();
  }

  #filter() {
    const words = this.search.value.trim().toLowerCase();
    for (const run of this.runs) this.items.get(run.id).element.hidden = !run.name.toLowerCase().includes(words);
  }

  #fold() {
    const folded = this.element.classList.toggle("folded");
    this.title.setAttribute("aria-expanded", String(!folded));
  }
}

/** The colour of the `by`th curve of a run that is alone: "var(--run-3)", say. */
export function colourOf(run, by) {
  const first = Number(/\d+/.exec(run.colour)[0]) - 1;
  return `var(--run-${((first + by) % COLOURS) + 1})`;
}

function tell(element, { state, steps, steps_planned: planned, seconds, began }) {
  const progress = state === "running" && planned ? `step ${whole(steps)} of ${whole(planned)}` : `${whole(steps)} steps`;
  element.textContent = [state, progress, duration(seconds)].join(" · ");
  element.title = began ? `began ${moment(began)}` : "";
}
