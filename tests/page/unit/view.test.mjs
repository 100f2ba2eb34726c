import assert from "node:assert/strict";
import test from "node:test";
import { findOutlier, medianOf } from "../../../gradscope/report/page/web/src/bars.js";
import {
  columnScale,
  formatBytes,
  formatCount,
  formatRatio,
  formatScaled,
  formatShare,
  formatTime,
  visible,
} from "../../../gradscope/report/page/web/src/format.js";
import { frameAt, layoutFrames } from "../../../gradscope/report/page/web/src/layout.js";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { matcher, search } from "../../../gradscope/report/page/web/src/search.js";
import { START, addressOf, fromHash, nodeOf, toHash } from "../../../gradscope/report/page/web/src/state.js";
import { sortRows, toCsv } from "../../../gradscope/report/page/web/src/table.js";
import { makeTable } from "../../../gradscope/report/page/web/src/tables.js";
import { ticks } from "../../../gradscope/report/page/web/src/timelineparts.js";
import { buildTree } from "../../../gradscope/report/page/web/src/tree.js";
import { sample } from "./sample.mjs";

const run = readRun(sample(), 0);
const tree = buildTree(run, true);
/** @param {Partial<import("../../../gradscope/report/page/web/src/state.js").ViewState>} state */
const scene = (state = {}) => ({ run, tree, state: { ...START, ...state }, zoom: tree.root, found: null });

test("numbers read as in the terminal", () => {
  assert.deepEqual([540, 12_345, 999_950, 61e9].map(formatTime), ["540 ns", "12.3 µs", "1.00 ms", "61.0 s"]);
  assert.deepEqual([512, 33_554_432].map(formatBytes), ["512 B", "33.6 MB"]);
  assert.deepEqual([12, 3_260_000].map(formatCount), ["12", "3.26 M"]);
  assert.deepEqual([0, 0.0001, 0.123, 1].map(formatShare), ["0.0 %", "<0.1 %", "12.3 %", "100.0 %"]);
  assert.equal(formatRatio(2.1), "×2.10");
  const scale = columnScale(123e6, false);
  assert.deepEqual(
    [scale.unit, formatScaled(123e6, scale), formatScaled(1_000, scale), formatScaled(0, scale)],
    ["ms", "123.0", "<0.1", "0"],
  );
});

test("what cannot be seen is made visible", () => {
  assert.equal(visible("a\0b\nc\u202Ed\u{1F600}"), "a␀b␊c⟨U+202E⟩d\u{1F600}");
});

test("a search finds all words, and counts nothing twice", () => {
  assert.equal(matcher("FC body")("body.0.fc"), true);
  assert.equal(matcher("fc norm")("body.0.fc"), false);
  assert.equal(search(tree.root, "  ", "backward", run.paths), null);
  const found = search(tree.root, "body", "backward", run.paths);
  assert.equal(found?.amount, 94); // body, with all below it
  const repeat = search(tree.root, "body.1.fc", "backward", run.paths);
  assert.deepEqual(
    repeat?.list.map((node) => node.address),
    ["body.0-1.fc"],
  );
  const names = (/** @type {string} */ query) =>
    search(tree.root, query, "backward", run.paths)?.list.map((node) => node.address);
  assert.deepEqual(names("/^BODY\\.[02]\\.FC /"), names("body.0.fc")?.concat(names("body.2.fc") ?? []));
  assert.deepEqual(names("/(/"), []);
  assert.equal(search(tree.root, "mmbackward", "backward", run.paths)?.amount, 66);
  assert.equal(search(tree.root, "autograd overhead", "backward", run.paths)?.amount, 5);
});

test("rows of layers add up to the ledger", () => {
  const { rows } = makeTable("layers", scene());
  assert.equal(
    rows.reduce((sum, row) => sum + Number(row.cells.backward), 0),
    105,
  );
  assert.equal(
    rows.reduce((sum, row) => sum + Number(row.cells.forward), 0),
    22,
  );
  assert.equal(sortRows({ columns: [], rows, summary: "", sort: "-backward" }, "").rows[0].cells.layer, "body.0-1.fc");
});

