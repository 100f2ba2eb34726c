// Roofline: what layers compute a second over what they compute for each byte, below this machine's ceilings.

import { element, refill, svgElement } from "./dom.js";
import { formatBytes, formatCount, formatTime, shorten, visible } from "./format.js";
import { isWithin, nameWithRepeats } from "./nodes.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./nodes.js").Tree} Tree
 *
 * @typedef {object} Point of a layer's own operations, forward and backward
 * @property {Node} node
 * @property {number} intensity FLOPs a byte
 * @property {number} rate GFLOP/s
 * @property {number} time ns
 */

const NAMED = 8;

/**
 * Whether this machine's ceilings are known, and what some layer computes and moves.
 * @param {Run} run
 */
export function hasRoofline({ info, columns }) {
  const { limit_flops: flops, limit_bytes: bytes, limit_dtype: dtype } = info.environment;
  // A damaged file may hold anything: what no machine reaches would be drawn for ever.
  const known = [flops, bytes].every((rate) => typeof rate === "number" && rate > 1e6 && rate < 1e18);
  return known && typeof dtype === "string" && columns.bytes !== undefined && columns.backward_flops !== undefined;
}

/**
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {Tree} tree
 * @param {Node} selected
 * @param {(node: Node) => void} select
 */
export function drawRoofline(place, run, tree, selected, select) {
  const { limit_flops: flops, limit_bytes: bytes, limit_dtype: dtype } = run.info.environment;
  const { width, height, left, right, top, base } = sizesOf(place);
  const points = pointsOf(run, tree);
  const [peak, knee] = [flops / 1e9, flops / bytes];
  const [fromX, toX] = decades([...points.map((point) => point.intensity), knee]);
  const [fromY, toY] = decades([...points.map((point) => point.rate), peak]);
  const x = (/** @type {number} */ value) => left + ((Math.log10(value) - fromX) / (toX - fromX)) * (right - left);
  const y = (/** @type {number} */ value) => base - ((Math.log10(value) - fromY) / (toY - fromY)) * (base - top);
  const roof = (/** @type {number} */ intensity) => Math.min(peak, (intensity * bytes) / 1e9);
  const label = `Roofline of ${points.length} layers`;
  const box = { width, height, viewBox: `0 0 ${width} ${height}` };
  const picture = svgElement("svg", { ...box, role: "img", "aria-label": label });
  for (let power = fromX; power <= toX; power++) {
    const at = x(10 ** power);
    picture.append(svgElement("line", { class: "grid", x1: at, x2: at, y1: top, y2: base }));
    picture.append(svgElement("text", { x: at, y: base + 14, "text-anchor": "middle" }, formatCount(10 ** power)));
  }
  for (let power = fromY; power <= toY; power++) {
    const at = y(10 ** power);
    picture.append(svgElement("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }));
    picture.append(svgElement("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, formatCount(10 ** power)));
  }
  const corners = [10 ** fromX, knee, 10 ** toX].map((value) => `${x(value)},${y(Math.max(roof(value), 10 ** fromY))}`);
  picture.append(svgElement("polyline", { class: "roof", points: corners.join(" ") }));
  picture.append(
    svgElement("text", { x: right, y: y(peak) - 5, "text-anchor": "end" }, `${dtype} matmul ${formatCount(peak)}`),
    svgElement("text", { x: right, y: height - 6, "text-anchor": "end" }, "FLOPs per byte"),
    svgElement("text", { x: 4, y: 12 }, "GFLOP/s"),
  );
  const slope = 10 ** ((fromX + Math.log10(knee)) / 2);
  picture.append(svgElement("text", { x: x(slope) + 8, y: y(roof(slope)) + 12 }, `${formatBytes(bytes)}/s`));
  const largest = Math.max(...points.map((point) => point.time), 1);
  /** @type {string[]} */
  const told = [];
  /** @type {[number, number][]} */
  const named = [];
  for (const { node, intensity, rate, time } of points) {
    const words = `${node.address || nameWithRepeats(node)}: ${formatCount(rate)} GFLOP/s at ${formatCount(intensity)} FLOPs per byte, ${formatTime(time)}`;
    const marked = selected.kind !== "all" && isWithin(node, selected);
    if (marked && told.length < NAMED) told.push(words);
    picture.append(
      svgElement(
        "circle",
        {
          class: `dot${marked ? " marked" : ""}`,
          cx: x(intensity),
          cy: y(rate),
          r: 3 + 9 * Math.sqrt(time / largest),
          onclick: () => select(node),
        },
        svgElement("title", {}, visible(shorten(words, 400))),
      ),
    );
    const [at, above] = [x(intensity), y(rate)];
    // Of dots that lie close together the one that takes longest has its name beside it.
    if (named.length >= NAMED || named.some((one) => Math.abs(at - one[0]) < 130 && Math.abs(above - one[1]) < 14))
      continue;
    named.push([at, above]);
    const name = visible(shorten(node.address.split(".").slice(-2).join("."), 24) || nameWithRepeats(node));
    const below = above + 3 + 9 * Math.sqrt(time / largest) + 12;
    picture.append(svgElement("text", { class: "dot-name", x: at, y: below, "text-anchor": "middle" }, name));
  }
  refill(
    place,
    picture,
    ...told.map((words) => element("p", {}, visible(shorten(words, 400)))),
    element(
      "p",
      { class: "note" },
      `A dot is a layer's own operations, forward and backward; its area is their time. Bytes: estimates. The slope is memory bandwidth, the flat part ${visible(dtype)} matmuls.`,
    ),
  );
}

/**
 * As wide as its place and as high as a window shows beside the flame, so that a letter is as large as elsewhere.
 * @param {HTMLElement} place
 */
function sizesOf(place) {
  const width = Math.min(Math.max(place.clientWidth - 4, 300), 900);
  const height = Math.min(Math.max(Math.round(window.innerHeight * 0.26), 190), 340);
  return { width, height, left: 52, right: width - 20, top: 26, base: height - 36 };
}

/**
 * @param {Run} run
 * @param {Tree} tree
 * @returns {Point[]} the longest first, so that no small one lies below a large one
 */
function pointsOf({ columns }, tree) {
  const points = tree.nodes.flatMap((node) => {
    if (node.kind !== "layer") return [];
    /** @param {string[]} names */
    const sumOf = (...names) =>
      node.layers.reduce((sum, layer) => names.reduce((all, name) => all + (columns[name]?.[layer] ?? 0), sum), 0);
    // As in the table, no rate of all of their time where one of them has no operations told.
    if (node.layers.some((layer) => columns.forward_flops?.[layer] == null)) return [];
    const [work, bytes] = [sumOf("forward_flops", "backward_flops"), sumOf("bytes")];
    const time = sumOf("forward_self_ns", "backward_self_ns");
    return work > 0 && bytes > 0 && time > 0 ? { node, intensity: work / bytes, rate: work / time, time } : [];
  });
  return points.sort((a, b) => b.time - a.time);
}

/**
 * The powers of ten around some values.
 * @param {number[]} values
 */
function decades(values) {
  const [low, high] = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)))];
  return [low, Math.max(high, low + 1)];
}
