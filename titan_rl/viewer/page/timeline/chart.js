// The canvas of the timeline, with mouse and keyboard control.
import { h } from "viewer/dom";
import { grouped, spanAt } from "viewer/timeline/lanes";
import { TOP, paint, palette } from "viewer/timeline/paint";
import { placed, rowAt } from "viewer/timeline/rows";
import { SpanTip } from "viewer/timeline/tip";

const ZOOM = 1.25;
const TALLEST = 620; // pixels; more lanes scroll
const MANY = 8; // groups with more lanes are folded at first, unless they have idle times

export class TimelineChart {
  /**
   * @param window the `TimeWindow` that is shown.
   * @param moved called when the user has changed the window.
   * @param selected called with [from, to] in seconds when a range has been chosen, or with null.
   * @param pointed called with the time under the pointer in seconds, or null; `clicked` with the time of a click.
   */
  constructor(window, { moved, selected, pointed = () => {}, clicked = () => {} }) {
    Object.assign(this, { window, moved, selected, pointed, clicked });
    this.pointedAt = null; // [from, to] seconds of the cursor's step
    this.folded = new Set();
    this.groups = [];
    this.width = 0; // pixels
    this.placed = placed([], this.folded);
    this.steps = [];
    this.syncs = [];
    this.current = null; // the span chosen by keyboard
    this.lane = null; // id of its lane
    this.range = null;
    this.canvas = h("canvas", {
      tabindex: "0", role: "application", "aria-label": "Timeline. Left and right move, plus and minus zoom, up and down choose a lane, n and p a span; the table below has the same figures.",
      onkeydown: event => this.#key(event), onpointerdown: event => this.#down(event), onpointermove: event => this.#move(event),
      onpointerup: event => this.#up(event), onpointerleave: () => { this.tip.hide(); this.pointed(null); }, ondblclick: event => this.#zoomTo(event),
      onfocus: () => this.draw(), onblur: () => this.tip.hide(),
    });
    this.canvas.addEventListener("wheel", event => this.#wheel(event), { passive: false });
    this.filler = h("div", {});
    this.scroller = h("div", { class: "timeline-scroll", onscroll: () => this.draw() }, this.canvas, this.filler);
    this.tip = new SpanTip();
    this.element = h("div", { class: "timeline-chart" }, this.scroller, this.tip.element);
    this.sized = new ResizeObserver(() => this.#resize());
    this.sized.observe(this.element);
    this.recolour();
  }

  /** Shows an answer of the API. */
  show({ lanes, idle, steps, syncs, seen }) {
    const known = new Set(this.groups.map(({ key }) => key));
    this.groups = grouped(lanes, idle ?? [], seen);
    for (const { key, waits, lanes: all } of this.groups) if (!known.has(key) && !waits && all.length > MANY) this.folded.add(key);
    this.steps = steps ?? [];
    this.syncs = syncs ?? [];
    this.#place();
    this.current &&= this.#found(this.current);
  }

  /** The same span in the present answer; null if it is not in it, or joined with others. It may be cut at another place. */
  #found([start, end, name]) {
    const spans = this.#lane()?.lane.spans ?? [];
    return spans.find(span => span[2] === name && (span[0] === start || span[1] === end)) ?? null;
  }

  #lane() {
    return this.placed.rows.find(row => row.kind === "lane" && row.lane.id === this.lane);
  }

  recolour() {
    this.colours = palette();
    this.draw();
  }

  /** Marks [from, to] seconds as chosen; null removes the mark. */
  select(range) {
    this.range = range;
    this.draw();
  }

  /** Marks [from, to] seconds as the cursor's step; null removes the mark. */
  point(range) {
    if (String(range) === String(this.pointedAt)) return;
    this.pointedAt = range;
    this.draw();
  }

  /** Width of the lanes' names in pixels. */
  get gutter() {
    return this.width < 640 ? 130 : 220;
  }

  /** Width of the time axis in pixels. */
  get room() {
    return Math.max(1, this.width - this.gutter);
  }

