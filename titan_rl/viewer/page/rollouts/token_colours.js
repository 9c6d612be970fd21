// Meaning of a token's colour: a class for its background (see rollouts.css), and a legend of the classes.
import { number, signed } from "viewer/quantities";

export const COLOURINGS = [
  ["logprob", "Logprob", "How likely the token was when it was sampled"],
  ["advantage", "Advantage", "How much better the rollout, or the token, was than its siblings"],
  ["version", "Version", "Which weights sampled the token"],
  ["mask", "Loss mask", "Whether the token is trained on"],
  ["none", "Plain", "No colours"],
];

const LOGPROBS = [-0.05, -0.3, -1, -2.5, -5]; // lower bounds of the classes except the last
const VERSIONS = 6;
const LEVELS = 4;

/** {of(token) -> class, legend: [[class, label], ...], what: a sentence} for the segments of a rollout. */
export function colouring(name, segments) {
  return { logprob: byLogprob, advantage: byAdvantage, version: byVersion, mask: byMask, none: plain }[name](segments.flatMap(one => one.tokens));
}

function byLogprob() {
  const share = value => number(Math.exp(value) * 100, Math.exp(value) < 0.1 ? 1 : 0);
  const level = logprob => (LOGPROBS.findIndex(low => logprob >= low) + LOGPROBS.length + 1) % (LOGPROBS.length + 1);
  const legend = [["lp0", `≥ ${number(LOGPROBS[0])}`, `probability ≥ ${share(LOGPROBS[0])}%`]];
  for (let i = 1; i < LOGPROBS.length; i++) {
    const [high, low] = [LOGPROBS[i - 1], LOGPROBS[i]];
    legend.push([`lp${i}`, `≥ ${number(low)}`, `probability ${share(low)}–${share(high)}%`]);
  }
  const least = LOGPROBS.at(-1);
  legend.push([`lp${LOGPROBS.length}`, `< ${number(least)}`, `probability < ${share(least)}%`]);
  return { of: ({ logprob }) => logprob === null ? "" : `lp${level(logprob)}`, legend, what: "logprob when sampled" };
}

function byAdvantage(tokens) {
  const most = tokens.reduce((high, { advantage }) => Math.max(high, Math.abs(advantage ?? 0)), 0);
  const limit = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100].find(one => one >= most) ?? most;
  const classes = [];
  for (let level = LEVELS; level >= 1; level--) classes.push([`neg${level}`, -limit * level / LEVELS]);
  classes.push(["zero", 0]);
  for (let level = 1; level <= LEVELS; level++) classes.push([`pos${level}`, limit * level / LEVELS]);
  return {
    of({ part, advantage }) {
      if (part === "prompt" || advantage === null) return "";
      const level = Math.min(LEVELS, Math.ceil(Math.abs(advantage) / limit * LEVELS));
      return level ? `${advantage < 0 ? "neg" : "pos"}${level}` : "zero";
    },
    legend: classes.map(([name, value]) => [name, signed(value)]),
    what: "advantage, up to",
  };
}

function byVersion(tokens) {
  const versions = [...new Set(tokens.map(({ version }) => version).filter(version => version !== null))].sort((a, b) => a - b);
  const classes = new Map(versions.map((version, i) => [version, `v${i % VERSIONS}`]));
  return { of: ({ version }) => classes.get(version) ?? "", legend: [...classes].map(([version, name]) => [name, String(version)]), what: "version of the weights" };
}

function byMask() {
  return {
    of: ({ trained }) => trained === null ? "" : trained ? "trained" : "masked",
    legend: [["trained", "trained on"], ["masked", "not trained on"]],
    what: "loss mask",
  };
}

function plain() {
  return { of: () => "", legend: [], what: "no colours" };
}
