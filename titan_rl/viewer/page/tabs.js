// The tabs. Each is a module with open(container, {source, runs, state, cursor, bundles}) -> {update(what), close()}.
//
// cursor: the current step; bundles: groups of runs whose curves are averaged, or null.
// runs: the selected runs, [{id, name, colour, state, steps, ...}], where colour is, for example, "var(--run-1)". A run of several adapters is
// replaced by them where `parts` is "adapters", and followed by them where it is "both".
// whole: the run of several adapters, if it alone is selected.
// update(what): what is {run, changed: ["metrics", "rollouts", "timeline"], runs} for a run in progress, where runs are the current selected runs,
// or {theme: true} after a change of theme. `opened` of the returned object resolves when the target of the link is shown.
import * as curves from "viewer/curves/tab";
import * as overview from "viewer/overview/tab";
import * as rollouts from "viewer/rollouts/tab";
import * as settings from "viewer/settings/tab";
import * as timeline from "viewer/timeline/tab";

export const TABS = [
  { id: "overview", label: "Overview", parts: "adapters", open: overview.open },
  { id: "curves", label: "Curves", parts: "both", open: curves.open },
  { id: "rollouts", label: "Rollouts", parts: "adapters", open: rollouts.open },
  { id: "timeline", label: "Timeline", open: timeline.open },
  { id: "settings", label: "Settings", open: settings.open },
];

/** The runs that a tab shows of those selected. */
export function shownRuns({ parts }, runs) {
  return runs.flatMap(run => (!parts || !run.adapters.length ? [run] : parts === "both" ? [run, ...run.adapters] : run.adapters));
}
