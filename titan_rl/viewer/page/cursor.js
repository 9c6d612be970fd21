// The step that is looked at, shared by curves, rollouts and timeline: the one under the pointer, or else the chosen one.

export class Cursor extends EventTarget {
  /** The chosen step is kept in the hash, under "at". */
  constructor(state) {
    super();
    this.state = state;
    this.hovered = null;
    this.chosen = state.number("at");
    state.addEventListener("change", () => this.#read());
  }

  get step() {
    return this.hovered ?? this.chosen;
  }

  /** The pointer is at a step, or at none: null. */
  hover(step) {
    const whole = step === null || step === undefined ? null : Math.max(0, Math.round(step));
    if (whole === this.hovered) return;
    this.hovered = whole;
    this.dispatchEvent(new Event("change"));
  }

  /** Chooses a step, for all tabs; null chooses none. */
  choose(step) {
    this.chosen = step === null ? null : Math.max(0, Math.round(step));
    this.state.set({ at: this.chosen });
    this.dispatchEvent(new Event("change"));
  }

  #read() {
    const chosen = this.state.number("at");
    if (chosen === this.chosen) return;
    this.chosen = chosen;
    this.dispatchEvent(new Event("change"));
  }
}
