// Source that asks the server, and receives its events.

export class HttpSource {
  live = true;

  constructor(base = "") {
    this.base = base;
  }

  runs() {
    return this.#get("/api/runs");
  }

  /** Settings of all runs: {run: {"training.lr": 0.0003}}. */
  settings() {
    return this.#get("/api/settings");
  }

  summary(run) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/summary`);
  }

  metrics(run) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/metrics`);
  }

  /** `names`: metrics; `points`: maximum number of points of each; `from`, `to`: steps. */
  curves(run, { names, points, from, to }) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/curves`, { names: names.join(","), points, from, to });
  }

  /** `filters`: filters of the API; null and "" are left out. */
  rollouts(run, filters = {}) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/rollouts`, filters);
  }

  rollout(run, index) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/rollouts/${index}`);
  }

  /** The prompts that occur at several steps. */
  prompts(run) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/prompts`);
  }

  /** `seen_from`, `seen_to`: seconds between which idle times are counted, if not the whole requested range. */
  timeline(run, { from, to, width, seen_from, seen_to } = {}) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/timeline`, { from, to, width, seen_from, seen_to });
  }

  /** URL of the whole trace, or null. */
  traceUrl(run) {
    return `${this.base}/api/runs/${encodeURIComponent(run)}/trace.json`;
  }

  /** Calls `onEvent({run, changed})` on each change, and `connected(bool)` when the connection comes or goes. Returns a function that stops this. */
  listen(onEvent, connected = () => {}) {
    const events = new EventSource(`${this.base}/api/events`);
    events.onopen = () => connected(true);
    events.onerror = () => connected(false);
    events.onmessage = event => onEvent(JSON.parse(event.data));
    return () => events.close();
  }

  async #get(path, query = {}) {
    const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const search = given.length ? `?${new URLSearchParams(given)}` : "";
    const answer = await fetch(this.base + path + search, { headers: { accept: "application/json" } });
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${(await answer.text()).slice(0, 300)}`);
    return answer.json();
  }
}
