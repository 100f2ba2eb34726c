// The tables that are not of nodes: source lines, the ledger, who holds the peak.

import { changeOfLine, isCompared, makeChange } from "./change.js";
import { isWithin, nameWithRepeats } from "./nodes.js";
import { BACKWARD, FORWARD, SAVED, amountOf, wordsOfLedger } from "./run.js";
import { matcher } from "./search.js";
import { addressOf } from "./state.js";
import {
  amountColumns,
  changeCells,
  changeColumns,
  countOf,
  shareColumn,
  shareOf,
  startOrder,
  wholeOf,
} from "./table.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./table.js").Table} Table
 * @typedef {import("./table.js").Row} Row
 * @typedef {import("./table.js").Column} Column
 * @typedef {import("./table.js").Scene} Scene
 */

/**
 * What a search looks at.
 * @param {Run} run
 * @param {import("./run.js").Line} line
 */
export function lineWords(run, line) {
  return `${line.file}:${line.line} ${line.function} ${line.text} ${run.paths[line.layer] ?? ""}`;
}

/** @param {Scene} scene @returns {Table} */
export function linesTable(scene) {
  const { run, tree, state, zoom } = scene;
  const fits = matcher(state.query);
  const whole = wholeOf(scene);
  const lines = run.lines.filter((line) => {
    const node = line.layer < 0 ? null : tree.layerNodes[line.layer];
    if (state.zoomedOnly && zoom.kind !== "all" && !(node && isWithin(node, zoom))) return false;
    return fits(`${lineWords(run, line)} ${node?.address ?? ""}`);
  });
  /** @type {Row[]} */
  const rows = lines.map((line) => {
    const change = changeOfLine(run, line, state.metric, tree.layerNodes);
    const gone = line.status === "removed";
    return {
      cells: {
        line: `${line.file}:${line.line}`,
        source: line.text || null,
        layer: line.layer < 0 ? null : tree.layerNodes[line.layer].address || tree.layerNodes[line.layer].label,
        forward: gone ? null : line.amounts[FORWARD],
        backward: gone ? null : line.amounts[BACKWARD],
        saved: run.memory && !gone ? line.amounts[SAVED] : null,
        ...changeCells(change),
        share: shareOf(amountOf(line.amounts, state.metric), whole),
      },
      change,
      shown: `${line.file.split("/").at(-1)}:${line.line}`,
      note: line.function,
      type: "",
      node: line.layer < 0 ? null : tree.layerNodes[line.layer],
    };
  });
  if (lines.length === run.lines.length) rows.push(noLineRow(scene, whole));
  /** @type {Column[]} */
  const columns = [
    { key: "line", label: "Line", kind: "text", isPath: true },
    ...(run.info.source
      ? [
          /** @type {Column} */ ({
            key: "source",
            label: "Source",
            kind: "code",
            rank: isCompared(run, state.metric) ? 3 : undefined,
          }),
        ]
      : []),
    { key: "layer", label: "Layer", kind: "text", isPath: true, rank: 1 },
    ...amountColumns(run, state.metric),
    ...changeColumns(run, state.metric),
    shareColumn(scene),
  ];
  const missing = run.info.source ? "" : "; source text was left out (--no-source)";
  const sort = startOrder(run, state.metric, "-share");
  return { columns, rows, summary: `${countOf(lines.length, "line")} of the forward code${missing}`, sort };
}

/**
 * What no source line accounts for.
 * @param {Scene} scene
 * @param {number} whole
 * @returns {Row}
 */
function noLineRow({ run, state }, whole) {
  const rest = run.whole.map((value, i) => value - run.lines.reduce((sum, line) => sum + line.amounts[i], 0));
  const { joined } = run;
  const was = run.lines.reduce(
    (left, line) => left.map((value, i) => value - line.was[i]),
    joined ? joined.whole : [0, 0, 0],
  );
  const change = isCompared(run, state.metric)
    ? makeChange(amountOf(was, state.metric), amountOf(rest, state.metric), state.metric === "saved" ? 0 : null)
    : null;
  return {
    cells: {
      line: "(no source line)",
      source: null,
      layer: null,
      forward: rest[FORWARD],
      backward: rest[BACKWARD],
      saved: run.memory ? rest[SAVED] : null,
      ...changeCells(change),
      share: shareOf(amountOf(rest, state.metric), whole),
    },
    change,
    note: "",
    type: "",
    node: null,
    rest: true,
  };
}

/**
 * What the backward pass is made of: the parts add up to it.
 * @param {Run} run
 */
