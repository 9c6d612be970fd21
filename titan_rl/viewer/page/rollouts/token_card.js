// A card beside a token with all that is known about it.
import { h } from "viewer/dom";
import { number, signed } from "viewer/quantities";
import { pieces } from "viewer/rollouts/visible_text";

export class TokenCard {
  constructor() {
    this.rows = h("dl", {});
    this.piece = h("code", { class: "piece" });
    this.box = h("div", { class: "token-card", "aria-hidden": "true", hidden: true }, this.piece, this.rows);
    this.status = h("div", { class: "offscreen", role: "status" });
    this.element = h("div", {}, this.box, this.status);
  }

  /** Shows the card below or above the span. `say`: whether to tell a screen reader, too. */
  show(token, span, { say = false } = {}) {
    const facts = factsOf(token);
    this.piece.textContent = quoted(token.text);
    this.rows.replaceChildren(...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    this.box.hidden = false;
    this.move(span);
    if (say) this.status.textContent = `${quoted(token.text)}: ${facts.map(fact => fact.join(" ")).join(", ")}`;
  }

  hide() {
    this.box.hidden = true;
  }

  /** Places the card beside the span. */
  move(span) {
    const of = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { width, height } = this.box.getBoundingClientRect();
    const left = Math.max(8, Math.min(of.left, innerWidth - width - 8));
    const below = of.bottom + 6;
    const top = below + height < innerHeight ? below : Math.max(8, of.top - height - 6);
    this.box.style.setProperty("left", `${left}px`);
    this.box.style.setProperty("top", `${top}px`);
  }
}

/** Pairs of [name, value] of all that is known about the token. */
export function factsOf(token) {
  const facts = [["id", String(token.id)]];
  if (token.logprob !== null) facts.push(["logprob", number(token.logprob, 4)], ["probability", probability(token.logprob)]);
  if (token.version !== null) facts.push(["version", String(token.version)]);
  if (token.part === "prompt") facts.push(["trained on", "no, it is part of the prompt"]);
  else facts.push(["trained on", token.trained === null ? "not recorded" : token.trained ? "yes" : "no"]);
  if (token.part === "completion" && token.advantage !== null) facts.push(["advantage", signed(token.advantage)]);
  facts.push(["position", `${token.position} in the context of turn ${token.turn + 1}`]);
  return facts;
}

function probability(logprob) {
  const share = Math.exp(logprob);
  return share >= 0.001 ? `${number(share * 100, share > 0.9995 ? 3 : 1)}%` : share.toExponential(1);
}

function quoted(text) {
  if (text === null) return "text not known";
  return JSON.stringify(pieces(text).map(([piece, hidden]) => hidden ? `⟦${piece}⟧` : piece).join(""));
}
