// The whole tree of a run: its layers, and what belongs to none. Own amounts of all nodes but operations add up to
// the whole of the run.

import { TreeBuilder } from "./fold.js";
import { addTo, hangKernels, makeNode, opNodes, walkTree } from "./nodes.js";
import { BACKWARD, FORWARD, LAYER_PHASES, PARTS, SAVED, wordsOfLedger } from "./run.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./nodes.js").Tree} Tree
 */

/**
 * @param {Run} run
 * @param {boolean} merged whether repeats are folded
 * @returns {Tree}
 */
export function buildTree(run, merged) {
  const builder = new TreeBuilder(run, merged);
  const root = makeNode("all", run.info.workload.model ? "step" : "all", [], 1);
  root.label = "whole step";
  root.own = [0, 0, 0];
  root.children = [...builder.roots(), ...outsideParts(run)];
  root.calls = 1;
  finish(root);
  const nodes = walkTree(root);
  const layerNodes = new Array(run.paths.length);
  for (const node of nodes) if (node.kind === "layer") for (const layer of node.layers) layerNodes[layer] = node;
  for (const [layer, node] of builder.elided) layerNodes[layer] = node;
  return { root, layerNodes, nodes, merged };
}

/**
 * What belongs to no layer: the rest of the ledger, of forward, and of what is saved.
 * @param {Run} run
 */
function outsideParts(run) {
  const layers = [0, 0, 0];
  for (const own of run.own) addTo(layers, own);
  const ops = run.ops[run.paths.length];
  const saved = run.saved[run.paths.length];
  const kernels = run.kernels[run.paths.length];
  const { baseline, joined } = run;
  const layersBefore = [0, 0, 0];
  for (const was of joined?.was ?? []) addTo(layersBefore, was);
  const words = new Map(wordsOfLedger(run).map(([key, ...both]) => [key, both]));
  return PARTS.map(([key, phase]) => {
    const [label, meaning] = words.get(key) ?? [key, ""];
    const part = makeNode("part", label, [], 1);
    part.address = key;
    part.className = meaning;
    part.type = "outside";
    part.own[BACKWARD] = run.info.ledger[key];
    part.was[BACKWARD] = baseline?.info.ledger[key] ?? 0;
    const outside = phase === "backward";
    if (outside) {
      part.own[FORWARD] = run.whole[FORWARD] - layers[FORWARD];
      part.own[SAVED] = run.whole[SAVED] - layers[SAVED];
      part.was[FORWARD] = joined ? joined.whole[FORWARD] - layersBefore[FORWARD] : 0;
      part.was[SAVED] = joined ? joined.whole[SAVED] - layersBefore[SAVED] : 0;
    }
    // What no layer owns is outside of them in whatever phase: without modules that is all there is.
    const isIts = (/** @type {{ phase: string }} */ it) =>
      it.phase === phase || (outside && (it.phase === "forward" || LAYER_PHASES.has(it.phase)));
    const its = ops.filter(isIts);
    part.children = opNodes(outside ? [its, saved] : [its], part, "op");
    hangKernels(part, kernels.filter(isIts));
    return part;
  }).filter((part) => [...part.own, ...part.was].some((value) => value !== 0));
}

/**
 * Parents and totals, bottom up.
 * @param {Node} node
 */
function finish(node) {
  node.total = [...node.own];
  node.wasTotal = [...node.was];
  for (const child of node.children) {
    child.parent = node;
    finish(child);
    // What operations take is in their layer's own amount already.
    if (child.kind === "op") continue;
    addTo(node.total, child.total);
    addTo(node.wasTotal, child.wasTotal);
  }
  for (const kernel of node.kernels) {
    kernel.parent = node;
    kernel.total = [...kernel.own];
    kernel.wasTotal = [...kernel.was];
  }
}
