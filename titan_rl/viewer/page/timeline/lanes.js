// The lanes of a trace in display order, and the activity of each in a range of time.

const KINDS = ["host", "controller", "trainer", "generator", "environment", "reward", "sync", "scheduler", "checkpoint", "validation"];
const LABELS = { host: "Hosts", controller: "Training loop", trainer: "Trainer", generator: "Generators", environment: "Environments", reward: "Rewards", sync: "Weight syncs", scheduler: "Scheduler", checkpoint: "Checkpoints", validation: "Validation" };
const OF_ALL = ["host", "controller"]; // kinds of lanes that belong to no host

/**
 * Groups of lanes by kind, and first by host if there are several hosts:
 * [{key, kind, host, label, waits, lanes: [lane with id, label, and spans [start, end, name, args, depth]]}]. The lanes of hosts and of the training loop are first.
 *
 * @param idle of the API: the lanes in which a gap means an idle machine, which `waits` tells.
 * @param seen the range [from, to] in which `idle` was counted.
 */
export function grouped(lanes, idle, seen) {
  const groups = new Map();
  const waiting = new Map(idle.map(({ lane, ...counted }) => [lane, { ...counted, seen }]));
  for (const lane of lanes) {
    const kind = lane.kind ?? "other";
    const host = OF_ALL.includes(kind) ? "" : lane.host ?? "";
    const key = host ? `${host}/${kind}` : kind;
    if (!groups.has(key)) groups.set(key, { key, kind, host, label: `${host ? `${host} · ` : ""}${LABELS[kind] ?? kind}`, lanes: [] });
    groups.get(key).lanes.push(prepared(lane, waiting.get(`${lane.process}/${lane.lane}`)));
  }
  const place = kind => (KINDS.indexOf(kind) + KINDS.length + 1) % (KINDS.length + 1);
  const byName = new Intl.Collator("en", { numeric: true }).compare;
  for (const group of groups.values()) {
    group.lanes.sort((a, b) => byName(a.id, b.id));
    group.waits = group.lanes.some(lane => lane.waits);
    const processes = new Set(group.lanes.map(lane => lane.process));
    for (const lane of group.lanes) lane.short = processes.size === group.lanes.length ? lane.process : lane.lane;
  }
  return [...groups.values()].sort((a, b) => byName(a.host, b.host) || place(a.kind) - place(b.kind));
}

/** Sorts spans by start, outer spans before inner ones, each with its nesting depth. */
function prepared(lane, counted) {
  const spans = lane.spans.map(([start, end, name, args]) => [start, end, name, args ?? {}, args?.depth ?? 0]);
  spans.sort((a, b) => a[0] - b[0] || a[4] - b[4]);
  const label = lane.kind === "host" ? lane.lane.replace(/^host /, "") : lane.lane && lane.lane !== lane.process ? `${lane.process} · ${lane.lane}` : lane.process;
  const from = spans[0]?.[0] ?? 0;
  const to = spans.reduce((last, [, end]) => Math.max(last, end), 0);
  const depth = spans.reduce((most, [, , , , one]) => Math.max(most, one), 0) + 1;
  return { ...lane, id: `${lane.process}/${lane.lane}`, label, counted, waits: counted !== undefined, from, to, spans, depth };
}

/** Seconds of [from, to] in which the lane was busy. A joined span counts with its share. */
export function busySeconds(lane, from, to) {
  let sum = 0;
  let done = from;
  for (const [start, end, , args, depth] of lane.spans) {
    if (start >= to) break;
    if (depth > 0) {
      if (isIdle(args)) sum -= Math.max(0, Math.min(end, to) - Math.max(start, from)); // it waits within another span
      continue;
    }
    const [begin, stop] = [Math.max(start, done), Math.min(end, to)];
    if (stop <= begin || isIdle(args)) continue;
    sum += (stop - begin) * (args.share ?? 1);
    done = stop;
  }
  return Math.max(0, sum);
}

/** Mean idle share in [from, to] of the lanes whose gaps mean idle time. */
export function idleShareOf(lanes, from, to) {
  const shares = lanes.filter(lane => lane.waits).map(lane => idleShare(lane, from, to));
  return shares.reduce((sum, one) => sum + one, 0) / Math.max(1, shares.length);
}

/** Seconds of [from, to] in which the lane existed and was idle: as counted by the server, or else according to the drawn spans. */
export function idleSeconds(lane, from, to) {
  if (isCounted(lane, from, to)) return lane.counted.seconds;
  const [begin, end] = [Math.max(from, lane.from), Math.min(to, lane.to)];
  return end > begin ? Math.max(0, end - begin - busySeconds(lane, begin, end)) : 0;
}

/** Idle seconds as a share of the time in which the lane existed. */
export function idleShare(lane, from, to) {
  if (isCounted(lane, from, to)) return lane.counted.share;
  const there = Math.min(to, lane.to) - Math.max(from, lane.from);
  return there > 0 ? idleSeconds(lane, from, to) / there : 0;
}

function isCounted({ counted }, from, to) {
  return counted?.seen !== undefined && Math.abs(counted.seen[0] - from) < 1e-6 && Math.abs(counted.seen[1] - to) < 1e-6;
}

/** Whether the args of a span say that its lane waits. */
export function isIdle(args) {
  return args.idle === true;
}

/** The innermost span of a lane at a time in seconds, or null. */
export function spanAt(lane, seconds, depth = Infinity) {
  let found = null;
  for (const span of lane.spans) {
    if (span[0] > seconds) break;
    if (span[1] >= seconds && span[4] <= depth) found = span;
  }
  return found;
}

/** Busy shares of the lanes of a group, from 0 to 1, in each of `parts` parts of [from, to]. */
export function occupancy(lanes, from, to, parts) {
  const sums = new Float64Array(parts);
  const width = (to - from) / parts;
  for (const lane of lanes) {
    for (const [start, end, , args, depth] of lane.spans) {
      if (depth > 0 || end <= from || start >= to || isIdle(args)) continue;
      const share = args.share ?? 1;
      const last = Math.min(parts - 1, Math.floor((end - from) / width));
      for (let i = Math.max(0, Math.floor((start - from) / width)); i <= last; i++) {
        sums[i] += share * (Math.min(end, from + (i + 1) * width) - Math.max(start, from + i * width)) / width;
      }
    }
  }
  return sums.map(sum => Math.min(1, sum / Math.max(1, lanes.length)));
}
