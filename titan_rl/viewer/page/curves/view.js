// How all curves are viewed: smoothing, the unit of x, log scale, and the zoomed range. Kept in the hash.

export class CurveView extends EventTarget {
  constructor(state) {
    super();
    this.state = state;
    this.smoothing = Math.min(Math.max(state.number("smoothing", 0.6), 0), 0.99);
    this.x = state.get("x") === "time" ? "time" : "step";
    this.log = state.get("log") === "1";
    this.from = state.number("from");
    this.to = state.number("to");
  }

  get zoomed() {
    return this.from !== null && this.to !== null;
  }

  /** `what` of the event "change" says whether other data is needed ("data") or the same data looks different ("look"). */
  set(changes) {
    const wider = "from" in changes || "to" in changes || "x" in changes;
    if ("x" in changes && changes.x !== this.x) Object.assign(changes, { from: null, to: null });
    Object.assign(this, changes);
    this.state.set({
      smoothing: this.smoothing === 0.6 ? null : this.smoothing, x: this.x === "step" ? null : this.x, log: this.log ? 1 : null,
      from: this.from === null ? null : +this.from.toPrecision(8), to: this.to === null ? null : +this.to.toPrecision(8),
    });
    this.dispatchEvent(Object.assign(new Event("change"), { what: wider ? "data" : "look" }));
  }
}
