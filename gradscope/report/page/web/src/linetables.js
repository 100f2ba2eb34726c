// The tables that are not of nodes: source lines, the ledger, who holds the peak.

import { isWithin, nameWithRepeats } from "./nodes.js";
import { BACKWARD, FORWARD, SAVED, amountOf } from "./run.js";
import { matcher } from "./search.js";
import { addressOf } from "./state.js";
import { countOf, shareColumn, shareOf, wholeOf } from "./table.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./table.js").Table} Table
 * @typedef {import("./table.js").Row} Row
 * @typedef {import("./table.js").Column} Column
 * @typedef {import("./table.js").Scene} Scene
 */

/** @param {Scene} scene @returns {Table} */
export function linesTable(scene) {
  const { run, tree, state, zoom } = scene;
  const fits = matcher(state.query);
  const whole = wholeOf(scene);
  const lines = run.lines.filter((line) => {
    const node = line.layer < 0 ? null : tree.layerNodes[line.layer];
    if (state.zoomedOnly && zoom.kind !== "all" && !(node && isWithin(node, zoom))) return false;
    const path = line.layer < 0 ? "" : run.paths[line.layer];
    return fits(`${line.file}:${line.line} ${line.function} ${line.text} ${path} ${node?.address ?? ""}`);
  });
  /** @type {Row[]} */
  const rows = lines.map((line) => ({
    cells: {
      line: `${line.file}:${line.line}`,
      source: line.text || null,
      layer: line.layer < 0 ? null : tree.layerNodes[line.layer].address || tree.layerNodes[line.layer].label,
      forward: line.amounts[FORWARD],
      backward: line.amounts[BACKWARD],
      saved: run.memory ? line.amounts[SAVED] : null,
      share: shareOf(amountOf(line.amounts, state.metric), whole),
    },
    shown: `${line.file.split("/").at(-1)}:${line.line}`,
    note: line.function,
    type: "",
    node: line.layer < 0 ? null : tree.layerNodes[line.layer],
  }));
  if (lines.length === run.lines.length) rows.push(noLineRow(scene, whole));
  /** @type {Column[]} */
  const columns = [
    { key: "line", label: "Line", kind: "text" },
    ...(run.info.source ? [/** @type {Column} */ ({ key: "source", label: "Source", kind: "code" })] : []),
    { key: "layer", label: "Layer", kind: "text" },
    { key: "forward", label: "Forward", kind: "time" },
    { key: "backward", label: "Backward", kind: "time" },
    ...(run.memory ? [/** @type {Column} */ ({ key: "saved", label: "Saved", kind: "bytes" })] : []),
    shareColumn(scene),
  ];
  const missing = run.info.source ? "" : "; source text was left out (--no-source)";
  return { columns, rows, summary: `${countOf(lines.length, "line")} of the forward code${missing}`, sort: "-share" };
}

/**
 * What no source line accounts for.
 * @param {Scene} scene
 * @param {number} whole
 * @returns {Row}
 */
function noLineRow({ run, state }, whole) {
  const rest = run.whole.map((value, i) => value - run.lines.reduce((sum, line) => sum + line.amounts[i], 0));
  return {
    cells: {
      line: "(no source line)",
      source: null,
      layer: null,
      forward: rest[FORWARD],
      backward: rest[BACKWARD],
      saved: run.memory ? rest[SAVED] : null,
      share: shareOf(amountOf(rest, state.metric), whole),
    },
    note: "",
    type: "",
    node: null,
    rest: true,
  };
}

// The ledger's rows: key, words, meaning.
const LEDGER_ROWS = /** @type {const} */ ([
  ["layers_ns", "layers", "the layers’ own backward nodes"],
  ["recompute_ns", "recompute", "forward run again by activation checkpointing"],
  ["gradient_sum_ns", "gradient sums", "adding gradients of values with several users"],
  ["accumulate_ns", "accumulate", "AccumulateGrad: writing the parameters’ .grad"],
  ["outside_modules_ns", "outside modules", "nodes of no module: a functional loss, say"],
  ["communication_ns", "communication", "collectives of DDP and FSDP"],
  ["engine_ns", "engine", "autograd’s engine, and Python between its nodes"],
  ["unattributed_ns", "unattributed", "nodes whose forward was not seen"],
]);

/**
 * What the backward pass is made of: the parts add up to it.
 * @param {Run} run
 */
export function ledgerParts(run) {
  const { ledger } = run.info;
  return LEDGER_ROWS.map(([key, words, meaning]) => ({ key, words, meaning, ns: Number(ledger[key]) }));
}

/** @param {Scene} scene @returns {Table} */
export function ledgerTable({ run, tree }) {
  const whole = run.whole[BACKWARD];
  const rows = ledgerParts(run).map(({ key, words, meaning, ns }) => ({
    cells: { part: words, meaning, time: ns, share: shareOf(ns, whole) },
    note: "",
    type: "",
    node: tree.root.children.find((node) => node.kind === "part" && node.address === key) ?? null,
  }));
  /** @type {Column[]} */
  const columns = [
    { key: "part", label: "Part of the backward pass", kind: "text" },
    { key: "meaning", label: "What it is", kind: "text" },
    { key: "time", label: "Time", kind: "time" },
    { key: "share", label: "Share of backward", kind: "share" },
  ];
  return { columns, rows, summary: "every nanosecond of backward is in exactly one row", sort: "-time" };
}

/**
 * Who holds memory at its peak; repeats as one where they are folded.
 * @param {Scene} scene
 * @param {import("./run.js").Memory} memory
 * @returns {Table}
 */
export function peakTable({ run, tree, state, zoom }, memory) {
  const fits = matcher(state.query);
  /** @type {Map<string, Row & { cells: { bytes: number } }>} */
  const groups = new Map();
  for (const holder of memory.holders) {
    const node = holder.layer < 0 ? null : tree.layerNodes[holder.layer];
    if (state.zoomedOnly && zoom.kind !== "all" && !(node && isWithin(node, zoom))) continue;
    const owner = node ? addressOf(node, run.paths) : "";
    const name = node ? node.address || nameWithRepeats(node) : "(outside the layers)";
    const path = holder.layer < 0 ? "" : run.paths[holder.layer];
    if (!fits(`${name} ${path} ${holder.category}`)) continue;
    const key = `${owner}\n${holder.category}`;
    const row = groups.get(key) ?? {
      cells: { owner: name, category: holder.category, bytes: 0, share: 0 },
      note: node ? `${node.layers.length > 1 ? `×${node.layers.length} ` : ""}${node.className}` : "",
      type: node ? node.type : "outside",
      node,
    };
    row.cells.bytes += holder.bytes;
    groups.set(key, row);
  }
  const whole = Number(memory.figures.peak_bytes);
  for (const { cells } of groups.values()) cells.share = shareOf(cells.bytes, whole);
  /** @type {Column[]} */
  const columns = [
    { key: "owner", label: "Held by", kind: "text" },
    { key: "category", label: "What it is", kind: "text" },
    { key: "bytes", label: "At the peak", kind: "bytes" },
    { key: "share", label: "Share of the peak", kind: "share" },
  ];
  const rows = [...groups.values()];
  return { columns, rows, summary: `${countOf(rows.length, "row")}: the live set at the peak`, sort: "-bytes" };
}
