// The rollouts of a run: filters, a list, and one rollout in full.
import { h, settled } from "viewer/dom";
import { percent } from "viewer/quantities";
import { Detail } from "viewer/rollouts/detail";
import { Filters } from "viewer/rollouts/filters";
import { RolloutList } from "viewer/rollouts/list";

const WIDE = 900; // pixels from which on list and rollout are side by side; the same as in rollouts.css

export function open(container, { source, runs, state, cursor }) {
  const tab = new RolloutsTab(source, runs, state, cursor);
  container.append(tab.element);
  tab.opened = tab.start();
  return tab;
}

class RolloutsTab {
  constructor(source, runs, state, cursor) {
    Object.assign(this, { source, runs, state, cursor });
    this.run = runs.find(run => run.id === state.get("rollouts.run")) ?? runs[0];
    this.request = 0;
    this.filters = new Filters(state, () => this.ask());
    this.list = new RolloutList({
      load: (offset, limit) => this.#load(offset, limit),
      open: (row, { focus = false } = {}) => this.openRollout(row.index, { focus }),
      moved: settled(row => this.openRollout(row.index, { entry: false }), 60),
    });
    this.detail = new Detail({ source, state, go: index => this.openRollout(index), leave: () => this.#leave() });
    this.note = h("p", { class: "soft list-note" });
    this.pointer = () => this.#follow();
    cursor.addEventListener("change", this.pointer);
    this.keys = event => this.#key(event);
    document.addEventListener("keydown", this.keys);
    this.element = h("div", { class: "rollouts" },
      h("div", { class: "rollouts-side" }, this.#runChoice(), this.filters.element, this.note, this.list.element), this.detail.element);
  }

  /** Resolves when the first rows and the rollout of the link are shown. */
  async start() {
    const index = this.state.number("rollouts.index");
    await this.ask();
    const first = innerWidth > WIDE ? this.answer?.rows[0]?.index ?? null : null;
    if (index !== null) await this.openRollout(index, { entry: false });
    else if (this.cursor.chosen !== null && await this.#goToStep(this.cursor.chosen)) return;
    else if (first !== null) await this.#open(first);
  }

  /** Requests the rollouts that match the filters. An answer that comes after a later request is dropped. */
  async ask({ keep = false } = {}) {
    const request = ++this.request;
    this.element.setAttribute("aria-busy", "true");
    let answer;
    try {
      answer = await this.#load(0, 100);
    } catch (error) {
      if (request === this.request) this.note.textContent = `The rollouts could not be read: ${error.message}`;
      return;
    }
    if (request !== this.request) return;
    this.element.removeAttribute("aria-busy");
    this.answer = answer;
    this.filters.show(answer);
    this.list.reset(answer, this.state.number("rollouts.index"), { keep });
    this.note.textContent = this.#noteOn(answer);
  }

  /** Shows a rollout by its index, and keeps the index in the link. */
  async openRollout(index, { focus = false, entry = true } = {}) {
    this.state.set({ "rollouts.index": index, "rollouts.run": this.runs.length > 1 ? this.run.id : null }, { entry });
    await this.#open(index);
    const { record } = this.detail;
    if (record?.index === index && typeof record.step === "number") this.cursor.choose(record.step);
    if (focus) this.detail.element.focus();
  }

  update(what) {
    if (what.run === this.run.id && what.changed?.includes("rollouts")) this.ask({ keep: true });
  }

  close() {
    this.request++;
    document.removeEventListener("keydown", this.keys);
    this.cursor.removeEventListener("change", this.pointer);
    this.list.close();
    this.detail.close();
  }

  async #open(index) {
    this.element.classList.add("has-open");
    this.list.mark(index);
    await this.detail.open(this.run, index);
  }

  /** Goes to the step that was chosen elsewhere. */
  #follow() {
    const { chosen } = this.cursor;
    if (chosen !== null && this.answer && this.detail.record?.step !== chosen) this.#goToStep(chosen);
  }

  /** Opens the first matching rollout of a step, and scrolls to it. Returns false if there is none. */
  async #goToStep(step) {
    const query = this.filters.query();
    const { rows } = await this.source.rollouts(this.run.id, { ...query, step_min: step, step_max: step, limit: 1 }).catch(() => ({ rows: [] }));
    if (!rows.length) {
      this.note.textContent = `No rollout of step ${step} ${Object.keys(query).length ? "fits these filters" : "was kept"}.`;
      return false;
    }
    if (!query.sort) {
      const { total } = await this.source.rollouts(this.run.id, { ...query, step_max: step - 1, limit: 1 }).catch(() => ({ total: 0 }));
      this.list.scrollTo(total);
    }
    this.state.set({ "rollouts.index": rows[0].index, "rollouts.run": this.runs.length > 1 ? this.run.id : null });
    await this.#open(rows[0].index);
    return true;
  }

  #load(offset, limit) {
    return this.source.rollouts(this.run.id, { ...this.filters.query(), offset, limit });
  }

  #noteOn({ total, indexed = 1 }) {
    if (indexed < 1) return `${percent(indexed)} of the file has been read so far.`;
    if (total) return (this.source.leftOut ?? []).join(" ");
    return Object.keys(this.filters.query()).length ? "No rollout fits these filters." : "No rollout has been written yet: logging.transcripts_per_step says of how many groups of a step they are.";
  }

  #runChoice() {
    if (this.runs.length < 2) return null;
    const select = h("select", { "aria-label": "Run", onchange: () => {
      this.run = this.runs.find(run => run.id === select.value);
      this.state.set({ "rollouts.run": this.run.id, "rollouts.index": null });
      this.detail.clear();
      this.ask();
    } }, this.runs.map(run => h("option", { value: run.id }, run.name)));
    select.value = this.run.id;
    return select;
  }

  #leave() {
    this.element.classList.remove("has-open");
    this.list.focus();
  }

  #key(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "Escape") {
      if (event.target.matches("input")) this.list.focus();
      else this.#leave();
    } else if (typing) return;
    else if (event.key === "j") this.list.move(this.list.at + 1);
    else if (event.key === "k") this.list.move(this.list.at - 1);
    else if (event.key === "/") this.filters.search();
    else if (event.key === "[") this.detail.neighbour(-1);
    else if (event.key === "]") this.detail.neighbour(1);
    else if (event.key === "c") this.detail.tokens?.nextColour?.();
    else if ("mts".includes(event.key) && event.key.length === 1) this.detail.show({ m: "messages", t: "tokens", s: "siblings" }[event.key]);
    else return;
    event.preventDefault();
  }
}
