// The tabs: each a module with open(container, {source, runs, state, cursor, bundles}) -> {update(what), close()}.
//
// cursor: the step that is looked at; bundles: groups of runs of which curves are averaged, or null.
// runs: those selected, [{id, name, colour, state, steps, ...}], where colour is "var(--run-1)", say.
// update(what): {run, changed: ["metrics", "rollouts", "timeline"], runs} of a run that goes on, where runs are those selected as they are by then;
// {theme: true} after a change of theme. `opened` of what open gives ends when what the link names is shown.
import * as curves from "viewer/curves/tab";
import * as overview from "viewer/overview/tab";
import * as rollouts from "viewer/rollouts/tab";
import * as settings from "viewer/settings/tab";
import * as timeline from "viewer/timeline/tab";

export const TABS = [
  { id: "overview", label: "Overview", open: overview.open },
  { id: "curves", label: "Curves", open: curves.open },
  { id: "rollouts", label: "Rollouts", open: rollouts.open },
  { id: "timeline", label: "Timeline", open: timeline.open },
  { id: "settings", label: "Settings", open: settings.open },
];
