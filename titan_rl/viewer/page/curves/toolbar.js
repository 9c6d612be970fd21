// The toolbar above the curves: search, smoothing, the unit of x, log scale, zoom, and a legend of the runs.
import { clock, short } from "viewer/quantities";
import { h, settled } from "viewer/dom";

/** `runs`: runs or groups of runs, {id, name, colour}; `on`: {search(words), toggleRun(id)}; returns {element, search, show()}, where show() displays the state of the view again. */
export function toolbar(view, { runs, words, hidden }, on) {
  const search = h("input", {
    type: "search", placeholder: "Search metrics", value: words, "aria-label": "Search metrics", "aria-keyshortcuts": "/", spellcheck: "false", autocomplete: "off",
    oninput: settled(() => on.search(search.value), 80),
    onkeydown: event => {
      if (event.key !== "Escape") return;
      search.value = "";
      on.search("");
      search.blur();
    },
  });
  const amount = h("output", {});
  const slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: view.smoothing, "aria-label": "Smoothing", oninput: () => view.set({ smoothing: Number(slider.value) }) });
  const x = ["step", "time"].map(name => h("button", { type: "button", onclick: () => view.set({ x: name }) }, name));
  const log = h("button", { type: "button", onclick: () => view.set({ log: !view.log }) }, "log");
  const reset = h("button", { type: "button", class: "reset", onclick: () => view.set({ from: null, to: null }) }, "Reset zoom");
  const range = h("span", { class: "range" });
  const chips = runs.map(run => h("button", { type: "button", class: "chip", style: { "--run": run.colour }, onclick: () => on.toggleRun(run.id) }, run.name));
  const element = h("div", { class: "toolbar", role: "toolbar", "aria-label": "Appearance of curves" },
    h("label", { class: "search" }, search, h("kbd", { "aria-hidden": "true" }, "/")),
    h("label", { class: "smoothing" }, h("span", {}, "Smoothing"), slider, amount),
    h("div", { class: "segments", role: "group", "aria-label": "Horizontal axis" }, x),
    h("div", { class: "segments", role: "group", "aria-label": "Vertical axis" }, log),
    reset, range,
    runs.length > 1 ? h("div", { class: "chips", role: "group", "aria-label": "Runs shown" }, chips) : null);

  function show() {
    amount.textContent = view.smoothing.toFixed(2);
    slider.value = view.smoothing;
    x.forEach(button => button.setAttribute("aria-pressed", String(button.textContent === view.x)));
    log.setAttribute("aria-pressed", String(view.log));
    reset.disabled = !view.zoomed;
    const say = view.x === "time" ? clock : one => short(Math.round(one));
    range.textContent = view.zoomed ? `${view.x} ${say(view.from)} – ${say(view.to)}` : "";
    chips.forEach((chip, i) => chip.setAttribute("aria-pressed", String(!hidden.has(runs[i].id))));
  }
  show();
  return { element, search, show };
}
