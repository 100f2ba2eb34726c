// How much of a layer's time is an estimate: its share of compiled kernels that several layers were fused into.

import { formatPercent } from "./limits.js";
import { walkTree } from "./nodes.js";
import { BACKWARD, FORWARD } from "./run.js";

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
  const layers = (own ? [node] : walkTree(node)).flatMap((one) => (one.kind === "layer" ? one.layers : []));
  let [estimated, whole] = [0, 0];
  for (const [pass, column] of ESTIMATES) {
    if (metric !== "both" && (metric === "forward") !== (pass === FORWARD)) continue;
    for (const layer of layers) estimated += run.columns[column]?.[layer] ?? 0;
    whole += (own ? node.own : node.total)[pass];
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
    return share ? `${formatPercent(share)} of its ${pass} is estimated: fused kernels` : [];
  });
}
