// What is known of the selection: amounts, repeats, operations, findings.

import { repeatBars, stepBars } from "./bars.js";
import { changeClass, changeOf, changeWords } from "./change.js";
import { element, refill } from "./dom.js";
import {
  formatBytes,
  formatCalls,
  formatCount,
  formatRatio,
  formatShare,
  formatSigned,
  formatTime,
  shorten,
  visible,
} from "./format.js";
import { estimatedWords, hasEstimates } from "./estimated.js";
import { findingLinks } from "./findings.js";
import { limitWords, limitedOf } from "./limits.js";
import { ancestry, backwardRatio, layerOf, nameWithRepeats, walkTree } from "./nodes.js";
import { BACKWARD, FORWARD, SAVED } from "./run.js";
import { largestOps } from "./tables.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {(node: Node) => void} Select
 */

/**
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {Node} node
 * @param {number[]} repeats the layers that the node is one of, or all of
 * @param {Metric} metric
 * @param {{ select: Select, selectRepeat: (layer: number) => void, finding: (index: number) => void, close: () => void }} actions
 */
export function drawDetails(place, run, node, repeats, metric, actions) {
  const isLayer = node.kind === "layer";
  place.classList.toggle("idle", node.kind === "all");
  refill(
    place,
    element(
      "button",
      { type: "button", class: "icon close", "aria-label": "Close the details", onclick: actions.close },
      "✕",
    ),
    heading(run, node),
    breadcrumbLine(node, actions.select),
    changesTable(run, node),
    node.kind === "op" || node.kind === "kernel" ? opFacts(node, metric) : amountsTable(run, node),
    limitLines(run, node),
    isLayer && layerFacts(run, node),
    isLayer && repeats.length > 1 && repeatBars(run, node, repeats, metric, actions.selectRepeat),
    isLayer && repeats.length === 1 && stepBars(run, node),
    findingLinks(run, node, actions.finding),
    callers(node, actions.select),
    opsLine(node, metric, "op"),
    opsLine(node, metric, "kernel"),
  );
}

/**
 * @param {Run} run
 * @param {Node} node
 */
function heading(run, node) {
  const name = node.kind === "all" ? run.info.workload.model || "whole step" : nameWithRepeats(node);
  const note = {
    all: "the whole step",
    layer: node.className,
    part: node.className,
    op: "operation",
    kernel: "device kernel",
  }[node.kind];
  return element(
    "h2",
    { class: "selection" },
    element("bdi", {}, visible(shorten(name, 4000))),
    " ",
    element("span", { class: "note" }, visible(shorten(note, 200))),
  );
}

/**
 * @param {Node} node
 * @param {Select} select
 */
function breadcrumbLine(node, select) {
  const above = ancestry(node).slice(0, -1);
  if (above.length === 0) return null;
  const line = element("p", { class: "note path" });
  above.forEach((one, i) => {
    if (i > 0) line.append(" › ");
    const name = visible(shorten(nameWithRepeats(one), 60));
    line.append(
      element("button", { type: "button", class: "link", onclick: () => select(one) }, element("bdi", {}, name)),
    );
  });
  return line;
}

/**
 * @param {Run} run
 * @param {Node} node
 */
function amountsTable(run, node) {
  const each = node.layers.length;
  /** @type {[string, number, (value: number) => string][]} */
  const rows = [
    ["Forward", FORWARD, formatTime],
    ["Backward", BACKWARD, formatTime],
  ];
  if (run.memory) rows.push(["Saved memory", SAVED, formatBytes]);
  const headings = ["", "per step", "itself", "share", ...(each > 1 ? [`each of ${each}`] : [])];
  const head = headings.map((text) => (text ? element("th", { scope: "col" }, text) : element("td", {})));
  const body = rows.map(([words, slot, format]) => {
    const whole = run.whole[slot];
    return element(
      "tr",
      { "data-row": words },
      element("th", { scope: "row" }, words),
      element("td", { "data-value": node.total[slot] }, format(node.total[slot])),
      element("td", { "data-value": node.own[slot] }, format(node.own[slot])),
      element("td", {}, formatShare(whole > 0 ? node.total[slot] / whole : 0)),
      each > 1 && element("td", {}, format(node.total[slot] / each)),
    );
  });
  return element(
    "table",
    { class: "amounts" },
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...body),
  );
}

