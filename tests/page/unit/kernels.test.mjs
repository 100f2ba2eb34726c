// Kernels below the operations that launched them.

import assert from "node:assert/strict";
import test from "node:test";

import { joinRuns } from "../../../gradscope/report/page/web/src/joined.js";
import { layoutFrames } from "../../../gradscope/report/page/web/src/layout.js";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { addressOf, nodeOf } from "../../../gradscope/report/page/web/src/state.js";
import { buildTree } from "../../../gradscope/report/page/web/src/tree.js";
import { sample } from "./sample.mjs";

// Of layer 5's MmBackward0, which takes 46 ns: a kernel that runs 35 ns, 30 of them by itself, and one of 10 ns. Of layer 3
// one that nobody knows who launched.
function record() {
  const made = sample();
  const s = (/** @type {string} */ text) => made.strings.push(text) - 1;
  const [run] = made.runs;
  const { name, phase } = run.ops;
  run.kernels = {
    layer: [5, 5, 3],
    phase: [phase[1], phase[1], phase[1]],
    name: [s("gemm"), s("reduce"), s("copy")],
    op: [name[1], name[1], -1],
    calls: [1, 2, 1],
    device_ns: [35, 10, 6],
    busy_ns: [30, 10, null],
  };
  return made;
}

const run = readRun(record(), 0);
const tree = buildTree(run, false);
const layer = (/** @type {number} */ index) => tree.layerNodes[index];
const operation = layer(5).children.find((node) => node.label === "MmBackward0");

test("a kernel is below its operation, and one of unknown launch below its layer", () => {
  assert.ok(operation);
  assert.deepEqual(
    operation.kernels.map((kernel) => [kernel.label, kernel.total[1], kernel.busy, kernel.calls]),
    [
      ["gemm", 35, 30, 1],
      ["reduce", 10, 10, 2],
    ],
  );
  assert.deepEqual(layer(5).kernels, []);
  assert.deepEqual(
    layer(3).kernels.map((kernel) => kernel.label),
    ["copy"],
  );
});

test("kernels are drawn as wide as their part of the operation", () => {
  const frames = layoutFrames(layer(5), "backward", 500, false);
  const find = (/** @type {string} */ label) => frames.find((frame) => frame.node.label === label);
  const [op, gemm, reduce] = ["MmBackward0", "gemm", "reduce"].map(find);
  assert.ok(op && gemm && reduce);
  const perUnit = 500 / 50; // 46 of the operation, 4 of accumulation
  assert.deepEqual([op.x, op.width], [0, 46 * perUnit]);
  assert.deepEqual([gemm.x, gemm.width, gemm.row, gemm.value], [0, 30 * perUnit, op.row + 1, 35]);
  assert.deepEqual([reduce.x, reduce.width], [30 * perUnit, 10 * perUnit]);
});

test("in forward, no kernel of backward is drawn", () => {
  const frames = layoutFrames(tree.root, "forward", 500, false);
  assert.ok(!frames.some((frame) => frame.node.kind === "kernel"));
});

test("a kernel is found again by its address, folded or not", () => {
  const folded = buildTree(run, true);
  for (const owner of [operation, layer(3)]) {
    for (const kernel of owner?.kernels ?? []) {
      const address = addressOf(kernel, run.paths);
      assert.equal(nodeOf(address, tree, run.byPath), kernel);
      assert.equal(nodeOf(address, folded, run.byPath).label, kernel.label);
    }
  }
});

test("of two runs, a kernel is as wide as in the run after", () => {
  const comparison = { names: ["a", "b"], warnings: [], notes: [], noise: {}, groups: [], totals: {} };
  const both = buildTree(joinRuns(run, readRun(record(), 0), comparison), false);
  const op = both.layerNodes[5].children.find((node) => node.label === "MmBackward0");
  assert.deepEqual(
    op?.kernels.map((kernel) => [kernel.label, kernel.total[1], kernel.wasTotal[1], kernel.busy]),
    [
      ["gemm", 35, 35, 30],
      ["reduce", 10, 10, 10],
    ],
  );
});
