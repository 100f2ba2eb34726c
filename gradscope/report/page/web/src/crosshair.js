// A line in the chart of memory that follows the pointer or the arrow keys, and what was allocated at that moment.

import { element, refill } from "./dom.js";
import { formatBytes, formatTime, shorten, visible } from "./format.js";
import { indexAt, kindOf, partsOf, peakIndex, phaseAt, placeOf, spanAt } from "./memorydata.js";

const MOST_OWNERS = 6;

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./memorydata.js").Memory} Memory
 * @typedef {import("./timelineparts.js").Scale} Scale
 *
 * @typedef {object} Moment
 * @property {number} time ns
 * @property {number} bytes
 * @property {string} phase
 * @property {string} layer path of the layer that ran; "" where none did
 * @property {{ category: string, colour: string, bytes: number, saved?: string }[]} parts kinds or owners, in the order of the stack from its top; they add up to `bytes`
 */

/**
 * @param {Run} run
 * @param {Memory} memory
 * @param {number} time
 * @param {number} index of the point that holds then
 * @param {boolean} [byOwner]
 * @returns {Moment}
 */
export function momentOf(run, memory, time, index, byOwner = false) {
  const span = spanAt(memory, time);
  const parts = byOwner
    ? partsOf(memory, true).map(({ key, words, colour, bytes }) => {
        return { category: words, colour, bytes: bytes[index], saved: largestSaved(run, key) };
      })
    : memory.categories.map((category, row) => {
        const colour = `var(--memory-${kindOf(category)})`;
        return { category, colour, bytes: memory.parts[row][index] };
      });
  if (byOwner) parts.reverse();
  else parts.sort((a, b) => placeOf(b.category) - placeOf(a.category));
  return {
    time,
    bytes: memory.bytes[index] ?? 0,
    phase: span?.phase ?? phaseAt(memory, time),
    layer: span ? run.paths[span.layer] || run.classes[span.layer] : "",
    parts: parts.filter((part) => part.bytes > 0),
  };
}

/**
 * What is the most that an owner saves for backward, and the line that saves it; "" for nothing.
 * @param {Run} run
 * @param {string} owner a path, numbers in it as "*"
 */
function largestSaved(run, owner) {
  const parts = owner.split("*").map((part) => part.replace(/[^\w]/g, "\\$&"));
  const fits = new RegExp(`^${parts.join("\\d+")}$`);
  const own = run.paths.flatMap((path, layer) => (fits.test(path) ? run.saved[layer] : []));
  if (owner === "" || own.length === 0) return "";
  const { name, line } = own.reduce((a, b) => (b.amount > a.amount ? b : a));
  return line ? `${name}, ${line}` : name;
}

/**
 * A moment in one sentence, as it is read out.
 * @param {Moment} moment
 */
export function momentWords(moment) {
  const ran = moment.layer ? `, ${visible(shorten(moment.layer, 200))} ran` : "";
  const parts = moment.parts.map((part) => `${part.category} ${formatBytes(part.bytes)}`);
  const made = parts.length > 0 ? `: ${parts.join(", ")}` : "";
  return `${formatTime(moment.time)}, ${phaseWords(moment)}${ran}. ${formatBytes(moment.bytes)} allocated${made}.`;
}

/**
 * Makes a chart answer to the pointer and the arrow keys. `chart` gets the focus; the line is moved in it.
 * @param {HTMLElement} chart
 * @param {Element} picture in it, by whose left edge `scale` counts
 * @param {SVGElement} line in the picture
 * @param {HTMLElement} tip
 * @param {HTMLElement} spoken a live region
 * @param {Run} run
 * @param {Memory} memory
 * @param {Scale} scale
 * @param {boolean} byOwner
 */
