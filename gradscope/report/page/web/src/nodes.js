// Nodes of the tree that the flame and the tables show: layers, parts of the ledger, operations, kernels.

import { BACKWARD, FORWARD, slotOf } from "./run.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Op} Op
 * @typedef {import("./run.js").Amounts} Amounts
 *
 * @typedef {object} Node
 * @property {"all" | "layer" | "op" | "kernel" | "part"} kind
 * @property {string} label
 * @property {string} address the whole path, repeats as a star; of operations, that of their layer
 * @property {string} className
 * @property {string} type by which it is coloured
 * @property {string} phase of an operation or kernel
 * @property {number[]} layers merged here; for operations, of their layer
 * @property {number} repeats among siblings; 1 unless folded
 * @property {number} calls per step
 * @property {Amounts} own
 * @property {Amounts} total
 * @property {Amounts} was own amounts in the run before
 * @property {Amounts} wasTotal
 * @property {import("./change.js").Status} status
 * @property {Node[]} children layers first, operations after them
 * @property {Node[]} kernels of an operation; of a layer those of which it is not recorded what launched them
 * @property {number} busy of a kernel: its part of the time of what it is below, ns
 * @property {Node | null} parent
 * @property {Op[]} rows what an operation or kernel is the sum of
 *
 * @typedef {object} Tree
 * @property {Node} root
 * @property {Node[]} layerNodes by layer
 * @property {Node[]} nodes all of them, parents first
 * @property {boolean} merged
 */

/**
 * @param {Node["kind"]} kind
 * @param {string} label
 * @param {number[]} layers
 * @param {number} repeats
 * @returns {Node}
 */
export function makeNode(kind, label, layers, repeats) {
  return {
    kind,
    label,
    address: "",
    className: "",
    type: "other",
    phase: "",
    layers,
    repeats,
    calls: 0,
    own: [0, 0, 0],
    total: [0, 0, 0],
    was: [0, 0, 0],
    wasTotal: [0, 0, 0],
    status: "matched",
    children: [],
    kernels: [],
    busy: 0,
    parent: null,
    rows: [],
  };
}

/**
 * Operations of one layer or part, those of equal name and phase as one, the largest first.
 * @param {Op[][]} lists
 * @param {Node} owner
 * @param {"op" | "kernel"} kind
 */
export function opNodes(lists, owner, kind) {
  /** @type {Map<string, Node>} */
  const found = new Map();
  for (const list of lists) {
    for (const op of list) {
      const slot = slotOf(op.phase);
      if (slot < 0) continue;
      const key = `${op.phase}\n${op.name}`;
      let node = found.get(key);
      if (!node) {
        node = makeNode(kind, op.name, owner.layers, 1);
        node.phase = op.phase;
        node.address = owner.address;
        node.type = owner.type;
        found.set(key, node);
      }
      node.own[slot] += op.amount;
      node.was[slot] += op.was;
      node.calls += op.calls;
      node.busy += op.busy;
      node.rows.push(op);
    }
  }
  for (const node of found.values()) node.status = statusOf(node.rows);
  return [...found.values()].sort((a, b) => sum(b.own) - sum(a.own));
}

/**
 * Kernels below the operations that launched them, or below their owner where that was not recorded.
 * @param {Node} owner a layer or part, its operations in place
 * @param {Op[]} kernels
 */
export function hangKernels(owner, kernels) {
  if (kernels.length === 0) return;
  /** @param {Op | Node} op @param {string} name */
  const key = (op, name) => `${op.phase}\n${name}`;
  const launchers = new Map(owner.children.filter((node) => node.kind === "op").map((op) => [key(op, op.label), op]));
  /** @type {Map<Node, Op[]>} */
  const below = new Map();
  for (const kernel of kernels) {
    const launcher = launchers.get(key(kernel, kernel.op)) ?? owner;
    below.set(launcher, [...(below.get(launcher) ?? []), kernel]);
  }
  for (const [launcher, its] of below) launcher.kernels = opNodes([its], launcher, "kernel");
}

/**
 * @param {Op[]} rows of one operation, of both runs where two are compared
 * @returns {import("./change.js").Status}
 */
function statusOf(rows) {
  if (rows.every((row) => row.removed)) return "removed";
  return rows.every((row) => row.added) ? "new" : "matched";
}

/**
 * @param {number[]} to
 * @param {number[]} from
 */
export function addTo(to, from) {
  for (let i = 0; i < to.length; i++) to[i] += from[i];
}

/** @param {number[]} values */
function sum(values) {
  return values.reduce((all, value) => all + value, 0);
}

/**
 * This node and all below it, parents first, without kernels.
 * @param {Node} node
 */
export function walkTree(node) {
  const found = [];
  const open = [node];
  for (let at = open.pop(); at; at = open.pop()) {
    found.push(at);
    for (let i = at.children.length - 1; i >= 0; i--) open.push(at.children[i]);
  }
  return found;
}

/**
 * From the root to the node itself.
 * @param {Node} node
 */
export function ancestry(node) {
  const line = [node];
  for (let at = node.parent; at; at = at.parent) line.unshift(at);
  return line;
}

/**
 * Whether `node` is `above` or below it.
 * @param {Node} node
 * @param {Node} above
 */
export function isWithin(node, above) {
  /** @type {Node | null} */
  let at = node;
  while (at && at !== above) at = at.parent;
  return at === above;
}

/**
 * The layer that a node is or belongs to; null for what is outside the layers.
 * @param {Node} node
 * @returns {Node | null}
 */
export function layerOf(node) {
  if (node.kind === "layer") return node;
  return node.parent && node.kind !== "all" ? layerOf(node.parent) : null;
}

/**
 * Backward over forward; null without a forward.
 * @param {Amounts} amounts
 */
export function backwardRatio(amounts) {
  return amounts[FORWARD] > 0 ? amounts[BACKWARD] / amounts[FORWARD] : null;
}

/** @param {Node} node */
export function nameWithRepeats(node) {
  return node.repeats > 1 ? `${node.label} ×${node.repeats}` : node.label;
}
