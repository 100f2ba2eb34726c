// Finding layers, operations, kernels and lines by words of their names.

import { amountOf } from "./run.js";
import { ancestry, walkTree } from "./nodes.js";

/**
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./run.js").Metric} Metric
 *
 * @typedef {object} Found
 * @property {Set<Node>} matches
 * @property {Set<Node>} lit matches, what is above them, and what is below them
 * @property {Node[]} list matches in the order of the tree
 * @property {number} amount of what matches, nothing counted twice
 */

/**
 * Whether all words of the query are in the text, or the regular expression between slashes fits it; upper and lower
 * case are the same. Nothing fits an expression that is none.
 * @param {string} query
 * @returns {(text: string) => boolean}
 */
export function matcher(query) {
  const between = /^\s*\/(.+)\/\s*$/s.exec(query);
  if (between) {
    const expression = expressionOf(between[1]);
    return (text) => expression?.test(text) ?? false;
  }
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return (text) => {
    const lower = text.toLowerCase();
    return words.every((word) => lower.includes(word));
  };
}

/**
 * What keeps a query from fitting anything: an expression that is none, or has no end yet; "" for nothing.
 * @param {string} query
 */
export function queryFault(query) {
  const [, text, end] = /^\s*\/(.*?)(\/?)\s*$/s.exec(query) ?? [];
  if (text === undefined) return "";
  return end ? (expressionOf(text) ? "" : "not a regular expression") : "a regular expression ends with /";
}

/**
 * @param {string} text
 */
function expressionOf(text) {
  try {
    return new RegExp(text, "i");
  } catch {
    return null;
  }
}

/**
 * Whether a node fits: a layer by path and class (of repeats, any of their paths), an operation by name and phase.
 * @param {Node} node
 * @param {(text: string) => boolean} fits
 * @param {string[]} paths of layers
 */
function nodeFits(node, fits, paths) {
  if (node.kind !== "layer") return fits(node.kind === "part" ? node.label : `${node.label} ${node.phase}`);
  const names = [node.address, ...node.layers.map((layer) => paths[layer])];
  return names.some((name) => fits(name) || fits(`${name} ${node.className}`));
}

/**
 * @param {Node} root
 * @param {string} query
 * @param {Metric} metric
 * @param {string[]} paths of layers
 * @param {Node[]} [lineNodes] layers of source lines that fit: they are lit, but no matches
 * @returns {Found | null} null without a query
 */
export function search(root, query, metric, paths, lineNodes = []) {
  if (!query.trim()) return null;
  const fits = matcher(query);
  /** @type {Found} */
  const found = { matches: new Set(), lit: new Set(), list: [], amount: 0 };
  /** @param {Node} node @param {boolean} below a match */
  const visit = (node, below) => {
    const own = node.kind !== "all" && nodeFits(node, fits, paths);
    if (own) {
      found.matches.add(node);
      if (amountOf(node.total, metric) > 0) found.list.push(node);
      if (!below && node.kind !== "kernel") found.amount += amountOf(node.total, metric);
    }
    let lit = own || below;
    for (const child of node.children) lit = visit(child, own || below) || lit;
    for (const kernel of node.kernels) lit = visit(kernel, own || below) || lit;
    if (lit) found.lit.add(node);
    return lit;
  };
  visit(root, false);
  for (const node of lineNodes) for (const one of lightOf([node])?.lit ?? []) found.lit.add(one);
  return found;
}

/**
 * These nodes with what is above and below them, as if a search had found them.
 * @param {Node[]} nodes
 * @returns {Found | null} null for none
 */
export function lightOf(nodes) {
  if (nodes.length === 0) return null;
  const lit = new Set(nodes.flatMap((node) => ancestry(node)));
  for (const node of nodes) {
    for (const below of walkTree(node)) for (const one of [below, ...below.kernels]) lit.add(one);
  }
  return { matches: new Set(nodes), lit, list: nodes, amount: 0 };
}

/**
 * Nodes that a table shows for a search: those that match, and those of which an operation does.
 * @param {Node} node
 * @param {Found | null} found
 */
export function isFound(node, found) {
  if (!found || found.matches.has(node)) return true;
  return [...node.children, ...node.kernels].some(
    (child) =>
      child.kind !== "layer" && (found.matches.has(child) || child.kernels.some((kernel) => found.matches.has(kernel))),
  );
}

/**
 * All layers and parts, parents first.
 * @param {Node} root
 */
export function rowsOf(root) {
  return walkTree(root).filter((node) => node.kind === "layer" || node.kind === "part");
}
