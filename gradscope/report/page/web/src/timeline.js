// Memory over the step that measured it, in steps; the peak, the phases, and what the peak is made of.

import { element, refill, svgElement } from "./dom.js";
import { columnScale, formatBytes, formatShare, formatTime, visible, shorten } from "./format.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Memory} Memory
 */

const HEIGHT = 168;
const MARGIN = { left: 58, right: 10, top: 34, bottom: 20 };

// Kinds of memory at the peak, in the order in which they are drawn: what stays from step to step first.
const KINDS = /** @type {const} */ ([
  ["weights", "weights, optimizer", ["parameters", "buffers", "optimizer state"]],
  ["gradients", "gradients", ["gradients"]],
  ["saved", "saved", ["saved activations"]],
  ["temporary", "temporary", ["other activations", "activation gradients", "temporaries"]],
  ["rest", "inputs and others", ["inputs", "other tensors"]],
]);

/**
 * Bytes of each kind at the peak; they add up to it.
 * @param {Memory} memory
 */
export function peakKinds(memory) {
  return KINDS.map(([key, words, categories]) => {
    const held = memory.holders.filter((holder) =>
      /** @type {readonly string[]} */ (categories).includes(holder.category),
    );
    return { key, words, bytes: held.reduce((sum, holder) => sum + holder.bytes, 0) };
  });
}

/**
 * The line of the timeline as points of a path, each value kept until the next.
 * @param {number[]} times
 * @param {number[]} bytes
 * @param {(time: number) => number} x
 * @param {(bytes: number) => number} y
 * @param {number} end
 */
export function stepPath(times, bytes, x, y, end) {
  if (times.length === 0) return "";
  let path = `M${x(times[0]).toFixed(1)} ${y(bytes[0]).toFixed(1)}`;
  for (let i = 1; i < times.length; i++) path += `H${x(times[i]).toFixed(1)}V${y(bytes[i]).toFixed(1)}`;
  return `${path}H${x(end).toFixed(1)}`;
}

/**
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {(layer: number) => void} select
 */
export function drawTimeline(place, run, select) {
  const { memory } = run;
  if (!memory) {
    refill(
      place,
      element("h2", {}, "Memory"),
      element("p", { class: "empty" }, "Memory was not measured in this run."),
    );
    return;
  }
  const { figures } = memory;
  const width = Math.max(place.clientWidth - 24, 240);
  const phaseEnd = memory.phases.reduce((most, phase) => Math.max(most, phase.end_ns), 0);
  const end = Math.max(phaseEnd, memory.times.at(-1) ?? 0, figures.peak_ns, 1);
  const most = Math.max(figures.peak_bytes, 1);
  /** @param {number} time */
  const x = (time) => MARGIN.left + (time / end) * (width - MARGIN.left - MARGIN.right);
  /** @param {number} bytes */
  const y = (bytes) => HEIGHT - MARGIN.bottom - (bytes / most) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const words = `Allocated memory over one step: peak ${formatBytes(most)} at ${formatTime(figures.peak_ns)}, in ${figures.peak_phase}.`;
  const chart = svgElement("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`,
    width,
    height: HEIGHT,
    role: "img",
    "aria-label": words,
  });
  chart.append(...axes(most, end, width, x, y), ...phaseMarks(memory, x));
  const path = stepPath(memory.times, memory.bytes, x, y, end);
  if (path) {
    const base = HEIGHT - MARGIN.bottom;
    chart.append(svgElement("path", { class: "area", d: `${path}V${base}H${x(memory.times[0]).toFixed(1)}Z` }));
    chart.append(svgElement("path", { class: "line", d: path }));
  }
  chart.append(...peakMark(run, memory, width, x(figures.peak_ns), y(figures.peak_bytes)));
  refill(
    place,
    element(
      "h2",
      {},
      "Memory ",
      element("span", { class: "note" }, `${figures.device}, one step of ${formatTime(end)}`),
    ),
    /** @type {SVGElement} */ (chart),
    kindsBar(memory),
    peakWords(run, memory, select),
  );
}

