// A rollout by token: each token is a span whose colour shows its logprob, advantage or version, or whether it is trained on.
import { choice, copyButton } from "viewer/controls";
import { h } from "viewer/dom";
import { count } from "viewer/quantities";
import { TokenCard } from "viewer/rollouts/token_card";
import { COLOURINGS, colouring } from "viewer/rollouts/token_colours";
import { hasTokens, segments } from "viewer/rollouts/token_rows";
import { visible } from "viewer/rollouts/visible_text";

const BLOCK = 400; // tokens of a block that the browser lays out only when it is in view
const LONGEST_BLOCK = 1200;
const SPECIAL = /^(<[|｜][^]*[|｜]>|<\/?(s|pad|unk|bos|eos|mask|start_of_turn|end_of_turn|im_start|im_end)>|\[(CLS|SEP|PAD|MASK|UNK|EOS|BOS)\])$/i;

export class TokenView {
  /** `state` keeps the colouring under "rollouts.colour". A record without tokens is shown with the reason. */
  constructor(record, state) {
    this.state = state;
    this.element = h("div", { class: "token-view" });
    if (!hasTokens(record)) {
      this.element.append(h("p", { class: "empty" }, whyNone(record)));
      return;
    }
    this.segments = segments(record);
    this.tokens = this.segments.flatMap(one => one.tokens);
    this.spans = [];
    this.current = null;
    this.card = new TokenCard();
    this.legend = h("div", { class: "legend" });
    this.text = h("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-label": `${count(this.tokens.length, "token")}; arrow keys go from one to the next`,
      onkeydown: event => this.#key(event), onpointerover: event => this.#hover(event), onpointerleave: () => this.#hide(),
      onclick: event => this.#click(event), onblur: () => this.#hide(), onfocus: () => this.current !== null && this.go(this.current),
    }, this.segments.map(one => this.#segment(one)));
    const chosen = COLOURINGS.some(([name]) => name === state.get("rollouts.colour")) ? state.get("rollouts.colour") : COLOURINGS[0][0];
    this.choice = choice("Colour by", COLOURINGS, chosen, name => this.colour(name));
    this.element.append(h("div", { class: "token-bar" }, this.choice, this.legend, h("span", { class: "spring" }), this.#copies()), this.text, this.card.element);
    this.colour(chosen);
  }

  /** Colours the tokens by this colouring. */
  colour(name) {
    this.state.set({ "rollouts.colour": name === COLOURINGS[0][0] ? null : name });
    this.choice.show(name);
    this.name = name;
    const { of, legend, what } = colouring(name, this.segments);
    this.tokens.forEach((token, i) => { this.spans[i].className = `t ${of(token)}${isSpecial(token) ? " special" : ""}`; });
    this.legend.replaceChildren(...legend.map(([css, label, title]) => h("span", { class: `t ${css}`, title: title ?? null }, label)));
    this.legend.setAttribute("aria-label", `Colours: ${what}`);
    this.legend.setAttribute("role", "group");
    this.text.dataset.colour = name;
  }

  /** Switches to the next colouring in the row of choices. */
  nextColour() {
    const names = COLOURINGS.map(([name]) => name);
    this.colour(names[(names.indexOf(this.name) + 1) % names.length]);
  }

  /** Makes the token with this index the current one, and shows its card. */
  go(at) {
    if (this.current !== null) this.spans[this.current].classList.remove("current");
    this.current = Math.max(0, Math.min(this.tokens.length - 1, at));
    const span = this.spans[this.current];
    span.classList.add("current");
    span.id = "current-token";
    for (const other of this.text.querySelectorAll("#current-token")) if (other !== span) other.removeAttribute("id");
    this.text.setAttribute("aria-activedescendant", span.id);
    span.scrollIntoView({ block: "nearest" });
    this.card.show(this.tokens[this.current], span, { say: true });
    requestAnimationFrame(() => this.#settle(span));
  }

  /** Scrolls to the current token again: parts of the text are laid out only when they come into view, which moves it. */
  #settle(span) {
    if (!span.classList.contains("current")) return;
    span.scrollIntoView({ block: "nearest" });
    this.card.move(span);
  }

  close() {
    this.#hide();
  }

  #copies() {
    const of = part => this.tokens.filter(token => token.part === part);
    return h("div", { class: "copies" },
      copyButton("Copy text", () => this.tokens.map(({ text }) => text ?? "").join("")),
      copyButton("Copy ids", () => JSON.stringify(this.tokens.map(({ id }) => id))),
      copyButton("Copy completion ids", () => JSON.stringify(of("completion").map(({ id }) => id))));
  }

  #segment({ kind, turn, tokens, kept }) {
    const name = kind === "prompt" ? "prompt" : "completion";
    const whole = kept && `continues from ${kept.kept.toLocaleString("en")} of the ${kept.of.toLocaleString("en")} tokens before it: the rest was dropped`;
    return h("section", { class: `segment ${kind}`, "aria-label": `${name} of turn ${turn + 1}` },
      h("header", {}, h("b", {}, `Turn ${turn + 1}`), ` ${name} · ${count(tokens.length, "token")}`, whole && h("span", { class: "branch" }, ` · ${whole}`)),
      h("div", { class: "segment-text" }, blocks(tokens).map(block => this.#block(block))));
  }

  #block(tokens) {
    const lines = tokens.reduce((sum, { text }) => sum + (text?.length ?? 3), 0) / 90;
    return h("div", { class: "block", style: { "contain-intrinsic-size": `auto ${Math.ceil(lines + 1) * 24}px` } }, tokens.map(token => this.#span(token)));
  }

  #span(token) {
    const span = h("span", { class: "t", data: { at: token.at } }, shown(token));
    this.spans[token.at] = span;
    if (token.part === "completion" && token.version !== null) {
      const before = this.tokens[token.at - 1];
      if (before?.part === "completion" && before.version !== token.version) span.dataset.newVersion = `v${token.version}`;
    }
    return span;
  }

  #at(event) {
    const span = event.target.closest("[data-at]");
    return span ? Number(span.dataset.at) : null;
  }

  #hover(event) {
    const at = this.#at(event);
    if (at === null) this.card.hide();
    else this.card.show(this.tokens[at], this.spans[at]);
  }

  #click(event) {
    const at = this.#at(event);
    if (at !== null && getSelection().isCollapsed) this.go(at);
  }

  #hide() {
    this.card?.hide();
  }

