// Parts of the chart of memory over time: axes, steps, phases, the mark of the peak.

import { svgElement } from "./dom.js";
import { columnScale, formatBytes } from "./format.js";

/**
 * @typedef {import("./memorydata.js").Memory} Memory
 *
 * @typedef {object} Scale of a chart, in pixels
 * @property {number} width
 * @property {number} height
 * @property {number} left of the plot
 * @property {number} right
 * @property {number} top
 * @property {number} base
 * @property {number} end ns at the right edge
 * @property {number} most bytes at the top
 * @property {(time: number) => number} x
 * @property {(bytes: number) => number} y
 */

/** @type {Record<string, string>} */
const SHORT = { forward: "fwd", backward: "bwd", optimizer: "opt" };
const MARGIN = { left: 58, right: 10, top: 34, bottom: 22 };

/**
 * @param {number} width
 * @param {number} height
 * @param {number} end ns
 * @param {number} most bytes
 * @returns {Scale}
 */
export function chartScale(width, height, end, most) {
  const [right, base] = [width - MARGIN.right, height - MARGIN.bottom];
  return {
    width,
    height,
    left: MARGIN.left,
    right,
    top: MARGIN.top,
    base,
    end,
    most,
    x: (time) => MARGIN.left + (time / end) * (right - MARGIN.left),
    y: (bytes) => base - (bytes / most) * (base - MARGIN.top),
  };
}

/**
 * Each value kept until the next, as a path.
 * @param {number[]} times
 * @param {number[]} bytes
 * @param {Scale} scale
 * @param {number} end ns until which the last value is kept
 */
export function stepPath(times, bytes, { x, y }, end) {
  if (times.length === 0) return "";
  let path = `M${x(times[0]).toFixed(1)} ${y(bytes[0]).toFixed(1)}`;
  for (let i = 1; i < times.length; i++) path += `H${x(times[i]).toFixed(1)}V${y(bytes[i]).toFixed(1)}`;
  return `${path}H${x(end).toFixed(1)}`;
}

/**
 * What lies between two courses in steps, as a closed path.
 * @param {number[]} times
 * @param {number[]} low
 * @param {number[]} high
 * @param {Scale} scale
 * @param {number} end ns
 */
export function areaPath(times, low, high, scale, end) {
  let path = stepPath(times, high, scale, end);
  if (!path) return "";
  const { x, y } = scale;
  for (let i = times.length - 1; i >= 0; i--) path += `V${y(low[i]).toFixed(1)}H${x(times[i]).toFixed(1)}`;
  return `${path}Z`;
}

/** @param {Scale} scale */
export function axes({ most, end, left, right, height, x, y }) {
  const made = [];
  const bytes = columnScale(most, true);
  const time = columnScale(end, false);
  for (const value of ticks(most / bytes.factor, 4)) {
    const at = y(value * bytes.factor);
    made.push(svgElement("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }));
    made.push(svgElement("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, `${value} ${bytes.unit}`));
  }
  for (const value of ticks(end / time.factor, 5)) {
    const at = x(value * time.factor);
    if (at > right - 30) continue;
    const label = value === 0 ? `0 ${time.unit}` : String(value);
    made.push(svgElement("text", { x: at, y: height - 4, "text-anchor": "middle" }, label));
  }
  return made;
}

/**
 * Round numbers from 0 up to `most`.
 * @param {number} most
 * @param {number} wanted how many, about
 */
export function ticks(most, wanted) {
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough) ?? rough;
  const made = [];
  for (let i = 0; i * step <= most * 1.0001; i++) made.push(Number((i * step).toPrecision(6)));
  return made;
}

/**
 * @param {Memory} memory
 * @param {Scale} scale
 */
export function phaseMarks(memory, { x, base }) {
  const made = [];
  for (const phase of memory.phases) {
    const [left, right] = [x(phase.start_ns), x(phase.end_ns)];
    if (phase.phase === "other") continue;
    made.push(svgElement("line", { class: "phase", x1: left, x2: left, y1: 4, y2: base }));
    const name = right - left > 56 ? phase.phase : right - left > 26 ? SHORT[phase.phase] : "";
    if (name) made.push(svgElement("text", { class: "phase-name", x: left + 4, y: 12 }, name));
  }
  return made;
}

/**
 * @param {Memory} memory
 * @param {Scale} scale
 */
export function peakMark(memory, { x, y, width }) {
  const { peak_ns: time, peak_bytes: bytes } = memory.figures;
  const [at, above] = [x(time), y(bytes)];
  const left = at > width / 2;
  const place = { x: left ? at - 8 : at + 8, y: above - 6, "text-anchor": left ? "end" : "start" };
  return [
    svgElement("circle", { class: "peak", cx: at, cy: above, r: 4 }),
    svgElement("text", { class: "peak-text", ...place }, `peak ${formatBytes(bytes)}`),
  ];
}