/**
 * @param {number} most
 * @param {number} end
 * @param {number} width
 * @param {(time: number) => number} x
 * @param {(bytes: number) => number} y
 */
function axes(most, end, width, x, y) {
  const made = [];
  const bytes = columnScale(most, true);
  const time = columnScale(end, false);
  for (const value of ticks(most / bytes.factor, 4)) {
    const at = y(value * bytes.factor);
    made.push(svgElement("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
    made.push(svgElement("text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, `${value} ${bytes.unit}`));
  }
  for (const value of ticks(end / time.factor, 5)) {
    const at = x(value * time.factor);
    if (at > width - 40) continue;
    const label = value === 0 ? `0 ${time.unit}` : String(value);
    made.push(svgElement("text", { x: at, y: HEIGHT - 4, "text-anchor": "middle" }, label));
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
 * @param {(time: number) => number} x
 */
function phaseMarks(memory, x) {
  const made = [];
  for (const phase of memory.phases) {
    const [left, right] = [x(phase.start_ns), x(phase.end_ns)];
    if (phase.phase === "other") continue;
    made.push(svgElement("line", { class: "phase", x1: left, x2: left, y1: 4, y2: HEIGHT - MARGIN.bottom }));
    if (right - left > 56) made.push(svgElement("text", { class: "phase-name", x: left + 4, y: 12 }, phase.phase));
  }
  return made;
}

/**
 * @param {Run} run
 * @param {Memory} memory
 * @param {number} width
 * @param {number} x
 * @param {number} y
 */
function peakMark(run, memory, width, x, y) {
  const text = `peak ${formatBytes(memory.figures.peak_bytes)}`;
  const left = x > width / 2;
  return [
    svgElement("circle", { class: "peak", cx: x, cy: y, r: 4 }),
    svgElement(
      "text",
      { class: "peak-text", x: left ? x - 8 : x + 8, y: y - 6, "text-anchor": left ? "end" : "start" },
      text,
    ),
  ];
}

/** @param {Memory} memory */
function kindsBar(memory) {
  const whole = Number(memory.figures.peak_bytes);
  const kinds = peakKinds(memory).filter((kind) => kind.bytes > 0);
  const bar = element("div", { class: "stack", "aria-hidden": "true" });
  const list = element("ul", { class: "legend" });
  for (const { key, words, bytes } of kinds) {
    const share = whole > 0 ? bytes / whole : 0;
    bar.append(element("span", { class: `memory-${key}`, "width%": share * 100 }));
    list.append(
      element(
        "li",
        {},
        element("span", { class: `swatch memory-${key}` }),
        `${words} `,
        element("b", { "data-value": bytes }, formatBytes(bytes)),
      ),
    );
  }
  return element("div", { class: "kinds" }, bar, list);
}

/**
 * When the peak is, and who holds most then.
 * @param {Run} run
 * @param {Memory} memory
 * @param {(layer: number) => void} select
 */
function peakWords(run, memory, select) {
  const { figures } = memory;
  /** @param {number} layer */
  const link = (layer) => {
    if (layer < 0) return "outside the layers";
    const path = visible(shorten(run.paths[layer] || run.classes[layer] || "model", 80));
    return element("button", { type: "button", class: "link", onclick: () => select(layer) }, element("bdi", {}, path));
  };
  const line = element(
    "p",
    { class: "note" },
    `At the peak ran ${visible(figures.peak_op || "nothing that has a name")} of `,
  );
  line.append(link(figures.peak_layer), ` (${figures.peak_phase}).`);
  const top = [...memory.holders].sort((a, b) => b.bytes - a.bytes)[0];
  if (top) {
    line.append(` Most is held by `, link(top.layer), `: ${formatBytes(top.bytes)} of ${top.category}, `);
    line.append(`${formatShare(top.bytes / Math.max(figures.peak_bytes, 1))} of it.`);
  }
  return line;
}
