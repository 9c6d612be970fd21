// Drawing of the timeline: a ruler, steps, lanes with their spans, hatched idle time, and marks of weight syncs.
import { css } from "viewer/dom";
import { clock } from "viewer/quantities";
import { percent, seconds } from "viewer/quantities";
import { idleShare, idleShareOf, isIdle, occupancy } from "viewer/timeline/lanes";
import { HEADER, band } from "viewer/timeline/rows";
import { ticks } from "viewer/timeline/window";

export const TOP = 46; // pixels of the ruler and the steps
const FONT = "12px system-ui, sans-serif";
const SMALL = "11px system-ui, sans-serif";
const SHADES = [0, 24, 44];

/** The colours of the current theme, in a form that a canvas accepts. */
export function palette() {
  const ink = css("--ink");
  const planes = {};
  for (const kind of ["trainer", "generator", "environment", "reward", "sync", "scheduler", "checkpoint", "validation", "host", "lost"]) {
    planes[kind] = SHADES.map(share => share ? `color-mix(in oklab, ${css(`--plane-${kind}`)}, ${ink} ${share}%)` : css(`--plane-${kind}`));
  }
  const named = Object.fromEntries(["card", "page", "sunken", "soft", "line", "grid", "accent", "accent-tint", "on-accent", "idle"].map(name => [name, css(`--${name}`)]));
  return { ...named, ink, planes, hatch: hatch(named.idle, named.soft) };
}

function hatch(ground, line) {
  const tile = Object.assign(document.createElement("canvas"), { width: 12, height: 12 });
  const pen = tile.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, 12, 12);
  pen.strokeStyle = line;
  pen.globalAlpha = 0.5;
  pen.lineWidth = 1.5;
  for (const shift of [-12, 0, 12]) {
    pen.beginPath();
    pen.moveTo(shift, 12);
    pen.lineTo(shift + 12, 0);
    pen.stroke();
  }
  return tile;
}

/** Draws everything. `view`: {width, height, gutter, scroll, window, placed, steps, syncs, colours, selected, current, lane}. */
export function paint(pen, view) {
  const { width, height, gutter, colours } = view;
  pen.clearRect(0, 0, width, height);
  pen.font = FONT;
  pen.textBaseline = "middle";
  pen.save();
  pen.beginPath();
  pen.rect(0, TOP, width, height - TOP);
  pen.clip();
  steps(pen, view, { bands: true });
  const hatched = pen.createPattern(colours.hatch, "repeat");
  for (const row of view.placed.rows) {
    const top = TOP + row.top - view.scroll;
    if (top > height || top + row.height < TOP) continue;
    if (row.kind === "group") group(pen, view, row, top);
    else lane(pen, view, row, top, hatched);
  }
  marks(pen, view);
  pen.restore();
  ruler(pen, view);
  selection(pen, view);
  pointed(pen, view);
  pen.fillStyle = colours.line;
  pen.fillRect(gutter - 1, 0, 1, height);
}

function group(pen, view, { group: { kind, label, lanes, waits }, folded, height }, top) {
  const { colours, gutter, width, window } = view;
  pen.fillStyle = colours.ink;
  pen.font = `600 ${FONT}`;
  const name = lanes.length > 1 ? `${label} (${lanes.length})` : label;
  pen.fillText(clipped(pen, `${folded ? "▸" : "▾"} ${name}`, gutter - 50), 8, top + HEADER / 2 + 1);
  pen.font = SMALL;
  pen.fillStyle = colours.soft;
  const idle = waits && kind !== "controller" ? percent(idleShareOf(lanes, window.from, window.to)) : "";
  pen.textAlign = "right";
  pen.fillText(idle, gutter - 8, top + HEADER / 2 + 1);
  pen.textAlign = "left";
  if (!folded) return;
  const parts = Math.max(1, Math.floor((width - gutter) / 2));
  const shares = occupancy(lanes, window.from, window.to, parts);
  const room = height - 6;
  pen.fillStyle = (colours.planes[kind] ?? colours.planes.scheduler)[0];
  shares.forEach((share, i) => pen.fillRect(gutter + 2 * i, top + 3 + room * (1 - share), 2, room * share));
}

