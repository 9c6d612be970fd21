// Parts of the overview, each made from a run's summary.
import { clock, moment, percent, seconds as duration, short, whole } from "viewer/quantities";
import { h } from "viewer/dom";

const TONES = { "in the run": "finished", gone: "failed", joining: "running" };
const BECAME = { joined: "joined", drains: "is drained", left: "has left", lost: "was lost" };
const MOST_EVENTS = 8;
const PARTS = { generation: "--plane-generator", environments: "--plane-environment", rewards: "--plane-reward", training: "--plane-trainer", "weight sync": "--plane-sync", validation: "--plane-validation", checkpoints: "--plane-checkpoint" };
const CORES = { "engine steps": "--plane-generator", "generators, besides steps": "--plane-generator", "trainer steps": "--plane-trainer", "trainer, besides steps": "--plane-trainer", "rollout workers": "--plane-environment", "idle, or used by other programs": "--idle" };

/** The run's name, its state and its progress. */
export function headline(run, summary) {
  const { steps, steps_planned: planned, seconds, state } = run;
  const left = run.seconds_left ?? summary.seconds_left;
  const running = state === "running";
  const share = planned ? Math.min(steps / planned, 1) : 0;
  const details = [
    planned ? `step ${whole(steps)} of ${whole(planned)}` : `${whole(steps)} steps`,
    duration(seconds), running && left > 0 && Number.isFinite(left) ? `${duration(left)} left` : null,
    run.tasks?.length ? run.tasks.join(", ") : null, run.began ? `began ${moment(run.began)}` : null,
  ];
  return h("div", { class: "headline" },
    h("div", { class: "name" }, h("h1", {}, run.name), h("span", { class: `pill ${state}` }, state)),
    h("p", { class: "soft" }, details.filter(Boolean).join(" · ")),
    running && planned ? h("div", { class: "progress", role: "progressbar", "aria-label": "Steps done", "aria-valuenow": Math.round(share * 100), "aria-valuemin": "0", "aria-valuemax": "100" }, h("span", { style: { width: `${share * 100}%` } })) : null);
}

export function failure(summary, run, alone) {
  const reason = summary.failure ?? run.reason;
  if (!reason || !["failed", "stopped"].includes(run.state)) return null;
  const tone = run.state === "failed" ? "bad" : "warn";
  return h("div", { class: `notice ${tone}`, role: "alert" }, h("b", {}, `${alone ? "The run" : run.name} ${run.state}: `), reason);
}

export function waiting(_summary, run, alone) {
  if (run.state !== "running" || !run.waits_for) return null;
  return h("div", { class: "notice warn", role: "status" }, h("b", {}, `${alone ? "The run" : run.name} waits for `), run.waits_for);
}

/** Problems of a run's files. Warnings about steps are shown with the verdicts, if there are any. */
export function warnings(summary, run, alone) {
  const all = (summary.warnings ?? []).filter(text => !(summary.verdicts?.length && isOfStep(text)));
  if (!all.length) return null;
  return h("div", { class: "notice warn" }, all.map(text => h("p", {}, alone ? "" : h("b", {}, `${run.name}: `), text)));
}

/** Whether a warning is about a step of the run. */
export function isOfStep(text) {
  return /^step \d+: /.test(text);
}

/** Held-out measurements before and after, for a run that is measured by `quantity`: "Reward" or "Loss". */
export function learned(summary, run, alone, quantity) {
  const trend = summary.trend && lowerIsBetter(summary.trend) === (quantity === "Loss") ? summary.trend : null;
  const label = `Held-out ${quantity.toLowerCase()}`;
  const name = alone ? label : h("span", { style: { "--run": run.colour }, class: "dotted", title: label }, run.name);
  if (!trend) {
    const suites = (summary.tasks ?? []).filter(task => task.held_out).length;
    const why = suites ? "of each task, below" : run.state === "running" ? "not measured twice yet" : "not measured twice";
    return h("div", { class: "gain" }, h("h2", {}, name), h("p", { class: "soft" }, why));
  }
  const gain = trend.after - trend.before;
  const better = lowerIsBetter(trend) ? -trend.direction : trend.direction; // 0 within the noise
  const steps = trend.count > 2 ? `from step ${whole(trend.first_step)} to ${whole(trend.last_step)}` : `2 measurements, at steps ${whole(trend.first_step)} and ${whole(trend.last_step)}`;
  const error = typeof trend.error === "number" ? ` ± ${figure(trend.error)}` : "";
  return h("div", { class: "gain" }, h("h2", {}, name),
    h("p", { class: "figures" }, h("span", { class: "before" }, figure(trend.before)), h("span", { class: "arrow", "aria-label": "to" }, "→"), h("span", { class: "after" }, figure(trend.after))),
    h("p", { class: better > 0 ? "good" : better < 0 ? "bad" : "soft" }, `${gain < 0 ? "−" : "+"}${figure(Math.abs(gain))}`, h("span", { class: "soft" }, `${error} ${steps}`)));
}

