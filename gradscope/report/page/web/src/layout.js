// Where the frames of the flame lie: in pixels, for one zoom, with runs of frames thinner than a pixel joined into one.

import { amountOf, slotOf, BACKWARD, FORWARD } from "./run.js";
import { ancestry } from "./nodes.js";

/**
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./run.js").Metric} Metric
 *
 * @typedef {object} Frame
 * @property {Node} node of a run of thin frames, what they are part of
 * @property {number} x
 * @property {number} width
 * @property {number} row
 * @property {number} hidden number of frames in a run of thin ones; 0 for a frame of its own
 * @property {number} value
 * @property {boolean} above the zoom
 */

const THIN = 1;

/**
 * @param {Node} zoom what fills the width
 * @param {Metric} metric
 * @param {number} width
 * @param {boolean} largestFirst among siblings; else as the model has them
 * @returns {Frame[]} in the order of rows above the zoom, then depth first
 */
export function layoutFrames(zoom, metric, width, largestFirst) {
  /** @type {Frame[]} */
  const frames = [];
  const line = ancestry(zoom);
  line.forEach((node, row) => {
    const above = node !== zoom;
    frames.push({ node, x: 0, width, row, hidden: 0, value: amountOf(node.total, metric), above });
  });
  const whole = amountOf(zoom.total, metric);
  if (whole > 0) placeBelow(frames, zoom, 0, width / whole, line.length, metric, largestFirst);
  return frames;
}

/**
 * @param {Frame[]} frames
 * @param {Node} node
 * @param {number} left
 * @param {number} perUnit pixels
 * @param {number} row
 * @param {Metric} metric
 * @param {boolean} largestFirst
 */
function placeBelow(frames, node, left, perUnit, row, metric, largestFirst) {
  const ops = node.children.filter((child) => child.kind === "op");
  const layers = node.children.filter((child) => child.kind !== "op");
  const opsLeft = place(frames, node, layers, left, perUnit, row, metric, largestFirst);
  const opsRight = place(frames, node, ops, opsLeft, perUnit, row, metric, largestFirst);
  if (node.kernels.length === 0) return;
  if (node.kind === "op")
    placeKernels(frames, node, left, amountOf(node.total, metric) * perUnit, perUnit, row, metric);
  else placeKernels(frames, node, opsLeft, opsRight - opsLeft, perUnit, row + 1, metric);
}

/**
 * @param {Frame[]} frames
 * @param {Node} parent
 * @param {Node[]} nodes siblings
 * @param {number} left
 * @param {number} perUnit
 * @param {number} row
 * @param {Metric} metric
 * @param {boolean} largestFirst
 * @returns {number} right end
 */
function place(frames, parent, nodes, left, perUnit, row, metric, largestFirst) {
  const order = largestFirst ? [...nodes].sort((a, b) => amountOf(b.total, metric) - amountOf(a.total, metric)) : nodes;
  let x = left;
  const thin = new ThinRun(frames, parent, row);
  for (const node of order) {
    const value = amountOf(node.total, metric);
    if (!(value > 0)) continue;
    const width = value * perUnit;
    if (width < THIN) {
      thin.add(x, width, value);
    } else {
      thin.flush();
      frames.push({ node, x, width, row, hidden: 0, value, above: false });
      placeBelow(frames, node, x, perUnit, row + 1, metric, largestFirst);
    }
    x += width;
  }
  thin.flush();
  return x;
}

/**
 * Kernels of an operation, as wide as their part of its time. Where it is not recorded what launched them, those of a
 * layer below its operations, narrowed where streams ran at the same time.
 * @param {Frame[]} frames
 * @param {Node} parent
 * @param {number} left
 * @param {number} room
 * @param {number} perUnit
 * @param {number} row
 * @param {Metric} metric
 */
function placeKernels(frames, parent, left, room, perUnit, row, metric) {
  /** @type {number[]} */
  const slots = { backward: [BACKWARD], forward: [FORWARD], both: [FORWARD, BACKWARD], saved: [] }[metric];
  const kernels = parent.kernels.filter((kernel) => slots.includes(slotOf(kernel.phase)));
  /** @param {Node} kernel */
  const sizeOf = (kernel) => (parent.kind === "op" ? kernel.busy : amountOf(kernel.total, metric));
  const whole = kernels.reduce((sum, kernel) => sum + sizeOf(kernel), 0);
  const scale = whole > 0 ? Math.min(perUnit, room / whole) : 0;
  const thin = new ThinRun(frames, parent, row);
  let x = left;
  for (const node of kernels) {
    const value = amountOf(node.total, metric);
    if (!(value > 0)) continue;
    const width = sizeOf(node) * scale;
    if (width < THIN) {
      thin.add(x, width, value);
    } else {
      thin.flush();
      frames.push({ node, x, width, row, hidden: 0, value, above: false });
    }
    x += width;
  }
  thin.flush();
}

/** Collects neighbours thinner than a pixel. */
class ThinRun {
  /**
   * @param {Frame[]} frames
   * @param {Node} parent
   * @param {number} row
   */
  constructor(frames, parent, row) {
    this.frames = frames;
    this.parent = parent;
    this.row = row;
    this.x = 0;
    this.width = 0;
    this.value = 0;
    this.hidden = 0;
  }

  /**
   * @param {number} x
   * @param {number} width
   * @param {number} value
   */
  add(x, width, value) {
    if (this.hidden === 0) this.x = x;
    this.hidden += 1;
    this.width += width;
    this.value += value;
  }

  flush() {
    const { frames, parent: node, x, width, row, hidden, value } = this;
    if (hidden > 0) frames.push({ node, x, width, row, hidden, value, above: false });
    this.hidden = 0;
    this.width = 0;
    this.value = 0;
  }
}

/**
 * The frame at a point, if any; of thin ones the nearest within two pixels.
 * @param {Frame[]} frames
 * @param {number} x
 * @param {number} row
 */
export function frameAt(frames, x, row) {
  let best = null;
  let distance = 2;
  for (const frame of frames) {
    if (frame.row !== row) continue;
    const away = Math.max(frame.x - x, x - frame.x - frame.width, 0);
    if (away < distance) {
      best = frame;
      distance = away;
    }
    if (away === 0) break;
  }
  return best;
}
