// One bar a repeat of a layer, or one a measured step.

import { isCompared } from "./change.js";
import { element } from "./dom.js";
import { formatBytes, formatTime, shorten, visible } from "./format.js";
import { amountOf } from "./run.js";
import { METRIC_WORDS } from "./table.js";
import { repeatAmounts, repeatAmountsBefore } from "./totals.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./nodes.js").Node} Node
 */

// A repeat stands out when it is this much costlier or cheaper than every other one, as in gradscope/report/fold.py.
const OUTLIER_RATIO = 1.25;

const OUTLIER_SHARE = 0.005;

const MOST_BARS = 200;

/**
 * The one repeat that lies outside the range of all others, if there is one: its place, or -1.
 * @param {number[]} amounts
 * @param {number} whole
 */
export function findOutlier(amounts, whole) {
  if (amounts.length < 3) return -1;
  const order = amounts.map((_, i) => i).sort((a, b) => amounts[a] - amounts[b]);
  const [lowest, low] = order;
  const [high, highest] = order.slice(-2);
  let odd = -1;
  if (amounts[highest] > OUTLIER_RATIO * amounts[high]) odd = highest;
  else if (amounts[lowest] * OUTLIER_RATIO < amounts[low]) odd = lowest;
  if (odd < 0) return -1;
  const usual = medianOf(amounts.filter((_, i) => i !== odd));
  return usual > 0 && Math.abs(amounts[odd] - usual) >= OUTLIER_SHARE * whole ? odd : -1;
}

/** @param {number[]} values */
export function medianOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/**
 * One bar a repeat; a click selects it alone.
 * @param {Run} run
 * @param {Node} node
 * @param {number[]} layers
 * @param {Metric} metric
 * @param {(layer: number) => void} selectRepeat
 */
export function repeatBars(run, node, layers, metric, selectRepeat) {
  const amounts = repeatAmounts(run, layers, metric);
  const format = metric === "saved" ? formatBytes : formatTime;
  const odd =
    metric === "backward"
      ? layers.findIndex((layer) => run.info.odd.includes(layer))
      : findOutlier(amounts, amountOf(run.whole, metric));
  const past = run.joined && isCompared(run, metric) ? repeatAmountsBefore(run, layers, metric) : [];
  const most = Math.max(...amounts, ...past);
  const bars = element("div", { class: "bars", role: "group", "aria-label": `${METRIC_WORDS[metric]} of each repeat` });
  layers.slice(0, MOST_BARS).forEach((layer, i) => {
    const before = past.length > 0 ? `, before ${format(past[i])}` : "";
    const words = `${visible(shorten(run.paths[layer], 200))}: ${format(amounts[i])}${before}${i === odd ? ", unlike the others" : ""}`;
    const one = node.layers.length === 1 && node.layers[0] === layer;
    bars.append(
      element(
        "button",
        {
          type: "button",
          title: words,
          "aria-label": words,
          "aria-pressed": one ? "true" : null,
          class: `${i === odd ? "odd" : ""}${one ? " current" : ""}`,
          "data-value": amounts[i],
          onclick: () => selectRepeat(layer),
        },
        past.length > 0 &&
          element("span", {
            class: "past",
            "data-value": past[i],
            "height%": most > 0 ? Math.max((past[i] / most) * 100, 2) : 2,
          }),
        element("span", { "height%": most > 0 ? Math.max((amounts[i] / most) * 100, 2) : 2 }),
      ),
    );
  });
  const range = `median ${format(medianOf(amounts))}, ${format(Math.min(...amounts))} to ${format(Math.max(...amounts))}${past.length > 0 ? "; lighter: before" : ""}`;
  const left = layers.length > MOST_BARS ? `; the first ${MOST_BARS} of ${layers.length}` : "";
  const note = odd >= 0 ? ` ${visible(shorten(run.paths[layers[odd]], 80))} is unlike the others.` : "";
  return element("div", {}, element("h3", {}, `Each repeat: ${range}${left}.${note}`), bars);
}

/**
 * One bar a measured step: how steady the layer is.
 * @param {Run} run
 * @param {Node} node
 */
export function stepBars(run, node) {
  const steps = run.steps[node.layers[0]] ?? [];
  const most = Math.max(0, ...steps);
  if (steps.length < 2 || most === 0) return null;
  const bars = element("div", {
    class: "bars low",
    role: "img",
    "aria-label": `each step: ${steps.map(formatTime).join(", ")}`,
  });
  for (const value of steps) {
    bars.append(
      element(
        "span",
        { class: "step", title: formatTime(value) },
        element("span", { "height%": Math.max((value / most) * 100, 2) }),
      ),
    );
  }
  const range = `median ${formatTime(medianOf(steps))}, ${formatTime(Math.min(...steps))} to ${formatTime(most)}`;
  return element("div", {}, element("h3", {}, `Its own backward in each step: ${range}`), bars);
}
