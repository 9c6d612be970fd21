// The visible range of the run in seconds, and its mapping to the screen.

const LEAST = 1e-4; // seconds

export class TimeWindow {
  /** Shows all of [0, whole]. */
  constructor(whole = 1) {
    this.whole = Math.max(whole, LEAST);
    this.from = 0;
    this.to = this.whole;
    this.follow = false; // whether the end of the run stays in view
  }

  get length() {
    return this.to - this.from;
  }

  get isWhole() {
    return this.from <= 0 && this.to >= this.whole;
  }

  /** Notes that the run has become longer. A window that showed the whole run continues to do so, and one that follows moves with the end. */
  extend(whole) {
    const wasWhole = this.isWhole;
    const { length } = this;
    this.whole = Math.max(whole, LEAST);
    if (wasWhole) this.set(0, this.whole);
    else if (this.follow) this.set(this.whole - length, this.whole);
  }

  /** Shows [from, to], as far as the run has it. */
  set(from, to) {
    const length = Math.min(Math.max(to - from, LEAST), this.whole);
    this.from = Math.min(Math.max(from, 0), this.whole - length);
    this.to = this.from + length;
  }

  /** Moves by a share of the visible range. */
  pan(share) {
    this.set(this.from + share * this.length, this.to + share * this.length);
    this.follow = this.follow && this.to >= this.whole;
  }

  /** Shows `factor` times as much time. The time at the share `at` of the window stays in place. */
  zoom(factor, at = 0.5) {
    const fixed = this.from + at * this.length;
    const length = Math.min(Math.max(this.length * factor, LEAST), this.whole);
    this.set(fixed - at * length, fixed + (1 - at) * length);
  }

  /** Converts seconds to pixels in an area of this width; `seconds` converts back. */
  x(seconds, width) {
    return (seconds - this.from) / this.length * width;
  }

  seconds(x, width) {
    return this.from + x / width * this.length;
  }
}

/** Round times for a ruler: at most one per `room` pixels. */
export function ticks(window, width, room = 90) {
  const least = window.length / Math.max(1, width / room);
  const power = 10 ** Math.floor(Math.log10(least));
  const decimal = [1, 2, 5, 10].map(one => one * power).find(one => one >= least);
  const step = least > 1 ? [2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].find(one => one >= least) ?? decimal : decimal;
  const found = [];
  for (let i = Math.ceil(window.from / step); i * step <= window.to; i++) found.push(i * step);
  return { step, at: found };
}
