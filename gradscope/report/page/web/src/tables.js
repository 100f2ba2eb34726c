// The tables below the flame, exact values included: layers, operations, kernels. How they are drawn is in tableview.js.

import { hasRoofline } from "./roofline.js";
import { changeOf, isCompared, sumOfChanges } from "./change.js";
import { estimatedShare, hasEstimates } from "./estimated.js";
import { hasFindings } from "./findings.js";
import { formatCalls, formatRatio } from "./format.js";
import { boundBy, formatPercent, hasLimits, limitTime, limitedOf, reachedOf } from "./limits.js";
import { ledgerTable, linesTable, peakTable } from "./linetables.js";
import { backwardRatio, isWithin, layerOf, walkTree } from "./nodes.js";
import { plainTable } from "./plaintables.js";
import { BACKWARD, FORWARD, SAVED, amountOf, slotOf } from "./run.js";
import { isFound, rowsOf } from "./search.js";
import {
  amountColumns,
  changeCells,
  changeColumns,
  countOf,
  shareColumn,
  shareOf,
  startOrder,
  wholeOf,
} from "./table.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./table.js").Table} Table
 * @typedef {import("./table.js").Column} Column
 * @typedef {import("./table.js").Scene} Scene
 */

/**
 * The tabs that this run has something for.
 * @param {Run} run
 * @returns {[key: string, words: string][]}
 */
export function tabsOf(run) {
  /** @type {[string, string, boolean][]} */
  const tabs = [
    ["fixed", "Fix", run.joined?.fixed != null],
    ["findings", "Findings", hasFindings(run)],
    ["layers", "Layers", true],
    ["ops", "Ops", true],
    ["kernels", "Kernels", run.kernels.some((list) => list.length > 0)],
    ["lines", "Lines", run.lines.length > 0],
    ["source", "Source", run.info.functions?.length > 0],
    ["ledger", "Ledger", true],
    ["device", "Device", run.info.tables?.device != null],
    ["buckets", "Buckets", run.info.tables?.buckets != null],
    ["peak", "Peak", run.memory !== null],
    ["roofline", "Roofline", hasRoofline(run)],
  ];
  return tabs.filter(([, , there]) => there).map(([key, words]) => [key, words]);
}

/**
 * @param {string} tab
 * @param {Scene} scene
 * @returns {Table}
 */
export function makeTable(tab, scene) {
  if (tab === "ops") return opsTable(scene, "op");
  if (tab === "kernels") return opsTable(scene, "kernel");
  if (tab === "lines") return linesTable(scene);
  if (tab === "ledger") return ledgerTable(scene);
  if (scene.run.info.tables?.[tab]) return plainTable(tab, scene);
  if (tab === "peak" && scene.run.memory) return peakTable(scene, scene.run.memory);
  return layersTable(scene);
}

// Columns that make room for those of the run before: the details have what they say.
/** @type {Column} */
const RATIO_COLUMN = { key: "ratio", label: "Bwd ÷ fwd", kind: "number", format: formatRatio };

/** @type {Column[]} */
const LIMIT_COLUMNS = [
  { key: "limit", label: "Limit", kind: "time", rank: 2 },
  { key: "reached", label: "Reached", kind: "number", format: formatPercent, rank: 1 },
  { key: "bound", label: "Bound by", kind: "text", isShort: true, rank: 2 },
];

/** @type {Column} */
const ESTIMATED_COLUMN = { key: "estimated", label: "Estimated", kind: "number", format: formatPercent, rank: 2 };

/** @param {Scene} scene @returns {Table} */
function layersTable(scene) {
  const { run, tree, state, zoom, found } = scene;
  const nodes = rowsOf(tree.root).filter((node) => isFound(node, found) && (!state.zoomedOnly || isWithin(node, zoom)));
  const whole = wholeOf(scene);
  const rows = nodes.map((node) => {
    const amounts = state.subtree ? node.total : node.own;
    const change = changeOf(run, node, state.metric, !state.subtree);
    const gone = node.status === "removed";
    const limited = limitedOf(run, node, state.metric, !state.subtree);
    return {
      cells: {
        layer: node.kind === "part" ? `(${node.label})` : node.address || node.label,
        class: node.className,
        forward: gone ? null : amounts[FORWARD],
        backward: gone ? null : amounts[BACKWARD],
        limit: limitTime(limited),
        reached: reachedOf(limited),
        bound: boundBy(limited),
        estimated: gone ? null : estimatedShare(run, node, state.metric, !state.subtree),
        ratio: node.kind === "part" ? null : backwardRatio(amounts),
        saved: run.memory && !gone ? amounts[SAVED] : null,
        ...changeCells(change),
        share: shareOf(amountOf(amounts, state.metric), whole),
      },
      change,
      count: node.layers.length > 1 ? `×${node.layers.length}` : "",
      note: node.className,
      type: node.type,
      node,
    };
  });
  const compared = isCompared(run, state.metric);
  const limits = !compared && state.metric !== "saved" && hasLimits(run);
  const [forward, backward, ...saved] = amountColumns(run, state.metric);
  /** @type {Column[]} */
  const columns = [
    { key: "layer", label: "Layer", kind: "text", isPath: true },
    forward,
    backward,
    ...(limits ? LIMIT_COLUMNS : []),
    ...(!compared && state.metric !== "saved" && hasEstimates(run) ? [ESTIMATED_COLUMN] : []),
    ...(compared ? [] : [/** @type {Column} */ ({ ...RATIO_COLUMN, rank: limits ? 1 : 2 })]),
    ...saved,
    ...changeColumns(run, state.metric),
    shareColumn(scene),
  ];
  const what = state.subtree ? "each with what is below it" : "each layer’s own operations";
  const sort = startOrder(run, state.metric, "-share");
  return { columns, rows, summary: `${countOf(rows.length, "row")}, ${what}`, sort };
}

