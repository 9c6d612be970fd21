// Filtering, sorting and grouping of runs by their fields and settings.

const FIELDS = ["kind", "state", "task"];
const CONDITION = /^([\w.]+)(!=|>=|<=|=|>|<)(.*)$/;

/** Filter for runs that match all words of a text. A word is part of the name, state, kind or a task; /a regex/; or a condition such as steps>100, state!=failed, training.lr<1e-4. */
export class RunFilter {
  constructor(text) {
    this.tests = text.trim().split(/\s+/).filter(Boolean).map(word => testOf(word));
  }

  /** Whether the text has conditions, which may need settings. */
  static asksForSettings(text) {
    return /[=<>]/.test(text);
  }

  /** `settings`: of the run, by dotted names. May be missing. */
  fits(run, settings = {}) {
    return this.tests.every(test => test(run, settings));
  }
}

function testOf(word) {
  const condition = CONDITION.exec(word);
  if (condition) {
    const [, name, operator, wanted] = condition;
    return (run, settings) => {
      const values = valuesOf(run, name, settings);
      return operator === "!=" ? values.length > 0 && !values.some(value => holds(value, "=", wanted)) : values.some(value => holds(value, operator, wanted));
    };
  }
  if (word.length > 2 && word.startsWith("/") && word.endsWith("/")) {
    try {
      const wanted = new RegExp(word.slice(1, -1), "i");
      return run => wanted.test(run.name) || wanted.test(run.folder ?? "");
    } catch {
      // not a regex yet, because the reader is still typing
    }
  }
  const part = word.toLowerCase();
  return run => [run.name, run.folder, run.state, run.kind, ...(run.tasks ?? [])].some(text => String(text ?? "").toLowerCase().includes(part));
}

function holds(value, operator, wanted) {
  const [number, other] = [Number(value), Number(wanted)];
  if (operator === "=") return String(value).toLowerCase() === wanted.toLowerCase() || (wanted !== "" && typeof value === "number" && number === other);
  if (wanted === "" || Number.isNaN(number) || Number.isNaN(other)) return false;
  return { ">": number > other, "<": number < other, ">=": number >= other, "<=": number <= other }[operator];
}

/** The values of a run under a name: a field, a setting by its dotted name, or by the last part of it. */
function valuesOf(run, name, settings) {
  if (name === "task") return run.tasks ?? [];
  if (["name", "state", "kind", "steps", "seconds"].includes(name)) return [run[name]];
  if (Object.hasOwn(settings, name)) return [settings[name]];
  return Object.entries(settings).filter(([key]) => key.endsWith(`.${name}`)).map(([, value]) => value);
}

/** The names by which runs can be grouped: fields and settings that have several values. */
export function groupings(runs, settings) {
  const known = runs.map(run => settings[run.id] ?? {});
  const names = [...new Set(known.flatMap(Object.keys))];
  const differ = names.filter(name => new Set(known.map(one => text(one[name]))).size > 1);
  return [...FIELDS.filter(name => new Set(runs.map(run => groupOf(run, name, {}))).size > 1), ...differ];
}

/** Groups of runs as [{name, runs}], in the order of the runs. */
export function groupsOf(runs, by, settings) {
  const groups = new Map();
  for (const run of runs) {
    const value = groupOf(run, by, settings[run.id] ?? {});
    if (!groups.has(value)) groups.set(value, []);
    groups.get(value).push(run);
  }
  return [...groups].map(([name, among]) => ({ name, runs: among }));
}

function groupOf(run, by, settings) {
  if (by === "task") return run.tasks?.length ? run.tasks.join(", ") : "no task";
  if (FIELDS.includes(by)) return String(run[by]);
  return Object.hasOwn(settings, by) ? `${by.split(".").at(-1)} ${text(settings[by])}` : `no ${by}`;
}

export function sorted(runs, order) {
  const by = {
    oldest: (a, b) => a.began - b.began, name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
    steps: (a, b) => b.steps - a.steps, seconds: (a, b) => b.seconds - a.seconds,
  }[order];
  return by ? [...runs].sort(by) : runs;
}

function text(value) {
  return typeof value === "string" ? value : JSON.stringify(value) ?? "–";
}
