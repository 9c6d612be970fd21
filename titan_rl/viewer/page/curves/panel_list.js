// Which curves share a panel, and the order of panels. The group in a pattern's parentheses is the label of a curve in its panel.

const GROUPS = [
  ["Reward", [
    ["Win rate", { "league/win_rate": "against earlier versions" }],
    ["Reward", { "rollout/finished_reward_mean": "all that finished", "rollout/reward_mean": "trained on" }],
    ["Held-out reward", { "validation/reward_mean": "held out" }],
    ["Reward by component", /^rollout\/reward\/(.+)$/],
    ["Reward by task", /^task\/([^/]+)\/finished_reward_mean$/],
    ["Reward by seat", /^rollout\/seat\/([^/]+)\/reward_mean$/],
    ["Held-out reward by suite", /^validation\/([^/]+)\/reward_mean$/],
    ["Groups that teach nothing", { "rollout/zero_variance_groups": "all rewards equal" }],
  ]],
  ["Rollouts", [
    ["Completion length", { "rollout/completion_tokens_mean": "mean", "rollout/completion_tokens_max": "longest" }],
    ["Turns", { "rollout/turns_mean": "mean" }],
    ["Lost to faults", { "rollout/finished_fault_fraction": "all that finished", "rollout/fault_fraction": "trained on", "validation/fault_fraction": "held out" }],
    ["How rollouts end", /^rollout\/status\/(.+)$/],
    ["Share of the groups by task", /^task\/([^/]+)\/share$/],
  ]],
  ["Optimization", [
    ["Entropy", { "train/entropy": "entropy" }],
    ["KL", { "train/approx_kl": "to the sampling policy", "train/reference_kl": "to the reference" }],
    ["Gradient norm", { "train/grad_norm": "before clipping" }],
    ["Loss", { "train/loss": "in training", "validation/loss": "held out" }, "rl"],
    ["Loss of supervised training", { "train/loss": "in training", "validation/loss": "held out" }, "sft"],
    ["Clipped tokens", { "train/clip_fraction": "share" }],
    ["Learning rate", { "train/lr": "learning rate" }],
  ]],
  ["Off-policy", [
    ["Staleness", { "train/staleness_mean": "mean", "train/staleness_max": "largest" }],
    ["Age of groups at training", /^scheduling\/age\/(.+)$/],
    ["Accepted length", { "scheduling/accepted_tokens_mean": "trained on", "scheduling/generated_tokens_mean": "generated" }],
    ["Logprobs, trainer - generator", { "train/on_policy_logprob_diff_mean": "mean", "train/on_policy_logprob_diff_max": "largest" }],
    ["Probes after a pull", { "sync/probe_diff": "worst probe" }],
    ["Unverified weights", { "sync/unverified_share": "share" }],
  ]],
  ["Throughput and time", [
    ["Throughput", { "throughput/tokens_per_s": "completion tokens" }],
    ["Time of a step", { "time/step_s": "whole step", "time/wait_for_rollouts_s": "waiting for rollouts" }],
    ["Idle", { "train/idle_s": "trainer", "engine/idle_s": "engines" }],
    ["Slots by state", /^scheduling\/slot_s\/(.+)$/],
    ["Weight sync", { "sync/pull_s": "pull", "sync/publish_s": "publish" }],
    ["KV cache in use", { "engine/kv_cache_usage_mean": "mean", "engine/kv_cache_usage_max": "most" }],
  ]],
];

/**
 * The groups of panels for the metrics of the runs.
 *
 * @param {{name, unit, help, group}[]} metrics of all selected runs, in the order of the source
 * @param {string[]} kinds of the runs; see `kindOf`
 * @returns {{title, panels: {title, unit, help, kind, curves: {name, label}[]}[], more: boolean}[]} `more`: whether the group is hidden at first
 */
export function grouped(metrics, kinds) {
  const known = new Map(metrics.map(metric => [metric.name, metric]));
  const taken = new Set(["step", "time_s"]);
  const groups = GROUPS.map(([title, panels]) => ({
    title, more: false,
    panels: panels.filter(([, , kind]) => !kind || kinds.includes(kind)).map(([name, wanted, kind]) => ({ ...panel(name, labelled(wanted, known), known, taken), kind })).filter(one => one.curves.length),
  }));
  const rest = new Map();
  for (const metric of metrics) {
    if (taken.has(metric.name)) continue;
    const title = metric.group || metric.name.split("/")[0];
    if (!rest.has(title)) rest.set(title, []);
    rest.get(title).push(single(metric));
  }
  const others = [...rest].map(([title, panels]) => ({ title: `More of ${title}`, more: true, panels }));
  return [...groups, ...others].filter(group => group.panels.length);
}

/** A panel for each metric whose name or help contains all the words. */
export function matching(metrics, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = metrics.filter(({ name, help }) => wanted.every(word => `${name} ${help ?? ""}`.toLowerCase().includes(word)));
  const exact = found.filter(({ name }) => wanted.every(word => name.toLowerCase().includes(word)));
  return [...exact, ...found.filter(one => !exact.includes(one))].map(single);
}

function labelled(wanted, known) {
  if (!(wanted instanceof RegExp)) return Object.entries(wanted).filter(([name]) => known.has(name)).map(([name, label]) => ({ name, label }));
  const found = [...known.keys()].map(name => ({ name, label: wanted.exec(name)?.[1] })).filter(({ label }) => label !== undefined);
  return found.map(({ name, label }) => ({ name, label: label.replaceAll("_", " ") }));
}

function panel(title, curves, known, taken) {
  curves.forEach(({ name }) => taken.add(name));
  const of = curves.map(({ name }) => known.get(name));
  const help = of.slice(0, 3).map(helpOf).filter(Boolean).join("\n\n");
  return { title, unit: of[0]?.unit ?? "", help, curves };
}

function helpOf({ name, help, normal, otherwise }) {
  if (!help) return "";
  return [`${name}: ${help}`, normal && `Normal: ${normal}`, otherwise && `If not: ${otherwise}`].filter(Boolean).join("\n");
}

function single(metric) {
  const { name, unit } = metric;
  return { title: name, unit: unit ?? "", help: helpOf(metric), curves: [{ name, label: name.split("/").pop().replaceAll("_", " ") }] };
}
