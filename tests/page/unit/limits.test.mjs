import assert from "node:assert/strict";
import test from "node:test";
import { joinRuns } from "../../../gradscope/report/page/web/src/joined.js";
import {
  boundBy,
  formatPercent,
  hasLimits,
  limitTime,
  limitWords,
  limitedOf,
  reachedOf,
} from "../../../gradscope/report/page/web/src/limits.js";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { START } from "../../../gradscope/report/page/web/src/state.js";
import { makeTable, tabsOf } from "../../../gradscope/report/page/web/src/tables.js";
import { buildTree } from "../../../gradscope/report/page/web/src/tree.js";
import { sample } from "./sample.mjs";

// Of the sample: the two Linear of body.0-1 (20 and 46 of their own in backward) and ln_1 have a limit.
function limitedSample() {
  const record = sample();
  const { layers } = record.runs[0];
  const limits = { 3: [10, "compute"], 5: [23, "compute"], 8: [1, "bandwidth"] };
  const column = (/** @type {number} */ place) =>
    layers.parent.map((_, i) => limits[/** @type {3} */ (i)]?.[place] ?? null);
  layers.backward_limit_ns = column(0);
  layers.forward_limit_ns = layers.parent.map((_, i) => (i in limits ? 1 : null));
  layers.bound_by = column(1).map((kind) => {
    if (kind === null) return -1;
    if (!record.strings.includes(String(kind))) record.strings.push(String(kind));
    return record.strings.indexOf(String(kind));
  });
  return record;
}

const run = readRun(limitedSample(), 0);
const tree = buildTree(run, true);
/** @param {string} path */
const at = (path) => tree.layerNodes[run.paths.indexOf(path)];
/** @param {string} path @param {boolean} own */
const backwardOf = (path, own = false) => limitedOf(run, at(path), "backward", own);

test("limits of repeats and of what is below are summed, with the time that they are of", () => {
  const linear = backwardOf("body.0.fc");
  assert.deepEqual(
    [linear?.whole, linear?.operations, linear?.known, linear?.limit],
    [70, 66, 66, 33], // 4 ns wrote .grad: they have no limit
  );
  assert.equal(reachedOf(linear), 0.5);
  assert.equal(boundBy(linear), "compute");
  const both = limitedOf(run, at("body.0.fc"), "both", false);
  assert.deepEqual([both?.whole, both?.known, both?.limit], [80, 76, 35]);
});

test("a limit stands beside a time only where it is that of nearly all of it", () => {
  assert.equal(limitTime(backwardOf("body.0.fc")), null); // 66 of 70
  assert.equal(limitTime(backwardOf("ln_1")), 1);
  const blocks = backwardOf("body.0"); // 20 of the Blocks' own have no limit
  assert.deepEqual([limitTime(blocks), reachedOf(blocks), boundBy(blocks)], [null, null, null]);
  assert.equal(backwardOf("body.0", true), null);
  assert.equal(backwardOf("ln_2"), null);
});

test("words compare like with like, and say of what part", () => {
  assert.equal(
    limitWords(/** @type {any} */ (backwardOf("body.0")), "backward"),
    "66 ns of backward 90 ns, at this machine’s limit 33 ns (50 %), bound by compute",
  );
  const whole = limitedOf(run, tree.root, "backward", false);
  assert.equal(
    limitWords(/** @type {any} */ (whole), "backward"),
    "68 ns of backward 105 ns, at this machine’s limit 34 ns (50 %), bound by compute 97 %, bandwidth 3 %",
  );
  assert.equal(
    limitWords(/** @type {any} */ (backwardOf("ln_1")), "backward"),
    "backward 2 ns, at this machine’s limit 1 ns (50 %), bound by bandwidth",
  );
  assert.deepEqual([null, 0, 0.001, 0.123, 2].map(formatPercent), ["–", "0 %", "<1 %", "12 %", "200 %"]);
});

test("the table of layers has limits where the run has", () => {
  const keys = (/** @type {any} */ of, /** @type {any} */ state) =>
    makeTable("layers", {
      run: of,
      tree: buildTree(of, true),
      state: { ...START, ...state },
      zoom: tree.root,
      found: null,
    }).columns.map((column) => column.key);
  assert.ok(tabsOf(run).some(([key]) => key === "layers"));
  assert.deepEqual(keys(run, {}).slice(3, 6), ["limit", "reached", "bound"]);
  assert.equal(keys(run, { metric: "saved" }).includes("limit"), false);
  const plain = readRun(sample(), 0);
  assert.equal(hasLimits(plain), false);
  assert.equal(keys(plain, {}).includes("limit"), false);
  const { rows } = makeTable("layers", { run, tree, state: START, zoom: tree.root, found: null });
  const cells = rows.find((row) => row.cells.layer === "ln_1")?.cells;
  assert.deepEqual([cells?.limit, cells?.reached, cells?.bound], [1, 0.5, "bandwidth"]);
});

test("a layer that only the run before has is without limits", () => {
  const before = sample();
  before.strings.push("gone");
  before.runs[0].layers.name[9] = before.strings.length - 1;
  const comparison = { names: ["a", "b"], warnings: [], notes: [], noise: {}, groups: [], totals: {} };
  const joined = joinRuns(run, readRun(before, 0), comparison);
  const node = buildTree(joined, true).layerNodes[joined.paths.indexOf("gone")];
  assert.equal(limitedOf(joined, node, "backward", false), null);
  assert.equal(limitedOf(joined, buildTree(joined, true).root, "backward", false)?.limit, 34);
});
