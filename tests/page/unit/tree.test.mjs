import assert from "node:assert/strict";
import test from "node:test";
import { typeOfLayer, typeWithin } from "../../../gradscope/report/page/web/src/layertypes.js";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { backwardRatio, walkTree } from "../../../gradscope/report/page/web/src/nodes.js";
import { repeatAmounts } from "../../../gradscope/report/page/web/src/totals.js";
import { buildTree } from "../../../gradscope/report/page/web/src/tree.js";
import { sample } from "./sample.mjs";

const run = readRun(sample(), 0);

/** @param {boolean} merged */
const shown = (merged) =>
  [...walkTree(buildTree(run, merged).root)]
    .filter((node) => node.kind !== "op")
    .map((node) => [node.label, node.address, node.layers.length, node.own[1], node.total[1]]);

test("paths come from parents and names", () => {
  assert.deepEqual(run.paths.slice(0, 4), ["", "body", "body.0", "body.0.fc"]);
});

test("repeats of one structure are folded, others and leaves are not", () => {
  assert.deepEqual(shown(true), [
    ["whole step", "", 0, 0, 105],
    ["Net", "", 1, 2, 100],
    ["body", "body", 1, 0, 94],
    ["body.0-body.1", "body.0-1", 2, 20, 90],
    ["fc", "body.0-1.fc", 2, 70, 70],
    ["body.2", "body.2", 1, 1, 4],
    ["fc", "body.2.fc", 1, 3, 3],
    ["ln_1", "ln_1", 1, 2, 2],
    ["ln_2", "ln_2", 1, 2, 2],
    ["outside modules", "outside_modules_ns", 0, 0, 0], // 2 ns of forward
    ["autograd overhead", "engine_ns", 0, 5, 5],
  ]);
});

test("without folding each layer is a node", () => {
  const labels = shown(false).map(([label]) => label);
  assert.deepEqual(labels, [
    "whole step",
    "Net",
    "body",
    "body.0",
    "fc",
    "body.1",
    "fc",
    "body.2",
    "fc",
    "ln_1",
    "ln_2",
    "outside modules",
    "autograd overhead",
  ]);
});

test("own amounts add up to the whole, folded or not", () => {
  for (const merged of [true, false]) {
    const { nodes, root } = buildTree(run, merged);
    for (const slot of [0, 1]) {
      const own = nodes.filter((node) => node.kind !== "op").reduce((sum, node) => sum + node.own[slot], 0);
      assert.equal(own, run.whole[slot]);
      assert.equal(root.total[slot], run.whole[slot]);
    }
  }
});

test("operations add up to what their layer owns", () => {
  const tree = buildTree(run, true);
  const fc = tree.layerNodes[run.paths.indexOf("body.1.fc")];
  assert.deepEqual(
    fc.children.map((op) => [op.label, op.phase, op.own[1], op.calls]),
    [
      ["MmBackward0", "backward", 66, 2],
      ["aten::mm", "forward", 0, 1],
      ["aten::mm", "accumulate", 4, 1],
    ],
  );
  assert.equal(
    fc.children.reduce((sum, op) => sum + op.own[1], 0),
    fc.own[1],
  );
});

test("repeats keep their own amounts", () => {
  const tree = buildTree(run, true);
  const blocks = tree.layerNodes[run.paths.indexOf("body.0")];
  assert.deepEqual(repeatAmounts(run, blocks.layers, "backward"), [30, 60]);
  assert.deepEqual(repeatAmounts(run, blocks.layers, "both"), [35, 65]);
});

test("types go by class, those of containers by name, and hold for what is inside", () => {
  assert.equal(typeOfLayer("CausalSelfAttention", "x"), "attention");
  assert.equal(typeOfLayer("Sequential", "mlp"), "mlp");
  assert.equal(typeOfLayer("Sequential", "norm_list"), "other");
  assert.equal(typeOfLayer("Linear", "attn"), "linear");
  assert.equal(typeOfLayer("LMHead", "x"), "linear");
  assert.equal(typeOfLayer("GPT2LMHeadModel", "x"), "other"); // it holds one
  assert.equal(typeWithin("mlp", "linear"), "mlp");
  assert.equal(typeWithin("norm", "linear"), "linear");
});

test("a ratio needs a forward", () => {
  assert.equal(backwardRatio([0, 5, 0]), null);
  assert.equal(backwardRatio([2, 5, 0]), 2.5);
});

test("operations of no layer add up to what lies outside, in whatever phase of backward", () => {
  const data = sample();
  const { ledger, step, ops } = data.runs[0];
  ledger.outside_modules_ns = 9;
  for (const part of [ledger, step]) part.backward_ns += 9;
  step.wall_ns += 9;
  const [backward, accumulate, name] = [ops.phase[0], ops.phase[2], ops.name[0]];
  for (const [phase, ns] of [
    [backward, 3],
    [accumulate, 6],
  ]) {
    ops.layer.push(-1);
    ops.phase.push(phase);
    ops.name.push(name);
    ops.shape.push(-1);
    ops.calls.push(1);
    ops.self_ns.push(ns);
  }
  const { root } = buildTree(readRun(data, 0), true);
  const outside = root.children.find((node) => node.address === "outside_modules_ns");
  assert.equal(outside.own[1], 9);
  assert.deepEqual(
    outside.children.map((op) => [op.phase, op.own[1]]),
    [
      ["accumulate", 6],
      ["backward", 3],
    ],
  );
});