/** The first and the last value of the headline of a run of games, and why it is not the reward. */
export function ofGames({ title, note }, lines, run, alone) {
  const { name, y } = lines.find(line => line.run === run.id);
  const known = y.filter(value => value !== null);
  return h("div", { class: "gain" }, h("h2", {}, alone ? title : h("span", { style: { "--run": run.colour }, class: "dotted" }, run.name)),
    h("p", { class: "figures" }, h("span", { class: "before" }, figure(known[0])), h("span", { class: "arrow", "aria-label": "to" }, "→"), h("span", { class: "after" }, figure(known.at(-1)))),
    h("p", { class: "soft" }, `${name}. ${note}`));
}

export function lowerIsBetter(trend) {
  return trend?.metric === "validation/loss";
}

export function tiles({ tiles: all = [] }) {
  return all.map(({ label, value, note, tone }) => h("div", { class: "card tile" },
    h("div", { class: "label" }, label), h("div", { class: `figure ${tone ?? ""}` }, value), h("div", { class: "note" }, note || " ")));
}

/** How the steps' time is spent, and what may help: one card for all runs. */
export function time(runs, summaries) {
  const alone = runs.length === 1;
  const rows = runs.map((run, i) => {
    const { bottleneck: found, time: parts = [] } = summaries[i];
    if (!found) return null;
    const shown = parts.length ? parts : [{ name: found.name, share: found.share }];
    return h("div", { class: "wait" },
      alone ? null : h("span", { class: "dotted", style: { "--run": run.colour } }, run.name),
      h("div", { class: "parts", "aria-hidden": "true" }, shown.map(({ name, share }) =>
        h("span", { style: { "flex-grow": String(share), background: `var(${PARTS[name] ?? "--plane-scheduler"})` }, title: `${name} ${percent(share)}` }, share > 0.12 ? `${name} ${percent(share)}` : ""))),
      h("p", { class: "soft" }, shown.filter(({ share }) => share >= 0.001).map(({ name, share }) => `${name} ${percent(share)}`).join(" · ")),
      h("p", {}, found.sentence.charAt(0).toUpperCase() + found.sentence.slice(1), /[.!?]$/.test(found.sentence) ? "" : "."));
  }).filter(Boolean);
  return rows.length ? h("section", { class: "card", "aria-label": "Where the steps' time goes" }, h("h2", {}, "Where the steps' time goes"), rows) : null;
}

/** Waterfall of the core seconds of a step, from the work to the idle time: a card for a run that has measured them. */
export function cores({ cores: parts = [] }, run, alone) {
  if (!parts.length) return null;
  const title = alone ? "Where the cores' time goes" : `Where the cores' time goes in ${run.name}`;
  const begins = parts.map((_, i) => parts.slice(0, i).reduce((sum, { share }) => sum + share, 0));
  const row = ({ name, seconds, share }, i) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, `${short(seconds, 3)} s`), h("td", {}, percent(share)),
    h("td", { class: "fall", "aria-hidden": "true" }, h("span", { style: { "margin-left": `${100 * begins[i]}%`, width: `${100 * share}%`, background: `var(${CORES[name] ?? "--plane-scheduler"})` } })));
  const head = ["Process", "Core seconds of a step", "Share"].map(label => h("th", { scope: "col" }, label));
  return h("section", { class: "card cores", "aria-label": title }, h("h2", {}, title),
    h("div", { class: "comparison", tabindex: "0", role: "region", "aria-label": `${title}, a line each` }, h("table", {}, h("thead", {}, h("tr", {}, head, h("td", {}))), h("tbody", {}, parts.map(row)))));
}

/** The hosts of a run, with their processes and events; nothing for a run on one host. */
export function hosts({ hosts: found }, run, alone) {
  if (!found) return null;
  const name = alone ? "Hosts" : `Hosts of ${run.name}`;
  const row = host => h("tr", {}, h("th", { scope: "row" }, host.name || host.address), h("td", {}, host.does || "–"),
    h("td", {}, h("span", { class: `pill ${TONES[host.state] ?? "stopped"}` }, host.state)), h("td", { class: "soft" }, host.reason), h("td", { class: "soft" }, host.address));
  const events = found.events.slice(-MOST_EVENTS).reverse();
  return h("section", { class: "card hosts", "aria-label": name }, h("h2", {}, name),
    h("div", { class: "comparison", tabindex: "0", role: "region", "aria-label": `${name}, a line each` }, h("table", {},
      h("thead", {}, h("tr", {}, ["Host", "Does", "State", "Why", "Address"].map(label => h("th", { scope: "col" }, label)))),
      h("tbody", {}, found.hosts.map(row)))),
    events.length > 0 && h("ul", { "aria-label": "Events of the hosts, newest first" }, events.map(({ at, host, what, why }) =>
      h("li", {}, h("time", { class: "soft", title: moment(at) }, clock(at - run.began)), " ", h("b", {}, host), ` ${BECAME[what] ?? what}`, why ? h("span", { class: "soft" }, `: ${why}`) : null))));
}

export function figure(value) {
  return Math.abs(value) < 1000 ? value.toFixed(Math.abs(value) < 10 ? 3 : 1) : short(value);
}