  draw() {
    if (this.frame || !this.width) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      const pen = this.canvas.getContext("2d");
      pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
      paint(pen, {
        width: this.width, height: this.height, gutter: this.gutter, scroll: this.scroller.scrollTop, window: this.window, placed: this.placed,
        steps: this.steps, syncs: this.syncs, colours: this.colours, selected: this.range, pointed: this.pointedAt, current: this.current, lane: this.lane,
      });
    });
  }

  close() {
    this.sized.disconnect();
    cancelAnimationFrame(this.frame);
    this.tip.hide();
  }

  #place() {
    this.placed = placed(this.groups, this.folded);
    this.#resize();
  }

  #resize() {
    this.width = this.element.clientWidth;
    const whole = this.placed.height + TOP + 4;
    this.height = Math.min(whole, TALLEST);
    this.scroller.style.setProperty("height", `${this.height}px`);
    this.filler.style.setProperty("height", `${whole - this.height}px`);
    const inner = this.scroller.clientWidth || this.width;
    this.width = inner;
    this.canvas.width = Math.round(inner * devicePixelRatio);
    this.canvas.height = Math.round(this.height * devicePixelRatio);
    this.canvas.style.setProperty("width", `${inner}px`);
    this.canvas.style.setProperty("height", `${this.height}px`);
    this.draw();
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const seconds = this.window.seconds(x - this.gutter, this.room);
    const row = y > TOP ? rowAt(this.placed.rows, y - TOP + this.scroller.scrollTop) : null;
    return { x, y, seconds, row, share: Math.min(1, Math.max(0, (x - this.gutter) / this.room)) };
  }

  #down(event) {
    if (event.button) return;
    const at = this.#at(event);
    if (at.row?.kind === "group" && (at.x < this.gutter || at.row.folded)) {
      this.#fold(at.row.group.key);
      return;
    }
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { ...at, selecting: event.shiftKey || at.y < TOP, from: this.window.from, moved: false };
  }

  #move(event) {
    const at = this.#at(event);
    if (!this.drag) {
      this.#hover(event, at);
      return;
    }
    this.drag.moved ||= Math.abs(at.x - this.drag.x) > 3;
    if (!this.drag.moved) return;
    this.tip.hide();
    if (this.drag.selecting) this.select([this.drag.seconds, at.seconds].sort((a, b) => a - b));
    else {
      const from = this.drag.from - (at.x - this.drag.x) / this.room * this.window.length;
      this.window.set(from, from + this.window.length);
      this.#changed();
    }
  }

  #up(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    const at = this.#at(event);
    if (!drag.moved && at.x >= this.gutter) this.clicked(at.seconds);
    if (drag.selecting && drag.moved) this.selected([drag.seconds, at.seconds].sort((a, b) => a - b));
    else if (drag.y < TOP) this.selected(this.#stepAt(at.seconds));
    else if (!drag.moved && at.row?.kind === "lane") {
      this.lane = at.row.lane.id;
      this.current = spanAt(at.row.lane, at.seconds);
      this.draw();
    }
  }

  #stepAt(seconds) {
    const step = this.steps.find(([, start, end]) => seconds >= start && seconds < end);
    return step ? [step[1], step[2]] : null;
  }

  #hover(event, { row, seconds, x }) {
    this.pointed(x >= this.gutter ? seconds : null);
    const span = row?.kind === "lane" && x >= this.gutter ? spanAt(row.lane, seconds) : null;
    if (span) this.tip.show(row.lane, span, event.clientX, event.clientY);
    else if (row?.kind === "lane" && row.lane.waits && x >= this.gutter) this.tip.showIdle(row.lane, seconds, event.clientX, event.clientY);
    else this.tip.hide();
  }

  #wheel(event) {
    const scrolls = this.filler.offsetHeight > 0 && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      this.window.pan((event.deltaX || event.deltaY) / this.room);
    } else if (scrolls) return;
    else this.window.zoom(ZOOM ** (event.deltaY / 60), this.#at(event).share);
    event.preventDefault();
    this.#changed();
  }

  #zoomTo(event) {
    const { row, seconds } = this.#at(event);
    const span = row?.kind === "lane" ? spanAt(row.lane, seconds) : null;
    if (span) this.#see(span);
  }

  #see([start, end]) {
    const margin = Math.max((end - start) * 0.5, 1e-3);
    this.window.set(start - margin, end + margin);
    this.#changed();
  }

  #fold(key) {
    if (!this.folded.delete(key)) this.folded.add(key);
    this.#place();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.window.pan(-0.2), ArrowRight: () => this.window.pan(0.2), "+": () => this.window.zoom(1 / ZOOM ** 2), "=": () => this.window.zoom(1 / ZOOM ** 2),
      "-": () => this.window.zoom(ZOOM ** 2), 0: () => this.window.set(0, this.window.whole), Home: () => this.window.set(0, this.window.length),
      End: () => this.window.set(this.window.whole - this.window.length, this.window.whole), ArrowUp: () => this.#nextLane(-1), ArrowDown: () => this.#nextLane(1),
      n: () => this.#nextSpan(1), p: () => this.#nextSpan(-1), Enter: () => this.current && this.#see(this.current), Escape: () => { this.current = null; this.tip.hide(); this.selected(null); },
    };
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
    this.#changed();
  }

  #nextLane(by) {
    const lanes = this.placed.rows.filter(row => row.kind === "lane");
    const at = lanes.findIndex(row => row.lane.id === this.lane);
    const row = lanes[Math.max(0, Math.min(lanes.length - 1, at + by))];
    if (!row) return;
    this.lane = row.lane.id;
    const { scrollTop } = this.scroller;
    if (row.top < scrollTop) this.scroller.scrollTop = row.top;
    else if (row.top + row.height > scrollTop + this.height - TOP) this.scroller.scrollTop = row.top + row.height - this.height + TOP;
    this.current = null;
    this.#nextSpan(1);
  }

  #nextSpan(by) {
    const row = this.#lane();
    if (!row) return;
    const { spans } = row.lane;
    const at = this.current ? spans.indexOf(this.current) + by : spans.findIndex(([, end]) => end >= this.window.from);
    const span = spans[at];
    if (!span) return;
    this.current = span;
    const { from, to, length } = this.window;
    if (span[0] > to || span[1] < from) this.window.set((span[0] + span[1] - length) / 2, (span[0] + span[1] + length) / 2);
    const box = this.canvas.getBoundingClientRect();
    const x = Math.max(0, this.window.x(span[0], this.room));
    this.tip.show(row.lane, span, box.left + this.gutter + x, box.top + TOP + row.top - this.scroller.scrollTop + row.height, { say: true });
  }

  #changed() {
    this.moved();
    this.draw();
  }
}
