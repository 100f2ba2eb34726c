// Time order: a lane for each level of modules, on the time of the memory chart, with the layer that ran then.

import { svgElement } from "./dom.js";
import { formatTime, shorten, visible } from "./format.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./memorydata.js").Memory} Memory
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./timelineparts.js").Scale} Scale
 *
 * @typedef {object} Bar of one lane
 * @property {number} level
 * @property {number} layer
 * @property {string} phase
 * @property {number} start ns
 * @property {number} end ns
 */

export const LANE = 14;
const MOST_LEVELS = 6;
const CHARACTER = 6.2; // pixels

/**
 * What ran when, level by level: a layer runs while a layer below it does. What is less than `gap` apart is one.
 * @param {Memory} memory
 * @param {number[]} parents of every layer; -1 for a root
 * @param {number} gap ns
 */
export function barsOf(memory, parents, gap) {
  /** @type {Bar[]} */
  const bars = [];
  /** @type {(Bar | undefined)[]} */
  const last = [];
  for (const { layer, phase, start, end } of memory.spans) {
    const line = [];
    for (let at = layer; at >= 0; at = parents[at]) line.unshift(at);
    line.slice(0, MOST_LEVELS).forEach((one, level) => {
      const before = last[level];
      if (before && before.layer === one && before.phase === phase && start - before.end <= gap) before.end = end;
      else bars.push((last[level] = { level, layer: one, phase, start, end }));
    });
    // Below the innermost layer nothing runs on: it would be joined across another one.
    last.length = Math.min(line.length, MOST_LEVELS);
  }
  return bars;
}

/** How many lanes there are. @param {Bar[]} bars */
export function levelsOf(bars) {
  return bars.reduce((most, bar) => Math.max(most, bar.level + 1), 0);
}

/**
 * @param {Bar[]} bars
 * @param {Run} run
 * @param {import("./nodes.js").Tree} tree
 * @param {Scale} scale
 * @param {number} top of the first lane
 * @param {(node: Node) => void} select
 */
export function drawLanes(bars, run, tree, scale, top, select) {
  const group = svgElement("g", { class: "lanes" });
  for (const { level, layer, phase, start, end } of bars) {
    const [x, node] = [scale.x(start), tree.layerNodes[layer]];
    const width = Math.max(scale.x(end) - x - 0.5, 0.5);
    const name = run.paths[layer] || run.classes[layer];
    const words = `${visible(shorten(name, 200))}, ${phase}, ${formatTime(end - start)}`;
    const place = { x: x.toFixed(1), y: top + level * LANE, width: width.toFixed(1), height: LANE - 2 };
    const colour = `var(--type-${node?.type || "other"})`;
    group.append(
      svgElement(
        "rect",
        { class: "lane", ...place, fill: colour, "data-layer": layer, onclick: () => node && select(node) },
        svgElement("title", {}, words),
      ),
    );
    const room = Math.floor((width - 4) / CHARACTER);
    const label = name.split(".").at(-1) ?? "";
    if (room > 2)
      group.append(
        svgElement("text", { class: "lane-name", x: x + 2, y: top + level * LANE + 10 }, visible(shorten(label, room))),
      );
  }
  return group;
}