/**
 * Operations, kernels, or saved tensors of all layers, those of equal name and phase as one.
 * @param {Scene} scene
 * @param {"op" | "kernel"} kind
 * @returns {Table}
 */
function opsTable(scene, kind) {
  const { run, tree, state, zoom, found } = scene;
  /** @type {Map<string, { nodes: Node[], amount: number, calls: number, layers: number }>} */
  const groups = new Map();
  for (const node of walkTree(tree.root)) {
    for (const op of kind === "op" ? (node.kind === "op" ? [node] : []) : node.kernels) {
      const amount = amountOf(op.total, state.metric);
      const there = amount > 0 || amountOf(op.wasTotal, state.metric) > 0;
      if (!there || (state.zoomedOnly && !isWithin(op, zoom)) || (found && !found.lit.has(op))) continue;
      const key = `${op.phase}\n${op.label}`;
      const group = groups.get(key) ?? { nodes: [], amount: 0, calls: 0, layers: 0 };
      group.nodes.push(op);
      group.amount += amount;
      group.calls += op.calls;
      group.layers += new Set(op.rows.map((row) => row.layer)).size;
      groups.set(key, group);
    }
  }
  const whole = wholeOf(scene);
  const rows = [...groups.values()].map(({ nodes, amount, calls, layers }) => {
    const largest = nodes.reduce((a, b) => (amountOf(b.total, state.metric) > amountOf(a.total, state.metric) ? b : a));
    const changes = nodes.flatMap((node) => changeOf(run, node, state.metric, false) ?? []);
    const change = changes.length > 0 ? sumOfChanges(changes) : null;
    const layer = layerOf(largest);
    const top = largest.rows.reduce((a, b) => (b.amount > a.amount ? b : a));
    return {
      cells: {
        name: largest.label,
        phase: largest.phase.replace("_", " "),
        calls: change?.status === "removed" ? null : calls,
        layers,
        shape: top.shape || null,
        amount: change?.status === "removed" ? null : amount,
        ...changeCells(change),
        share: shareOf(amount, whole),
      },
      change,
      note: nodes.length === 1 && layer ? `in ${layer.address || layer.label}` : `in ${countOf(layers, "layer")}`,
      type: largest.type,
      node: largest,
    };
  });
  const saved = state.metric === "saved";
  /** @type {Column[]} */
  const columns = [
    { key: "name", label: kind === "kernel" ? "Kernel" : saved ? "Saved by" : "Operation", kind: "text" },
    { key: "phase", label: "Phase", kind: "text", isShort: true, rank: 3 },
    ...(isCompared(run, state.metric)
      ? []
      : [/** @type {Column} */ ({ key: "shape", label: saved ? "Largest" : "Shapes", kind: "text", rank: 2 })]),
    { key: "calls", label: saved ? "Tensors" : "Calls", kind: "number", format: formatCalls, rank: 2 },
    {
      key: "amount",
      label: saved ? "Saved" : kind === "kernel" ? "Device time" : "Time",
      kind: saved ? "bytes" : "time",
    },
    ...changeColumns(run, state.metric),
    shareColumn(scene),
  ];
  const words = kind === "kernel" ? "device time; streams may overlap" : "merged by name";
  const sort = startOrder(run, state.metric, "-share");
  return { columns, rows, summary: `${countOf(rows.length, "row")}, ${words}`, sort };
}

/**
 * Operations of a node that count for the metric, the largest first.
 * @param {Node} node
 * @param {Metric} metric
 * @param {"op" | "kernel"} kind
 */
export function largestOps(node, metric, kind) {
  /** @type {Map<string, { name: string, phase: string, amount: number }>} */
  const groups = new Map();
  for (const below of walkTree(node)) {
    for (const op of kind === "op" ? (below.kind === "op" ? [below] : []) : below.kernels) {
      if (slotOf(op.phase) < 0 || !(amountOf(op.total, metric) > 0)) continue;
      const key = `${op.phase}\n${op.label}`;
      const group = groups.get(key) ?? { name: op.label, phase: op.phase, amount: 0 };
      group.amount += amountOf(op.total, metric);
      groups.set(key, group);
    }
  }
  return [...groups.values()].sort((a, b) => b.amount - a.amount);
}