/**
 * Backward and forward beside what they would be at this machine's limits, with all below the selection.
 * @param {Run} run
 * @param {Node} node
 */
function limitLines(run, node) {
  const lines = /** @type {const} */ (["backward", "forward"]).flatMap((pass) => {
    const found = limitedOf(run, node, pass, false);
    return found && found.limit > 0
      ? element("li", { "data-limit": pass }, limitWords(found, pass).replaceAll(" %", "\u00a0%"))
      : [];
  });
  return lines.length > 0 && element("ul", { class: "limits" }, ...lines);
}

/** @type {readonly [Metric, string][]} */
const COMPARED = [
  ["forward", "Forward"],
  ["backward", "Backward"],
  ["both", "Both"],
  ["saved", "Saved memory"],
];

/**
 * Baseline, now, change: with all below it, and whether it means something, in words.
 * @param {Run} run
 * @param {Node} node
 */
function changesTable(run, node) {
  const rows = COMPARED.flatMap(([metric, words]) => {
    const change = changeOf(run, node, metric, false);
    if (!change || (change.before === 0 && change.after === 0)) return [];
    const format = metric === "saved" ? formatBytes : formatTime;
    return element(
      "tr",
      { "data-compared": metric },
      element("th", { scope: "row" }, words),
      element("td", { "data-value": change.before }, format(change.before)),
      element("td", { "data-value": change.after }, format(change.after)),
      element(
        "td",
        { class: changeClass(change), "data-value": change.difference },
        formatSigned(change.difference, format),
      ),
      element("td", { class: "note" }, changeWords(change, format)),
    );
  });
  if (rows.length === 0) return null;
  const head = ["before", "after", "change", "noise"].map((text) => element("th", { scope: "col" }, text));
  return element(
    "table",
    { class: "amounts compared" },
    element("thead", {}, element("tr", {}, element("td", {}), ...head)),
    element("tbody", {}, ...rows),
  );
}

/**
 * @param {Node} node
 * @param {Metric} metric
 */
function opFacts(node, metric) {
  const top = node.rows.reduce((a, b) => (b.amount > a.amount ? b : a), node.rows[0]);
  const format = node.phase === "saved" ? formatBytes : formatTime;
  const amount = node.own.reduce((sum, value) => sum + value, 0);
  const s = node.calls === 1 ? "" : "s";
  const counted = node.phase === "saved" ? `tensor${s}` : `call${s} a step`;
  const facts = [`${format(amount)} in ${node.phase.replace("_", " ")}`, `${formatCalls(node.calls)} ${counted}`];
  if (top?.shape) facts.push(`${node.rows.length > 1 ? "largest" : "shape"} ${top.shape}`);
  if (top?.line) facts.push(`saved at ${top.line}`);
  if (node.kind === "kernel" && node.parent?.kind === "op") {
    facts.push(`launched by ${node.parent.label}`, `${formatTime(node.busy)} of its time`);
  } else if (node.kind === "kernel") facts.push("which operation launched it was not recorded");
  return element("p", { "data-metric": metric }, visible(facts.join(" · ")));
}

/**
 * @param {Run} run
 * @param {Node} node
 */
function layerFacts(run, node) {
  const { layers } = node;
  /** @param {string} column @returns {number | null} */
  const sumOf = (column) => {
    const values = run.columns[column];
    if (!values) return null;
    const known = layers.map((layer) => values[layer]).filter((value) => value !== null);
    return known.length > 0 ? known.reduce((sum, value) => sum + value, 0) : null;
  };
  const facts = [];
  const parameters = sumOf("parameters");
  if (parameters) facts.push(`${formatCount(parameters)} parameters of its own`);
  facts.push(callWords(run, node));
  const ratio = backwardRatio(node.total);
  if (ratio !== null) facts.push(`backward is ${formatRatio(ratio)} forward`);
  const parts = {
    recompute_ns: "recompute",
    gradient_sum_ns: "gradient sums",
    accumulate_ns: "accumulate",
    hook_ns: "backward hooks",
  };
  for (const [column, words] of Object.entries(parts)) {
    const value = sumOf(column);
    if (value) facts.push(`${words} ${formatTime(value)}`);
  }
  facts.push(...estimatedWords(run, node));
  const peaks = run.columns.peak_bytes;
  if (peaks) facts.push(`raises memory by up to ${formatBytes(Math.max(...layers.map((layer) => peaks[layer] ?? 0)))}`);
  const copied = sumOf("copied_bytes");
  if (copied) facts.push(`copies ${formatBytes(copied)}`);
  // A rate of all of their time: as in the table, of none where one of them has no operations told.
  const told = layers.every((layer) => run.columns.backward_flops?.[layer] != null);
  const flops = told ? sumOf("backward_flops") : null;
  if (flops && node.own[BACKWARD] > 0 && !run.estimated)
    facts.push(`${formatCount(flops / node.own[BACKWARD])} GFLOP/s in backward`);
  const source = run.sources[layers[0]];
  if (source) facts.push(source);
  const tied = layers.flatMap((layer) => run.tied[layer] ?? []);
  if (tied.length > 0) facts.push(`shares ${tied.slice(0, 3).join(", ")}${tied.length > 3 ? " …" : ""}`);
  return element("p", { class: "facts" }, visible(shorten(facts.join(" · "), 2000)));
}

