// Answers of the server, and word of what changed.

export class HttpSource {
  live = true;

  constructor(base = "") {
    this.base = base;
  }

  runs() {
    return this.#get("/api/runs");
  }

  /** Of all runs: {run: {"training.lr": 0.0003}}. */
  settings() {
    return this.#get("/api/settings");
  }

  summary(run) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/summary`);
  }

  metrics(run) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/metrics`);
  }

  /** `names`: of metrics; `points`: at most so many of each; `from`, `to`: steps. */
  curves(run, { names, points, from, to }) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/curves`, { names: names.join(","), points, from, to });
  }

  /** `filters`: as in the API; what is null or "" is left out. */
  rollouts(run, filters = {}) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/rollouts`, filters);
  }

  rollout(run, index) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/rollouts/${index}`);
  }

  /** The same prompts at several steps. */
  prompts(run) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/prompts`);
  }

  /** `seen_from`, `seen_to`: seconds between which idle times are counted, where it is not all that is asked for. */
  timeline(run, { from, to, width, seen_from, seen_to } = {}) {
    return this.#get(`/api/runs/${encodeURIComponent(run)}/timeline`, { from, to, width, seen_from, seen_to });
  }

  /** Where the whole trace can be had, or null. */
  traceUrl(run) {
    return `${this.base}/api/runs/${encodeURIComponent(run)}/trace.json`;
  }

  /** Calls `heard({run, changed})` on each change and `connected(bool)` as the connection comes and goes; returns what ends it. */
  listen(heard, connected = () => {}) {
    const events = new EventSource(`${this.base}/api/events`);
    events.onopen = () => connected(true);
    events.onerror = () => connected(false);
    events.onmessage = event => heard(JSON.parse(event.data));
    return () => events.close();
  }

  async #get(path, query = {}) {
    const said = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const search = said.length ? `?${new URLSearchParams(said)}` : "";
    const answer = await fetch(this.base + path + search, { headers: { accept: "application/json" } });
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${(await answer.text()).slice(0, 300)}`);
    return answer.json();
  }
}
