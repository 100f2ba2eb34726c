import assert from "node:assert/strict";
import test from "node:test";
import { readRun } from "../../../gradscope/report/page/web/src/run.js";
import { hasEstimate, runWithout } from "../../../gradscope/report/page/web/src/whatif.js";
import { sample } from "./sample.mjs";

// body.2 has a name that begins like that of body.1.
const run = readRun(sample(), 0);
run.paths = run.paths.map((path) => path.replace(/^body\.2/, "body.10"));
run.byPath = new Map(run.paths.map((path, i) => [path, i]));

/** @param {string} path @param {import("../../../gradscope/report/page/web/src/run.js").Run} of */
const backward = (path, of) => of.own[run.paths.indexOf(path)][1];

test("a layer whose name begins like the finding's keeps its time", () => {
  const finding = { layers: ["body.1"], saved_ns: 13, saved_bytes: 0 };
  assert.ok(hasEstimate(run, finding));
  const without = runWithout(run, finding); // forward 5 and backward 10 + 50 of body.1: 13 of 65 is a fifth
  assert.deepEqual([backward("body.1", without), backward("body.1.fc", without)], [8, 40]);
  for (const path of ["body.10", "body.10.fc", "body.0", "body"])
    assert.equal(backward(path, without), backward(path, run), path);
  assert.deepEqual(without.whole.slice(0, 2), [run.whole[0] - 1, run.whole[1] - 12]);
});

test("what the whole step would save is no layer's", () => {
  assert.ok(!hasEstimate(run, { layers: ["", "body.1"], saved_ns: 13, saved_bytes: 0 }));
  assert.ok(!hasEstimate(run, { layers: ["elsewhere"], saved_ns: 13, saved_bytes: 0 }));
  assert.ok(!hasEstimate(run, { layers: ["body.1"], saved_ns: 0, saved_bytes: 0 }));
});
