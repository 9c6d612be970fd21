// Filters of the listed rollouts: facets with counts, ranges, a group, a text, and the order.
import { button } from "viewer/controls";
import { h, settled } from "viewer/dom";
import { number } from "viewer/quantities";
import { oneLine } from "viewer/rollouts/visible_text";

const FACETS = [["phase", "Phase"], ["status", "Status"], ["task", "Task"], ["dropped", "Dropped"]];
const TEXTS = ["text", "group", "step_min", "step_max", "reward_min", "reward_max"];
const ORDERS = [
  ["", "in order"], ["index desc", "latest first"], ["reward desc", "best reward first"], ["reward asc", "worst reward first"],
  ["advantage desc", "highest advantage first"], ["advantage asc", "lowest advantage first"], ["num_completion_tokens desc", "longest first"],
  ["num_completion_tokens asc", "shortest first"], ["turns desc", "most turns first"],
];
const NAMES = [...FACETS.map(([name]) => name), ...TEXTS];
const DROPPED = { false: null, true: null }; // the answer has no counts of these
const LABELS = { dropped: { true: "dropped", false: "kept" } };

export class Filters {
  /** `changed()` is called when the reader has changed a filter. The state keeps filters under "rollouts.<name>". */
  constructor(state, changed) {
    this.state = state;
    this.changed = changed;
    this.inputs = new Map(TEXTS.map(name => [name, this.#input(name)]));
    this.facets = new Map(FACETS.map(([name, label]) => [name, h("div", { class: "facet", role: "group", "aria-label": label })]));
    this.order = h("select", { "aria-label": "Order", onchange: () => this.#set({ order: this.order.value }) },
      ORDERS.map(([value, label]) => h("option", { value }, label)));
    this.order.value = this.#get("order") ?? "";
    this.clearing = button("Clear filters", () => this.clear(), { class: "quiet", hidden: true });
    this.element = h("form", { class: "filters", "aria-label": "Filters", onsubmit: event => event.preventDefault() },
      h("div", { class: "filter-main" }, this.inputs.get("text"), this.order),
      h("details", { class: "filter-more", open: innerWidth > 700 }, h("summary", {}, "Filters"),
        FACETS.map(([name, label]) => h("div", { class: "filter-row" }, h("span", { class: "soft" }, label), this.facets.get(name))),
        range("Reward", this.inputs.get("reward_min"), this.inputs.get("reward_max")), range("Step", this.inputs.get("step_min"), this.inputs.get("step_max")),
        h("div", { class: "filter-row" }, h("span", { class: "soft" }, "Group"), this.inputs.get("group"), this.clearing)));
  }

  /** The filters in the form of the API. */
  query() {
    const [sort, direction] = (this.#get("order") ?? "").split(" ");
    const filters = Object.fromEntries(NAMES.map(name => [name, this.#get(name)]).filter(([, value]) => value !== null));
    return sort ? { ...filters, sort, descending: direction === "desc" } : filters;
  }

  /** Shows the facets and ranges of an answer. */
  show({ facets = {}, ranges = {} }) {
    for (const [name] of FACETS) this.#showFacet(name, name === "dropped" ? DROPPED : facets[name]);
    for (const name of ["step", "reward"]) {
      const range = ranges[name];
      for (const [end, i] of [["min", 0], ["max", 1]]) this.inputs.get(`${name}_${end}`).placeholder = range ? number(range[i]) : "";
    }
    this.clearing.hidden = !NAMES.some(name => this.#get(name) !== null);
  }

  clear() {
    for (const input of this.inputs.values()) input.value = "";
    this.#set(Object.fromEntries(NAMES.map(name => [name, null])));
  }

  /** Focuses the field for searching text. */
  search() {
    this.inputs.get("text").focus();
    this.inputs.get("text").select();
  }

  #showFacet(name, counts) {
    const chosen = this.#get(name);
    const values = Object.entries(counts ?? {}).filter(([value, times]) => times !== 0 || value === chosen);
    if (chosen !== null && !values.some(([value]) => value === chosen)) values.push([chosen, 0]);
    const box = this.facets.get(name);
    box.parentElement.hidden = values.length < 2 && chosen === null;
    const focused = box.contains(document.activeElement) ? document.activeElement.dataset.value : null;
    box.replaceChildren(...values.map(([value, times]) => button(
      [oneLine(LABELS[name]?.[value] ?? value.replaceAll("_", " ")), times !== null && h("span", { class: "times" }, times.toLocaleString("en"))],
      () => this.#set({ [name]: value === chosen ? null : value }),
      { "aria-pressed": String(value === chosen), data: { value } })));
    if (focused !== null) [...box.children].find(one => one.dataset.value === focused)?.focus();
  }

  #input(name) {
    const words = { text: ["search", "Search the text   ( / )"], group: ["text", "its id"] }[name] ?? ["number", ""];
    const update = settled(() => this.#set({ [name]: input.value.trim() || null }), 150);
    const input = h("input", { type: words[0], step: "any", placeholder: words[1], "aria-label": name.replaceAll("_", " "), autocomplete: "off", spellcheck: "false", oninput: update });
    input.value = this.#get(name) ?? "";
    return input;
  }

  #get(name) {
    return this.state.get(`rollouts.${name}`);
  }

  #set(changes) {
    this.state.set(Object.fromEntries(Object.entries(changes).map(([name, value]) => [`rollouts.${name}`, value])));
    this.changed();
  }
}

function range(label, low, high) {
  return h("div", { class: "filter-row" }, h("span", { class: "soft" }, label), low, h("span", { class: "soft" }, "to"), high);
}
