// The list of matching rollouts. Only rows in view are in the page; others are requested while scrolling.
import { h } from "viewer/dom";
import { count } from "viewer/quantities";
import { oneLine } from "viewer/rollouts/visible_text";

const HEIGHT = 54; // pixels of a row; the same as in rollouts.css
const PAGE = 100;
const SPARE = 6; // rows above and below those in view

export class RolloutList {
  /** `load(offset, limit)` -> answer of the API, or null once it is stale; `open(row)` is called when a row is chosen, `moved(row)` when it becomes the current one. */
  constructor({ load, open, moved }) {
    Object.assign(this, { load, open, moved });
    this.total = 0;
    this.at = -1;
    this.pages = new Map();
    this.canvas = h("div", { class: "rows", role: "presentation" });
    this.status = h("div", { class: "list-count", role: "status" });
    this.box = h("div", {
      class: "list", role: "listbox", tabindex: "0", "aria-label": "Rollouts", onscroll: () => this.draw(), onkeydown: event => this.#key(event),
    }, this.canvas);
    this.element = h("div", { class: "list-column" }, this.status, this.box);
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.box);
  }

  /** Shows an answer with the first rows. The rollout with this index becomes the current one if it is among them. */
  reset(answer, index, { keep = false } = {}) {
    this.total = answer.total;
    this.pages = new Map([[0, answer.rows]]);
    this.ranges = answer.ranges ?? {};
    const place = answer.rows.findIndex(row => row.index === index);
    this.at = place >= 0 ? place : keep ? Math.min(this.at, this.total - 1) : -1;
    this.status.textContent = count(this.total, "rollout");
    this.canvas.style.setProperty("height", `${this.total * HEIGHT}px`);
    if (!keep) this.box.scrollTop = 0;
    this.draw();
    if (this.at >= 0 && !keep) this.#reveal();
  }

  /** Makes the row at a place the current one, and the first in view. */
  scrollTo(place) {
    this.at = Math.max(0, Math.min(this.total - 1, place));
    this.box.scrollTop = this.at * HEIGHT;
    this.draw();
  }

  /** Marks the rollout with this index as the open one. */
  mark(index) {
    this.opened = index;
    for (const [page, rows] of this.pages) {
      const place = Array.isArray(rows) ? rows.findIndex(row => row.index === index) : -1;
      if (place >= 0) this.at = page * PAGE + place;
    }
    this.draw();
  }

  focus() {
    this.box.focus();
  }

  close() {
    this.watch.disconnect();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / HEIGHT) - SPARE);
    const last = Math.min(this.total, Math.ceil((this.box.scrollTop + (this.box.clientHeight || 600)) / HEIGHT) + SPARE);
    const options = [];
    for (let i = first; i < last; i++) options.push(this.#option(i, this.#row(i)));
    this.canvas.replaceChildren(...options);
    if (this.at >= first && this.at < last) this.box.setAttribute("aria-activedescendant", `rollout-row-${this.at}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  /** Makes the row `to` the current one. */
  move(to) {
    if (!this.total) return;
    this.at = Math.max(0, Math.min(this.total - 1, to));
    this.#reveal();
    this.draw();
    const row = this.#row(this.at);
    if (row) this.moved(row);
  }

  #row(i) {
    const page = Math.floor(i / PAGE);
    const rows = this.pages.get(page);
    if (Array.isArray(rows)) return rows[i % PAGE] ?? null;
    if (!rows) this.#fetch(page);
    return null;
  }

  async #fetch(page) {
    const pages = this.pages;
    pages.set(page, "requested");
    const answer = await this.load(page * PAGE, PAGE).catch(() => null);
    if (pages !== this.pages) return; // the answer belongs to an earlier filter
    if (answer) pages.set(page, answer.rows);
    else pages.delete(page);
    if (answer) this.draw();
  }

  #option(i, row) {
    const props = {
      class: "row", role: "option", id: `rollout-row-${i}`, "aria-posinset": i + 1, "aria-setsize": this.total,
      "aria-selected": String(i === this.at), style: { top: `${i * HEIGHT}px` },
    };
    if (!row) return h("div", { ...props, class: "row waiting" }, "…");
    const [low, high] = this.ranges.reward ?? [0, 1];
    const share = typeof row.reward === "number" && high > low ? (row.reward - low) / (high - low) : 0;
    const state = row.dropped ? `dropped: ${row.dropped}` : row.status === "completed" ? "" : row.status;
    const kind = row.dropped ? "warn" : String(row.status).startsWith("error") ? "bad" : "warn";
    return h("div", { ...props, data: { index: row.index }, class: `row${row.index === this.opened ? " opened" : ""}`, onclick: () => { this.at = i; this.open(row); this.draw(); } },
      h("span", { class: "score" }, h("b", {}, typeof row.reward === "number" ? row.reward.toFixed(2).replace("-", "−") : "–"), h("i", { style: { "--share": share.toFixed(3) } })),
      h("span", { class: "row-text" },
        h("span", { class: "row-top" }, h("span", {}, `step ${row.step}`), h("span", { class: "id" }, oneLine(`${row.group_id}/${row.sibling}${row.seat ? `/${row.seat}` : ""}`)),
          row.phase !== "train" && !String(row.group_id).startsWith(row.phase) && h("span", {}, oneLine(row.phase)), state && h("span", { class: `state ${kind}` }, oneLine(state.replaceAll("_", " "))),
          h("span", { class: "spring" }), h("span", {}, [row.turns > 1 && `${row.turns} turns, `, count(row.num_completion_tokens ?? 0, "token")])),
        h("span", { class: "preview" }, oneLine(row.preview ?? ""))));
  }

  #reveal() {
    const top = this.at * HEIGHT;
    const room = this.box.clientHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + HEIGHT > this.box.scrollTop + room) this.box.scrollTop = top + HEIGHT - room;
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / HEIGHT) - 1);
    const to = {
      ArrowDown: this.at + 1, ArrowUp: this.at - 1, PageDown: this.at + page, PageUp: this.at - page, Home: 0, End: this.total - 1,
    }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (to !== undefined) this.move(to);
    else if (event.key === "Enter" && this.at >= 0) {
      const row = this.#row(this.at);
      if (row) this.open(row, { focus: true });
    } else return;
    event.preventDefault();
  }
}