/**
 * @param {Run} run
 * @param {Node} node
 */
function callWords(run, node) {
  if (node.calls > 0) return `${formatCalls(node.calls)} call${node.calls === 1 ? "" : "s"} a step`;
  // No module is called there: its operations are a part of the graph.
  return hasEstimates(run) && node.total[FORWARD] + node.total[BACKWARD] > 0 ? "in compiled code" : "never called";
}

/**
 * @param {Node} node
 * @param {Metric} metric
 * @param {"op" | "kernel"} kind
 */
function opsLine(node, metric, kind) {
  if (node.kind === "kernel" || (node.kind === "op" && kind === "op")) return null;
  const ops = largestOps(node, metric, kind);
  if (ops.length === 0) return null;
  /** @param {string} phase */
  const where = (phase) => (["forward", "backward", "saved"].includes(phase) ? "" : ` (${phase.replace("_", " ")})`);
  const bars = ops.map(({ name, phase, amount }) => {
    const told = name === `(${phase})` ? "autograd overhead" : name + where(phase);
    return { name: visible(shorten(told, 120)), amount };
  });
  const words = kind === "kernel" ? "Kernels" : metric === "saved" ? "Saved by" : "Operations, with all below";
  return barList(words, bars);
}

/**
 * The layers that call the same operation, or in which the same kernel runs; a click selects it there.
 * @param {Node} node
 * @param {Select} select
 */
function callers(node, select) {
  if (node.kind !== "op" && node.kind !== "kernel") return null;
  /** @type {Map<Node, Node[]>} */
  const groups = new Map();
  for (const below of walkTree(ancestry(node)[0])) {
    /** @type {Node[]} */
    const here = node.kind === "op" ? [below] : below.kernels;
    for (const one of here) {
      /** @type {Node | null} */
      const owner = layerOf(one) ?? one.parent;
      if (one.kind !== node.kind || one.label !== node.label || one.phase !== node.phase || !owner) continue;
      groups.set(owner, [...(groups.get(owner) ?? []), one]);
    }
  }
  const bars = [...groups].map(([owner, ops]) => {
    const name = visible(shorten(owner.address || nameWithRepeats(owner), 120));
    const amount = ops.reduce((sum, one) => sum + one.own.reduce((all, value) => all + value, 0), 0);
    return { name, amount, go: () => select(ops[0]) };
  });
  return (
    bars.length > 1 &&
    barList(
      "Called by",
      bars.sort((a, b) => b.amount - a.amount),
    )
  );
}

/**
 * The largest of some amounts, with their shares of all.
 * @param {string} words
 * @param {{ name: string, amount: number, go?: () => void }[]} bars the largest first
 */
function barList(words, bars) {
  const whole = bars.reduce((sum, { amount }) => sum + amount, 0);
  const items = bars.slice(0, 6).map(({ name, amount, go }) => {
    const text = element("bdi", {}, name);
    const bar = element("span", { class: "bar", "width%": (amount / Math.max(bars[0].amount, 1)) * 100 });
    return element(
      "li",
      {},
      element("span", { class: "track" }, bar),
      go ? element("button", { type: "button", class: "link", onclick: go }, text) : text,
      element("span", { class: "amount" }, formatShare(whole > 0 ? amount / whole : 0)),
    );
  });
  const left = bars.length - items.length;
  return element(
    "div",
    {},
    element("h3", {}, words),
    element("ul", { class: "ops" }, ...items),
    left > 0 && element("p", { class: "note" }, `and ${left} more`),
  );
}
