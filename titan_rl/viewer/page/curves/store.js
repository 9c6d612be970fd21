// Curves of runs. They are requested together, one request per run, and kept until the run has more.

const POINTS = 1000;
const NAMES_A_REQUEST = 40;

export class CurveStore {
  constructor(source) {
    this.source = source;
    this.kept = new Map(); // "run|range|name" -> promise of a curve or null
    this.wanted = new Map(); // "run|range" -> {run, from, to, names: Map(name -> resolvers)}
    this.requests = 0;
  }

  /** A promise of {steps, values, low?, high?}; null if the run has no such metric. `range`: {from, to} in steps, or null for all. */
  curve(run, name, range = null) {
    const batch = range ? `${run}|${range.from}-${range.to}` : `${run}|`;
    const key = `${batch}|${name}`;
    if (!this.kept.has(key)) this.kept.set(key, new Promise((done, failed) => this.#want(batch, run, range, name, { done, failed })));
    return this.kept.get(key);
  }

  /** Forgets the kept curves of a run, because it has more data. */
  forget(run) {
    for (const key of this.kept.keys()) if (key.startsWith(`${run}|`)) this.kept.delete(key);
  }

  /** Forgets the curves of parts of the steps. */
  forgetRanges() {
    for (const key of this.kept.keys()) if (!key.includes("||")) this.kept.delete(key);
  }

  /** The times of the run's steps: an object that converts between steps and seconds; null if they are unknown. */
  async times(run) {
    const curve = await this.curve(run, "time_s");
    return curve && curve.steps.length ? new Times(curve) : null;
  }

  #want(batch, run, range, name, resolvers) {
    if (!this.wanted.size) queueMicrotask(() => this.#send());
    if (!this.wanted.has(batch)) this.wanted.set(batch, { run, range, names: new Map() });
    this.wanted.get(batch).names.set(name, resolvers);
  }

  #send() {
    const wanted = [...this.wanted.values()];
    this.wanted.clear();
    for (const { run, range, names } of wanted) {
      const all = [...names.keys()];
      for (let i = 0; i < all.length; i += NAMES_A_REQUEST) this.#ask(run, range, all.slice(i, i + NAMES_A_REQUEST), names);
    }
  }

  async #ask(run, range, names, resolvers) {
    this.requests += 1;
    try {
      const { curves } = await this.source.curves(run, { names, points: POINTS, ...range });
      for (const name of names) resolvers.get(name).done(curves[name] ?? null);
    } catch (error) {
      for (const name of names) resolvers.get(name).failed(error);
    }
  }
}

class Times {
  constructor({ steps, values }) {
    this.steps = steps;
    this.seconds = values;
  }

  /** Seconds at a step, interpolated between known steps. */
  at(step) {
    return between(this.steps, this.seconds, step);
  }

  /** The step at a time in seconds. */
  step(second) {
    return between(this.seconds, this.steps, second);
  }
}

function between(x, y, at) {
  const i = nearest(x, at, true);
  if (x.length === 1 || i >= x.length - 1) return y[x.length - 1];
  const share = Math.min(Math.max((at - x[i]) / (x[i + 1] - x[i] || 1), 0), 1);
  return y[i] + share * (y[i + 1] - y[i]);
}

/** Index of the value closest to `at`; with `below`, of the last value that is not greater (or the first value). `x` ascends. */
export function nearest(x, at, below = false) {
  let low = 0;
  let high = x.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (x[middle] <= at) low = middle;
    else high = middle - 1;
  }
  if (!below && low + 1 < x.length && x[low + 1] - at < at - x[low]) return low + 1;
  return low;
}
