// Two runs as one: matching, sums, noise, folding.

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  changeOf,
  changeOfWhole,
  changeText,
  changeWords,
  makeChange,
  sumOfChanges,
} from "../../../gradscope/report/page/web/src/change.js";
import { formatTime } from "../../../gradscope/report/page/web/src/format.js";
import { joinRuns } from "../../../gradscope/report/page/web/src/joined.js";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { START, colourOf } from "../../../gradscope/report/page/web/src/state.js";
import { sortRows } from "../../../gradscope/report/page/web/src/table.js";
import { makeTable } from "../../../gradscope/report/page/web/src/tables.js";
import { buildTree } from "../../../gradscope/report/page/web/src/tree.js";
import { sample } from "./sample.mjs";

/** A comparison without any noise but 8 ns for the backward of body.0.fc and 5 of all of backward. */
function comparisonOf(count, groups = []) {
  const zeros = () => new Array(count).fill(0);
  const own = zeros();
  own[3] = 8;
  return {
    names: ["a.json", "b.json"],
    warnings: ["torch: 1 before, 2 after"],
    notes: [],
    noise: { backward_own_ns: own, backward_total_ns: zeros(), forward_self_ns: zeros(), forward_total_ns: zeros() },
    groups,
    totals: { backward_ns: 5, forward_ns: 0, engine_ns: 0 },
  };
}

/** The run after is the sample with 6 ns more in body.0.fc; `edit` changes the record of the run before. */
function pair(edit = () => {}, groups = []) {
  const [after, before] = [sample(), sample()];
  const raw = after.runs[0];
  raw.layers.backward_self_ns[3] += 6;
  raw.ledger.backward_ns += 6;
  raw.ledger.layers_ns += 6;
  raw.ops.self_ns[0] += 6;
  edit(before);
  return joinRuns(readRun(after, 0), readRun(before, 0), comparisonOf(raw.layers.parent.length, groups));
}

/** @param {any} record */
function rename(record, layer, name) {
  record.strings.push(name);
  record.runs[0].layers.name[layer] = record.strings.length - 1;
}

const state = { ...START, merged: false };

test("own changes add up to the change of the whole", () => {
  for (const merged of [true, false]) {
    for (const edit of [() => {}, (record) => rename(record, 8, "gone")]) {
      const run = pair(edit);
      const tree = buildTree(run, merged);
      const table = makeTable("layers", { run, tree, state, zoom: tree.root, found: null });
      assert.equal(table.sort, "-change");
      assert.equal(
        table.rows.reduce((sum, row) => sum + row.cells.change, 0),
        6,
      );
      assert.deepEqual([tree.root.wasTotal, tree.root.total], [run.joined.whole, run.whole]);
    }
  }
});

test("a renamed layer is removed and new", () => {
  const run = pair((record) => rename(record, 8, "gone"));
  assert.equal(run.paths.at(-1), "gone");
  const tree = buildTree(run, true);
  const byName = new Map(tree.nodes.map((node) => [node.address, node]));
  assert.deepEqual(
    [byName.get("gone").status, byName.get("gone").was, byName.get("gone").own],
    ["removed", [1, 2, 0], [0, 0, 0]],
  );
  assert.equal(byName.get("ln_1").status, "new");
  assert.equal(byName.get("ln_2").status, "matched");
  assert.equal(changeOf(run, byName.get("gone"), "backward", true).real, true);
});

test("repeats of which one had another class are not folded", () => {
  const folded = (run) =>
    buildTree(run, true)
      .nodes.filter((node) => node.repeats > 1)
      .map((node) => node.address);
  assert.deepEqual(folded(pair()), ["body.0-1"]);
  const other = pair((record) => {
    record.runs[0].layers.class[3] = record.strings.indexOf("LayerNorm");
  });
  assert.deepEqual(folded(other), []);
  const node = buildTree(other, true).layerNodes[3];
  assert.equal(node.className, "LayerNorm → Linear");
});

test("noise is the comparison's, of operations relatively that of their layer", () => {
  const run = pair();
  const tree = buildTree(run, false);
  const layer = tree.layerNodes[3];
  const change = changeOf(run, layer, "backward", true);
  assert.deepEqual(change, { before: 20, after: 26, difference: 6, noise: 8, real: false, status: "matched" });
  const [op] = layer.children;
  assert.equal(changeOf(run, op, "backward", false).noise, 8);
  assert.equal(changeOfWhole(run, "backward").real, true);
  assert.equal(changeOf(run, layer, "saved", true), null, "memory was not measured");
  const folded = buildTree(run, true).layerNodes[3];
  assert.equal(changeOf(run, folded, "backward", true).noise, 8, "the sum of 8 and 0");
  const grouped = pair(undefined, [{ layers: [3, 5], backward_own_ns: 4, backward_total_ns: 4 }]);
  assert.equal(changeOf(grouped, buildTree(grouped, true).layerNodes[3], "backward", true).noise, 4);
});

test("a change in words", () => {
  const format = (change) => [changeText(change, formatTime), changeWords(change, formatTime)];
  assert.deepEqual(format(makeChange(10, 20, 5)), ["+10 ns", "beyond ±5 ns"]);
  assert.deepEqual(format(makeChange(20, 10, 10)), ["≈", "within ±10 ns"]);
  assert.deepEqual(format(makeChange(20, 10, null)), ["−10 ns ?", "not tested"]);
  assert.deepEqual(format(makeChange(20, 20, null)), ["0", "the same"]);
  assert.deepEqual(format(makeChange(0, 9, 0, "new")), ["+9 ns", "new"]);
  assert.deepEqual(sumOfChanges([makeChange(1, 2, 3), makeChange(1, 2, null)]).noise, null);
});

test("lines match by place, then by text", () => {
  const moved = pair((record) => {
    record.runs[0].lines.line[0] = 3;
  });
  assert.deepEqual(
    moved.lines.map((line) => [line.line, line.status, line.was]),
    [[7, "matched", [10, 70, 0]]],
  );
  const edited = pair((record) => {
    record.runs[0].lines.text[0] = record.strings.indexOf("Net");
  });
  assert.deepEqual(
    edited.lines.map((line) => line.status),
    ["new", "removed"],
  );
});

test("runs without a layer in common, and an empty one", () => {
  const empty = pair((record) => {
    const raw = record.runs[0];
    for (const [key, column] of Object.entries(raw.layers)) raw.layers[key] = Array.isArray(column) ? [] : {};
    raw.ops = { layer: [], phase: [], name: [], shape: [], calls: [], self_ns: [] };
    raw.lines = { file: [], function: [], text: [], layer: [] };
    for (const key of Object.keys(raw.ledger)) raw.ledger[key] = 0;
    raw.step.forward_ns = 0;
  });
  assert.ok(empty.joined.statuses.every((status) => status === "new"));
  const tree = buildTree(empty, true);
  assert.deepEqual([tree.root.wasTotal, changeOfWhole(empty, "backward").difference], [[0, 0, 0], 111]);
});

test("changes sort by their size, and colour the flame only while compared", () => {
  const rows = [3, -9, 5].map((change) => ({ cells: { change }, note: "", type: "", node: null }));
  const table = { columns: [{ key: "change", label: "", kind: "change" }], rows, summary: "", sort: "-change" };
  assert.deepEqual(
    sortRows(table, "").rows.map((row) => row.cells.change),
    [-9, 5, 3],
  );
  assert.deepEqual([colourOf(START, true), colourOf(START, false)], ["change", "type"]);
  assert.equal(colourOf({ ...START, colour: "change" }, false), "type");
});
