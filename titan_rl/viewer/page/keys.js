// The dialog that lists the keys, which "?" opens.
import { button } from "viewer/controls";
import { h } from "viewer/dom";

const EVERYWHERE = [
  ["?", "show or hide this list"], ["1 … 5", "open a tab"], ["← →", "next tab, where a tab has the focus"], ["r", "search runs"],
  ["x", "clear the chosen step"], ["/", "search what the tab shows"], ["Esc", "close, clear or go back"],
];
const OF_TABS = {
  overview: [["← →", "move from step to step, where the chart has the focus"], ["Enter", "choose the step, where the chart has the focus"], ["p  n", "previous or next prompt"]],
  curves: [["← →", "move from point to point, where a chart has the focus"], ["Enter", "choose the step, where a chart has the focus"], ["Esc", "zoom out"], ["drag", "zoom all charts"], ["click", "choose the step"]],
  rollouts: [["j  k", "next or previous rollout"], ["Enter", "open it"], ["m  t  s", "its messages, tokens or siblings"], ["[  ]", "better or worse sibling"], ["c", "change what the colours of tokens show"]],
  timeline: [["+  −", "zoom"], ["← →", "move"], ["↑ ↓", "choose a lane"], ["n  p", "next or previous span"], ["0", "see the whole run"], ["Enter", "zoom to the span"]],
  settings: [],
};

export class KeyList {
  constructor() {
    this.body = h("div", { class: "key-lists" });
    this.element = h("dialog", { class: "keys", "aria-label": "Keys", onkeydown: event => this.#key(event), onclick: event => event.target === this.element && this.element.close() },
      h("header", {}, h("h2", {}, "Keys"), h("span", { class: "spring" }), button("Close", () => this.element.close(), { class: "quiet" })), this.body);
  }

  /** Shows or hides the list of the keys that work everywhere and the keys of a tab. */
  toggle({ id, label }) {
    if (this.element.open) return this.element.close();
    this.body.replaceChildren(list("Everywhere", EVERYWHERE), ...(OF_TABS[id]?.length ? [list(label, OF_TABS[id])] : []));
    this.element.showModal();
  }

  /** Keeps keys from the tab behind the list. A closed list may keep the focus until the next frame, and then lets keys pass. */
  #key(event) {
    if (!this.element.open) return;
    event.stopPropagation();
    if (event.key === "?" || event.key === "Escape") {
      event.preventDefault();
      this.element.close();
    }
  }
}

function list(title, keys) {
  return h("section", {}, h("h3", {}, title), h("dl", {}, keys.map(([key, does]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)))));
}