test("lines and what has no line add up to the whole", () => {
  const { rows } = makeTable("lines", scene());
  assert.deepEqual(
    rows.map((row) => [row.cells.line, row.cells.backward]),
    [
      ["m.py:7", 70],
      ["(no source line)", 35],
    ],
  );
});

test("CSV is exact, quoted, and no formula", () => {
  const columns = [
    { key: "name", label: "", kind: /** @type {const} */ ("text") },
    { key: "spent", label: "", kind: /** @type {const} */ ("time") },
  ];
  const rows = ['=a"b', "c,d", "e"].map((name, i) => ({
    cells: { name, spent: i === 2 ? null : i },
    note: "",
    type: "",
    node: null,
  }));
  assert.equal(toCsv({ columns, rows, summary: "", sort: "" }), 'name,spent_ns\n"\'=a""b",0\n"c,d",1\ne,\n');
});

test("frames fill the width and share it by amount", () => {
  const frames = layoutFrames(tree.root, "backward", 1050, false);
  const of = (/** @type {string} */ label) => frames.find((frame) => frame.node.label === label && frame.hidden === 0);
  assert.deepEqual([of("Net")?.x, of("Net")?.width, of("autograd overhead")?.x], [0, 1000, 1000]);
  assert.equal(of("body.0-body.1")?.width, 900);
  assert.equal(frameAt(frames, 5, 1)?.node.label, "Net");
  assert.equal(frameAt(frames, 5, 40), null);
});

test("frames thinner than a pixel are one", () => {
  const thin = layoutFrames(tree.root, "backward", 30, false).filter((frame) => frame.hidden > 0);
  assert.ok(thin.some((frame) => frame.node.label === "Net" && frame.hidden === 2 && frame.value === 4)); // ln_1, ln_2
});

test("a zoom shows what is above it at full width", () => {
  const zoom = tree.layerNodes[run.paths.indexOf("body.0.fc")];
  const frames = layoutFrames(zoom, "backward", 700, true);
  assert.deepEqual(
    frames.slice(0, 5).map((frame) => [frame.width, frame.above]),
    [
      [700, true],
      [700, true],
      [700, true],
      [700, true],
      [700, false],
    ],
  );
});

test("the address holds the view and gives it back", () => {
  const state = {
    ...START,
    metric: /** @type {const} */ ("both"),
    merged: false,
    query: "a&b=c #/",
    zoom: "layer/body.0",
    theme: /** @type {const} */ ("dark"),
  };
  assert.deepEqual(fromHash(toHash(state)), state);
  assert.equal(toHash({ ...START }), "");
  assert.deepEqual(fromHash("#metric=nonsense&foo=1&zoom=%E0%A4%A&__proto__=1"), { ...START, zoom: "" });
});

test("nodes are found again by their address, folded or not", () => {
  const unfolded = buildTree(run, false);
  for (const [one, other] of [
    [tree, unfolded],
    [unfolded, tree],
  ]) {
    for (const node of one.nodes) {
      const again = nodeOf(addressOf(node, run.paths), other, run.byPath);
      assert.equal(again.kind, node.kind);
      if (node.kind === "op") assert.equal(again.label, node.label);
    }
  }
  assert.equal(nodeOf("layer/no.such", tree, run.byPath), tree.root);
});

test("one repeat unlike the others stands out", () => {
  assert.equal(findOutlier([10, 10, 20, 10], 50), 2);
  assert.equal(findOutlier([10, 10, 5, 10], 50), 2);
  assert.equal(findOutlier([10, 14, 18], 42), 2);
  assert.equal(findOutlier([10, 12, 14], 36), -1);
  assert.equal(findOutlier([10, 10, 20], 1e6), -1); // too small to matter
  assert.equal(findOutlier([10, 20], 30), -1);
  assert.equal(medianOf([3, 1, 2, 10]), 2.5);
});

test("ticks are round and reach the top", () => {
  assert.deepEqual(ticks(198, 3), [0, 100]);
  assert.deepEqual(ticks(2330, 5), [0, 500, 1000, 1500, 2000]);
});
