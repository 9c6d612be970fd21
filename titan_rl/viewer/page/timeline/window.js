// Which seconds of the run are in sight, and where on the screen each of them is.

const LEAST = 1e-4; // seconds

export class TimeWindow {
  /** Sees all of [0, whole]. */
  constructor(whole = 1) {
    this.whole = Math.max(whole, LEAST);
    this.from = 0;
    this.to = this.whole;
    this.follow = false; // whether the end of the run stays in sight
  }

  get length() {
    return this.to - this.from;
  }

  get isWhole() {
    return this.from <= 0 && this.to >= this.whole;
  }

  /** The run has become longer: what saw all of it goes on doing so, what follows goes with the end. */
  extend(whole) {
    const wasWhole = this.isWhole;
    const { length } = this;
    this.whole = Math.max(whole, LEAST);
    if (wasWhole) this.set(0, this.whole);
    else if (this.follow) this.set(this.whole - length, this.whole);
  }

  /** Sees [from, to], or as much of it as there is. */
  set(from, to) {
    const length = Math.min(Math.max(to - from, LEAST), this.whole);
    this.from = Math.min(Math.max(from, 0), this.whole - length);
    this.to = this.from + length;
  }

  /** Moves by a share of what is in sight. */
  pan(share) {
    this.set(this.from + share * this.length, this.to + share * this.length);
    this.follow = this.follow && this.to >= this.whole;
  }

  /** Sees `factor` times as much; the second at the share `at` of the window stays where it is. */
  zoom(factor, at = 0.5) {
    const fixed = this.from + at * this.length;
    const length = Math.min(Math.max(this.length * factor, LEAST), this.whole);
    this.set(fixed - at * length, fixed + (1 - at) * length);
  }

  /** Seconds to pixels of a place that wide, and back. */
  x(seconds, width) {
    return (seconds - this.from) / this.length * width;
  }

  seconds(x, width) {
    return this.from + x / width * this.length;
  }
}

/** Round times for a ruler: at most one in `room` pixels. */
export function ticks(window, width, room = 90) {
  const least = window.length / Math.max(1, width / room);
  const power = 10 ** Math.floor(Math.log10(least));
  const decimal = [1, 2, 5, 10].map(one => one * power).find(one => one >= least);
  const step = least > 1 ? [2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].find(one => one >= least) ?? decimal : decimal;
  const found = [];
  for (let i = Math.ceil(window.from / step); i * step <= window.to; i++) found.push(i * step);
  return { step, at: found };
}
