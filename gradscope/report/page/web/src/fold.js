// Layers to nodes, repeated blocks folded into one.
//
// The rules are those of gradscope/report/fold.py: numbered siblings *that contain layers* become one node when class,
// parameters and everything below them are the same.

import { typeOfLayer, typeWithin } from "./layertypes.js";
import { addTo, hangKernels, makeNode, opNodes } from "./nodes.js";
import { childrenFirst } from "./totals.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./nodes.js").Node} Node
 */

const NUMBERED = /^(.*?)(\d+)$/s;

/** Layers of a run to nodes. */
export class TreeBuilder {
  /**
   * @param {Run} run
   * @param {boolean} merged
   */
  constructor(run, merged) {
    this.run = run;
    this.merged = merged;
    /** @type {Map<number, Node>} layers that are not shown, and what stands for them */
    this.elided = new Map();
    /** @type {number[][]} */
    this.children = run.paths.map(() => []);
    run.parents.forEach((parent, i) => parent >= 0 && this.children[parent].push(i));
    this.signatures = this.sign();
  }

  roots() {
    const roots = this.run.parents.flatMap((parent, i) => (parent < 0 ? [i] : []));
    return roots.map((root) => {
      const name = this.run.paths[root];
      const label = name || this.run.classes[root] || this.run.info.workload.model || "model";
      return this.merge([root], label, name, 1, "other");
    });
  }

  /** Equal structures numbered equally, bottom up. */
  sign() {
    const { run, children } = this;
    const numbers = new Map();
    /** @type {number[]} */
    const signatures = new Array(run.paths.length).fill(-1);
    for (const layer of childrenFirst(run)) {
      const below = children[layer].map((child) => [run.names[child], signatures[child]]);
      // Repeats of which one is new, removed or of another class than before are not alike.
      const past = run.joined ? [run.joined.statuses[layer], run.joined.classesBefore[layer]] : [];
      const key = JSON.stringify([run.classes[layer], run.parameters[layer] ?? 0, below, ...past]);
      if (!numbers.has(key)) numbers.set(key, numbers.size);
      signatures[layer] = numbers.get(key);
    }
    return signatures;
  }

  /**
   * One node for layers of one structure.
   * @param {number[]} layers
   * @param {string} label
   * @param {string} address
   * @param {number} repeats
   * @param {string} above type of the layer above
   * @returns {Node}
   */
  merge(layers, label, address, repeats, above) {
    const { run, children } = this;
    const node = makeNode("layer", label, layers, repeats);
    node.address = address;
    node.className = run.classes[layers[0]];
    node.type = typeWithin(above, typeOfLayer(node.className, run.names[layers[0]]));
    const { joined } = run;
    if (joined) {
      for (const layer of layers) addTo(node.was, joined.was[layer]);
      node.status = joined.statuses[layers[0]];
      const before = joined.classesBefore[layers[0]];
      if (node.status === "matched" && before !== node.className) node.className = `${before} → ${node.className}`;
    }
    for (const layer of layers) {
      addTo(node.own, run.own[layer]);
      node.calls += run.calls[layer] ?? 0;
    }
    const siblings = children[layers[0]].map((_, i) => layers.map((layer) => children[layer][i]));
    const below = this.fold(siblings, node).map((child) => this.elide(child, node));
    const lists = layers.flatMap((layer) => [run.ops[layer], run.saved[layer]]);
    node.children = [...below, ...opNodes(lists, node, "op")];
    hangKernels(
      node,
      layers.flatMap((layer) => run.kernels[layer]),
    );
    return node;
  }

  /**
   * Nodes of the children of `parent`; each sibling comes as its counterparts in every repeat.
   * @param {number[][]} siblings
   * @param {Node} parent
   */
  fold(siblings, parent) {
    const { run, children } = this;
    /** @type {Map<string, number[][]>} */
    const groups = new Map();
    siblings.forEach((counterparts, i) => {
      const first = counterparts[0];
      const match = NUMBERED.exec(run.names[first]);
      const foldable = this.merged && match && children[first].length > 0;
      const key = foldable ? `${this.signatures[first]} ${match[1]}` : `#${i}`;
      const group = groups.get(key);
      if (group) group.push(counterparts);
      else groups.set(key, [counterparts]);
    });
    const numbered = siblings.map((s) => s[0]).filter((i) => children[i].length > 0 && NUMBERED.test(run.names[i]));
    return [...groups.values()].map((members) => this.groupNode(members, numbered, parent));
  }

  /**
   * @param {number[][]} members
   * @param {number[]} numbered all siblings that could be folded
   * @param {Node} parent
   */
  groupNode(members, numbered, parent) {
    const { run } = this;
    const names = members.map((member) => run.names[member[0]]);
    const before = parent.address ? `${parent.address}.` : "";
    const parentName = run.names[parent.layers[0]].split(".").at(-1) ?? "";
    // A bare number says nothing: put the parent's name before it.
    const lead = parentName && /^\d+$/.test(names[0]) ? `${parentName}.` : "";
    if (members.length === 1) return this.merge(members[0], lead + names[0], before + names[0], 1, parent.type);
    const prefix = names[0].replace(/\d+$/, "");
    const spans = spansOf(names.map((name) => Number(name.slice(prefix.length))).sort((a, b) => a - b));
    const [first, last] = [spans[0].split("-")[0], spans[spans.length - 1].split("-").at(-1)];
    const short = spans.length <= 3 ? spans.join(",") : `${spans[0]},${spans[1]},…,${spans.at(-1)}`;
    const label = spans.length === 1 ? `${lead}${prefix}${first}-${lead}${prefix}${last}` : lead + prefix + short;
    // A star only where it means all of them.
    const same = numbered.filter((i) => NUMBERED.exec(run.names[i])?.[1] === prefix);
    const address = before + prefix + (same.length === names.length ? "*" : short);
    return this.merge(members.flat(), label, address, members.length, parent.type);
  }

  /**
   * A container that is never called and holds one row says nothing: its child takes its place, with its name.
   * @param {Node} node
   * @param {Node} parent
   */
  elide(node, parent) {
    const busy = node.calls > 0 || [...node.own, ...node.was].some((value) => value !== 0);
    if (node.children.length !== 1 || node.repeats > 1 || busy || node.children[0].kind !== "layer") return node;
    const child = node.children[0];
    if (!child.label.startsWith(`${node.label}.`)) child.label = `${node.label}.${child.label}`;
    for (const layer of node.layers) this.elided.set(layer, child);
    child.parent = parent;
    return child;
  }
}

/**
 * [0, 1, 2, 5] as ["0-2", "5"].
 * @param {number[]} numbers
 */
function spansOf(numbers) {
  /** @type {[number, number][]} */
  const spans = [];
  for (const number of numbers) {
    const last = spans[spans.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else spans.push([number, number]);
  }
  return spans.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`));
}
