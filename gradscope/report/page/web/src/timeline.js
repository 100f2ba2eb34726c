// Memory over the step that measured it, in steps and by kind; when the selected layer ran, and what the peak is made of.

import { addCrosshair } from "./crosshair.js";
import { element, refill, svgElement } from "./dom.js";
import { formatBytes, formatCount, formatShare, formatTime, shorten, visible } from "./format.js";
import { LANE, barsOf, drawLanes, levelsOf } from "./lanes.js";
import { bandsOf, partsOf, peakIndex, peakKinds, withDescendants } from "./memorydata.js";
import { areaPath, axes, chartScale, peakMark, phaseMarks, stepPath } from "./timelineparts.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./memorydata.js").Memory} Memory
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./timelineparts.js").Scale} Scale
 *
 * @typedef {object} Drawn the parts of a chart that a selection changes
 * @property {SVGElement} bands
 * @property {HTMLElement} words
 * @property {Scale} scale
 */

const HEIGHT = 176;
const STRIP = 4; // below the base line: bands of a light colour would be lost in front of the areas

/** @type {WeakMap<HTMLElement, Drawn>} */
const drawnIn = new WeakMap();
/** @type {WeakMap<HTMLElement, number[]>} */
const markedIn = new WeakMap();

/**
 * Draw the chart; the layers that were marked in `place` stay so.
 * @param {HTMLElement} place
 * @param {Run} run `run.baseline`, if there is one with memory, is a dashed line
 * @param {import("./nodes.js").Tree} tree
 * @param {boolean} owners whether it is stacked by owner, where they are known
 * @param {{ select: (node: Node) => void, owners: (owners: boolean) => void }} actions
 */
export function drawTimeline(place, run, tree, owners, actions) {
  const { memory } = run;
  drawnIn.delete(place);
  if (!memory) {
    refill(
      place,
      element("h2", {}, "Memory"),
      element("p", { class: "empty" }, "Memory was not measured in this run."),
    );
    return;
  }
  const { figures } = memory;
  const byOwner = owners && memory.owners.length > 0;
  const baseline = run.baseline?.memory ?? null;
  const end = Math.max(endOf(memory), baseline ? endOf(baseline) : 0);
  const most = Math.max(figures.peak_bytes, baseline?.figures.peak_bytes ?? 0, 1);
  const scale = chartScale(Math.max(place.clientWidth - 24, 240), HEIGHT, end, most);
  const bars = barsOf(memory, run.parents, end / (scale.right - scale.left));
  const height = HEIGHT + levelsOf(bars) * LANE;
  const bands = svgElement("g", { class: "bands" });
  const line = svgElement("line", { class: "crosshair", y1: scale.top - 8, y2: scale.base, visibility: "hidden" });
  const picture = svgElement(
    "svg",
    { viewBox: `0 0 ${scale.width} ${height}`, width: scale.width, height, "aria-hidden": "true" },
    ...axes(scale),
    ...areas(memory, scale, byOwner),
    bands,
    ...phaseMarks(memory, scale),
    ...(baseline ? [baselineOf(baseline, scale)] : []),
    ...peakMark(memory, scale),
    drawLanes(bars, run, tree, scale, HEIGHT, actions.select),
    line,
  );
  const chart = element(
    "div",
    { class: "chart", tabindex: "0", role: "group", "aria-label": `${summaryOf(memory)} Arrow keys move over it.` },
    picture,
  );
  const tip = element("div", { class: "moment", hidden: true });
  const spoken = element("p", { class: "spoken", "aria-live": "polite" });
  const words = element("p", { class: "note ran-when", hidden: true });
  addCrosshair(chart, picture, line, tip, spoken, run, memory, scale, byOwner);
  const note = `${figures.device}, one step of ${formatTime(endOf(memory))}`;
  refill(
    place,
    element(
      "h2",
      {},
      "Memory ",
      element("span", { class: "note" }, note),
      memory.owners.length > 0 && byButton(byOwner, () => actions.owners(!byOwner)),
    ),
    chart,
    tip,
    spoken,
    words,
    kindsBar(memory, baseline, byOwner),
    peakWords(memory, tree, byOwner, actions.select),
  );
  drawnIn.set(place, { bands, words, scale });
  markLayers(place, run, markedIn.get(place) ?? []);
}

