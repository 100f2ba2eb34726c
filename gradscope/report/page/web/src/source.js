// Functions with measured lines, whole: what each line takes, and in grey those that take nothing.

import { element, refill } from "./dom.js";
import { shorten, visible } from "./format.js";
import { isWithin } from "./nodes.js";
import { amountOf } from "./run.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./nodes.js").Node} Node
 */

/**
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {import("./nodes.js").Tree} tree
 * @param {import("./run.js").Metric} metric
 * @param {Node} selected
 * @param {(value: number) => string} format
 * @param {(node: Node) => void} select
 */
export function drawSource(place, run, tree, metric, selected, format, select) {
  /** @type {Map<string, { amount: number, node: Node | undefined }>} */
  const measured = new Map();
  for (const line of run.lines) {
    const key = `${line.file}:${line.line}`;
    const { amount = 0, node = tree.layerNodes[line.layer] } = measured.get(key) ?? {};
    measured.set(key, { amount: amount + amountOf(line.amounts, metric), node });
  }
  const largest = Math.max(...[...measured.values()].map((one) => one.amount), 1);
  const whole = amountOf(run.whole, metric);
  /** @param {any} part */
  const listing = ({ file, function: name, first, lines }, /** @type {number} */ at) => {
    let sum = 0;
    const rows = lines.map((/** @type {string} */ text, /** @type {number} */ i) => {
      const found = measured.get(`${file}:${first + i}`);
      const [amount, node] = [found?.amount ?? 0, found?.node];
      sum += amount;
      const number = String(first + i);
      const marked = node && selected.kind !== "all" && isWithin(node, selected);
      const go = node && { type: "button", class: "link", id: `line-${at}-${number}`, onclick: () => select(node) };
      return element(
        "tr",
        { class: `${found ? "" : "unmeasured"}${marked ? " marked" : ""}` },
        element("td", { class: "number" }, go ? element("button", go, number) : number),
        element("td", { class: "amount" }, amount > 0 ? format(amount) : ""),
        element(
          "td",
          { class: "heat" },
          amount > 0 && element("span", { class: "bar", "width%": Math.min(amount / largest, 1) * 100 }),
        ),
        element("td", {}, element("code", {}, visible(shorten(text, 300)))),
      );
    });
    const share = whole > 0 ? `, ${format(sum)}` : "";
    return element(
      "section",
      {},
      element("h3", {}, visible(name || "module"), element("span", { class: "note" }, ` ${visible(file)}${share}`)),
      element("table", { "aria-label": `Lines of ${visible(name || file)}` }, element("tbody", {}, ...rows)),
    );
  };
  refill(place, ...run.info.functions.map(listing));
}
