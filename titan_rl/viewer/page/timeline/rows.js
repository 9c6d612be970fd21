// Vertical layout of the lanes: rows below each other, with a header for each group, which can be folded.

export const HEADER = 24;
const GAP = 8;
const LANE = 20;
const NESTED = 12;
const MOST_DEPTH = 4;

/** Rows as [{kind: "group" | "lane", group, lane, top, height}], and the total height. */
export function placed(groups, folded) {
  const rows = [];
  let top = 0;
  for (const group of groups) {
    const isFolded = folded.has(group.key);
    const height = isFolded ? HEADER + 14 : HEADER;
    rows.push({ kind: "group", group, folded: isFolded, top, height });
    top += height;
    if (!isFolded) {
      for (const lane of group.lanes) {
        const tall = LANE + NESTED * (Math.min(lane.depth, MOST_DEPTH) - 1);
        rows.push({ kind: "lane", group, lane, top, height: tall + 4 });
        top += tall + 4;
      }
    }
    top += GAP;
  }
  return { rows, height: top };
}

/** Position within its row of a span with this depth: [offset, height]. */
export function band(depth) {
  return depth === 0 ? [2, LANE - 3] : [2 + LANE + NESTED * (Math.min(depth, MOST_DEPTH - 1) - 1), NESTED - 1];
}

/** The row at a height, found by bisection. */
export function rowAt(rows, y) {
  let [low, high] = [0, rows.length - 1];
  while (low <= high) {
    const middle = (low + high) >> 1;
    const row = rows[middle];
    if (y < row.top) high = middle - 1;
    else if (y >= row.top + row.height) low = middle + 1;
    else return row;
  }
  return null;
}
