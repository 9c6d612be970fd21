// The state of the page, kept in the URL's hash, so that a view can be linked to: #tab=curves&runs=a,b&smoothing=0.6

export class State extends EventTarget {
  constructor() {
    super();
    this.values = new URLSearchParams(location.hash.slice(1));
    addEventListener("hashchange", () => this.#changed());
  }

  /** The string kept under the name, or `fallback`. */
  get(name, fallback = null) {
    return this.values.get(name) ?? fallback;
  }

  /** The number kept under the name, or `fallback`. */
  number(name, fallback = null) {
    const value = this.values.get(name);
    return value === null || value === "" || !Number.isFinite(Number(value)) ? fallback : Number(value);
  }

  /**
   * Keeps the values; null and "" remove a name. `entry`: whether the browser's Back button returns to the former state.
   * Listeners of "change" are notified when the hash is changed from outside, not by calls of this method.
   */
  set(changes, { entry = false } = {}) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") this.values.delete(name);
      else this.values.set(name, String(value));
    }
    const url = `#${this.values}`;
    if (url === location.hash) return;
    if (entry) history.pushState(null, "", url);
    else history.replaceState(null, "", url);
  }

  #changed() {
    this.values = new URLSearchParams(location.hash.slice(1));
    this.dispatchEvent(new Event("change"));
  }
}
