// The settings of the selected runs: a table of differences, and each run's whole file.
import { h, settled } from "viewer/dom";

export function open(container, { source, runs, state }) {
  let closed = false;
  const words = h("input", { type: "search", placeholder: "Search settings", "aria-label": "Search settings", value: state.get("settings", ""), oninput: settled(() => draw(), 80) });
  const alone = runs.length === 1;
  const all = h("input", { type: "checkbox", checked: alone ? state.get("settings.all") !== "0" : state.get("settings.all") === "1", onchange: () => draw() });
  const table = h("div", { class: "settings-table" });
  const files = h("div", {});
  let summaries = [];
  container.append(
    h("div", { class: "settings-bar" }, words, h("label", {}, all, alone ? " show defaults too" : " show equal settings too")), table, files);

  Promise.all(runs.map(run => source.summary(run.id))).then(found => {
    if (closed) return;
    summaries = found;
    draw();
    files.replaceChildren(...runs.map((run, i) => file(run, summaries[i].config)).filter(Boolean));
  }).catch(error => table.replaceChildren(h("p", { class: "empty bad", role: "alert" }, `The settings could not be read: ${error.message}`)));

  function draw() {
    state.set({ settings: words.value.trim(), "settings.all": all.checked === alone ? null : alone ? 0 : 1 });
    const rows = rowsOf(summaries.map(({ settings }) => settings ?? {}));
    const defaults = alone ? summaries[0].defaults ?? {} : {};
    for (const row of rows) if (Object.hasOwn(defaults, row.name)) Object.assign(row, { differs: true, usual: defaults[row.name] });
    const wanted = words.value.trim().toLowerCase();
    const shown = rows.filter(row => (all.checked || row.differs) && `${row.name} ${row.values.join(" ")}`.toLowerCase().includes(wanted));
    table.replaceChildren(shown.length ? grid(shown, runs, alone) : h("p", { class: "empty" }, nothing(rows, wanted)));
  }

  return { update() {}, close: () => (closed = true) };
}

/** Each setting of any run, with its value in each run as text; "–" if a run does not have it. */
export function rowsOf(settings) {
  const names = [...new Set(settings.flatMap(Object.keys))];
  return names.map(name => {
    const values = settings.map(one => (Object.hasOwn(one, name) ? text(one[name]) : "–"));
    return { name, values, differs: new Set(values).size > 1 };
  });
}

function text(value) {
  if (typeof value === "string") return value === "" ? '""' : value;
  return JSON.stringify(value);
}

function nothing(rows, wanted) {
  if (!rows.length) return "This run keeps no settings.";
  if (wanted) return `No setting has “${wanted}” in it.`;
  return rows[0].values.length > 1 ? "The settings of these runs are the same." : "All settings have their defaults.";
}

/** `usual`: whether a column shows the defaults that a setting differs from. */
function grid(rows, runs, usual) {
  const head = h("tr", {}, h("th", { scope: "col" }, "Setting"), runs.map(run => h("th", { scope: "col" }, h("span", { class: "dot", style: { "--run": run.colour } }), run.name)), usual ? h("th", { scope: "col" }, "Default, if it differs") : null);
  let table = null;
  const body = rows.map(row => {
    const at = row.name.lastIndexOf(".");
    const of = row.name.slice(0, Math.max(at, 0));
    const starts = of !== table;
    table = of;
    return h("tr", { class: [starts && "starts", row.differs && "differs"].filter(Boolean).join(" ") || null },
      h("th", { scope: "row" }, h("span", { class: "soft" }, of && `${of}.`), row.name.slice(at + 1)), row.values.map(value => h("td", {}, value)), usual ? h("td", { class: "soft" }, row.usual ?? "") : null);
  });
  return h("table", { class: "card" }, h("thead", {}, head), h("tbody", {}, body));
}

function file(run, config) {
  if (!config) return null;
  return h("details", { class: "card config" }, h("summary", {}, `config.toml of ${run.name}`), h("pre", { tabindex: "0" }, config));
}
