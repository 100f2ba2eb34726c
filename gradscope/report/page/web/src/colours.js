// Colours of the flame, from the style sheet's variables, so that light and dark are decided in one place.

import { LAYER_TYPES } from "./layertypes.js";
import { backwardRatio } from "./nodes.js";

/**
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {[number, number, number]} Rgb
 *
 * @typedef {object} Palette
 * @property {Rgb} background
 * @property {string} text
 * @property {string} textFaint
 * @property {string} accent
 * @property {Map<string, Rgb>} types
 * @property {Rgb} low ratio of 0
 * @property {Rgb} middle
 * @property {Rgb} high
 * @property {Rgb} less
 * @property {Rgb} same
 * @property {Rgb} more
 */

// Backward over forward: blue below this, orange above. Near 2 is what matrix products take.
export const USUAL_RATIO = 2;
export const HIGH_RATIO = 6;

/**
 * @param {Element} element
 * @returns {Palette}
 */
export function readPalette(element) {
  const style = getComputedStyle(element);
  /** @param {string} name */
  const colour = (name) => parseColour(style.getPropertyValue(`--${name}`).trim());
  return {
    background: colour("panel"),
    text: style.getPropertyValue("--frame-text").trim(),
    textFaint: style.getPropertyValue("--text-2").trim(),
    accent: style.getPropertyValue("--accent").trim(),
    types: new Map(LAYER_TYPES.map((type) => [type.key, colour(`type-${type.key}`)])),
    low: colour("ratio-low"),
    middle: colour("ratio-middle"),
    high: colour("ratio-high"),
    less: colour("change-low"),
    same: colour("change-middle"),
    more: colour("change-high"),
  };
}

/**
 * "#5e9bd6" as numbers.
 * @param {string} text
 * @returns {Rgb}
 */
export function parseColour(text) {
  const number = parseInt(text.slice(1), 16);
  return [(number >> 16) & 255, (number >> 8) & 255, number & 255];
}

/**
 * @param {Rgb} from
 * @param {Rgb} to
 * @param {number} part 0 is `from`, 1 is `to`
 * @returns {Rgb}
 */
export function mix(from, to, part) {
  /** @param {0 | 1 | 2} i */
  const channel = (i) => Math.round(from[i] + (to[i] - from[i]) * part);
  return [channel(0), channel(1), channel(2)];
}

/** @param {Rgb} colour */
export function cssColour(colour) {
  return `rgb(${colour[0]} ${colour[1]} ${colour[2]})`;
}

/**
 * Blue - grey - orange, on a logarithmic scale around the usual ratio.
 * @param {number | null} ratio
 * @param {Palette} palette
 * @returns {Rgb}
 */
export function ratioColour(ratio, palette) {
  if (ratio === null) return palette.middle;
  const place = Math.max(
    -1,
    Math.min(1, Math.log(Math.max(ratio, 1e-9) / USUAL_RATIO) / Math.log(HIGH_RATIO / USUAL_RATIO)),
  );
  return place < 0 ? mix(palette.middle, palette.low, -place) : mix(palette.middle, palette.high, place);
}

/**
 * Blue - grey - orange around no change; grey where it may be noise.
 * @param {import("./change.js").Change | null} change
 * @param {number} largest difference, which has the full colour
 * @param {Palette} palette
 * @returns {Rgb}
 */
export function changeColour(change, largest, palette) {
  if (!change || change.real !== true || largest <= 0) return palette.same;
  const place = Math.max(-1, Math.min(1, change.difference / largest));
  return place < 0 ? mix(palette.same, palette.less, -place) : mix(palette.same, palette.more, place);
}

/**
 * Layers strong, operations light, kernels lightest.
 * @param {Node} node
 * @param {"type" | "ratio"} mode
 * @param {Palette} palette
 * @returns {Rgb}
 */
export function frameColour(node, mode, palette) {
  const isLayer = node.kind === "layer" || node.kind === "part" || node.kind === "all";
  // Backward and forward operations have names of their own: their ratio is that of their layer.
  const measured = isLayer ? node.total : (node.parent?.own ?? node.own);
  const base =
    mode === "ratio" && node.type !== "outside"
      ? ratioColour(backwardRatio(measured), palette)
      : (palette.types.get(node.type) ?? palette.middle);
  if (isLayer) return base;
  return mix(base, palette.background, node.kind === "op" ? 0.4 : 0.62);
}
