// The list of runs to choose from: filtered, sorted, grouped, and with names given by the reader. The hash keeps the selected runs under "runs".
import { button } from "viewer/controls";
import { h, settled } from "viewer/dom";
import { moment, seconds as duration, whole } from "viewer/quantities";
import { RunFilter, groupsOf, groupings, sorted } from "viewer/workspace";

const COLOURS = 8;
const NAMES = "titan-rl-names"; // in the storage: {run id: name}
const ORDERS = [["", "newest first"], ["oldest", "oldest first"], ["name", "by name"], ["steps", "most steps first"], ["seconds", "longest first"]];

export class RunList {
  /** `changed` is called when the reader has changed the selection or the appearance of runs; `source` provides their settings. */
  constructor(state, source, changed) {
    Object.assign(this, { state, source, changed });
    this.runs = [];
    this.settings = {}; // by run, once they have been requested
    this.chosen = new Set();
    this.missing = []; // ids in the selection that do not exist
    this.colours = new Map();
    this.items = new Map(); // id -> {element, box, name, about}
    this.names = storedNames();
    this.list = h("ul", { id: "run-list" });
    this.title = button("Runs", () => this.#fold(), { class: "quiet", "aria-expanded": "false", "aria-controls": "run-list" });
    this.search = h("input", {
      type: "search", placeholder: "Filter: sort lr>1e-4", "aria-label": "Search runs", value: state.get("runs.filter", ""), spellcheck: "false", autocomplete: "off",
      title: "Words of the name, state, kind or task; /regex/; and conditions on name, state, kind, task, steps, seconds or a setting: state=failed steps>100 training.lr<=1e-4 task!=sort",
      oninput: settled(() => this.#filter(), 120), onkeydown: event => event.key === "Escape" && (this.search.value ? (this.search.value = "", this.#filter()) : this.search.blur()),
    });
    this.order = h("select", { "aria-label": "Sort runs", onchange: () => this.#set({ "runs.sort": this.order.value }) }, ORDERS.map(([value, label]) => h("option", { value }, label)));
    this.group = h("select", { "aria-label": "Group runs by", onchange: () => this.#set({ "runs.group": this.group.value }, true) });
    this.mean = button("mean of each group", () => this.#set({ "runs.mean": this.state.get("runs.mean") ? null : 1 }, true), { title: "Draw a curve for each group: the mean of its selected runs, and the range they span" });
    this.status = h("p", { class: "soft filter-note", role: "status" });
    this.bar = h("div", { class: "run-bar" }, this.search, h("div", { class: "run-choices" }, this.order, this.group),
      h("div", { class: "run-choices" }, button("all", () => this.#selectShown(true), { class: "quiet", title: "Select all that are listed" }), button("none", () => this.#selectShown(false), { class: "quiet", title: "Select none of those listed" }), this.mean), this.status);
    this.element = h("aside", { class: "runs folded", "aria-label": "Runs", hidden: true }, h("h2", {}, this.title), this.bar, this.list);
  }

  /** Shows the runs in the order given. A run keeps its colour for as long as the page is open. */
  show(runs) {
    const before = this.runs.map(run => run.id).join();
    this.runs = runs.map(run => ({ ...run, folder: run.name, name: this.names[run.id] ?? run.name, colour: this.#colour(run.id) }));
    if (this.runs.map(run => run.id).join() !== before) {
      this.items = new Map(this.runs.map(run => [run.id, this.#item(run)]));
      this.readSelection();
      this.settingsAsked = null;
      this.#arrange();
      if (this.runs.length > 1) this.#askSettings();
    }
    for (const run of this.runs) tell(this.items.get(run.id), run);
  }

  /** The selected runs, in the order of the list. Each has the runs of its `adapters`, which may be none. */
  selected() {
    return this.#sorted().filter(run => this.chosen.has(run.id)).map(run => ({ ...run, adapters: this.runs.filter(one => one.parent === run.id) }));
  }

  /** Groups of selected runs whose curves are averaged, [{name, colour, ids}]; null if each run has its own curves. */
  bundles() {
    const by = this.state.get("runs.group");
    if (!by || !this.state.get("runs.mean")) return null;
    return groupsOf(this.selected(), by, this.settings).map(({ name, runs }) => ({ name, colour: runs[0].colour, ids: new Set(runs.map(run => run.id)) }));
  }

  /**
   * Selects the runs in the hash. If there are none, selects the runs named on the command line, or else the first. The hash then
   * keeps them, so that a link leads to the same runs, and later runs do not replace them.
   */
  readSelection() {
    if (this.state.get("runs") === null && this.runs.length) {
      const named = this.runs.filter(run => run.named).slice(0, COLOURS);
      this.state.set({ runs: (named.length ? named : this.runs.slice(0, 1)).map(run => run.id).join(",") });
    }
    const wanted = this.state.get("runs", "").split(",");
    const known = new Set(this.runs.map(run => run.id));
    this.chosen = new Set(wanted.filter(id => known.has(id)));
    this.missing = wanted.filter(id => id && id !== "none" && !known.has(id));
    this.element.hidden = this.runs.length < 2 && (this.chosen.size > 0 || !this.runs.length);
    this.#mark();
  }

  /** Focuses the field for searching runs. */
  focus() {
    if (this.element.classList.contains("folded")) this.#fold();
    this.search.focus();
    this.search.select();
  }

  #sorted() {
    return sorted(this.runs, this.state.get("runs.sort", ""));
  }

  #shown() {
    const filter = new RunFilter(this.search.value);
    return this.#sorted().filter(run => filter.fits(run, this.settings[run.id]));
  }

  /** Lists the runs that match the filter, in their groups. */
  #arrange() {
    const shown = this.#shown();
    const by = this.state.get("runs.group", "");
    this.order.value = this.state.get("runs.sort", "");
    const choices = groupings(this.runs, this.settings);
    this.group.replaceChildren(h("option", { value: "" }, "no groups"), ...(by && !choices.includes(by) ? [by, ...choices] : choices).map(value => h("option", { value }, `by ${value}`)));
    this.group.value = by;
    this.mean.hidden = !by;
    this.mean.setAttribute("aria-pressed", String(Boolean(this.state.get("runs.mean"))));
    this.status.textContent = shown.length < this.runs.length ? `${shown.length} of ${this.runs.length} fit the filter` : "";
    const sections = by ? groupsOf(shown, by, this.settings).map(({ name, runs }) => this.#section(name, runs)) : [shown.map(run => this.items.get(run.id).element)];
    this.list.replaceChildren(...sections.flat());
  }

  #section(name, runs) {
    const all = runs.every(run => this.chosen.has(run.id));
    const box = h("input", { type: "checkbox", onchange: () => this.#select(runs, box.checked) });
    box.checked = all;
    box.indeterminate = !all && runs.some(run => this.chosen.has(run.id));
    return [h("li", { class: "run-group" }, h("label", {}, box, h("b", {}, name), h("span", { class: "about" }, `${runs.length} run${runs.length === 1 ? "" : "s"}`))), ...runs.map(run => this.items.get(run.id).element)];
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
    const box = h("input", { type: "checkbox", onchange: () => this.#select([run], box.checked) });
    const name = h("span", { class: "name" }, run.name);
    const about = h("span", { class: "about" });
    const rename = button("✎", () => this.#rename(run.id), { class: "quiet rename", title: "Rename", "aria-label": `Rename ${run.name}` });
    const only = button("only", () => this.#only(run.id), { class: "quiet rename", title: "Show this run alone", "aria-label": `Only ${run.name}` });
    const element = h("li", { class: run.parent ? "of-run" : null }, h("label", { style: { "--run": run.colour } }, box, name, about), h("span", { class: "run-acts" }, only, rename));
    return { element, box, name, about };
  }

  #select(runs, on) {
    for (const { id } of runs) {
      if (on) this.chosen.add(id);
      else this.chosen.delete(id);
    }
    this.state.set({ runs: this.selected().map(run => run.id).join(",") || "none" });
    this.#mark();
    if (this.state.get("runs.group")) this.#arrange();
    this.changed();
  }

  #selectShown(on) {
    this.#select(this.#shown(), on);
  }

  #only(id) {
    this.chosen.clear();
    this.#select(this.runs.filter(run => run.id === id), true);
  }

  /** Lets the reader name a run. This browser keeps the name; an empty name restores the folder's. */
  #rename(id) {
    const item = this.items.get(id);
    const run = this.runs.find(one => one.id === id);
    const input = h("input", { type: "text", value: run.name, "aria-label": `Name of ${run.folder}`, spellcheck: "false" });
    const label = item.name.parentElement;
    let ended = false; // removing the input triggers "blur", which would end it again
    const end = keep => {
      if (ended) return;
      ended = true;
      if (keep) {
        const name = input.value.trim();
        if (name && name !== run.folder) this.names[id] = name;
        else delete this.names[id];
        storeNames(this.names);
      }
      input.replaceWith(label);
      for (const one of this.runs) if (one.id === id) one.name = this.names[id] ?? one.folder;
      tell(item, this.runs.find(one => one.id === id));
      if (keep) this.changed();
    };
    input.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
      event.stopPropagation();
    });
    input.addEventListener("blur", () => end(true));
    label.replaceWith(input);
    input.focus();
    input.select();
  }

  #filter() {
    this.state.set({ "runs.filter": this.search.value.trim() });
    if (RunFilter.asksForSettings(this.search.value)) this.#askSettings();
    this.#arrange();
  }

  #set(values, redraw = false) {
    this.state.set(values);
    this.#arrange();
    if (redraw || this.chosen.size > 1) this.changed();
  }

  /** Requests the settings of all runs, for grouping and filtering. One request for the same runs. */
  #askSettings() {
    this.settingsAsked ??= this.source.settings().then(({ settings }) => {
      this.settings = settings;
      this.#arrange();
      if (this.bundles()) this.changed();
    }).catch(() => { this.settingsAsked = null; });
  }

  #fold() {
    const folded = this.element.classList.toggle("folded");
    this.title.setAttribute("aria-expanded", String(!folded));
  }
}

/** The colour of the `by`th curve of a single run, for example "var(--run-3)". */
export function colourOf(run, by) {
  const first = Number(/\d+/.exec(run.colour)[0]) - 1;
  return `var(--run-${((first + by) % COLOURS) + 1})`;
}

function tell({ name, about }, { name: called, folder, state, steps, steps_planned: planned, seconds, began }) {
  const progress = state === "running" && planned ? `step ${whole(steps)} of ${whole(planned)}` : `${whole(steps)} steps`;
  name.textContent = called;
  about.textContent = [state, progress, duration(seconds)].join(" · ");
  about.title = [called === folder ? "" : folder, began ? `began ${moment(began)}` : ""].filter(Boolean).join(", ");
}

function storedNames() {
  try {
    const found = JSON.parse(localStorage.getItem(NAMES) ?? "{}");
    return typeof found === "object" && found !== null ? found : {};
  } catch {
    return {}; // storage may be forbidden
  }
}

function storeNames(names) {
  try {
    localStorage.setItem(NAMES, JSON.stringify(names));
  } catch {
    // then they last only as long as the page
  }
}
