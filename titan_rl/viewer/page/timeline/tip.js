// A card beside a span with all that is known about it.
import { h } from "viewer/dom";
import { percent, seconds } from "viewer/quantities";
import { visible } from "viewer/rollouts/visible_text";

export class SpanTip {
  constructor() {
    this.box = h("div", { class: "span-tip", "aria-hidden": "true", hidden: true });
    this.status = h("div", { class: "offscreen", role: "status" });
    this.element = h("div", {}, this.box, this.status);
  }

  /** Shows the card at a point of the screen. `say`: whether to tell a screen reader, too. */
  show(lane, span, x, y, { say = false } = {}) {
    const facts = factsOf(lane, span);
    const name = span[3].share === undefined ? span[2] : "several";
    this.#place([h("b", {}, visible(String(name))), h("dl", {}, facts.map(([label, value]) => [h("dt", {}, visible(label)), h("dd", {}, visible(value))]))], x, y);
    if (say) this.status.textContent = `${lane.label}: ${name}, ${facts.map(fact => fact.join(" ")).join(", ")}`;
  }

  /** Shows the card for a gap. */
  showIdle(lane, at, x, y) {
    const top = lane.spans.filter(span => span[4] === 0);
    const before = top.findLast(span => span[1] <= at);
    const after = top.find(span => span[0] > at);
    const length = after && before ? after[0] - before[1] : null;
    const facts = [["lane", lane.label], ...(length === null ? [] : [["for", seconds(length)]]), ...(after ? [["until", after[2]]] : [])];
    this.#place([h("b", {}, "idle"), h("dl", {}, facts.map(([label, value]) => [h("dt", {}, label), h("dd", {}, visible(String(value)))]))], x, y);
  }

  hide() {
    this.box.hidden = true;
  }

  #place(children, x, y) {
    this.box.replaceChildren(...children);
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    this.box.style.setProperty("left", `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`);
    this.box.style.setProperty("top", `${y + 16 + height < innerHeight ? y + 16 : Math.max(8, y - height - 12)}px`);
  }
}

/** Pairs of [name, value] of all that is known about a span. */
export function factsOf(lane, [start, end, , args]) {
  const { share, depth: _depth, kind: _kind, idle, ...others } = args;
  const facts = [[idle ? "waits" : "takes", seconds(end - start)], ["begins at", seconds(start)], ["lane", lane.label]];
  if (share !== undefined) facts.push(["busy", `${percent(share)}; zoom in for each`]);
  for (const [name, value] of Object.entries(others)) facts.push([name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
  return facts;
}