export function ledgerParts(run) {
  const { ledger } = run.info;
  return wordsOfLedger(run).map(([key, words, meaning]) => ({ key, words, meaning, ns: Number(ledger[key]) }));
}

/** @param {Scene} scene @returns {Table} */
export function ledgerTable({ run, tree }) {
  const whole = Number(run.info.ledger.backward_ns); // as measured: an estimate says nothing of the parts
  const { baseline, joined } = run;
  /** @param {string} key */
  const wasOf = (key) => Number(baseline?.info.ledger[key] ?? 0);
  // Few programs have hooks: the others need no row that says so.
  const shown = ledgerParts(run).filter(({ key, ns }) => key !== "hook_ns" || ns > 0 || wasOf(key) > 0);
  const rows = shown.map(({ key, words, meaning, ns }) => {
    const was = wasOf(key);
    const change = joined ? makeChange(was, ns, joined.totals[key] ?? null) : null;
    return {
      cells: { part: words, meaning, time: ns, ...changeCells(change), share: shareOf(ns, whole) },
      change,
      note: "",
      type: "",
      node: tree.root.children.find((node) => node.kind === "part" && node.address === key) ?? null,
    };
  });
  /** @type {Column[]} */
  const columns = [
    { key: "part", label: "Part", kind: "text" },
    { key: "meaning", label: "What it is", kind: "text", isWide: true, rank: 3 },
    { key: "time", label: "Time", kind: "time" },
    ...changeColumns(run, "backward"),
    { key: "share", label: "Share", of: "backward", kind: "share", rank: joined ? 3 : undefined },
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
  const { baseline } = run;
  const compared = isCompared(run, "saved");
  /** @type {Map<string, Row & { cells: { bytes: number }, held: { after: boolean, before: boolean, was: number } }>} */
  const groups = new Map();
  const before = (baseline && compared && baseline.memory?.holders) || [];
  const holders = [
    ...memory.holders.map((holder) => ({ ...holder, past: false })),
    ...before.map((holder) => ({ ...holder, layer: numberOf(run, baseline, holder.layer), past: true })),
  ];
  for (const holder of holders) {
    const node = holder.layer < 0 ? null : tree.layerNodes[holder.layer];
    if (state.zoomedOnly && zoom.kind !== "all" && !(node && isWithin(node, zoom))) continue;
    const owner = node ? addressOf(node, run.paths) : "";
    const name = node ? node.address || nameWithRepeats(node) : "(outside the layers)";
    const path = holder.layer < 0 ? "" : run.paths[holder.layer];
    if (!fits(`${name} ${path} ${holder.category} ${node?.className ?? ""}`)) continue;
    const key = `${owner}\n${holder.category}`;
    const row = groups.get(key) ?? {
      cells: { owner: name, category: holder.category, bytes: 0, share: 0 },
      count: node && node.layers.length > 1 ? `×${node.layers.length}` : "",
      note: node ? node.className : "",
      type: node ? node.type : "outside",
      node,
      held: { after: false, before: false, was: 0 },
    };
    if (holder.past) {
      row.held.was += holder.bytes;
      row.held.before = true;
    } else {
      row.cells.bytes += holder.bytes;
      row.held.after = true;
    }
    groups.set(key, row);
  }
  const whole = Number(memory.figures.peak_bytes);
  for (const row of groups.values()) {
    const { cells } = row;
    cells.share = shareOf(cells.bytes, whole);
    if (!compared) continue;
    const status = row.held.after ? (row.held.before ? "matched" : "new") : "removed";
    row.change = makeChange(row.held.was, cells.bytes, 0, status);
    Object.assign(cells, changeCells(row.change));
  }
  /** @type {Column[]} */
  const columns = [
    { key: "owner", label: "Held by", kind: "text", isPath: true },
    { key: "category", label: "What it is", kind: "text", isShort: true },
    { key: "bytes", label: "At peak", kind: "bytes" },
    ...changeColumns(run, "saved"),
    { key: "share", label: "Share", of: "the peak", kind: "share", rank: compared ? 3 : undefined },
  ];
  const rows = [...groups.values()];
  const sort = startOrder(run, "saved", "-bytes");
  return { columns, rows, summary: `${countOf(rows.length, "row")}: the live set at the peak`, sort };
}

/**
 * The number that a layer of the run before has in both.
 * @param {Run} run
 * @param {Run | null} baseline
 * @param {number} layer
 */
function numberOf(run, baseline, layer) {
  return layer < 0 || !baseline ? -1 : (run.byPath.get(baseline.paths[layer]) ?? -1);
}
