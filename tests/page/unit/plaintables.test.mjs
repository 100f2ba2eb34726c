// Tables that come as they are shown: each row at its layer, or at its part of backward.

import assert from "node:assert/strict";
import test from "node:test";

import { plainTable } from "../../../gradscope/report/page/web/src/plaintables.js";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { buildTree } from "../../../gradscope/report/page/web/src/tree.js";
import { sample } from "./sample.mjs";

const run = readRun(sample(), 0);
const tree = buildTree(run, false);

test("a row leads to its layer, to its part of backward, or nowhere", () => {
  const rows = [
    [{ part: "a" }, 3],
    [{ part: "b" }, "communication_ns"],
    [{ part: "c" }, -1],
    [{ part: "d" }, "optimizer_ns"],
  ];
  const given = { columns: [{ key: "part", label: "Part", kind: "text" }], rows, summary: "so", sort: "part" };
  const scene = /** @type {any} */ ({ run: { ...run, info: { ...run.info, tables: { device: given } } }, tree });
  const table = plainTable("device", scene);
  const part =
    tree.root.children.find(({ kind, address }) => kind === "part" && address === "communication_ns") ?? null;
  assert.deepEqual(
    table.rows.map(({ node }) => node),
    [tree.layerNodes[3], part, null, null],
  );
  assert.deepEqual(
    table.rows.map(({ cells }) => cells.part),
    ["a", "b", "c", "d"],
  );
  assert.deepEqual([table.summary, table.sort, table.columns], [given.summary, given.sort, given.columns]);
});
