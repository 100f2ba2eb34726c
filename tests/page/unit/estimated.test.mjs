import assert from "node:assert/strict";
import test from "node:test";
import { estimatedShare, estimatedWords, hasEstimates } from "../../../gradscope/report/page/web/src/estimated.js";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { START } from "../../../gradscope/report/page/web/src/state.js";
import { makeTable } from "../../../gradscope/report/page/web/src/tables.js";
import { buildTree } from "../../../gradscope/report/page/web/src/tree.js";
import { sample } from "./sample.mjs";

// Of the sample: 5 of the Block body.0 (10 of its own, 20 of its Linear), 3 of body.1, and 1 of ln_1's 2.
function compiledSample() {
  const record = sample();
  const { layers } = record.runs[0];
  const backward = { 2: 5, 4: 3, 8: 1 };
  const column = (/** @type {Record<number, number>} */ values) => layers.parent.map((_, i) => values[i] ?? 0);
  return {
    ...record,
    runs: [
      { ...record.runs[0], layers: { ...layers, estimated_ns: column(backward), forward_estimated_ns: column({}) } },
    ],
  };
}

const run = readRun(compiledSample(), 0);
const tree = buildTree(run, true);
/** @param {string} path */
const at = (path) => tree.layerNodes[run.paths.indexOf(path)];

test("what is estimated is a share of the same layers' time, repeats and what is below them too", () => {
  assert.equal(estimatedShare(run, at("body.0"), "backward", true), 8 / 20); // both Blocks
  assert.equal(estimatedShare(run, at("body.0"), "backward", false), 8 / 90); // and their Linear: 20 and 50
  assert.equal(estimatedShare(run, at("ln_1"), "both", true), 1 / 3);
  assert.equal(estimatedShare(run, at("ln_1"), "forward", true), 0);
  assert.equal(estimatedShare(run, at("ln_1"), "saved", true), null);
  assert.equal(estimatedShare(run, at("body.0"), "forward", true), null); // takes none
});

test("it is said of the pass of which a part is", () => {
  assert.deepEqual(estimatedWords(run, at("ln_1")), ["50 % of its backward is estimated: fused kernels"]);
  assert.deepEqual(estimatedWords(run, at("ln_2")), []);
});

test("a column of the layers' table, of runs that have estimates", () => {
  const scene = { run, tree, state: START, zoom: tree.root, found: null };
  const table = makeTable("layers", scene);
  assert.ok(table.columns.some(({ key }) => key === "estimated"));
  assert.equal(table.rows.find(({ node }) => node === at("ln_1"))?.cells.estimated, 0.5);
  const eager = readRun(sample(), 0);
  assert.equal(hasEstimates(eager), false);
  const plain = { ...scene, run: eager, tree: buildTree(eager, true) };
  assert.ok(!makeTable("layers", { ...plain, zoom: plain.tree.root }).columns.some(({ key }) => key === "estimated"));
});
