// The timeline of a run: the activity of each process, its waits, and the staleness and length of the trained rollouts.
import { button } from "viewer/controls";
import { h, settled } from "viewer/dom";
import { percent, seconds } from "viewer/quantities";
import { TimelineChart } from "viewer/timeline/chart";
import { busySeconds, idleSeconds, idleShareOf } from "viewer/timeline/lanes";
import { NAMES, Schedule } from "viewer/timeline/schedule";
import { timelineTables } from "viewer/timeline/table";
import { TimeWindow } from "viewer/timeline/window";
import { visible } from "viewer/rollouts/visible_text";

const ASK_AGAIN_MS = 1000; // between two requests for a run in progress
const READ_AGAIN_MS = 30; // between two requests while a trace is being read
const TIMES = ["time_s", "time/step_s"];

export function open(container, { source, runs, state, cursor }) {
  const tab = new TimelineTab(source, runs, state, cursor);
  container.append(tab.element);
  tab.opened = tab.start();
  return tab;
}

class TimelineTab {
  constructor(source, runs, state, cursor) {
    Object.assign(this, { source, runs, state, cursor });
    this.run = runs.find(run => run.id === state.get("timeline.run")) ?? runs[0];
    this.window = new TimeWindow();
    this.window.follow = this.run.state === "running";
    this.request = 0;
    this.chart = new TimelineChart(this.window, { moved: () => this.#moved(), selected: range => this.select(range), pointed: seconds => this.#point(seconds), clicked: seconds => this.#choose(seconds) });
    this.schedule = new Schedule(this.window, () => this.view.hidden ? { gutter: 60, width: this.schedule.element.clientWidth } : this.chart, { pointed: seconds => this.#point(seconds), clicked: seconds => this.#choose(seconds) });
    this.sentence = h("p", { class: "bottleneck", role: "status" }, "Reading the trace …");
    this.reading = h("progress", { class: "reading", max: "1", "aria-label": "How much of the trace is read" });
    this.pointer = () => this.#showStep();
    cursor.addEventListener("change", this.pointer);
    this.chosen = h("div", { class: "chosen" });
    this.tables = h("details", { class: "timeline-tables", ontoggle: () => this.#fillTables() }, h("summary", {}, "As a table"), this.body = h("div", {}));
    this.more = settled(() => this.#ask(), 150);
    this.again = settled(() => this.#refresh(), ASK_AGAIN_MS);
    this.view = h("div", { class: "timeline-view", hidden: true }, this.#toolbar(), this.chart.element, this.chosen);
    this.element = h("div", { class: "timeline" }, this.sentence, this.reading, this.view, this.schedule.element, this.tables);
  }

  /** Resolves when the whole run is drawn, and the target of the link is in view. */
  async start() {
    await this.#refresh();
    const [from, to] = [this.state.number("timeline.from"), this.state.number("timeline.to")];
    if (from !== null && to !== null) {
      this.window.set(from, to);
      await this.#ask();
    }
    const steps = this.state.get("timeline.steps")?.split("-").map(Number);
    if (steps?.length === 2) this.select(this.#secondsOf(...steps));
  }

  /** The drawn data: lanes with their spans, and the activity of each in [from, to], by default in the visible range. */
  figures(from = this.window.from, to = this.window.to) {
    const lanes = this.chart.groups.flatMap(group => group.lanes);
    return {
      from, to, steps: this.chart.steps, syncs: this.chart.syncs,
      lanes: lanes.map(lane => ({
        id: lane.id, kind: lane.kind, spans: lane.spans, busy: busySeconds(lane, from, to), idle: lane.waits ? idleSeconds(lane, from, to) : null,
      })),
    };
  }

  /** Chooses the steps within [from, to] seconds; null chooses none. */
  select(range) {
    const steps = range ? this.chart.steps.filter(([, start, end]) => end > range[0] + 1e-9 && start < range[1] - 1e-9) : [];
    const chosen = steps.length ? [steps[0][1], steps.at(-1)[2]] : range;
    this.chart.select(chosen);
    this.state.set({ "timeline.steps": steps.length ? `${steps[0][0]}-${steps.at(-1)[0]}` : null });
    this.#tell(chosen, steps);
  }

  update(what) {
    if (what.theme) {
      this.chart.recolour();
      this.schedule.draw();
    } else if (what.run === this.run.id && what.changed?.some(one => one === "timeline" || one === "metrics")) this.again();
  }

  close() {
    this.request++;
    this.cursor.removeEventListener("change", this.pointer);
    this.chart.close();
    this.schedule.close();
  }

  /** Until the trace is read, draws the steps according to the metrics, and the lanes as far as they are known. */
  async #refresh() {
    const request = ++this.request;
    const pending = this.source.curves(this.run.id, { names: [...NAMES, ...TIMES], points: 2000 }).then(answer => answer.curves).catch(() => ({}));
    const answer = this.#timeline();
    const curves = await pending;
    if (request !== this.request) return;
    if (!this.shown) this.#showSteps(curves);
    let timeline = await answer;
    while (request === this.request && timeline?.read < 1 && timeline.lanes) {
      this.#showAll(timeline, curves);
      await new Promise(resolve => setTimeout(resolve, READ_AGAIN_MS));
      timeline = await this.#timeline();
    }
    if (request !== this.request) return;
    this.#showAll(timeline, curves);
    if (this.shown && !this.window.isWhole) await this.#ask();
  }

  #timeline() {
    return this.source.timeline(this.run.id, { width: this.#pixels() }).catch(error => ({ failed: error }));
  }

  #showAll(timeline, curves) {
    const read = timeline?.read ?? 1;
    const has = Boolean(timeline && !timeline.failed && timeline.lanes.length > 0);
    this.shown = has;
    this.reading.hidden = read >= 1;
    this.reading.value = read;
    if (has) this.#show(timeline);
    else if (read >= 1) this.#showNone(timeline, curves);
    if (read < 1) this.sentence.textContent = `Reading the trace: ${percent(read)}`;
    if (has || read >= 1) this.view.hidden = this.tables.hidden = !has;
    if (has || read >= 1) this.schedule.show(this.chart.steps, curves);
    this.#showStep();
  }

  /** Places the steps according to the metrics, until the trace gives exact times. */
  #showSteps(curves) {
    const { time_s: ends, "time/step_s": lengths } = curves;
    const steps = (ends?.steps ?? []).flatMap((step, i) => {
      const length = lengths?.values[lengths.steps.indexOf(step)];
      return step > 0 && length > 0 && ends.values[i] !== null ? [[step, Math.max(0, ends.values[i] - length), ends.values[i]]] : [];
    });
    if (!steps.length) return;
    this.view.hidden = false;
    this.tables.hidden = true;
    this.window.extend(steps.at(-1)[2]);
    this.chart.show({ lanes: [], idle: [], steps, syncs: [] });
    this.schedule.show(steps, curves);
    this.#showStep();
  }

  #stepAt(seconds) {
    return seconds === null ? null : this.chart.steps.find(([, start, end]) => seconds >= start && seconds < end)?.[0] ?? null;
  }

  #point(seconds) {
    this.cursor.hover(this.#stepAt(seconds));
  }

  #choose(seconds) {
    const step = this.#stepAt(seconds);
    if (step !== null) this.cursor.choose(step);
  }

  /** Marks the cursor's step. */
  #showStep() {
    const found = this.cursor.step === null ? null : this.chart.steps.find(([step]) => step === this.cursor.step) ?? null;
    this.chart.point(found && [found[1], found[2]]);
    this.schedule.point(found && (found[1] + found[2]) / 2);
  }

  #show(timeline) {
    this.window.extend(timeline.to);
    this.sentence.replaceChildren(...visible(sentence(timeline.bottleneck?.sentence ?? "No process waits for another for long: there is no bottleneck.")));
    this.#draw(timeline);
  }

  #showNone(timeline, curves) {
    const steps = [...new Set(Object.values(curves).flatMap(curve => curve.steps))].sort((a, b) => a - b);
    this.chart.steps = steps.map((step, i) => [step, i, i + 1]);
    this.window.extend(Math.max(1, steps.length));
    this.sentence.textContent = timeline?.failed ? `The timeline could not be read: ${timeline.failed.message}`
      : timeline === null && !this.source.live ? "The report holds no timeline of this run: `titan-rl view` shows it." : "This run has no trace, so there is no timeline of it.";
  }

  #draw(timeline) {
    this.chart.show(timeline);
    this.#fillTables();
    this.#sayWindow();
  }

  /** Requests the visible range, in the detail that fits the screen. */
  async #ask() {
    const request = ++this.request;
    const { from, to } = this.window;
    const margin = (to - from) / 2;
    const answer = await this.source.timeline(this.run.id, { from: Math.max(0, from - margin), to: to + margin, width: 2 * this.#pixels(), seen_from: from, seen_to: to }).catch(() => null);
    if (answer && request === this.request) this.#draw(answer);
  }

  /** Width of the time axis in pixels, also before it is drawn for the first time. */
  #pixels() {
    return Math.round(this.view.hidden ? Math.max(400, this.element.clientWidth) : this.chart.room);
  }

  #moved() {
    this.schedule.draw();
    this.#sayWindow();
    const { from, to, isWhole } = this.window;
    this.state.set(isWhole ? { "timeline.from": null, "timeline.to": null } : { "timeline.from": from.toFixed(4), "timeline.to": to.toFixed(4) });
    this.more();
  }

  #sayWindow() {
    const { from, to, isWhole, length } = this.window;
    this.where.textContent = isWhole ? `all ${seconds(length)}` : `${seconds(from)} to ${seconds(to)}, ${seconds(length)}`;
  }

