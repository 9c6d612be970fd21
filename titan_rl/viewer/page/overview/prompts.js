// The same prompts over time: answers of the policy at several steps, each from the rollout of median reward.
import { button } from "viewer/controls";
import { h } from "viewer/dom";
import { link } from "viewer/links";
import { count, short, whole } from "viewer/quantities";
import { messageCard, messageCards } from "viewer/rollouts/messages";

export class Prompts {
  /** `cursor`: the column of its step is marked. */
  constructor({ source, state, cursor }) {
    Object.assign(this, { source, state, cursor });
    this.element = h("section", { class: "prompts", hidden: true, "aria-label": "The same prompts over time" });
    this.moved = () => this.#mark();
    cursor.addEventListener("change", this.moved);
  }

  /** Shows the prompts of a run. Resolves when they are shown. `several`: whether other runs are shown as well. */
  async show(run, several) {
    const answer = await this.source.prompts(run.id).catch(() => null);
    if (this.closed || !answer?.prompts.length) return;
    const before = JSON.stringify(this.answer);
    Object.assign(this, { run, several, answer });
    if (JSON.stringify(answer) !== before) await this.#draw();
  }

  /** Moves on by `by` prompts. */
  async move(by) {
    const { length } = this.answer?.prompts ?? [];
    if (length < 2) return;
    this.state.set({ prompt: this.answer.prompts[(this.#place() + by + length) % length].prompt });
    await this.#draw();
  }

  close() {
    this.closed = true;
    this.cursor.removeEventListener("change", this.moved);
  }

  #place() {
    const chosen = this.answer.prompts.findIndex(({ prompt }) => prompt === this.state.get("prompt"));
    return chosen >= 0 ? chosen : this.answer.median ?? 0;
  }

  async #draw() {
    const request = this.request = {};
    const { same, prompts, median } = this.answer;
    const place = this.#place();
    const line = prompts[place];
    const answers = await Promise.allSettled(line.steps.map(({ index }) => this.source.rollout(this.run.id, index)));
    if (request !== this.request || this.closed) return;
    const found = line.steps.map((at, i) => ({ at, record: answers[i].value })).filter(({ record }) => record);
    this.element.hidden = !found.length;
    if (!found.length) return;
    const opening = same ? openingOf(found[0].record) : [];
    this.columns = found.map(({ at, record }) => this.#column(at, record, opening.length));
    const of = this.several ? ` of ${this.run.name}` : "";
    const title = same ? `Answers${of} to one prompt over time` : `Median rollout of each step${of}`;
    const held = found[0].record.phase === "validation" ? "held out" : "of the training data";
    const about = [same ? held : "no prompt was asked twice", same && line.task, same && line.seat && `seat ${line.seat}`, place === median && same && prompts.length > 2 ? "this prompt earns the median of all" : null];
    this.element.replaceChildren(
      h("header", {}, h("h2", {}, title), h("span", { class: "soft" }, about.filter(Boolean).join(" · ")), h("span", { class: "spring" }), ...this.#choice(place, prompts)),
      opening.length ? h("div", { class: "transcript opening" }, opening.map(message => messageCard(message))) : "",
      h("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "The median rollout of each step" }, this.columns.map(({ element }) => element)));
    this.#mark();
  }

  #choice(place, prompts) {
    if (prompts.length < 2) return [];
    return [button("‹", () => this.move(-1), { class: "quiet", title: "key p", "aria-label": "Previous prompt" }),
      h("span", { class: "soft" }, `prompt ${place + 1} of ${prompts.length}`), button("›", () => this.move(1), { class: "quiet", title: "key n", "aria-label": "Next prompt" })];
  }

  #column({ step, index, reward, lowest, highest, count: siblings }, record, shared) {
    const { status, num_completion_tokens: tokens, error } = record;
    const spread = siblings > 1 && typeof lowest === "number" && highest > lowest ? `median of ${siblings}, ${short(lowest, 2)} to ${short(highest, 2)}` : siblings > 1 ? `median of ${siblings}, all alike` : "";
    const values = { "rollouts.index": index, ...(this.several ? { "rollouts.run": this.run.id } : {}), at: step };
    const element = h("article", { class: "card transcript", "aria-label": `Rollout of step ${step}` },
      h("header", {}, link(`Step ${whole(step)}`, "rollouts", values), h("span", { class: "spring" }),
        typeof reward === "number" ? h("span", {}, "reward ", h("b", {}, short(reward, 3))) : h("span", { class: "soft" }, "not scored"),
        status === "completed" ? null : h("span", { class: "bad" }, String(status ?? "").replaceAll("_", " ")), h("span", { class: "soft" }, [spread, count(tokens ?? 0, "token")].filter(Boolean).join(" · "))),
      messageCards(record).slice(shared), error ? h("p", { class: "bad" }, String(error)) : null);
    return { step, element };
  }

  /** Marks the column of the cursor's step, or the last column before it. */
  #mark() {
    const { step } = this.cursor;
    const at = step === null ? -1 : (this.columns ?? []).findLastIndex(column => column.step <= step);
    this.columns?.forEach(({ element }, i) => element.classList.toggle("current", i === at));
    const box = this.columns?.[at]?.element;
    if (box && this.cursor.hovered === null) box.parentElement.scrollLeft = box.offsetLeft - box.parentElement.offsetLeft;
  }
}

/** The messages before the first answer. */
function openingOf({ messages = [] }) {
  const first = messages.findIndex(({ role }) => role === "assistant");
  return first < 0 ? [] : messages.slice(0, first);
}
