// Whether one of several equal layers stands out, by its ratio to the others in each step.
// The same as gradscope/tables/siblings.py.

// How far outside the others' range a layer must be, in widths of that range.
const FENCE = 3;

// Fewer steps have no median that one of them could not make.
const FEWEST_STEPS = 3;

// One step in so many may be otherwise.
const ONE_IN = 5;

/** @param {number[]} values */
export function medianOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/**
 * Of each step in which the others took any time.
 * @param {number[]} steps
 * @param {number[][]} others
 */
function ratiosOf(steps, others) {
  /** @type {number[]} */
  const found = [];
  steps.forEach((own, step) => {
    const there = others.filter((each) => step < each.length).map((each) => each[step]);
    const usual = there.length > 0 ? medianOf(there) : 0;
    if (usual > 0) found.push(own / usual);
  });
  return found;
}

/**
 * The ratio of a layer to the median of the others in the usual step; null where it cannot be told.
 * @param {number[]} steps
 * @param {number[][]} others
 */
function typicalRatio(steps, others) {
  const ratios = ratiosOf(steps, others);
  if (ratios.length === 0) return null;
  if (ratios.length >= FEWEST_STEPS) return medianOf(ratios);
  const least = Math.min(...ratios);
  return least > 1 ? least : Math.min(Math.max(...ratios), 1);
}

/**
 * How many times the others' time a layer usually takes; null where it does not stand out.
 * @param {number[]} odd ns of each measured step
 * @param {number[][]} others the same of two or more layers like it
 * @param {number} least how many times as long it must take, or as short
 */
export function outsideRatio(odd, others, least) {
  const ratio = typicalRatio(odd, others);
  /** @type {number[]} */
  const scatter = [];
  others.forEach((each, i) => {
    const rest = others.filter((_, j) => j !== i);
    const found = typicalRatio(each, rest);
    if (found !== null) scatter.push(found);
  });
  if (ratio === null || ratio <= 0 || scatter.length < 2 || Math.max(ratio, 1 / ratio) < least) return null;
  const apart = ratiosOf(odd, others).map((each) => (ratio > 1 ? each : 1 / Math.max(each, 1e-9)));
  if (apart.filter((each) => each < least).length > Math.floor(apart.length / ONE_IN)) return null;
  const [lowest, highest] = [Math.min(...scatter), Math.max(...scatter)];
  const away = ratio > 1 ? ratio - highest : lowest - ratio;
  return away > FENCE * (highest - lowest) * Math.min(ratio, 1) ? ratio : null;
}
