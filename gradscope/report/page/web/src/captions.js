// Words around the flame: the breadcrumb of the zoom, the legend, and what is said of a frame under the pointer.

import { HIGH_RATIO, USUAL_RATIO } from "./colours.js";
import { element, refill } from "./dom.js";
import {
  formatBytes,
  formatCalls,
  formatRatio,
  formatShare,
  formatSigned,
  formatTime,
  shorten,
  visible,
} from "./format.js";
import { LAYER_TYPES } from "./layertypes.js";
import { ancestry, backwardRatio, nameWithRepeats } from "./nodes.js";
import { BACKWARD, FORWARD, SAVED, amountOf } from "./run.js";
import { changeClass, changeOf, changeText, changeWords } from "./change.js";
import { countOf } from "./table.js";

/**
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./run.js").Run} Run
 */

/**
 * @param {HTMLElement} place
 * @param {Node} zoom
 * @param {(node: Node) => void} zoomTo
 */
export function drawCrumbs(place, zoom, zoomTo) {
  const line = ancestry(zoom);
  const made = line.flatMap((node, i) => {
    const name = element("bdi", {}, visible(shorten(nameWithRepeats(node), 60)));
    const last = i === line.length - 1;
    const crumb = last
      ? element("b", { "aria-current": "true" }, name)
      : element("button", { type: "button", class: "link", onclick: () => zoomTo(node) }, name);
    return i > 0 ? [element("span", { "aria-hidden": "true" }, " › "), crumb] : [crumb];
  });
  refill(place, ...made);
}

/**
 * What the colours mean, with their shares; a click on a type dims the others.
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {import("./nodes.js").Tree} tree
 * @param {import("./state.js").ViewState} state
 * @param {"type" | "ratio" | "change"} colour
 * @param {number} largest change, which has the full colour
 * @param {(type: string) => void} highlight
 */
export function drawLegend(place, run, tree, state, colour, largest, highlight) {
  if (colour === "change") {
    const format = state.metric === "saved" ? formatBytes : formatTime;
    const noise = state.metric === "saved" ? "grey: the same" : "grey: within noise, or not tested";
    if (largest === 0) {
      refill(place, element("span", { class: "note" }, `No frame changed beyond noise; ${noise}; hatched: new`));
      return;
    }
    refill(
      place,
      element("span", { class: "note" }, `${formatSigned(-largest, format)} less`),
      element("span", { class: "ramp by-change", "aria-hidden": "true" }),
      element("span", { class: "note" }, `more ${formatSigned(largest, format)}; ${noise}; hatched: new`),
    );
    return;
  }
  if (colour === "ratio") {
    refill(
      place,
      element("span", { class: "note" }, "backward ÷ forward"),
      element("span", {}, formatRatio((USUAL_RATIO * USUAL_RATIO) / HIGH_RATIO)),
      element("span", { class: "ramp", "aria-hidden": "true" }),
      element("span", {}, `${formatRatio(HIGH_RATIO)} and more; grey ${formatRatio(USUAL_RATIO)} is usual`),
    );
    return;
  }
  const whole = amountOf(run.whole, state.metric);
  /** @type {Map<string, number>} */
  const amounts = new Map();
  for (const node of tree.nodes) {
    if (node.kind !== "op") amounts.set(node.type, (amounts.get(node.type) ?? 0) + amountOf(node.own, state.metric));
  }
  const shown = LAYER_TYPES.filter((type) => (amounts.get(type.key) ?? 0) > 0);
  const keys = shown.map((type) => {
    const chosen = state.highlight === type.key;
    return element(
      "button",
      {
        type: "button",
        class: "key",
        "data-type": type.key,
        "aria-pressed": String(chosen),
        onclick: () => highlight(chosen ? "" : type.key),
      },
      element("span", { class: `swatch type-${type.key}`, "aria-hidden": "true" }),
      `${type.words} `,
      element("span", { class: "note" }, formatShare(whole > 0 ? (amounts.get(type.key) ?? 0) / whole : 0)),
    );
  });
  refill(place, ...keys);
}

/**
 * What is said of a frame under the pointer.
 * @param {Run} run
 * @param {import("./layout.js").Frame} frame
 * @param {(value: number) => string} metricText an amount in words
 */
export function tipLines(run, frame, metricText) {
  const { node, hidden } = frame;
  if (hidden > 0) {
    const name = visible(shorten(nameWithRepeats(node), 80));
    return [
      element("b", {}, `${countOf(hidden, "thin frame")} of ${name}`),
      element("p", {}, `${metricText(frame.value)} together. Click to zoom to ${name}.`),
    ];
  }
  const lines = [
    element("b", {}, visible(shorten(nameWithRepeats(node), 300))),
    element(
      "p",
      { class: "note" },
      visible(
        shorten(
          [node.kind === "layer" ? node.address : "", node.className, node.phase.replace("_", " ")]
            .filter(Boolean)
            .join(" · "),
          300,
        ),
      ),
    ),
  ];
  /** @type {[string, number, (value: number) => string][]} */
  const rows = [
    ["forward", FORWARD, formatTime],
    ["backward", BACKWARD, formatTime],
    ["saved", SAVED, formatBytes],
  ];
  const table = element("table", {});
  for (const [words, slot, format] of rows) {
    if (!(node.total[slot] > 0 || node.wasTotal[slot] > 0)) continue;
    const share = run.whole[slot] > 0 ? node.total[slot] / run.whole[slot] : 0;
    const own = node.kind === "layer" && node.total[slot] !== node.own[slot] ? `itself ${format(node.own[slot])}` : "";
    table.append(
      element(
        "tr",
        {},
        element("th", {}, words),
        element("td", {}, format(node.total[slot])),
        element("td", {}, formatShare(share)),
        element("td", { class: "note" }, own),
        tipChange(run, node, slot, format),
      ),
    );
  }
  const ratio = node.kind === "layer" ? backwardRatio(node.total) : null;
  const facts = [
    ratio === null ? "" : `backward is ${formatRatio(ratio)} forward`,
    node.calls > 0 ? `${formatCalls(node.calls)} ${node.phase === "saved" ? "tensors" : "calls"}` : "",
  ];
  return [...lines, table, element("p", { class: "note" }, facts.filter(Boolean).join(" · "))];
}

/** @type {readonly import("./run.js").Metric[]} by slot */
const SLOT_METRICS = ["forward", "backward", "saved"];

/**
 * @param {Run} run
 * @param {Node} node
 * @param {number} slot
 * @param {(value: number) => string} format
 */
function tipChange(run, node, slot, format) {
  const change = changeOf(run, node, SLOT_METRICS[slot], false);
  if (!change) return null;
  return element(
    "td",
    { class: changeClass(change) },
    `${changeText(change, format)} (${changeWords(change, format)})`,
  );
}