  #toolbar() {
    const act = change => () => { change(); this.chart.draw(); this.#moved(); };
    this.where = h("span", { class: "soft where" });
    const follow = h("input", { type: "checkbox", checked: this.window.follow, onchange: () => { this.window.follow = follow.checked; } });
    return h("div", { class: "timeline-bar", role: "toolbar", "aria-label": "Visible range" },
      button("−", act(() => this.window.zoom(1.6)), { "aria-label": "Zoom out", title: "key −" }), button("+", act(() => this.window.zoom(1 / 1.6)), { "aria-label": "Zoom in", title: "key +" }),
      button("‹", act(() => this.window.pan(-0.4)), { "aria-label": "Earlier", title: "key ←" }), button("›", act(() => this.window.pan(0.4)), { "aria-label": "Later", title: "key →" }),
      button("Whole run", act(() => this.window.set(0, this.window.whole)), { title: "key 0" }), this.where, this.run.state === "running" && h("label", {}, follow, " follow the end"),
      h("span", { class: "spring" }), h("span", { class: "idle-key" }, "idle"), h("span", { class: "soft hint" }, "drag to move · wheel to zoom · drag the ruler to choose steps"));
  }

  #secondsOf(first, last) {
    const steps = this.chart.steps.filter(([step]) => step >= first && step <= last);
    return steps.length ? [steps[0][1], steps.at(-1)[2]] : null;
  }

  #tell(range, steps) {
    if (!range) {
      this.chosen.replaceChildren();
      return;
    }
    const [from, to] = range;
    const idle = this.chart.groups.filter(group => group.waits && group.kind !== "controller").map(({ label, lanes }) =>
      `${label.toLowerCase()} idle ${percent(idleShareOf(lanes, from, to))}`);
    const [first, last] = [steps[0]?.[0], steps.at(-1)?.[0]];
    const name = steps.length ? first === last ? `Step ${first}` : `Steps ${first} to ${last}` : "Selection";
    this.chosen.replaceChildren(h("b", {}, name), h("span", {}, `${seconds(to - from)}${steps.length > 1 ? `, ${seconds((to - from) / steps.length)} a step` : ""}; ${idle.join(", ")}`),
      button("Zoom to it", () => { this.window.set(from, to); this.chart.draw(); this.#moved(); }),
      steps.length > 0 && button("Its rollouts", () => this.#goToRollouts(first, last)),
      button("Clear", () => this.select(null), { class: "quiet" }));
  }

  #goToRollouts(first, last) {
    const hash = new URLSearchParams(location.hash.slice(1));
    for (const name of [...hash.keys()]) if (name.startsWith("rollouts.")) hash.delete(name);
    hash.set("tab", "rollouts");
    hash.set("rollouts.step_min", first);
    hash.set("rollouts.step_max", last);
    location.hash = hash;
  }

  #fillTables() {
    if (this.tables.open) this.body.replaceChildren(...timelineTables(this.chart.groups, this.window.from, this.window.to));
  }
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