  #key(event) {
    const at = this.current ?? -1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    const down = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || (to === undefined && down === undefined)) return;
    event.preventDefault();
    event.stopPropagation();
    this.go(to ?? this.#otherLine(down));
  }

  #otherLine(direction) {
    if (this.current === null) return 0;
    const from = this.spans[this.current].getBoundingClientRect();
    for (let at = this.current + direction; at >= 0 && at < this.tokens.length; at += direction) {
      const box = this.spans[at].getBoundingClientRect();
      if (direction * (box.top - from.top) > 4 && direction * (box.left - from.left) * -1 <= 0) return at;
      if (direction * (box.top - from.top) > 44) return at;
    }
    return direction > 0 ? this.tokens.length - 1 : 0;
  }
}

/** The reason why a record has no tokens, for people. */
function whyNone(record) {
  if (record.tokens_left_out) return `Without tokens: ${record.tokens_left_out}.`;
  if (!(record.turns ?? []).length) return "No turn was played, so there are no tokens.";
  return "This record has no tokens: they were left out to keep the file small, or an older version wrote it. The messages are all there is.";
}

function isSpecial({ text }) {
  return text !== null && SPECIAL.test(text);
}

function shown({ id, text }) {
  if (text === null) return h("span", { class: "hidden-character", title: "a token whose text is not known" }, `#${id}`);
  if (text === "") return h("span", { class: "hidden-character", title: "no text of its own: the first bytes of a character that a later token ends" }, "…");
  return visible(text, true);
}

/** Divides tokens into blocks that end at a line break, if there is any. */
function blocks(tokens) {
  const found = [];
  let block = [];
  for (const token of tokens) {
    block.push(token);
    if ((block.length >= BLOCK && token.text?.endsWith("\n")) || block.length >= LONGEST_BLOCK) {
      found.push(block);
      block = [];
    }
  }
  return block.length ? [...found, block] : found;
}
