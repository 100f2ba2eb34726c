import assert from "node:assert/strict";
import test from "node:test";
import { momentOf, momentWords } from "../../../gradscope/report/page/web/src/crosshair.js";
import {
  MEMORY_KINDS,
  bandsOf,
  indexAt,
  kindOf,
  peakIndex,
  peakKinds,
  phaseAt,
  readMemory,
  spanAt,
  stackOf,
  withDescendants,
} from "../../../gradscope/report/page/web/src/memorydata.js";
import { areaPath, chartScale, stepPath } from "../../../gradscope/report/page/web/src/timelineparts.js";

const TEXTS = ["parameters", "saved activations", "temporaries", "inputs", "forward", "backward"];
/** @param {number} number */
const text = (number) => TEXTS[number];

// Layers: 0 is the root, 1 and 2 lie in it, 3 in 2. The peak is the second of two points of one time.
const memory = readMemory(
  {
    peak_ns: 40,
    peak_bytes: 100,
    at_peak: { layer: [1, 2, -1], category: [0, 1, 3], bytes: [50, 40, 10] },
    timeline: {
      ns: [0, 20, 20, 0, 40],
      bytes: [60, 75, 95, 100, 60],
      category: [0, 3, 1, 2],
      parts: [
        [50, 0, 0, 0, 0],
        [10, 0, 0, 0, 0],
        [0, 10, 15, 15, -40],
        [0, 5, 5, -10, 0],
      ],
    },
    spans: { layer: [0, 1, 3, 2, 1], phase: [4, 4, 4, 5, 5], start_ns: [5, 5, 10, 20, 21], ns: [5, 10, 8, 20, 9] },
    phases: [
      { phase: "forward", start_ns: 5, end_ns: 40 },
      { phase: "backward", start_ns: 40, end_ns: 80 },
    ],
  },
  text,
);
const run = /** @type {any} */ ({
  memory,
  paths: ["", "a", "b", "b.c"],
  classes: ["Net", "A", "B", "C"],
  parents: [-1, 0, 0, 2],
});

test("columns of steps are read as sums", () => {
  assert.deepEqual(memory.parts[2], [0, 10, 25, 40, 0]);
  assert.deepEqual(memory.parts[3], [0, 5, 10, 0, 0]);
  memory.bytes.forEach((bytes, i) =>
    assert.equal(
      memory.parts.reduce((sum, part) => sum + part[i], 0),
      bytes,
    ),
  );
  assert.deepEqual(
    memory.spans.map(({ layer, phase, start, end }) => [layer, phase, start, end]),
    [
      [0, "forward", 5, 10],
      [1, "forward", 10, 20],
      [3, "forward", 20, 28],
      [2, "backward", 40, 60],
      [1, "backward", 61, 70],
    ],
  );
});

test("a file without categories and spans has a timeline", () => {
  const old = readMemory({ at_peak: { layer: [] }, timeline: { ns: [0], bytes: [7] }, phases: [] }, text);
  assert.deepEqual([old.times, old.bytes, old.categories, old.parts, old.spans], [[0], [7], [], [], []]);
  const moment = momentOf({ ...run, memory: old }, old, 3, 0);
  assert.deepEqual([moment.bytes, moment.parts, moment.layer, moment.phase], [7, [], "", "other"]);
});

test("the stack at the peak is what is held at the peak", () => {
  const at = peakIndex(memory);
  assert.equal(at, 3);
  const kinds = Object.fromEntries(peakKinds(memory).map(({ key, bytes }) => [key, bytes]));
  assert.deepEqual(kinds, { weights: 50, gradients: 0, saved: 40, temporary: 0, rest: 10 });
  for (const { key, low, high } of stackOf(memory)) assert.equal(high[at] - low[at], kinds[key]);
  assert.equal(stackOf(memory).at(-1)?.high[at], 100);
});

test("every category is of one kind, and one that is new is among the others", () => {
  const all = MEMORY_KINDS.flatMap(([, , categories]) => [...categories]);
  assert.equal(new Set(all).size, 10);
  assert.equal(kindOf("buffers"), "weights");
  assert.equal(kindOf("something new"), "rest");
});

test("what holds and what runs at a moment", () => {
  assert.deepEqual(
    [-1, 0, 19, 20, 40, 79, 99].map((time) => indexAt(memory.times, time)),
    [0, 0, 0, 1, 3, 3, 4],
  );
  assert.deepEqual(
    [4, 5, 10, 27, 28, 60, 61].map((time) => spanAt(memory, time)?.layer ?? null),
    [null, 0, 1, 3, null, null, 1],
  );
  assert.deepEqual(
    [0, 5, 40, 80].map((time) => phaseAt(memory, time)),
    ["other", "forward", "backward", "other"],
  );
});

test("a moment is read out from the top of the stack", () => {
  assert.equal(
    momentWords(momentOf(run, memory, 25, 1)),
    "25 ns, forward, b.c ran. 75 B allocated: inputs 10 B, temporaries 5 B, saved activations 10 B, parameters 50 B.",
  );
  assert.equal(momentOf(run, memory, 6, 0).layer, "Net"); // the root has no path
  assert.match(momentWords(momentOf(run, memory, 30, 1)), /^30 ns, forward\. 75 B/);
});

test("bands hold all that is below, and join what is close", () => {
  assert.deepEqual([...withDescendants([2], run.parents)].sort(), [2, 3]);
  assert.deepEqual([...withDescendants([0], run.parents)].sort(), [0, 1, 2, 3]);
  assert.deepEqual([...withDescendants([], run.parents)], []);
  assert.deepEqual(bandsOf(memory, new Set([0, 1, 2, 3]), 0), [
    { phase: "forward", start: 5, end: 28, ns: 23 },
    { phase: "backward", start: 40, end: 60, ns: 20 },
    { phase: "backward", start: 61, end: 70, ns: 9 },
  ]);
  assert.deepEqual(bandsOf(memory, new Set([1, 2]), 1), [
    { phase: "forward", start: 10, end: 20, ns: 10 },
    { phase: "backward", start: 40, end: 70, ns: 29 },
  ]);
});

test("paths are steps in the chart's own scale", () => {
  const scale = chartScale(168, 156, 100, 50); // 100 ns on 100 pixels from 58, 50 bytes on 100 from 134 up to 34
  assert.equal(stepPath([0, 50], [0, 25], scale, 100), "M58.0 134.0H108.0V84.0H158.0");
  assert.equal(areaPath([0, 50], [0, 10], [0, 25], scale, 100), "M58.0 134.0H108.0V84.0H158.0V114.0H108.0V134.0H58.0Z");
  assert.equal(areaPath([], [], [], scale, 100), "");
});