export function addCrosshair(chart, picture, line, tip, spoken, run, memory, scale, byOwner) {
  if (memory.times.length === 0) return;
  let at = -1; // number of the point under the line; -1: it is hidden

  const hide = () => {
    at = -1;
    tip.hidden = true;
    line.setAttribute("visibility", "hidden");
  };
  /**
   * @param {number} index
   * @param {number} time
   */
  const show = (index, time) => {
    at = index;
    const moment = momentOf(run, memory, time, index, byOwner);
    const x = scale.x(time);
    for (const end of ["x1", "x2"]) line.setAttribute(end, x.toFixed(1));
    line.setAttribute("visibility", "visible");
    refill(tip, ...tipOf(moment));
    tip.hidden = false;
    placeTip(tip, picture, x);
    return moment;
  };
  /** @param {number} index */
  const speak = (index) => {
    spoken.textContent = momentWords(show(index, memory.times[index]));
  };

  chart.addEventListener("pointermove", (event) => {
    const x = event.clientX - picture.getBoundingClientRect().left;
    const part = (x - scale.left) / (scale.right - scale.left);
    const time = Math.min(Math.max(part, 0), 1) * scale.end;
    show(indexAt(memory.times, time), time);
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("focus", () => {
    if (at < 0) speak(peakIndex(memory));
  });
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = memory.times.length - 1;
    const from = at < 0 ? peakIndex(memory) : at;
    const leap = Math.max(Math.round(last / 20), 1);
    /** @type {Record<string, number>} */
    const stops = {
      ArrowLeft: from - 1,
      ArrowRight: from + 1,
      PageUp: from - leap,
      PageDown: from + leap,
      Home: 0,
      End: last,
      ArrowUp: peakIndex(memory),
    };
    if (event.key === "Escape") hide();
    else if (event.key in stops) speak(Math.min(Math.max(stops[event.key], 0), last));
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

/** @param {Moment} moment */
function phaseWords({ phase }) {
  return phase === "other" ? "between the phases" : phase;
}

/**
 * The parts that hold most, and the others as one where there are many: the tip lies beside the chart, not over it.
 * @param {Moment["parts"]} parts
 */
function largest(parts) {
  if (parts.length <= MOST_OWNERS || parts[0].saved === undefined) return parts; // there are few kinds
  const sorted = [...parts].sort((a, b) => b.bytes - a.bytes);
  const rest = sorted.splice(MOST_OWNERS - 1);
  const bytes = rest.reduce((sum, part) => sum + part.bytes, 0);
  return [...sorted, { category: `… ${rest.length} more`, colour: "transparent", bytes }];
}

/** @param {Moment} moment */
function tipOf(moment) {
  const rows = largest(moment.parts).map(({ category, colour, bytes, saved }) =>
    element(
      "tr",
      {},
      element(
        "th",
        { scope: "row" },
        element("span", { class: "swatch", colour }),
        visible(shorten(category, 60)),
        saved && element("div", { class: "note" }, visible(shorten(saved, 80))),
      ),
      element("td", { "data-category": category, "data-value": bytes }, formatBytes(bytes)),
    ),
  );
  return [
    element("b", { "data-value": moment.bytes }, formatBytes(moment.bytes)),
    ` at ${formatTime(moment.time)}, ${phaseWords(moment)}`,
    moment.layer ? element("div", { class: "ran" }, element("bdi", {}, visible(shorten(moment.layer, 80)))) : null,
    rows.length > 0 ? element("table", {}, ...rows) : null,
  ];
}

/**
 * Below the chart where there is room, else above it: the areas beside the line stay in sight.
 * @param {HTMLElement} tip
 * @param {Element} picture
 * @param {number} x
 */
function placeTip(tip, picture, x) {
  const [box, around] = [tip.getBoundingClientRect(), picture.getBoundingClientRect()];
  const left = Math.max(4, Math.min(around.left + x - box.width / 2, window.innerWidth - box.width - 8));
  const below = around.bottom + 4;
  const top = below + box.height <= window.innerHeight ? below : Math.max(4, around.top - box.height - 4);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}
