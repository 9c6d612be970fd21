// The rollouts of a group side by side: their common beginning, then turn beside turn. Text that the open rollout lacks is marked.
import { button } from "viewer/controls";
import { h } from "viewer/dom";
import { count, isJudged, number, signed } from "viewer/quantities";
import { differences } from "viewer/rollouts/differences";
import { messageCard, plainText } from "viewer/rollouts/messages";
import { visible } from "viewer/rollouts/visible_text";

const MOST = 32; // columns

/** The rows of all siblings of a record's group, best first. */
export async function siblingRows(source, run, row) {
  const { rows } = await source.rollouts(run, { group: row.group_id, step_min: row.step, step_max: row.step, phase: row.phase, limit: MOST });
  return rows.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.sibling - b.sibling);
}

/**
 * @param rows of the group.
 * @param records by the rows' index.
 * @param open index of the rollout that the others are compared with.
 * @param go called with the index of a rollout to open it.
 */
export function siblingColumns(rows, records, open, go) {
  const columns = rows.filter(row => records.has(row.index));
  const messages = columns.map(({ index }) => records.get(index).messages ?? []);
  const own = columns.findIndex(({ index }) => index === open);
  const shared = commonStart(messages);
  const longest = Math.max(0, ...messages.map(all => all.length));
  const grid = h("div", { class: "siblings", style: { "--columns": columns.length }, tabindex: "0", role: "group", "aria-label": "Siblings side by side" },
    columns.map((row, i) => columnHead(row, i === own, go)));
  for (let turn = shared; turn < longest; turn++) {
    columns.forEach((_, i) => grid.append(cell(messages[i][turn], i === own ? null : messages[own]?.[turn])));
  }
  return h("div", { class: "sibling-view" }, spread(columns, open, go),
    shared > 0 && h("details", { class: "shared", open: shared === 1 },
      h("summary", {}, `Common beginning of all ${columns.length} (${count(shared, "message")})`), messages[0].slice(0, shared).map(message => messageCard(message))),
    grid);
}

function columnHead(row, own, go) {
  return h("header", { class: `sibling-head${own ? " own" : ""}` },
    h("b", { class: "reward" }, number(row.reward)), h("span", { class: "soft" }, ` advantage ${signed(row.advantage)}`),
    h("div", { class: "soft" }, `sibling ${row.sibling}${row.seat ? `, ${row.seat}` : ""} · ${String(row.status).replaceAll("_", " ")} · ${count(row.num_completion_tokens, "token")}`),
    own ? h("span", { class: "soft" }, "the others are compared with this one") : button("Open", () => go(row.index), { class: "quiet", "aria-label": `Open sibling ${row.sibling}` }));
}

function cell(message, other) {
  if (!message) return h("div", { class: "gap", "aria-label": "no message" });
  if (other === null) return messageCard(message);
  const theirs = other ? plainText(other) : "";
  return messageCard(message, null, text => marked(text, theirs));
}

function marked(text, other) {
  return differences(text, other).flatMap(([piece, different]) => different ? h("mark", {}, visible(piece)) : visible(piece));
}

/** Number of messages at the beginning that all have in common. */
function commonStart(all) {
  let shared = 0;
  const texts = all.map(messages => messages.map(message => JSON.stringify(message)));
  while (texts.length && texts.every(one => shared < one.length && one[shared] === texts[0][shared])) shared++;
  return shared;
}

/** The rewards on a line, which shows their spread. */
function spread(rows, open, go) {
  const judged = rows.filter(isJudged);
  const rewards = judged.map(row => row.reward);
  const left = rows.length - judged.length;
  if (!rewards.length) return h("p", { class: "soft" }, `${count(rows.length, "sibling")}, none of them scored`);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const mean = rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
  const place = reward => high === low ? 50 : 100 * (reward - low) / (high - low);
  return h("div", { class: "spread" },
    h("span", {}, count(rows.length, "sibling"), ", mean reward ", h("b", {}, number(mean)), left ? ` without the ${left} not scored or lost to faults` : "", high === low ? ", all the same: this group teaches nothing" : ""),
    h("div", { class: "dots" }, h("span", { class: "soft" }, number(low)), h("div", { class: "line" },
      h("i", { class: "mean", style: { left: `${place(mean)}%` } }),
      judged.map(row => button("", () => go(row.index), {
        class: `dot${row.index === open ? " own" : ""}`, style: { left: `${place(row.reward)}%` },
        "aria-label": `sibling ${row.sibling}: reward ${number(row.reward)}`, title: `sibling ${row.sibling}: ${number(row.reward)}` }))),
    h("span", { class: "soft" }, number(high))));
}
