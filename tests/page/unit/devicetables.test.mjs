// The tables of the device and of DDP's buckets: each number in its column, each row at its layer.

import assert from "node:assert/strict";
import test from "node:test";

import { bucketsTable, deviceTable } from "../../../gradscope/report/page/web/src/devicetables.js";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { buildTree } from "../../../gradscope/report/page/web/src/tree.js";
import { sample } from "./sample.mjs";

const run = readRun(sample(), 0);
const tree = buildTree(run, false);

/** @param {Record<string, any>} info */
const scene = (info) => /** @type {any} */ ({ run: { ...run, info: { ...run.info, ...info } }, tree });

const bucket = {
  model: "",
  number: 7,
  bytes: 1000,
  layers: [5, 3],
  first_at_ns: 11,
  mean_at_ns: 22,
  last_at_ns: 33,
  begun_at_ns: 44,
  exposed_ns: 55,
};

test("a bucket's numbers are in their columns, and the row leads to its largest layer", () => {
  const { columns, rows, sort, summary } = bucketsTable(scene({ buckets: [bucket] }));
  const [{ cells, node }] = rows;
  assert.deepEqual(
    columns.map(({ key }) => [key, cells[key]]),
    [
      ["number", 7],
      ["layers", `${run.paths[5]}, ${run.paths[3]}`],
      ["bytes", 1000],
      ["last", 33],
      ["sent", 44],
      ["waited", 55],
    ],
  );
  assert.equal(node, tree.layerNodes[5]);
  assert.equal(sort, "number");
  assert.match(summary, /^1 bucket:/);
});

test("what no layer has is left out", () => {
  const { rows } = bucketsTable(
    scene({
      buckets: [
        { ...bucket, layers: [-1, 3] },
        { ...bucket, layers: [] },
      ],
    }),
  );
  assert.deepEqual(
    rows.map(({ cells, node }) => [cells.layers, node]),
    [
      [run.paths[3], tree.layerNodes[3]],
      ["", null],
    ],
  );
});

test("models are named where there are several", () => {
  const keys = (/** @type {string[]} */ ...models) =>
    bucketsTable(scene({ buckets: models.map((model) => ({ ...bucket, model })) })).columns.map(({ key }) => key);
  assert.ok(!keys("", "").includes("model") && !keys("actor").includes("model"));
  assert.ok(keys("actor", "critic").includes("model"));
  const { rows } = bucketsTable(scene({ buckets: [bucket, { ...bucket, model: "critic" }] }));
  assert.deepEqual(
    rows.map(({ cells }) => cells.model),
    ["(the root)", "critic"],
  );
});

test("a device's time is told by what launched it, as shares of all", () => {
  const part = tree.root.children.find(({ kind }) => kind === "part");
  assert.ok(part);
  const parts = [
    [part.address, "one", "what it is", 30],
    ["nowhere", "other", "", 10],
  ];
  const { rows, summary, sort } = deviceTable(scene({ device: { whole: 40, words: "in words", parts } }));
  assert.deepEqual(
    rows.map(({ cells, node }) => [cells.part, cells.meaning, cells.time, cells.share, node]),
    [
      ["one", "what it is", 30, 0.75, part],
      ["other", "", 10, 0.25, null],
    ],
  );
  assert.deepEqual([summary, sort], ["in words", "-time"]);
});
