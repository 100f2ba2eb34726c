// What if: the run with a finding's estimated saving cut out of its layers. All of it is an estimate.

import { BACKWARD, FORWARD, LAYER_PHASES, SAVED } from "./run.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Amounts} Amounts
 * @typedef {import("./run.js").Op} Op
 */

/**
 * Whether a finding says how much layers of the run would save.
 * @param {Run} run
 * @param {any} finding
 */
export function hasEstimate(run, finding) {
  // The root stands for the whole step: which of its layers would shrink it does not say.
  const known = finding.layers.some((/** @type {string} */ path) => run.byPath.has(path));
  return known && !finding.layers.includes("") && (finding.saved_ns > 0 || finding.saved_bytes > 0);
}

/**
 * Times of the finding's layers, and of those below them, shrink by its saving in time, each by the same share, and what
 * they save for backward by its saving in memory. Where in them the saving lies nobody has measured.
 * @param {Run} run
 * @param {any} finding
 * @returns {Run}
 */
export function runWithout(run, finding) {
  const within = run.paths.map((path) =>
    finding.layers.some((/** @type {string} */ one) => one === "" || path === one || path.startsWith(`${one}.`)),
  );
  /** @param {number} slot */
  const sumOf = (slot) => run.own.reduce((sum, amounts, layer) => sum + (within[layer] ? amounts[slot] : 0), 0);
  const [time, bytes] = [sumOf(FORWARD) + sumOf(BACKWARD), sumOf(SAVED)];
  /** @param {number} saving @param {number} whole */
  const left = (saving, whole) => (whole > 0 ? 1 - Math.min((saving ?? 0) / whole, 1) : 1);
  const [slower, larger] = [left(finding.saved_ns, time), left(finding.saved_bytes, bytes)];
  /** @type {number[]} */
  const factors = [slower, slower, larger];
  /** @param {Amounts} amounts @param {number} layer */
  const scaled = (amounts, layer) => (within[layer] ? amounts.map((amount, slot) => amount * factors[slot]) : amounts);
  /** @param {Op[][]} lists */
  const scaledOps = (lists) =>
    lists.map((list, layer) =>
      within[layer]
        ? list.map((op) => {
            const isTime = op.phase === "forward" || LAYER_PHASES.has(op.phase);
            const factor = op.phase === "saved" ? larger : isTime ? slower : 1;
            return { ...op, amount: op.amount * factor, busy: op.busy * factor };
          })
        : list,
    );
  // Limits, and the roofline, are of what was measured.
  const columns = { ...run.columns };
  delete columns.backward_limit_ns;
  return {
    ...run,
    estimated: true,
    columns,
    own: run.own.map(scaled),
    ops: scaledOps(run.ops),
    kernels: scaledOps(run.kernels),
    saved: scaledOps(run.saved),
    lines: run.lines.map((line) => ({ ...line, amounts: scaled(line.amounts, line.layer) })),
    whole: run.whole.map((amount, slot) => amount - (1 - factors[slot]) * sumOf(slot)),
  };
}
