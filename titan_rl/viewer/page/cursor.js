// The current step, shared by curves, rollouts and timeline: the step under the pointer, or else the chosen step.

export class Cursor extends EventTarget {
  /** The hash keeps the chosen step under "at". */
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

  /** Notes that the pointer is at a step; null if it is at none. */
  hover(step) {
    const whole = step === null || step === undefined ? null : Math.max(0, Math.round(step));
    if (whole === this.hovered) return;
    this.hovered = whole;
    this.dispatchEvent(new Event("change"));
  }

  /** Chooses a step for all tabs; null chooses none. */
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
