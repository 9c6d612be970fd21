// Formatting of numbers, seconds and shares.

/** "0.734", "1.2e-5"; "–" if the value is not a number. */
export function number(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return value.toExponential(1).replace(/^-/, "−");
  return value.toLocaleString("en", { maximumFractionDigits: digits, useGrouping: Math.abs(value) >= 10000 }).replace(/^-/, "−");
}

/** The same with a sign, for advantages and differences. */
export function signed(value, digits = 3) {
  return typeof value === "number" && value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

/** "40 ms", "1.25 s", "3 min 20 s", "2 h 5 min". */
export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.001) return `${number(value * 1e6, 0)} µs`;
  if (value < 1) return `${number(value * 1e3, value < 0.01 ? 2 : 0)} ms`;
  if (value < 60) return `${number(value, value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value);
  const [large, small, size, part] = whole < 3600 ? ["min", "s", 60, 1] : ["h", "min", 3600, 60];
  const rest = Math.floor((whole % size) / part);
  return `${Math.floor(whole / size)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

/** Four significant digits: 0.4336, 12.3K, 2.4e-5. */
export function short(value, digits = 4) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e12)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e").replace(/^-/, "−");
  const notation = size >= 1e4 ? "compact" : "standard";
  return value.toLocaleString("en", { notation, maximumSignificantDigits: digits }).replace(/^-/, "−");
}

/** "12,345". */
export function whole(value) {
  return typeof value === "number" ? Math.round(value).toLocaleString("en") : "–";
}

/** A time since the beginning in a short form for axes: "40s", "1:20", "2:05:00". */
export function clock(value) {
  if (Math.abs(value) < 60) return `${short(value, 3)}s`;
  const all = Math.round(value);
  const two = part => String(part).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(all / 3600), Math.floor((all % 3600) / 60), all % 60];
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** Seconds since the epoch as "22 Nov 2026, 13:31", in the reader's time zone. */
export function moment(value) {
  return new Date(value * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" });
}

/** "37%", "0.4%". */
export function percent(share) {
  return typeof share === "number" ? `${number(share * 100, share < 0.1 ? 1 : 0)}%` : "–";
}

/** "1 token", "2,000 tokens". */
export function count(value, noun) {
  return `${Number(value).toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
}

/** Whether means include the reward of a rollout: a fault that the policy did not cause has none, or one that does not count. */
export function isJudged({ reward, status }) {
  return typeof reward === "number" && !["error_env", "error_timeout", "error_generate"].includes(status);
}
