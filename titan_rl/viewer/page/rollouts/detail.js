// One rollout: its reward and the reasons for it, then its messages, its tokens, or its siblings.
import { choice, copyButton } from "viewer/controls";
import { h } from "viewer/dom";
import { number, seconds, signed } from "viewer/quantities";
import { messageCards, plainText } from "viewer/rollouts/messages";
import { siblingColumns, siblingRows } from "viewer/rollouts/siblings";
import { TokenView } from "viewer/rollouts/tokens";
import { visible } from "viewer/rollouts/visible_text";

const VIEWS = [["messages", "Messages", "m"], ["tokens", "Tokens", "t"], ["siblings", "Siblings", "s"]];

export class Detail {
  /** `go(index)` opens another rollout; `leave()` returns the focus to the list. */
  constructor({ source, state, go, leave }) {
    Object.assign(this, { source, state, go, leave });
    this.element = h("section", { class: "detail", tabindex: "-1", "aria-label": "Rollout" });
    this.clear();
  }

  clear() {
    this.tokens?.close();
    this.record = null;
    this.tokens = null;
    this.element.replaceChildren(h("p", { class: "empty" }, "Choose a rollout: j and k move, enter opens, t shows its tokens, s its siblings."));
  }

  /** Shows a rollout of a run. Of several calls the last counts. */
  async open(run, index) {
    const request = this.request = {};
    let record;
    try {
      record = await this.source.rollout(run.id, index);
    } catch (error) {
      if (request === this.request) this.#fail(error);
      return;
    }
    if (request !== this.request) return;
    Object.assign(this, { run, index, record: { ...record, index }, siblings: null });
    this.#draw();
    const rows = await siblingRows(this.source, run.id, record).catch(() => []);
    if (request !== this.request) return;
    this.siblings = rows;
    this.#drawNeighbours();
    if (this.view() === "siblings") this.show("siblings");
  }

  view() {
    const chosen = this.state.get("rollouts.view");
    return VIEWS.some(([name]) => name === chosen) ? chosen : "messages";
  }

  /** Shows messages, tokens or siblings. */
  async show(name) {
    if (!this.record) return;
    this.state.set({ "rollouts.view": name === "messages" ? null : name });
    this.choice.show(name);
    this.tokens?.close();
    this.tokens = null;
    this.body.dataset.view = name;
    if (name === "messages") this.body.replaceChildren(...this.#messages());
    else if (name === "tokens") {
      this.tokens = new TokenView(this.record, this.state);
      this.body.replaceChildren(this.tokens.element);
    } else await this.#showSiblings();
  }

  /** The sibling `by` places further; the best is first. */
  neighbour(by) {
    const rows = this.siblings ?? [];
    const at = rows.findIndex(row => row.index === this.index);
    if (rows.length > 1) this.go(rows[(at + by + rows.length) % rows.length].index);
  }

  close() {
    this.request = null;
    this.tokens?.close();
  }

  #draw() {
    const record = this.record;
    this.choice = choice("Show", VIEWS.map(([name, label, key]) => [name, label, `key ${key}`]), this.view(), name => this.show(name));
    this.neighbours = h("div", { class: "neighbours" });
    this.body = h("div", { class: "detail-body" });
    this.element.replaceChildren(
      h("header", { class: "detail-head" }, this.#title(record), failure(record), facts(record)),
      h("div", { class: "detail-bar" }, this.choice, this.neighbours, h("span", { class: "spring" }),
        copyButton("Copy link", () => location.href),
        copyButton("Copy text", () => (record.messages ?? []).map(message => `${message.role}: ${plainText(message)}`).join("\n\n")),
        copyButton("Copy record", () => JSON.stringify(record, null, 2))),
      this.body);
    this.element.scrollTop = 0;
    this.show(this.view());
  }

  #title(record) {
    const where = [`step ${record.step ?? "?"}`, record.phase, record.task, record.group_id && `group ${record.group_id}`, record.sibling != null && `sibling ${record.sibling}`, record.seat && `seat ${record.seat}`];
    return h("div", { class: "detail-title" },
      h("button", { type: "button", class: "quiet back", onclick: () => this.leave(), "aria-label": "Back to the list" }, "←"),
      h("span", { class: "reward big" }, number(record.reward)),
      h("span", { class: "advantage" }, record.reward == null ? "not scored" : `advantage ${signed(record.advantage)}`),
      statusBadge(record.status), record.dropped && h("span", { class: "badge warn" }, visible(`dropped: ${String(record.dropped).replaceAll("_", " ")}`)),
      h("span", { class: "where soft" }, visible(where.filter(Boolean).join(" · "))));
  }

