// What the policy says to the same prompt in the first step and in the last, side by side.
import { count, short, whole } from "viewer/quantities";
import { h } from "viewer/dom";
import { messageCards, plainText } from "viewer/rollouts/messages";

/** `first`, `last`: records of rollouts; `name`: of the run, where there are several. */
export function pair(first, last, name) {
  const same = promptOf(first) === promptOf(last);
  const title = `What ${name ? `the policy of ${name}` : "the policy"} says${same ? " to the same prompt" : ""}`;
  return [h("h2", {}, title), h("div", { class: "columns" }, column(first), column(last))];
}

/**
 * The indices of a rollout of the first step and one of the last, of the same group where both have it, held out where
 * there are such; null where there is none. {first, last}
 */
export async function findPair(source, run) {
  for (const phase of ["validation", "train"]) {
    const [last] = (await source.rollouts(run, { phase, dropped: false, sort: "step", descending: true, limit: 1 })).rows;
    if (!last) continue;
    const [same] = (await source.rollouts(run, { phase, group: last.group_id, sort: "step", limit: 1 })).rows;
    if (same && same.step < last.step) return { first: same.index, last: last.index };
    const [first] = (await source.rollouts(run, { phase, dropped: false, sort: "step", limit: 1 })).rows;
    if (first && first.step < last.step) return { first: first.index, last: last.index };
  }
  return null;
}

function column(record) {
  const { step, phase, reward, status, num_completion_tokens: tokens, error } = record;
  return h("article", { class: "card transcript", "aria-label": `Rollout of step ${step}` },
    h("header", {}, h("b", {}, `Step ${whole(step)}`), h("span", { class: "soft" }, phase === "validation" ? "held out" : ""), h("span", { class: "spring" }),
      typeof reward === "number" ? h("span", {}, "reward ", h("b", {}, short(reward))) : h("span", { class: "soft" }, "not scored"),
      h("span", { class: status === "completed" ? "good" : "bad" }, String(status ?? "").replaceAll("_", " ")), h("span", { class: "soft" }, count(tokens ?? 0, "token"))),
    messageCards(record), error ? h("p", { class: "bad" }, String(error)) : null);
}

function promptOf({ messages }) {
  const user = (messages ?? []).find(({ role }) => role === "user");
  return user ? plainText(user) : null;
}
