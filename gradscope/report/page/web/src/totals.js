// Amounts of each layer with all below it, whatever is folded.

import { addTo } from "./nodes.js";
import { amountOf } from "./run.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Amounts} Amounts
 * @typedef {import("./run.js").Metric} Metric
 */

/**
 * Amounts of each repeat of a folded node, all below it counted: one entry a module merged there.
 * @param {Run} run
 * @param {number[]} layers
 * @param {Metric} metric
 */
export function repeatAmounts(run, layers, metric) {
  const totals = subtreeTotals(run);
  return layers.map((layer) => amountOf(totals[layer], metric));
}

/**
 * The same of the run before; 0 where it lacks the layer.
 * @param {Run} run
 * @param {number[]} layers
 * @param {Metric} metric
 */
export function repeatAmountsBefore(run, layers, metric) {
  const { baseline } = run;
  if (!baseline) return [];
  const totals = subtreeTotals(baseline);
  return layers.map((layer) => {
    const place = baseline.byPath.get(run.paths[layer]);
    return place === undefined ? 0 : amountOf(totals[place], metric);
  });
}

/** @type {WeakMap<Run, Amounts[]>} */
const totalsOfRuns = new WeakMap();

/**
 * Each layer with all below it.
 * @param {Run} run
 * @returns {Amounts[]}
 */
export function subtreeTotals(run) {
  let totals = totalsOfRuns.get(run);
  if (!totals) {
    totals = run.own.map((own) => [...own]);
    for (const layer of childrenFirst(run)) {
      const parent = run.parents[layer];
      if (parent >= 0) addTo(totals[parent], totals[layer]);
    }
    totalsOfRuns.set(run, totals);
  }
  return totals;
}

/** @param {Run} run */
export function childrenFirst(run) {
  const depth = run.parents.map(() => -1);
  /** @param {number} i @returns {number} */
  const depthOf = (i) => (depth[i] < 0 ? (depth[i] = run.parents[i] < 0 ? 0 : depthOf(run.parents[i]) + 1) : depth[i]);
  return run.parents.map((_, i) => i).sort((a, b) => depthOf(b) - depthOf(a));
}