function lane(pen, view, { lane: one, height }, top, hatched) {
  const { colours, gutter, width, window } = view;
  const current = view.lane === one.id;
  if (current) {
    pen.fillStyle = colours["accent-tint"];
    pen.fillRect(0, top, gutter, height);
  }
  pen.font = SMALL;
  pen.fillStyle = colours.soft;
  const idle = one.waits && one.kind !== "controller" ? percent(idleShare(one, window.from, window.to)) : "";
  pen.fillStyle = colours.ink;
  pen.fillText(clipped(pen, gutter < 200 ? one.short : one.label, gutter - 66), 20, top + 11);
  pen.textAlign = "right";
  pen.fillStyle = colours.soft;
  pen.fillText(idle, gutter - 8, top + 11);
  pen.textAlign = "left";
  pen.save();
  pen.beginPath();
  pen.rect(gutter, top, width - gutter, height);
  pen.clip();
  const x = at => gutter + window.x(at, width - gutter);
  if (one.waits) {
    const [offset, tall] = band(0);
    pen.fillStyle = hatched;
    pen.fillRect(x(one.from), top + offset, x(one.to) - x(one.from), tall);
  }
  for (const span of one.spans) {
    if (span[0] > window.to) break;
    if (span[1] >= window.from) drawSpan(pen, view, one, span, top, x, hatched);
  }
  pen.restore();
}

function drawSpan(pen, view, one, span, top, x, hatched) {
  const [start, end, name, args, depth] = span;
  const { colours } = view;
  const [offset, full] = band(depth);
  const tall = full * (args.share === undefined ? 1 : Math.max(0.12, args.share));
  const left = Math.max(x(start), view.gutter - 1);
  const wide = Math.max(1, Math.min(x(end), view.width + 1) - left - (x(end) - x(start) > 4 ? 1 : 0));
  const y = top + offset + full - tall;
  if (!isIdle(args)) {
    pen.fillStyle = (colours.planes[args.kind ?? one.kind] ?? colours.planes.scheduler)[shade(one, name, depth)];
    pen.fillRect(left, y, wide, tall);
  } else if (depth) {
    pen.fillStyle = hatched;
    pen.fillRect(left, y, wide, tall);
  }
  if (view.current === span) {
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 2;
    pen.strokeRect(left + 1, y + 1, Math.max(1, wide - 2), tall - 2);
  }
  if (wide < 34 || args.share !== undefined) return;
  if (isIdle(args)) { // text on hatching needs a background
    const room = Math.min(wide - 8, pen.measureText(name).width);
    pen.fillStyle = colours.card;
    pen.fillRect(left + 2, y + 2, room + 5, tall - 4);
  }
  pen.fillStyle = isIdle(args) ? colours.soft : colours["on-accent"];
  pen.font = depth ? "10px system-ui, sans-serif" : SMALL;
  pen.fillText(clipped(pen, name, wide - 8), left + 4, y + tall / 2 + 1);
}

/** Names of a lane get shades of its colour, in the order in which they first appear. */
function shade(one, name, depth) {
  one.shades ??= new Map();
  if (!one.shades.has(name)) one.shades.set(name, one.shades.size);
  return (one.shades.get(name) + (depth ? 1 : 0)) % SHADES.length;
}

function steps(pen, view, { bands }) {
  const { colours, gutter, width, height, window } = view;
  const place = time => Math.min(width, Math.max(gutter, gutter + window.x(time, width - gutter)));
  const seen = view.steps.map(([step, start, end], i) => ({ step, i, start, end, left: place(start), right: place(end) })).filter(({ start, end }) => end >= window.from && start <= window.to);
  for (const { i, left, right } of seen.filter(({ left, right }) => right - left > 1.5)) {
    pen.fillStyle = bands ? colours.sunken : i % 2 ? colours.card : colours.grid;
    if (!bands) pen.fillRect(left, 24, right - left, TOP - 26);
    else if (i % 2 === 0) pen.fillRect(left, TOP, right - left, height - TOP);
  }
  if (!bands) stepLabels(pen, view, seen);
}

