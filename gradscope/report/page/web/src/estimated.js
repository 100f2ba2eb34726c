// How much of a layer's time is an estimate: its share of compiled kernels that several layers were fused into.

import { formatPercent } from "./limits.js";
import { BACKWARD, FORWARD } from "./run.js";
import { childrenFirst } from "./totals.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./nodes.js").Node} Node
 */

const ESTIMATES = /** @type {const} */ ([
  [FORWARD, "forward_estimated_ns"],
  [BACKWARD, "estimated_ns"],
]);

/** @param {Run} run */
export function hasEstimates(run) {
  return run.columns.estimated_ns !== undefined;
}

/**
 * Of a layer, with all below it or by itself, the share of its time; null where it takes none, and of what is no layer.
 * @param {Run} run
 * @param {Node} node
 * @param {Metric} metric
 * @param {boolean} own
 */
export function estimatedShare(run, node, metric, own) {
  if (!hasEstimates(run) || metric === "saved" || node.kind !== "layer") return null;
  const amounts = own ? node.own : node.total;
  let [estimated, whole] = [0, 0];
  for (const [pass, column] of ESTIMATES) {
    if (metric !== "both" && (metric === "forward") !== (pass === FORWARD)) continue;
    const sums = sumsOf(run, column);
    for (const layer of node.layers) estimated += (own ? run.columns[column]?.[layer] : sums[layer]) ?? 0;
    whole += amounts[pass];
  }
  return whole > 0 ? estimated / whole : null;
}

/**
 * "12 % of its backward is estimated" for each pass of which a part is, with all below the selection.
 * @param {Run} run
 * @param {Node} node
 */
export function estimatedWords(run, node) {
  return /** @type {const} */ (["forward", "backward"]).flatMap((pass) => {
    const share = estimatedShare(run, node, pass, false);
    return share ? `${formatPercent(share)} of its ${pass} is estimated: kernels that compute several layers` : [];
  });
}

/** @type {WeakMap<Run, Map<string, number[]>>} */
const sumsOfRuns = new WeakMap();

/**
 * Of each layer with all below it.
 * @param {Run} run
 * @param {string} column
 */
function sumsOf(run, column) {
  const known = sumsOfRuns.get(run) ?? new Map();
  sumsOfRuns.set(run, known);
  let sums = known.get(column);
  if (!sums) {
    sums = run.paths.map((_, layer) => run.columns[column]?.[layer] ?? 0);
    for (const layer of childrenFirst(run)) if (run.parents[layer] >= 0) sums[run.parents[layer]] += sums[layer];
    known.set(column, sums);
  }
  return sums;
}
