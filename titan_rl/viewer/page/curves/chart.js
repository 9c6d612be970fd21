// One uPlot chart: smoothed lines over the original values, bands of extremes, and a cursor that all charts share.
import { short, clock } from "viewer/quantities";
import { smooth, unitOf } from "viewer/curves/smoothing";
import { nearest } from "viewer/curves/store";
import { css, h } from "viewer/dom";

const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7];
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
const FONT = "11px system-ui, sans-serif";

/** Whether the lines are equal, so that the second would hide the first. */
function isEqual(one, other) {
  return one.y.length === other.y.length && one.y.every((y, i) => y === other.y[i] && one.x[i] === other.x[i]);
}

export class Chart {
  /**
   * @param {HTMLElement} element that has the size of the chart
   * @param {object} options zoom: called with (from, to) after a drag, with (null, null) after a double click;
   *   cursor: called with the x under the pointer, or null; choose: called with the x that is clicked;
   *   sync: whether other charts share the cursor
   */
  constructor(element, { zoom = () => {}, cursor = () => {}, choose = () => {}, sync = true } = {}) {
    this.element = element;
    this.options = { zoom, cursor, choose, sync };
    this.marked = null; // the x of the marking line
    this.plot = null;
    this.lines = [];
    this.shape = "";
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.resized = new ResizeObserver(() => this.#fit());
    this.resized.observe(element);
    element.addEventListener("keydown", event => this.#key(event));
  }

  /**
   * @param {object[]} lines {label, colour: "var(--run-1)", dash, dots, x, y, low, high}
   * @param {object} view {smoothing, log, x: "step"|"time", from, to}
   */
  draw(lines, view) {
    this.lines = lines.map((line, i) => ({ ...line, dash: line.dash ?? (lines.slice(0, i).some(one => isEqual(one, line)) ? [7, 7] : undefined), smoothed: this.#smoothed(line, view) }));
    this.view = view;
    const positive = this.lines.every(line => [line.y, line.low ?? []].every(all => all.every(y => y === null || y > 0)));
    this.log = view.log && positive && this.lines.length > 0;
    const shape = JSON.stringify([this.log, view.x, this.lines.map(({ colour, dash, dots, low, label, x }) => [colour, dash, dots, Boolean(low), label, x.length < 3]), this.lines.map(line => line.smoothed !== line.y)]);
    const data = this.#columns();
    if (this.plot && shape === this.shape) this.plot.setData(data, false);
    else this.#make(data, shape);
    this.#scale();
  }

  /** Draws again in the colours of the current theme. */
  recolour() {
    this.shape = "";
    if (this.view) this.draw(this.lines, this.view);
  }

  /** Draws a line at x; null removes it. */
  mark(x) {
    if (x === this.marked) return;
    this.marked = x;
    this.plot?.redraw(false, false);
  }

  close() {
    this.resized.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  /** The values of the lines at the points nearest to x, as [{line, x, y, smoothed}]. */
  at(x) {
    return this.lines.filter(line => line.x.length).map(line => {
      const i = nearest(line.x, x);
      return { line, x: line.x[i], y: line.y[i], smoothed: line.smoothed[i] };
    });
  }

  #smoothed(line, { smoothing }) {
    return smoothing && !line.dots && line.x.length > 2 ? smooth(line.x, line.y, smoothing, unitOf(line.x)) : line.y;
  }

  #columns() {
    const tables = this.lines.map(line => {
      const columns = [line.smoothed];
      if (line.smoothed !== line.y) columns.push(line.y);
      if (line.low) columns.push(line.low, line.high);
      return [line.x, ...columns];
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  #make(data, shape) {
    this.plot?.destroy();
    this.shape = shape;
    const { series, bands } = this.#series();
    const soft = css("--soft");
    const axis = { stroke: soft, font: FONT, ticks: { show: false }, grid: { stroke: css("--grid"), width: 1 } };
    const time = this.view.x === "time";
    const options = {
      ...this.#size(), series, bands, legend: { show: false }, padding: [8, 10, 0, 0],
      scales: { x: { time: false }, y: this.log ? { distr: 3 } : { range: honest } },
      axes: [
        { ...axis, size: 24, gap: 4, space: time ? 62 : 48, incrs: time ? SECONDS : STEPS, values: (_, all) => all.map(time ? clock : one => short(one)) },
        { ...axis, size: 46, gap: 5, space: 28, values: (_, all) => all.map(one => (one === null ? "" : short(one))) },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false, dist: 4 }, focus: { prox: -1 },
        points: { size: 7, width: 1.5, stroke: css("--card") },
        ...(this.options.sync ? { sync: { key: "curves", scales: ["x", null], setSeries: false, filters: { pub: moves } } } : {}),
      },
      hooks: { setCursor: [plot => this.#cursor(plot)], setSelect: [plot => this.#select(plot)], draw: [plot => this.#line(plot)] },
    };
    this.plot = new uPlot(options, data, this.element);
    const { over } = this.plot;
    over.append(this.tip);
    over.addEventListener("mouseenter", () => (this.hovered = true));
    over.addEventListener("mouseleave", () => this.#left());
    over.addEventListener("dblclick", () => this.options.zoom(null, null));
    let down = null;
    over.addEventListener("mousedown", event => (down = event.button ? null : event.clientX));
    over.addEventListener("mouseup", event => {
      if (down !== null && Math.abs(event.clientX - down) < 4 && this.lines.length) this.options.choose(this.plot.posToVal(event.clientX - over.getBoundingClientRect().left, "x"));
      down = null;
    });
  }

  #series() {
    const series = [{}];
    const bands = [];
    for (const line of this.lines) {
      const stroke = css(line.colour);
      const few = line.x.length <= 40 || line.dots;
      const points = { show: few && line.smoothed === line.y, size: line.dots ? 7 : 4, fill: stroke, stroke };
      series.push({ stroke, width: line.dots ? 1.5 : 1.75, dash: line.dash, points, spanGaps: Boolean(line.dots), ...(line.x.length < 3 ? { paths: () => null } : {}) }); // a line between two points would look like steady progress
      if (line.smoothed !== line.y) series.push({ stroke, width: 1, alpha: 0.3, dash: line.dash, points: { show: line.x.length < 3 } });
      if (line.low) {
        series.push({ stroke: "transparent", width: 0, points: { show: false } }, { stroke: "transparent", width: 0, points: { show: false } });
        bands.push({ series: [series.length - 1, series.length - 2], fill: `color-mix(in srgb, ${stroke} 14%, transparent)` });
      }
    }
    return { series, bands };
  }

  #scale() {
    const { from, to } = this.view;
    const xs = this.plot.data[0];
    const low = from ?? xs[0];
    const high = to ?? xs[xs.length - 1];
    if (low === undefined) return;
    const margin = low === high ? 1 : 0;
    this.plot.batch(() => this.plot.setScale("x", { min: low - margin, max: high + margin }));
  }

  #line(plot) {
    if (this.marked === null || this.marked < plot.scales.x.min || this.marked > plot.scales.x.max) return;
    const { ctx: pen, bbox } = plot;
    const x = Math.round(plot.valToPos(this.marked, "x", true));
    pen.save();
    pen.strokeStyle = css("--accent");
    pen.lineWidth = 1.5 * devicePixelRatio;
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, bbox.top + bbox.height);
    pen.stroke();
    pen.restore();
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.options.zoom(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }

  #cursor(plot) {
    const { left } = plot.cursor;
    const x = left === undefined || left === null || left < 0 || !this.lines.length ? null : plot.posToVal(left, "x");
    this.options.cursor(x);
    this.tip.hidden = x === null || !this.hovered;
    if (!this.tip.hidden) this.#tell(x, left, plot.over.clientWidth);
  }

  #tell(x, left, width) {
    const found = this.at(x);
    const head = this.view.x === "time" ? clock(x) : `step ${Math.round(x).toLocaleString("en")}`;
    const rows = found.map(({ line, y, smoothed, x: own }) => h("li", { style: { "--run": line.colour } },
      h("span", { class: "name" }, line.label),
      h("b", {}, short(y)),
      h("span", { class: "also" }, smoothed !== y ? `~ ${short(smoothed)}` : "", Math.abs(own - x) > Math.max(1, (this.plot.scales.x.max - this.plot.scales.x.min) / 50) ? ` at ${this.view.x === "time" ? clock(own) : short(own)}` : "")));
    this.tip.replaceChildren(h("div", { class: "x" }, head), h("ul", {}, rows));
    const right = left > width / 2;
    this.tip.style.left = right ? "" : `${left + 12}px`;
    this.tip.style.right = right ? `${width - left + 12}px` : "";
  }

  #left() {
    this.hovered = false;
    this.tip.hidden = true;
  }

  /** Arrow keys move the cursor from point to point, and Enter chooses one. */
  #key(event) {
    if (event.key === "Enter" && this.index !== undefined && this.plot) return this.options.choose(this.plot.data[0][this.index]);
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.plot?.data[0].length) return;
    event.preventDefault();
    const xs = this.plot.data[0];
    this.index = Math.min(Math.max((this.index ?? xs.length - 1) + move, 0), xs.length - 1);
    this.hovered = true;
    this.plot.setCursor({ left: this.plot.valToPos(xs[this.index], "x"), top: 10 });
    this.element.addEventListener("blur", () => this.#left(), { once: true });
  }

  #size() {
    return { width: Math.max(this.element.clientWidth, 60), height: Math.max(this.element.clientHeight, 60) };
  }

  #fit() {
    const size = this.#size();
    if (this.plot && (size.width !== this.plot.width || size.height !== this.plot.height)) this.plot.setSize(size);
  }
}

/** Whether charts pass an event on: they share the position of the cursor. Zooming reaches the other charts through the view. */
function moves(type) {
  return type === "mousemove" || type === "mouseleave";
}

/** The range of the y axis: the values with a margin. It extends beyond zero only if the values do, and starts at zero if that is near. */
function honest(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (high - low <= 1e-9 * Math.abs(high)) return low === 0 ? [-1, 1] : [Math.min(0, low * 1.2), Math.max(0, low * 1.2)];
  const margin = (high - low) * 0.08;
  const bottom = low >= 0 && (low - margin < 0 || low < 0.3 * high) ? 0 : low - margin;
  const top = high <= 0 && (high + margin > 0 || high > 0.3 * low) ? 0 : high + margin;
  return [bottom, top];
}