/** The numbers of the steps, as many as there is room for. They are drawn last, since one may be wider than its step. */
function stepLabels(pen, { colours, width }, seen) {
  let lastLabel = -Infinity;
  pen.font = SMALL;
  pen.fillStyle = colours.ink;
  for (const { step, left, right } of seen) {
    const label = right - left > 60 ? `step ${step}` : String(step);
    const room = pen.measureText(label).width;
    if (left < lastLabel + 12 || left + 3 + room > width) continue;
    pen.fillText(label, left + 3, 35);
    lastLabel = left + 3 + room;
  }
}

function ruler(pen, view) {
  const { colours, gutter, width, window } = view;
  pen.fillStyle = colours.card;
  pen.fillRect(0, 0, width, TOP);
  steps(pen, view, { bands: false });
  pen.font = SMALL;
  const { step, at } = ticks(window, width - gutter);
  for (const second of at) {
    const x = gutter + window.x(second, width - gutter);
    pen.fillStyle = colours.line;
    pen.fillRect(x, 16, 1, 6);
    pen.fillStyle = colours.soft;
    const label = step < 1 ? seconds(second) : clock(second);
    const room = pen.measureText(label).width;
    if (x - room / 2 > gutter && x + room / 2 < width) pen.fillText(label, x - room / 2, 9);
  }
  pen.fillStyle = colours.card;
  pen.fillRect(0, 0, gutter - 1, TOP);
  pen.fillStyle = colours.soft;
  pen.fillText("time", 8, 9);
  pen.fillText("steps", 8, 35);
  pen.textAlign = "right";
  pen.fillText("idle", gutter - 8, 35);
  pen.textAlign = "left";
  pen.fillStyle = colours.line;
  pen.fillRect(0, TOP - 1, width, 1);
}

/** Draws each sync as a line across all lanes, with its version if there is room. */
function marks(pen, view) {
  const { colours, gutter, width, height, window } = view;
  pen.strokeStyle = colours.planes.sync[0];
  pen.setLineDash([3, 3]);
  pen.lineWidth = 1;
  let last = -Infinity;
  const inSight = view.syncs.filter(([at]) => at >= window.from && at <= window.to);
  if (inSight.length * 10 < width - gutter) {
    for (const [at, version] of inSight) {
      const x = Math.round(gutter + window.x(at, width - gutter)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, TOP);
      pen.lineTo(x, height);
      pen.stroke();
      if (x > last + 34) {
        pen.fillStyle = colours.planes.sync[0];
        pen.font = SMALL;
        pen.textAlign = "right";
        pen.fillText(`v${version}`, x - 3, TOP + 8);
        pen.textAlign = "left";
        last = x;
      }
    }
  }
  pen.setLineDash([]);
}

function selection(pen, view) {
  if (!view.selected) return;
  const { colours, gutter, width, height, window } = view;
  const [from, to] = view.selected;
  const left = Math.max(gutter, gutter + window.x(from, width - gutter));
  const right = Math.min(width, gutter + window.x(to, width - gutter));
  if (right <= left) return;
  pen.fillStyle = colours.accent;
  pen.globalAlpha = 0.13;
  pen.fillRect(left, 0, right - left, height);
  pen.globalAlpha = 1;
  pen.fillRect(left, 0, 2, height);
  pen.fillRect(right - 2, 0, 2, height);
}

/** Draws a frame around the cursor's step. */
function pointed(pen, view) {
  if (!view.pointed) return;
  const { colours, gutter, width, height, window } = view;
  const [left, right] = view.pointed.map(at => Math.min(width, Math.max(gutter, gutter + window.x(at, width - gutter))));
  if (right <= left) return;
  pen.strokeStyle = colours.accent;
  pen.lineWidth = 1.5;
  pen.strokeRect(left + 0.5, 24.5, Math.max(1, right - left - 1), height - 26);
}

function clipped(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let kept = text.slice(0, Math.max(0, Math.floor(text.length * room / pen.measureText(text).width)));
  while (kept && pen.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
  return kept ? `${kept}…` : "";
}