/**
 * Switches between what the bytes are and who owns them.
 * @param {boolean} byOwner
 * @param {() => void} change
 */
function byButton(byOwner, change) {
  const about = { type: "button", class: "by-owner", "aria-pressed": String(byOwner) };
  return element("button", { ...about, onclick: change }, "by layer");
}

/**
 * Shade the times at which `layers`, and the layers below them, ran, and say what is shaded; nothing for no layers.
 * @param {HTMLElement} place that `drawTimeline` drew in
 * @param {Run} run
 * @param {number[]} layers
 */
export function markLayers(place, run, layers) {
  markedIn.set(place, layers);
  const drawn = drawnIn.get(place);
  const { memory } = run;
  if (!drawn || !memory) return;
  const { bands, words, scale } = drawn;
  const shown = layers.length > 0 && memory.spans.length > 0;
  words.hidden = !shown;
  refill(bands);
  refill(words);
  if (!shown) return;
  const pixel = scale.end / (scale.right - scale.left);
  const found = bandsOf(memory, withDescendants(layers, run.parents), pixel);
  for (const band of found) {
    const x = scale.x(band.start);
    const width = Math.max(scale.x(band.end) - x, 1);
    const sides = { x: x.toFixed(1), width: width.toFixed(1) };
    const data = { "data-phase": band.phase, "data-start": band.start, "data-end": band.end };
    bands.append(
      svgElement("rect", { class: "band", ...sides, y: scale.top, height: scale.base - scale.top, ...data }),
      svgElement("rect", { class: "strip", ...sides, y: scale.base + 1, height: STRIP }),
    );
  }
  refill(words, ...bandWords(found, nameOf(run, layers), memory.figures.spans_left_out));
}

/**
 * @param {{ phase: string, ns: number }[]} bands
 * @param {string} name
 * @param {number | undefined} leftOut short stretches of any layer that RUN.json or the page had no room for
 */
function bandWords(bands, name, leftOut) {
  const bold = element("b", {}, element("bdi", {}, name));
  if (bands.length === 0) return [bold, " did not run in this step, or too briefly to be shown."];
  /** @type {Map<string, number>} */
  const times = new Map();
  for (const { phase, ns } of bands) times.set(phase, (times.get(phase) ?? 0) + ns);
  const parts = [...times].flatMap(([phase, ns], i) => [
    i > 0 ? ", " : "",
    `${phase} `,
    element("span", { "data-phase": phase, "data-value": ns }, formatTime(ns)),
  ]);
  const swatch = element("span", { class: "swatch band-key", "aria-hidden": "true" });
  return [
    swatch,
    "Shaded: when ",
    bold,
    " ran, ",
    ...parts,
    leftOut ? `. The ${formatCount(leftOut)} shortest of all layers are left out.` : ".",
  ];
}

/**
 * One path, or one for all repeats, with a star where they differ.
 * @param {Run} run
 * @param {number[]} layers
 */
function nameOf(run, layers) {
  const paths = layers.map((layer) => (run.paths[layer] || run.classes[layer] || "the model").split("."));
  const [first, ...others] = paths;
  const alike = others.every((path) => path.length === first.length);
  const parts = first.map((part, i) => (others.every((path) => path[i] === part) ? part : "*"));
  const name = visible(shorten((alike ? parts : first).join("."), 80));
  if (layers.length === 1) return name;
  return alike ? `${name} ×${layers.length}` : `${name} and ${layers.length - 1} more`;
}

/** @param {Memory} memory */
function endOf(memory) {
  const phases = memory.phases.reduce((most, phase) => Math.max(most, phase.end_ns), 0);
  return Math.max(phases, memory.times.at(-1) ?? 0, memory.figures.peak_ns, 1);
}

/** @param {Memory} memory */
function summaryOf({ figures }) {
  return `Allocated memory over one step: peak ${formatBytes(figures.peak_bytes)} at ${formatTime(figures.peak_ns)}, in ${figures.peak_phase}.`;
}

/**
 * One area a kind, or an owner, stacked; a single one where it was not written down what the bytes were.
 * @param {Memory} memory
 * @param {Scale} scale
 * @param {boolean} byOwner
 */
