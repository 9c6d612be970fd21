// The weighted mean of the values so far, in which a value has the weight `smoothing` to the power of its distance. For steps one apart
// this is the exponential moving average with Adam's bias correction. Gaps and thinned-out points do not change its meaning.

/**
 * @param {number[]} x ascending
 * @param {(number|null)[]} values null leaves a gap, and weighs nothing
 * @param {number} smoothing from 0 (none) to below 1
 * @param {number} unit the distance at which a value's weight has fallen by the factor `smoothing`
 */
export function smooth(x, values, smoothing, unit = 1) {
  let sum = 0;
  let weight = 0;
  let last = null;
  return values.map((value, i) => {
    if (value === null || value === undefined) return value;
    const decay = last === null ? 0 : smoothing ** Math.max((x[i] - last) / unit, 0);
    sum = sum * decay + value;
    weight = weight * decay + 1;
    last = x[i];
    return sum / weight;
  });
}

/** The unit for a curve: the distance of its points, but at least a thousandth of the whole. */
export function unitOf(x) {
  if (x.length < 2) return 1;
  const distances = x.slice(1).map((one, i) => one - x[i]).sort((a, b) => a - b);
  const span = x[x.length - 1] - x[0];
  return Math.max(distances[distances.length >> 1], span / 1000) || 1;
}
