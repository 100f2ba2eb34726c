// Time beside what it would be at this machine's limits. The rules are those of gradscope/report/limited.py.
//
// Like is compared with like: the limit of the layers that have one, with the measured time of their own operations.

import { formatCount, formatShare, formatTime } from "./format.js";
import { BACKWARD, FORWARD } from "./run.js";
import { childrenFirst } from "./totals.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./nodes.js").Node} Node
 *
 * @typedef {object} Limited of one pass, of a layer or several
 * @property {number} whole all that they take in it, ns
 * @property {number} operations the part of it that is their own operations
 * @property {number} known the part of that which is of layers that have a limit
 * @property {number} limit what these would take at it
 * @property {Map<string, number>} kinds what limits them, ns
 */

// The share of a time that must be that of layers with a limit, for their limit to stand for all of it.
const ENOUGH = 0.95;
// What limits less than this share of it is not named.
const LEAST = 0.005;

/** @param {Run} run */
export function hasLimits(run) {
  return run.columns.backward_limit_ns !== undefined;
}

/**
 * What is known of a node, with all below it or by itself; null where no limit is known, and of what is no layer.
 * @param {Run} run
 * @param {Node} node
 * @param {Metric} metric
 * @param {boolean} own
 * @returns {Limited | null}
 */
export function limitedOf(run, node, metric, own) {
  if (!hasLimits(run) || metric === "saved" || (node.kind !== "layer" && node.kind !== "all")) return null;
  const whole = node.kind === "all";
  const layers = whole ? run.parents.flatMap((parent, i) => (parent < 0 ? [i] : [])) : node.layers;
  /** @type {Limited} */
  const found = { whole: 0, operations: 0, known: 0, limit: 0, kinds: new Map() };
  for (const pass of metric === "both" ? [FORWARD, BACKWARD] : [metric === "forward" ? FORWARD : BACKWARD]) {
    const all = limitsOf(run, pass);
    for (const layer of layers) add(found, own ? all.own[layer] : all.total[layer]);
    // Of the whole step there is more than its layers.
    if (whole) found.whole += run.whole[pass] - layers.reduce((sum, layer) => sum + all.total[layer].whole, 0);
  }
  return found.known > 0 ? found : null;
}

/**
 * The time at the limit; null unless that is the limit of nearly all of the time.
 * @param {Limited | null} found
 */
export function limitTime(found) {
  return found && found.known >= ENOUGH * found.whole ? found.limit : null;
}

/**
 * The limit over the time of the operations that it is of; null unless these are nearly all of the layers'.
 * @param {Limited | null} found
 */
export function reachedOf(found) {
  return found && hasEnough(found) && found.limit > 0 ? found.limit / found.known : null;
}

/**
 * What limits most of these operations: "compute", "bandwidth 78 %"; null where it is not known.
 * @param {Limited | null} found
 */
export function boundBy(found) {
  return found && hasEnough(found) ? (kindsOf(found)[0] ?? null) : null;
}

/** @param {Limited} found */
function hasEnough({ known, operations }) {
  return known >= ENOUGH * operations;
}

/**
 * "backward 12.3 ms, at this machine’s limit 4.10 ms (33 %), bound by compute 81 %, bandwidth 19 %"; where only a part of
 * the pass has a limit, it begins with that part.
 * @param {Limited} found
 * @param {string} pass
 */
export function limitWords(found, pass) {
  const [time, known] = [`${pass} ${formatTime(found.whole)}`, formatTime(found.known)];
  const measured = known === formatTime(found.whole) ? time : `${known} of ${time}`;
  const kinds = kindsOf(found).join(", ");
  const reached = formatPercent(found.limit / found.known);
  const limit = `${measured}, at this machine’s limit ${formatTime(found.limit)} (${reached})`;
  return kinds === "" ? limit : `${limit}, bound by ${kinds}`;
}

/**
 * A share of one as "12 %": a limit is no more exact.
 * @param {number | null} share
 */
export function formatPercent(share) {
  if (share === null || (share > 0 && share < 0.005)) return share === null ? formatShare(null) : "<1 %";
  return `${formatCount(Math.round(share * 100))} %`;
}

/**
 * The longest first, with their parts of the time where there are several.
 * @param {Limited} found
 */
function kindsOf(found) {
  const kinds = [...found.kinds].filter(([, time]) => time >= LEAST * found.known).sort((a, b) => b[1] - a[1]);
  return kinds.map(([kind, time]) =>
    time > (1 - LEAST) * found.known ? kind : `${kind} ${formatPercent(time / found.known)}`,
  );
}

/** @type {WeakMap<Run, Map<number, { own: Limited[], total: Limited[] }>>} */
const limitsOfRuns = new WeakMap();

/**
 * Of each layer, by itself and with all below it.
 * @param {Run} run
 * @param {number} pass
 */
function limitsOf(run, pass) {
  const passes = limitsOfRuns.get(run) ?? new Map();
  limitsOfRuns.set(run, passes);
  let limits = passes.get(pass);
  if (!limits) {
    const own = run.paths.map((_, layer) => ownLimit(run, layer, pass));
    const total = own.map((each) => ({ ...each, kinds: new Map(each.kinds) }));
    for (const layer of childrenFirst(run)) {
      if (run.parents[layer] >= 0) add(total[run.parents[layer]], total[layer]);
    }
    limits = { own, total };
    passes.set(pass, limits);
  }
  return limits;
}

/**
 * @param {Run} run
 * @param {number} layer
 * @param {number} pass
 * @returns {Limited}
 */
function ownLimit(run, layer, pass) {
  const name = pass === FORWARD ? "forward" : "backward";
  // A layer that only the run before has is in none of these columns.
  const operations = run.columns[`${name}_self_ns`]?.[layer] ?? 0;
  const limit = run.columns[`${name}_limit_ns`]?.[layer] ?? null;
  const kind = run.bounds[layer] ?? "";
  return {
    whole: run.own[layer][pass],
    operations,
    known: limit === null ? 0 : operations,
    limit: limit ?? 0,
    kinds: new Map(limit !== null && kind !== "" && operations > 0 ? [[kind, operations]] : []),
  };
}

/**
 * @param {Limited} to
 * @param {Limited} from
 */
function add(to, from) {
  to.whole += from.whole;
  to.operations += from.operations;
  to.known += from.known;
  to.limit += from.limit;
  for (const [kind, time] of from.kinds) to.kinds.set(kind, (to.kinds.get(kind) ?? 0) + time);
}
