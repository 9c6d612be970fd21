// The messages of a rollout, for reading: by role, with tool calls and their results.
import { button } from "viewer/controls";
import { h } from "viewer/dom";
import { count } from "viewer/quantities";
import { visible } from "viewer/rollouts/visible_text";

const LONG = 6000; // characters of a message that are shown at first

/**
 * @param record of the rollout. Its turns are shown with its assistant messages if their numbers match.
 * @param draw (text, message index) -> nodes: displays text, for example with marked differences.
 */
export function messageCards(record, draw = text => visible(text)) {
  const turns = turnsByMessage(record);
  return (record.messages ?? []).map((message, i) => messageCard(message, turns.get(i), text => draw(text, i)));
}

export function messageCard(message, turn, draw = text => visible(text)) {
  const role = String(message.role ?? "?");
  const parts = [
    ...reasoning(message, draw),
    ...contentOf(message).map(part => part.text === undefined ? h("pre", { class: "attachment" }, visible(json(part.other))) : text(part.text, draw)),
    ...(message.tool_calls ?? []).map(call => toolCall(call)),
  ];
  return h("article", { class: `message ${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}` },
    h("header", {}, h("b", { class: "role" }, visible(role)), message.name && h("span", {}, " ", visible(String(message.name))),
      message.tool_call_id && h("span", { class: "soft" }, " answers ", h("code", {}, visible(String(message.tool_call_id)))),
      h("span", { class: "spring" }), turn && h("span", { class: "soft" }, aboutTurn(turn))),
    parts.length ? parts : h("p", { class: "soft" }, "(empty)"));
}

/** A message as plain text, for copying and comparing. */
export function plainText(message) {
  const texts = contentOf(message).map(part => part.text ?? json(part.other));
  const calls = (message.tool_calls ?? []).map(call => `${call.function?.name ?? "?"}(${argumentsOf(call)})`);
  return [...texts, ...calls].join("\n");
}

function turnsByMessage({ messages = [], turns = [] }) {
  const places = messages.flatMap((message, i) => message.role === "assistant" ? [i] : []);
  return new Map(places.length === turns.length ? places.map((place, i) => [place, { ...turns[i], number: i + 1 }]) : []);
}

function aboutTurn({ number, num_completion_tokens: tokens, finish_reason: finish, version_spans: spans = [], rewards = {} }) {
  const versions = [...new Set(spans.map(([version]) => version))];
  const parts = [`turn ${number}`];
  if (tokens != null) parts.push(count(tokens, "token"));
  if (finish && finish !== "stop") parts.push(`ended by ${finish}`);
  if (versions.length) parts.push(`version ${versions.join(" → ")}`);
  for (const [name, value] of Object.entries(rewards)) parts.push(`${name} ${value}`);
  return parts.join(" · ");
}

function contentOf({ content }) {
  if (content == null || content === "") return [];
  if (typeof content === "string") return [{ text: content }];
  if (!Array.isArray(content)) return [{ other: content }];
  return content.map(part => typeof part === "string" ? { text: part } : typeof part?.text === "string" ? { text: part.text } : { other: part });
}

function reasoning(message, draw) {
  const content = message.reasoning_content ?? message.reasoning ?? message.thinking;
  if (typeof content !== "string" || !content) return [];
  return [h("details", { class: "reasoning", open: true }, h("summary", {}, "reasoning"), text(content, draw))];
}

function text(content, draw) {
  if (content.length <= LONG) return h("pre", {}, draw(content));
  const pre = h("pre", {}, draw(content.slice(0, LONG)));
  const more = button(`Show ${(content.length - LONG).toLocaleString("en")} characters more`, () => { pre.replaceChildren(...draw(content)); more.remove(); });
  return h("div", {}, pre, more);
}

function toolCall(call) {
  const name = String(call.function?.name ?? call.name ?? "?");
  return h("div", { class: "tool-call" },
    h("header", {}, h("span", { class: "soft" }, "calls "), h("b", {}, visible(name)), call.id && h("span", { class: "soft" }, " ", h("code", {}, visible(String(call.id))))),
    h("pre", {}, visible(argumentsOf(call))));
}

function argumentsOf(call) {
  const given = call.function?.arguments ?? call.arguments ?? {};
  if (typeof given !== "string") return json(given);
  try {
    return json(JSON.parse(given));
  } catch {
    return given; // the policy's text is not JSON, so it is shown as it is
  }
}

function json(value) {
  return JSON.stringify(value, null, 2);
}
