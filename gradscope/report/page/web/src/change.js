// What changed from the run before, and whether it is more than noise.
//
// The limits are those of gradscope/compare, which come with the page. What it does not test by itself (an operation,
// a source line) has the relative limit of its layer's own time, and a sum the sum of its parts' limits.

import { formatSigned } from "./format.js";
import { BACKWARD, FORWARD, SAVED, amountOf } from "./run.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Amounts} Amounts
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {"matched" | "new" | "removed"} Status
 *
 * @typedef {object} Change
 * @property {number} before
 * @property {number} after
 * @property {number} difference
 * @property {number | null} noise largest difference that may be noise; null where it is not known
 * @property {boolean | null} real null where nothing can be said
 * @property {Status} status
 */

/** @type {Record<Metric, number[]>} */
const SLOTS = { backward: [BACKWARD], forward: [FORWARD], both: [FORWARD, BACKWARD], saved: [SAVED] };

/**
 * Whether a metric was measured in both runs.
 * @param {Run} run
 * @param {Metric} metric
 */
export function isCompared(run, metric) {
  return run.baseline !== null && (metric !== "saved" || (run.memory !== null && run.baseline.memory !== null));
}

/**
 * @param {number} before
 * @param {number} after
 * @param {number | null} noise
 * @param {Status} [status]
 * @returns {Change}
 */
export function makeChange(before, after, noise, status = "matched") {
  const difference = after - before;
  const real = difference === 0 ? false : noise === null ? null : Math.abs(difference) > noise;
  return { before, after, difference, noise, real, status };
}

/**
 * @param {Run} run
 * @param {Node} node
 * @param {Metric} metric
 * @param {boolean} own without what is below it
 * @returns {Change | null} null where there is nothing to compare with
 */
export function changeOf(run, node, metric, own) {
  if (!isCompared(run, metric)) return null;
  const [before, after] = own ? [node.was, node.own] : [node.wasTotal, node.total];
  const noise = SLOTS[metric].map((slot) => noiseOf(run, node, slot, own));
  return makeChange(amountOf(before, metric), amountOf(after, metric), sumOrNull(noise), node.status);
}

/**
 * The whole step's.
 * @param {Run} run
 * @param {Metric} metric
 */
export function changeOfWhole(run, metric) {
  if (!run.joined || !isCompared(run, metric)) return null;
  const noise = SLOTS[metric].map((slot) => totalNoise(run, slot));
  return makeChange(amountOf(run.joined.whole, metric), amountOf(run.whole, metric), sumOrNull(noise));
}

/**
 * @param {Run} run
 * @param {import("./run.js").Line} line
 * @param {Metric} metric
 * @param {(Node | undefined)[]} layerNodes
 */
export function changeOfLine(run, line, metric, layerNodes) {
  if (!isCompared(run, metric)) return null;
  const node = layerNodes[line.layer];
  const noise = SLOTS[metric].map((slot) => {
    const most = Math.max(line.amounts[slot], line.was[slot]);
    if (slot === SAVED || most === 0 || line.status !== "matched") return 0;
    return node ? partNoise(run, node, slot, most) : null;
  });
  return makeChange(amountOf(line.was, metric), amountOf(line.amounts, metric), sumOrNull(noise), line.status);
}

/**
 * One change for several things that are shown as one.
 * @param {Change[]} changes
 * @returns {Change}
 */
export function sumOfChanges(changes) {
  const [before, after] = [
    changes.reduce((sum, one) => sum + one.before, 0),
    changes.reduce((s, one) => s + one.after, 0),
  ];
  const same = changes.every((one) => one.status === changes[0].status);
  return makeChange(before, after, sumOrNull(changes.map((one) => one.noise)), same ? changes[0].status : "matched");
}

/**
 * @param {Run} run
 * @param {Node} node
 * @param {number} slot
 * @param {boolean} own
 * @returns {number | null}
 */
function noiseOf(run, node, slot, own) {
  // Bytes are exact, and what only one run has is not a matter of noise.
  if (slot === SAVED || node.status !== "matched") return 0;
  if (node.kind === "all") return totalNoise(run, slot);
  if (node.kind === "layer") return layersNoise(run, node.layers, slot, own);
  const [was, now] = [node.was[slot], node.own[slot]];
  if (was === 0 && now === 0) return 0;
  if (node.kind === "part") return slot === BACKWARD ? (run.joined?.totals[node.address] ?? null) : null;
  return node.parent ? partNoise(run, node.parent, slot, Math.max(was, now)) : null;
}

/**
 * @param {Run} run
 * @param {number} slot
 */
function totalNoise(run, slot) {
  return slot === SAVED ? 0 : (run.joined?.totals[slot === FORWARD ? "forward_ns" : "backward_ns"] ?? null);
}

/**
 * @param {Run} run
 * @param {Node} owner
 * @param {number} slot
 * @param {number} amount
 */
function partNoise(run, owner, slot, amount) {
  const whole = Math.max(owner.own[slot], owner.was[slot]);
  const noise = noiseOf(run, owner, slot, true);
  return noise === null || whole <= 0 ? null : (noise / whole) * amount;
}

/**
 * @param {Run} run
 * @param {number[]} layers
 * @param {number} slot
 * @param {boolean} own
 */
function layersNoise(run, layers, slot, own) {
  const { joined } = run;
  if (!joined) return null;
  const column =
    slot === FORWARD ? (own ? "forward_self_ns" : "forward_total_ns") : own ? "backward_own_ns" : "backward_total_ns";
  const group = layers.length > 1 ? joined.groups.get(groupKey(layers)) : undefined;
  if (group) return group[column] ?? null;
  return sumOrNull(layers.map((layer) => joined.noise[column]?.[layer] ?? null));
}

/**
 * A change in one short text: signed where it is real or cannot be tested, else "≈".
 * @param {Change} change
 * @param {(value: number) => string} format
 */
export function changeText(change, format) {
  if (change.real === false) return change.difference === 0 ? "0" : "≈";
  return `${formatSigned(change.difference, format)}${change.real === null ? " ?" : ""}`;
}

/**
 * Whether a difference means something, in words.
 * @param {Change} change
 * @param {(value: number) => string} format
 */
export function changeWords(change, format) {
  const { noise, real, difference, status } = change;
  if (status !== "matched") return status;
  if (difference === 0) return "the same";
  if (real === null) return "not tested";
  if (!noise) return "exact";
  return `${real ? "beyond" : "within"} ±${format(noise)}`;
}

/**
 * The class of the style sheet: colour only where the change is real.
 * @param {Change} change
 */
export function changeClass(change) {
  if (change.real !== true) return "change-none";
  return change.difference < 0 ? "change-less" : "change-more";
}

/** @param {number[]} layers */
export function groupKey(layers) {
  return [...layers].sort((a, b) => a - b).join(" ");
}

/**
 * @param {(number | null)[]} values
 * @returns {number | null}
 */
function sumOrNull(values) {
  let sum = 0;
  for (const value of values) {
    if (value === null) return null;
    sum += value;
  }
  return sum;
}
