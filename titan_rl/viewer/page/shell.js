// The frame around the tabs: their names, the list of runs, the theme, and updates of a run in progress.
import { h, svg } from "viewer/dom";
import { showHelp } from "viewer/help";
import { Cursor } from "viewer/cursor";
import { KeyList } from "viewer/keys";
import { RunList } from "viewer/runs";
import { State } from "viewer/state";
import { TABS, shownRuns } from "viewer/tabs";
import { THEMES, chooseTheme, chosenTheme } from "viewer/theme";

const LISTENING_MS = 2000; // longest wait for the first event; changes before it would be missed
const EVERYTHING = ["metrics", "rollouts", "timeline", "state"];

export class Shell {
  constructor(container, source) {
    this.source = source;
    this.state = new State();
    this.cursor = new Cursor(this.state);
    this.keys = new KeyList();
    this.view = null;
    this.opened = null; // id of the tab
    this.ready = false; // whether the first tab is open
    this.settled = false; // whether the tab shows the target of the link
    this.tabs = TABS.map((tab, i) => this.#tabButton(tab, i));
    this.connection = h("span", { class: "connection", role: "status" });
    this.panel = h("main", { id: "panel", role: "tabpanel", tabindex: "-1" });
    this.list = new RunList(this.state, source, () => this.#reopen());
    this.at = h("button", { type: "button", class: "chip at", hidden: true, title: "The step that all tabs mark; click to clear it (key x)", onclick: () => this.cursor.choose(null) });
    this.cursor.addEventListener("change", () => this.#sayStep());
    this.help = h("button", { type: "button", class: "quiet", "aria-label": "Keys", title: "Keys (key ?)", onclick: () => this.#toggleKeys() }, "?");
    this.theme = h("button", { type: "button", class: "quiet theme", onclick: () => this.#nextTheme() });
    container.replaceChildren(
      h("a", { class: "skip", href: "#panel", onclick: event => this.#skip(event) }, "Skip to the content"),
      h("header", { class: "top" },
        h("span", { class: "brand" }, mark(), "titan_rl"),
        h("div", { role: "tablist", "aria-label": "Views", class: "tabs", onkeydown: event => this.#arrows(event) }, this.tabs),
        h("span", { class: "spring" }), this.at, this.connection, this.help, this.theme),
      h("div", { class: "body" }, this.list.element, this.panel), this.keys.element,
      source.leftOut?.length ? h("p", { class: "left-out" }, source.leftOut.join(" ")) : "");
    showHelp(container);
    this.#sayTheme();
    this.#sayStep();
    document.addEventListener("keydown", event => this.#key(event));
    this.panel.append(h("p", { class: "empty" }, "Reading the runs …"));
  }

  /** Resolves when the first tab is open. */
  async start() {
    document.addEventListener("theme", () => this.view?.update({ theme: true }));
    this.acting = this.#begin(); // events are handled afterwards, one after another
    await this.acting;
  }

  async #begin() {
    try {
      await this.#listening();
      await this.refreshRuns();
    } catch (error) {
      this.panel.replaceChildren(h("p", { class: "empty bad", role: "alert" }, `The runs could not be read: ${error.message}`));
      this.ready = this.settled = true;
      return;
    }
    this.#show();
    this.state.addEventListener("change", () => this.#show({ again: true }));
    this.ready = true;
    await this.view?.opened;
    this.settled = true;
  }

  /** Resolves when changes are reported, or when that takes too long. */
  #listening() {
    if (!this.source.live) return Promise.resolve();
    return new Promise(resolve => {
      let first = true;
      setTimeout(resolve, LISTENING_MS);
      this.source.listen(word => {
        if (!first) this.acting = this.acting.then(() => this.#onEvent(word)).catch(console.error);
        first = false;
        resolve();
      }, connected => this.#connected(connected));
    });
  }

  async refreshRuns() {
    const { runs } = await this.source.runs();
    this.list.show(runs);
    if (this.isConnected !== undefined) this.#sayLive();
  }

  #tabButton({ id, label }, i) {
    return h("button", {
      type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "panel", "aria-selected": "false", tabindex: i ? "-1" : "0",
      data: { label }, onclick: () => this.open(id),
    }, label);
  }

  /** Opens the tab with this id. */
  open(id) {
    if (id === this.opened) return;
    this.state.set({ tab: id }, { entry: true });
    if (this.ready) this.#show();
  }

  #arrows(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const at = this.tabs.indexOf(document.activeElement);
    const to = event.key === "Home" ? 0 : event.key === "End" ? this.tabs.length - 1 : at + moves[event.key];
    if (at < 0 || Number.isNaN(to)) return;
    event.preventDefault();
    const next = (to + this.tabs.length) % this.tabs.length;
    this.tabs[next].focus();
    this.open(TABS[next].id);
  }

  #key(event) {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (typing || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const tab = TABS[Number(event.key) - 1];
    if (event.key === "?") this.#toggleKeys();
    else if (this.keys.element.open) return;
    else if (tab) this.open(tab.id);
    else if (event.key === "r") this.list.focus();
    else if (event.key === "x") this.cursor.choose(null);
    else return;
    event.preventDefault();
  }

  #toggleKeys() {
    this.keys.toggle(TABS.find(({ id }) => id === this.opened) ?? TABS[0]);
  }

  #sayStep() {
    const { chosen } = this.cursor;
    this.at.hidden = chosen === null;
    this.at.textContent = `step ${chosen ?? ""} ×`;
  }

  #reopen() {
    this.#show({ again: true });
  }

  #show({ again = false } = {}) {
    const wanted = this.state.get("tab");
    const tab = TABS.find(({ id }) => id === wanted) ?? TABS[0];
    if (again) this.list.readSelection();
    if (tab.id === this.opened && !again) return;
    this.view?.close();
    this.cursor.hover(null);
    TABS.forEach(({ id }, i) => {
      this.tabs[i].setAttribute("aria-selected", String(id === tab.id));
      this.tabs[i].tabIndex = id === tab.id ? 0 : -1;
    });
    this.panel.setAttribute("aria-labelledby", `tab-${tab.id}`);
    this.panel.dataset.tab = tab.id;
    this.panel.replaceChildren();
    if (this.isConnected !== undefined) this.#sayLive();
    this.opened = tab.id;
    const runs = this.list.selected();
    if (runs.length) this.view = tab.open(this.panel, { source: this.source, runs: shownRuns(tab, runs), whole: this.#whole(), state: this.state, cursor: this.cursor, bundles: this.list.bundles() });
    else this.panel.append(h("p", { class: "empty", role: "status" }, this.#whyEmpty()));
    if (!runs.length) this.view = null;
    document.title = runs.length === 1 ? `${runs[0].name} · titan_rl` : "titan_rl";
  }

  #whyEmpty() {
    if (!this.list.runs.length) return "There is no run here yet.";
    return this.list.missing.length ? `There is no run ${this.list.missing.join(", ")} here.` : "No run is selected.";
  }

  async #onEvent(word) {
    const before = this.#watched();
    await this.refreshRuns().catch(() => {});
    const runs = this.#watched();
    if (runs.map(run => run.id).join() !== before.map(run => run.id).join() || !this.view) {
      if (runs.length || this.view) this.#reopen();
      return;
    }
    if (!word.changed.length) runs.forEach(run => this.view.update({ run: run.id, changed: EVERYTHING, runs })); // the connection is back
    else if (runs.some(run => run.id === word.run)) this.view.update({ ...word, runs, whole: this.#whole() });
    runs.filter((run, i) => run.state !== before[i].state).forEach(run => this.view.update({ run: run.id, changed: ["state"], runs }));
  }

  /** The runs that the open tab shows. */
  #watched() {
    return shownRuns(TABS.find(({ id }) => id === this.opened) ?? TABS[0], this.list.selected());
  }

  /** The run of several adapters, if it alone is selected. */
  #whole() {
    const [run, ...others] = this.list.selected();
    return run?.adapters.length && !others.length ? run : null;
  }

  #connected(connected) {
    this.isConnected = connected;
    this.#sayLive();
  }

  #sayLive() {
    const going = this.list.selected().some(run => run.state === "running");
    this.connection.textContent = !this.isConnected ? "not connected" : going ? "live" : "";
    this.connection.classList.toggle("off", !this.isConnected);
  }

  #nextTheme() {
    chooseTheme(THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length]);
    this.#sayTheme();
  }

  #sayTheme() {
    const theme = chosenTheme();
    this.theme.textContent = { system: "◐", light: "○", dark: "●" }[theme];
    this.theme.setAttribute("aria-label", `Theme: ${theme}`);
    this.theme.title = `Theme: ${theme}`;
  }

  #skip(event) {
    event.preventDefault();
    this.panel.focus();
  }
}

function mark() {
  const line = { d: "M1 13 6 7l3 3 6-8", fill: "none", stroke: "var(--accent)", "stroke-width": "2.4", "stroke-linecap": "round", "stroke-linejoin": "round" };
  return svg("svg", { viewBox: "0 0 16 16", width: "16", height: "16", "aria-hidden": "true" }, svg("path", line));
}
