// The timeline as tables, for users who cannot see it or want figures.
import { h } from "viewer/dom";
import { percent, seconds } from "viewer/quantities";
import { busySeconds, idleSeconds, idleShare } from "viewer/timeline/lanes";
import { visible } from "viewer/rollouts/visible_text";

const LONGEST = 15;

/** The activity of each lane in [from, to], and the longest spans. */
export function timelineTables(groups, from, to) {
  const lanes = groups.flatMap(group => group.lanes);
  const spans = lanes.flatMap(lane => lane.spans.filter(span => span[1] > from && span[0] < to && span[3].share === undefined).map(span => [lane, span]));
  spans.sort(([, a], [, b]) => (b[1] - b[0]) - (a[1] - a[0]));
  return [
    table("Lanes", ["Lane", "Kind", "Spans", "Busy", "Idle", "Idle share"], lanes.map(lane => [
      lane.label, lane.kind, lane.spans.length.toLocaleString("en"), seconds(busySeconds(lane, from, to)),
      lane.waits ? seconds(idleSeconds(lane, from, to)) : "–", lane.waits && lane.kind !== "controller" ? percent(idleShare(lane, from, to)) : "–"])),
    table("Longest spans", ["Lane", "What", "Begins at", "Takes"], spans.slice(0, LONGEST).map(([lane, [start, end, name]]) => [lane.label, name, seconds(start), seconds(end - start)])),
  ];
}

function table(caption, columns, rows) {
  return h("table", { class: "figures" }, h("caption", {}, caption), h("thead", {}, h("tr", {}, columns.map(column => h("th", { scope: "col" }, column)))),
    h("tbody", {}, rows.map(([first, ...others]) => h("tr", {}, h("th", { scope: "row" }, visible(String(first))), others.map(value => h("td", {}, visible(String(value))))))));
}
