// Curves below the lanes, on the same axis: the staleness of each step's batch, the length of accepted rollouts, and what was discarded.
import { css, h } from "viewer/dom";
import { short } from "viewer/quantities";

const HEIGHT = 74;
const PANELS = [
  { title: "Staleness", unit: "versions", lines: [["train/staleness_max", "most", "--plane-validation"], ["train/staleness_mean", "mean", "--plane-trainer"]] },
  { title: "Length", unit: "tokens a rollout", lines: [
    ["scheduling/generated_tokens_mean", "all that finished, over the run", "--plane-checkpoint"], ["scheduling/accepted_tokens_mean", "trained on, over the run", "--plane-generator"],
    ["rollout/completion_tokens_mean", "trained on, this step", "--plane-trainer"]] },
  { title: "Thrown away", unit: "tokens of dropped groups", bars: true, lines: [["scheduling/wasted_tokens", "tokens", "--plane-sync"]] },
];
export const NAMES = PANELS.flatMap(({ lines }) => lines.map(([name]) => name));

export class Schedule {
  /** `place()`: {gutter, width} in pixels, as in the timeline; `pointed` and `clicked` are called with seconds, as by the chart. */
  constructor(window, place, { pointed = () => {}, clicked = () => {} } = {}) {
    Object.assign(this, { window, place, pointed });
    this.steps = [];
    this.curves = {};
    this.at = null;
    this.element = h("div", { class: "schedule", onpointermove: event => this.#point(event), onpointerleave: () => { this.at = null; this.pointed(null); this.draw(); }, onclick: () => this.at !== null && clicked(this.at) });
    this.sized = new ResizeObserver(() => this.draw());
    this.sized.observe(this.element);
  }

  /** `steps`: [[step, start, end]]; `curves` in the form of the API. */
  show(steps, curves) {
    this.steps = steps;
    this.curves = curves;
    this.places = new Map(steps.map(([step, start, end]) => [step, [start, end]]));
    this.panels = PANELS.filter(({ bars, lines }) => lines.some(([name]) => curves[name]?.values.some(value => value !== null && (!bars || value > 0))));
    this.element.replaceChildren(...this.panels.map(panel => this.#panel(panel)));
    this.draw();
  }

  /** The values of all lines at a step: {metric: value}. */
  of(step) {
    return Object.fromEntries(NAMES.filter(name => this.curves[name]).map(name => [name, this.curves[name].values[this.curves[name].steps.indexOf(step)] ?? null]));
  }

  /** Marks a time in seconds; null removes the mark. The pointer takes precedence. */
  point(seconds) {
    if (seconds === this.marked) return;
    this.marked = seconds;
    this.draw();
  }

  draw() {
    for (const panel of this.panels ?? []) this.#paint(panel);
  }

  close() {
    this.sized.disconnect();
  }

  #panel(panel) {
    panel.canvas = h("canvas", { "aria-hidden": "true" });
    panel.legend = h("div", { class: "schedule-legend" });
    return h("div", { class: "schedule-panel" }, h("div", { class: "schedule-head" }, h("b", {}, panel.title), h("span", { class: "soft" }, panel.unit), panel.legend), panel.canvas);
  }

  #paint({ canvas, legend, lines, bars }) {
    const { gutter, width } = this.place();
    if (!width) return;
    canvas.style.setProperty("width", `${width}px`);
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(HEIGHT * devicePixelRatio);
    const pen = canvas.getContext("2d");
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    const known = lines.filter(([name]) => this.curves[name]);
    const points = known.map(([name]) => this.#points(this.curves[name]));
    const most = Math.max(1e-9, ...points.flat().map(([, , value]) => value));
    const y = value => HEIGHT - 4 - (HEIGHT - 14) * value / most;
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = css("--soft");
    pen.textAlign = "right";
    pen.fillText(short(most, 3), gutter - 8, 12);
    pen.fillText("0", gutter - 8, HEIGHT - 3);
    pen.fillStyle = css("--line");
    pen.fillRect(gutter, y(most), width - gutter, 1);
    pen.fillRect(gutter, HEIGHT - 4, width - gutter, 1);
    pen.save();
    pen.beginPath();
    pen.rect(gutter, 0, width - gutter, HEIGHT);
    pen.clip();
    const x = seconds => gutter + this.window.x(seconds, width - gutter);
    known.forEach(([, , colour], i) => (bars ? drawBars : drawLine)(pen, points[i].map(([start, end, value]) => [x(start), x(end), y(value)]), css(colour), HEIGHT - 4));
    const at = this.#at();
    if (at !== null) {
      pen.fillStyle = css("--accent");
      pen.fillRect(x(at), 0, 1, HEIGHT);
    }
    pen.restore();
    const step = this.#step();
    legend.replaceChildren(...known.map(([name, label, colour]) => h("span", { style: { "--line-colour": `var(${colour})` } },
      step === null ? label : `${label} ${short(this.of(step)[name])}`)), ...(step === null ? [] : [h("b", {}, `step ${step}`)]));
  }

  #points({ steps, values }) {
    return steps.flatMap((step, i) => {
      const place = this.places.get(step);
      return place && values[i] !== null ? [[place[0], place[1], values[i]]] : [];
    });
  }

  #at() {
    return this.at ?? this.marked ?? null;
  }

  #step() {
    const at = this.#at();
    if (at === null) return null;
    return this.steps.find(([, start, end]) => at >= start && at < end)?.[0] ?? null;
  }

  #point(event) {
    const { left } = this.element.getBoundingClientRect();
    const { gutter, width } = this.place();
    this.at = event.clientX - left < gutter ? null : this.window.seconds(event.clientX - left - gutter, width - gutter);
    this.pointed(this.at);
    this.draw();
  }
}

function drawLine(pen, points, colour) {
  pen.strokeStyle = colour;
  pen.lineWidth = 2;
  pen.beginPath();
  points.forEach(([left, right, y], i) => {
    if (i) pen.lineTo((left + right) / 2, y);
    else pen.moveTo((left + right) / 2, y);
  });
  pen.stroke();
  if (points.length > 60) return;
  pen.fillStyle = colour;
  for (const [left, right, y] of points) {
    pen.beginPath();
    pen.arc((left + right) / 2, y, 2.5, 0, 7);
    pen.fill();
  }
}

function drawBars(pen, points, colour, bottom) {
  pen.fillStyle = colour;
  for (const [left, right, y] of points) pen.fillRect(left + 1, y, Math.max(1, right - left - 2), bottom - y);
}