  #drawNeighbours() {
    const rows = this.siblings;
    if (rows.length < 2) return;
    const at = rows.findIndex(row => row.index === this.index);
    this.neighbours.replaceChildren(
      h("button", { type: "button", class: "quiet", title: "key [", "aria-label": "Better sibling", onclick: () => this.neighbour(-1) }, "‹"),
      h("span", { class: "soft" }, `${at + 1} of ${rows.length} siblings`),
      h("button", { type: "button", class: "quiet", title: "key ]", "aria-label": "Worse sibling", onclick: () => this.neighbour(1) }, "›"));
  }

  #messages() {
    const cards = messageCards(this.record);
    return cards.length ? cards : [h("p", { class: "empty" }, "This rollout has no messages: its environment keeps none. Its tokens may be there.")];
  }

  async #showSiblings() {
    const request = this.request;
    if (!this.siblings) {
      this.body.replaceChildren(h("p", { class: "empty" }, "Reading the siblings …"));
      return;
    }
    const records = new Map([[this.index, this.record]]);
    const others = this.siblings.filter(row => row.index !== this.index);
    const answers = await Promise.allSettled(others.map(row => this.source.rollout(this.run.id, row.index)));
    if (request !== this.request || this.view() !== "siblings") return;
    answers.forEach((answer, i) => { if (answer.status === "fulfilled") records.set(others[i].index, answer.value); });
    if (records.size < 2) this.body.replaceChildren(h("p", { class: "empty" }, "No sibling of this rollout was kept."), ...this.#messages());
    else this.body.replaceChildren(siblingColumns(this.siblings, records, this.index, index => this.go(index)));
  }

  #fail(error) {
    this.record = null;
    this.element.replaceChildren(h("p", { class: "empty bad", role: "alert" }, visible(String(error.message))));
  }
}

function statusBadge(status) {
  const kind = status === "completed" ? "good" : String(status).startsWith("error") || status === "aborted" ? "bad" : "warn";
  return h("span", { class: `badge ${kind}` }, visible(String(status ?? "?").replaceAll("_", " ")));
}

function failure(record) {
  if (!record.error) return null;
  return h("div", { class: "failure", role: "note" }, h("pre", {}, visible(String(record.error))), record.error_at && h("p", {}, "at ", h("code", {}, visible(String(record.error_at)))));
}

function facts(record) {
  const entries = [["tokens", record.num_completion_tokens], ["turns", (record.turns ?? []).length], ["versions", (record.versions ?? []).join(", ") || "–"]];
  for (const [name, value] of Object.entries(record.metrics ?? {})) entries.push([name.replaceAll("_", " "), name.endsWith("seconds") || name.endsWith("_s") ? seconds(value) : number(value)]);
  const breakdown = Object.entries(record.reward_breakdown ?? {});
  const most = Math.max(1e-9, ...breakdown.map(([, value]) => Math.abs(value ?? 0)));
  return h("div", { class: "facts" },
    breakdown.length > 0 && h("table", { class: "breakdown" }, h("caption", { class: "offscreen" }, "Reward by component"), h("tbody", {}, breakdown.map(([name, value]) =>
      h("tr", {}, h("th", { scope: "row" }, visible(name)), h("td", {}, number(value)),
        h("td", { class: "bar", "aria-hidden": "true" }, h("i", { class: value < 0 ? "below" : "", style: { width: `${100 * Math.abs(value ?? 0) / most}%` } })))))),
    h("dl", {}, entries.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, visible(String(value ?? "–")))))));
}