function areas(memory, scale, byOwner) {
  const { times, bytes, parts } = memory;
  const end = endOf(memory);
  const line = svgElement("path", { class: "line", d: stepPath(times, bytes, scale, end) });
  if (parts.length === 0) {
    const low = times.map(() => 0);
    return [svgElement("path", { class: "area", d: areaPath(times, low, bytes, scale, end) }), line];
  }
  let low = times.map(() => 0);
  return partsOf(memory, byOwner)
    .filter((part) => part.bytes.some((value) => value > 0))
    .map(({ key, words, colour, bytes: own }) => {
      const high = low.map((value, i) => value + own[i]);
      const d = areaPath(times, low, high, scale, end);
      low = high;
      return svgElement("path", { class: "kind", fill: colour, "data-kind": key, d }, svgElement("title", {}, words));
    });
}

/**
 * @param {Memory} baseline
 * @param {Scale} scale
 */
function baselineOf(baseline, scale) {
  return svgElement("path", {
    class: "baseline",
    "data-peak": baseline.figures.peak_bytes,
    d: stepPath(baseline.times, baseline.bytes, scale, endOf(baseline)),
  });
}

/**
 * What the peak is made of, or who owns it; the colours are those of the chart.
 * @param {Memory} memory
 * @param {Memory | null} baseline
 * @param {boolean} byOwner
 */
function kindsBar(memory, baseline, byOwner) {
  const whole = Number(memory.figures.peak_bytes);
  const peak = peakIndex(memory);
  const kinds = byOwner
    ? partsOf(memory, true).map((part) => ({ ...part, bytes: part.bytes[peak] ?? 0 }))
    : peakKinds(memory).map((kind) => ({ ...kind, colour: `var(--memory-${kind.key})` }));
  const bar = element("div", { class: "stack", "aria-hidden": "true" });
  const list = element("ul", { class: "legend" }, element("li", { class: "note" }, "at the peak"));
  for (const { key, words, bytes, colour } of kinds.filter((kind) => kind.bytes > 0)) {
    const share = whole > 0 ? bytes / whole : 0;
    bar.append(element("span", { colour, "width%": share * 100 }));
    list.append(
      element(
        "li",
        {},
        element("span", { class: "swatch", colour }),
        element("bdi", {}, visible(shorten(words, 80))),
        " ",
        element("b", { "data-value": bytes, "data-kind": key }, formatBytes(bytes)),
      ),
    );
  }
  if (baseline) {
    list.append(
      element(
        "li",
        { class: "of-baseline" },
        element("span", { class: "swatch dashes", "aria-hidden": "true" }),
        `before, peak ${formatBytes(baseline.figures.peak_bytes)}`,
      ),
    );
  }
  return element("div", { class: "kinds" }, bar, list);
}

/**
 * When the peak is, and who holds most then; repeats as one where they are folded.
 * @param {Memory} memory
 * @param {import("./nodes.js").Tree} tree
 * @param {boolean} byOwner the bar above says who holds what
 * @param {(node: Node) => void} select
 */
function peakWords(memory, tree, byOwner, select) {
  const { figures, holders } = memory;
  /** @param {Node | undefined} node */
  const link = (node) => {
    if (!node) return "outside the layers";
    const name = element("bdi", {}, visible(shorten(node.address || node.className || "model", 80)));
    return element("button", { type: "button", class: "link", onclick: () => select(node) }, name);
  };
  const line = element(
    "p",
    { class: "note" },
    `At the peak ran ${visible(shorten(figures.peak_op || "nothing that has a name", 80))} of `,
  );
  line.append(link(tree.layerNodes[figures.peak_layer]), ` (${figures.peak_phase}).`);
  if (byOwner) return line;
  /** @type {Map<string, { node: Node | undefined, category: string, bytes: number }>} */
  const groups = new Map();
  for (const { layer, category, bytes } of holders) {
    const node = tree.layerNodes[layer];
    const key = `${node ? node.layers.join(" ") : ""}\n${category}`;
    const group = groups.get(key) ?? { node, category, bytes: 0 };
    group.bytes += bytes;
    groups.set(key, group);
  }
  const top = [...groups.values()].sort((a, b) => b.bytes - a.bytes)[0];
  if (top) {
    line.append(" Most is held by ", link(top.node), `: ${formatBytes(top.bytes)} of ${top.category}, `);
    line.append(`${formatShare(top.bytes / Math.max(figures.peak_bytes, 1))} of it.`);
  }
  return line;
}
