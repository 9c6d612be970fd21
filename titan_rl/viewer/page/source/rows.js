// Filters rollouts in the same way as the server: rows in, {total, rows, facets, ranges} out.

const FACETS = ["status", "task", "phase"];
const RANGES = ["step", "reward"];

export function filtered(rows, { sort, descending, offset = 0, limit = 100, ...filters }) {
  const kept = fitting(rows, filters);
  kept.sort(by(sort || "index", truthy(descending)));
  const facets = Object.fromEntries(FACETS.map(name => [name, counts(fitting(rows, { ...filters, [name]: null }), name)]));
  const ranges = Object.fromEntries(RANGES.map(name => [name, extent(rows, name)]));
  return { total: kept.length, rows: kept.slice(Number(offset), Number(offset) + Number(limit)), facets, ranges };
}

function fitting(rows, filters) {
  const tests = testsOf(filters);
  return rows.filter(row => tests.every(test => test(row)));
}

function testsOf(filters) {
  const tests = [];
  for (const [name, value] of Object.entries(filters)) {
    if (value === null || value === undefined || value === "") continue;
    if (name === "step_min" || name === "reward_min") tests.push(row => row[name.slice(0, -4)] != null && row[name.slice(0, -4)] >= Number(value));
    else if (name === "step_max" || name === "reward_max") tests.push(row => row[name.slice(0, -4)] != null && row[name.slice(0, -4)] <= Number(value));
    else if (name === "dropped") tests.push(row => Boolean(row.dropped) === truthy(value));
    else if (name === "group") tests.push(row => String(row.group_id) === String(value));
    else if (name === "text") tests.push(row => String(row.preview ?? "").toLowerCase().includes(String(value).toLowerCase()));
    else tests.push(row => String(row[name]) === String(value));
  }
  return tests;
}

function truthy(value) {
  return value === true || value === "true" || value === "1" || value === 1;
}

/** Comparison by a column. Missing values are last; ties keep the order of the file. */
function by(name, descending) {
  const sign = descending ? -1 : 1;
  return (a, b) => {
    if (a[name] == null !== (b[name] == null)) return a[name] == null ? 1 : -1;
    if (a[name] == null || a[name] === b[name]) return sign * (a.index - b.index);
    return a[name] < b[name] ? -sign : sign;
  };
}

function counts(rows, name) {
  const found = {};
  for (const row of rows) if (row[name] != null) found[row[name]] = (found[row[name]] ?? 0) + 1;
  return found;
}

function extent(rows, name) {
  let low = null;
  let high = null;
  for (const { [name]: value } of rows) {
    if (value == null) continue;
    if (low === null || value < low) low = value;
    if (high === null || value > high) high = value;
  }
  return low === null ? null : [low, high];
}
