// The head of the page: what was measured, and the cards that switch the metric.

import { changeClass, changeOfWhole, makeChange } from "./change.js";
import { element, refill } from "./dom.js";
import {
  formatBytes,
  formatCount,
  formatRatio,
  formatShare,
  formatSigned,
  formatTime,
  shorten,
  visible,
} from "./format.js";
import { BACKWARD, FORWARD, SAVED } from "./run.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Metric} Metric
 */

/**
 * Short facts about the run.
 * @param {Run} run
 * @returns {string[]}
 */
export function chipsOf(run) {
  const { workload, environment, measured } = run.info;
  const chips = [workload.target];
  if (workload.parameters) chips.push(`${formatCount(workload.parameters)} parameters`);
  if (workload.batch) chips.push(`batch ${workload.batch.replaceAll(/(?<=\d)x(?=\d)/g, "×")}`);
  if (environment.dtype) chips.push(environment.dtype);
  chips.push(environment.device_name ?? environment.device ?? "unknown device");
  if (environment.device === "cpu" && environment.threads)
    chips.push(`${environment.threads} thread${environment.threads === 1 ? "" : "s"}`);
  if (environment.torch) chips.push(`torch ${environment.torch}`);
  return [...chips, ...measured];
}

/**
 * @param {Run} run
 * @param {{ theme: () => void, help: () => void }} actions
 */
export function makeHeader(run, actions) {
  const { workload } = run.info;
  const chips = element("ul", { class: "chips" });
  for (const chip of chipsOf(run))
    chips.append(
      element("li", { title: visible(shorten(chip, 300)) }, element("bdi", {}, visible(shorten(chip, 120)))),
    );
  return element(
    "header",
    {},
    element("span", { class: "brand" }, element("span", { class: "logo", "aria-hidden": "true" }), "gradscope"),
    element(
      "h1",
      { title: visible(shorten(workload.model || "model", 300)) },
      element("bdi", {}, visible(shorten(workload.model || "model", 80))),
    ),
    chips,
    element(
      "button",
      {
        type: "button",
        class: "icon",
        id: "theme",
        "aria-label": "Light or dark",
        title: "Light or dark",
        onclick: actions.theme,
      },
      "◐",
    ),
    element(
      "button",
      {
        type: "button",
        class: "icon",
        id: "help",
        "aria-label": "Keys and help",
        title: "Keys and help ( ? )",
        onclick: actions.help,
      },
      "?",
    ),
  );
}

/**
 * Sentences that a reader has to know before believing a number.
 * @param {Run} run
 */
export function warningsOf(run) {
  const { workload, partial, notes, environment } = run.info;
  const warnings = [];
  if (partial) warnings.push(partial);
  if (workload.loss === "mean of outputs") warnings.push("No loss was given: the mean of the outputs stands for it.");
  if (environment.anomaly_mode) warnings.push("Anomaly mode was on: backward is slower than usual.");
  const compared = run.joined
    ? [...run.joined.warnings.map((text) => `The runs differ in more than the code: ${text}`), ...run.joined.notes]
    : [];
  return [...compared, ...warnings, ...notes];
}

/**
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {Metric} metric
 * @param {any} estimated the finding whose saving is cut out; null for what was measured
 * @param {{ metric: (metric: Metric) => void, peak: () => void }} actions
 */
export function drawCards(place, run, metric, estimated, actions) {
  const [forward, backward, saved] = [run.whole[FORWARD], run.whole[BACKWARD], run.whole[SAVED]];
  const ratio = forward > 0 ? `${formatRatio(backward / forward)} forward` : "";
  /** @type {[Metric, string, string, string][]} */
  const cards = [
    ["backward", "Backward", formatTime(backward), ratio],
    ["forward", "Forward", formatTime(forward), ""],
    ["both", "Both", formatTime(forward + backward), ""],
  ];
  if (run.memory) {
    const passes = run.memory.figures.backward_passes ?? 1;
    cards.push([
      "saved",
      "Saved memory",
      formatBytes(saved),
      passes > 1 ? `over ${passes} backward passes` : "for backward",
    ]);
  }
  const made = cards.map(([key, words, value, note]) =>
    element(
      "button",
      {
        type: "button",
        class: "card",
        "data-metric": key,
        "aria-pressed": String(key === metric),
        onclick: () => actions.metric(key),
      },
      element("span", { class: "words" }, words),
      element("span", { class: "value" }, estimated ? `≈ ${value}` : value),
      cardChange(changeOfWhole(run, key), key === "saved" ? formatBytes : formatTime),
      note !== "" && element("span", { class: "note" }, note),
    ),
  );
  if (run.memory) {
    const { peak_bytes, peak_phase } = run.memory.figures;
    const peak = formatBytes(Math.max(peak_bytes - (estimated?.saved_bytes ?? 0), 0));
    made.push(
      element(
        "button",
        { type: "button", class: "card", id: "peak", title: "Who holds it, and what ran then", onclick: actions.peak },
        element("span", { class: "words" }, "Peak memory"),
        element("span", { class: "value" }, estimated ? `≈ ${peak}` : peak),
        cardChange(peakChange(run), formatBytes),
        element("span", { class: "note" }, `in ${peak_phase}`),
      ),
    );
  }
  refill(place, ...made);
}

/** @param {Run} run */
function peakChange(run) {
  const [now, was] = [run.memory, run.baseline?.memory];
  return now && was ? makeChange(was.figures.peak_bytes, now.figures.peak_bytes, 0) : null;
}

/**
 * @param {import("./change.js").Change | null} change
 * @param {(value: number) => string} format
 */
function cardChange(change, format) {
  if (!change) return null;
  const { before, difference, real } = change;
  const share = before > 0 ? ` (${formatSigned(difference / before, formatShare)})` : "";
  const signed = `${formatSigned(difference, format)}${share}`;
  const words = difference === 0 ? "the same" : real === null ? `${signed}, not tested` : signed;
  return element(
    "span",
    { class: `delta ${changeClass(change)}` },
    real === false && difference !== 0 ? "≈ within noise" : words,
  );
}
