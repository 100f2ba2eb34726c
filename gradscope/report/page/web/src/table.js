// What a table is, whatever it shows: rows, columns, order, CSV.

import { isCompared } from "./change.js";
import { formatCount } from "./format.js";
import { amountOf } from "./run.js";

/**
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./nodes.js").Tree} Tree
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./state.js").ViewState} ViewState
 * @typedef {import("./search.js").Found} Found
 * @typedef {import("./change.js").Change} Change
 *
 * @typedef {object} Column
 * @property {string} key
 * @property {string} label
 * @property {string} [of] what a share is of
 * @property {"text" | "code" | "time" | "bytes" | "number" | "share" | "change"} kind a change sorts by its size
 * @property {boolean} [inBytes] of a change
 * @property {(value: number) => string} [format] of numbers
 * @property {boolean} [isWide] its texts are sentences
 * @property {boolean} [isShort] its texts are a word or two: it takes no room from the names
 * @property {boolean} [isPath] its texts say most at their end: where there is no room, their front is cut
 * @property {1 | 2 | 3} [rank] which goes first where there is little room, 1 before 3; the CSV has it
 *
 * @typedef {object} Row
 * @property {Record<string, string | number | null>} cells
 * @property {string} [shown] in place of the first cell, where that is long
 * @property {string} [count] beside the first cell
 * @property {string} note likewise; the first to be cut
 * @property {string} type for the swatch
 * @property {Node | null} node what a click selects
 * @property {boolean} [rest] what no other row holds
 * @property {Change | null} [change] from the run before
 *
 * @typedef {object} Table
 * @property {Column[]} columns
 * @property {Row[]} rows
 * @property {string} summary
 * @property {string} sort
 *
 * @typedef {object} Scene what tables are made from
 * @property {Run} run
 * @property {Tree} tree
 * @property {ViewState} state
 * @property {Node} zoom
 * @property {Found | null} found
 */

/** @type {Record<Metric, string>} */
export const METRIC_WORDS = {
  backward: "backward",
  forward: "forward",
  both: "forward and backward",
  saved: "saved memory",
};

/**
 * Rows in the reader's order; what is the rest stays last.
 * @param {Table} table
 * @param {string} sort
 */
export function sortRows(table, sort) {
  const wanted = table.columns.some((column) => column.key === sort.replace("-", "")) ? sort : table.sort;
  const [key, sign] = wanted.startsWith("-") ? [wanted.slice(1), -1] : [wanted, 1];
  const rest = table.rows.filter((row) => row.rest);
  const rows = table.rows.filter((row) => !row.rest);
  const bySize = table.columns.find((column) => column.key === key)?.kind === "change";
  /** @param {Row} row */
  const cellOf = (row) => {
    const value = row.cells[key];
    return bySize && typeof value === "number" ? Math.abs(value) : value;
  };
  rows.sort((a, b) => compareCells(cellOf(a), cellOf(b), sign));
  return { rows: [...rows, ...rest], sort: wanted };
}

/**
 * What was not measured comes last in both orders.
 * @param {string | number | null} a
 * @param {string | number | null} b
 * @param {number} sign
 */
function compareCells(a, b, sign) {
  if (a === null || b === null) return Number(a === null) - Number(b === null);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

/**
 * A table as CSV: exact values, nothing in place of what was not measured.
 * @param {Table} table
 */
export function toCsv(table) {
  /** @param {string | number | null | undefined} value */
  const quoted = (value) => {
    if (typeof value === "number") return String(value);
    // A spreadsheet would take these for formulas.
    const text = /^[=+\-@\t\r]/.test(value ?? "") ? `'${value}` : (value ?? "");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const units = { time: "_ns", bytes: "_bytes", text: "", code: "", number: "", share: "", change: "_ns" };
  /** @param {Column} column */
  const unitOf = (column) => (column.inBytes ? "_bytes" : units[column.kind]);
  /** @param {Column} column */
  const heading = (column) => quoted(column.key === "bytes" ? "bytes" : column.key + unitOf(column));
  const lines = [table.columns.map(heading).join(",")];
  for (const row of table.rows) lines.push(table.columns.map((column) => quoted(row.cells[column.key])).join(","));
  return `${lines.join("\n")}\n`;
}

/** @param {Scene} scene */
export function shareColumn({ run, state }) {
  return /** @type {Column} */ ({
    key: "share",
    label: "Share",
    of: METRIC_WORDS[state.metric],
    kind: "share",
    rank: isCompared(run, state.metric) ? 3 : undefined,
  });
}

/**
 * Columns of the run before, where the metric is compared.
 * @param {Run} run
 * @param {Metric} metric
 * @returns {Column[]}
 */
export function changeColumns(run, metric) {
  if (!isCompared(run, metric)) return [];
  const inBytes = metric === "saved";
  return [
    { key: "before", label: "Before", kind: inBytes ? "bytes" : "time", rank: 3 },
    { key: "change", label: "Change", kind: "change", inBytes },
  ];
}

/**
 * Cells of these columns.
 * @param {Change | null} change
 */
export function changeCells(change) {
  return { before: change ? change.before : null, change: change ? change.difference : null };
}

/**
 * The order of a table that nobody chose: by change while two runs are compared.
 * @param {Run} run
 * @param {Metric} metric
 * @param {string} otherwise
 */
export function startOrder(run, metric, otherwise) {
  return isCompared(run, metric) ? "-change" : otherwise;
}

/**
 * Forward, backward and saved memory; what the metric is not of goes where there is little room.
 * @param {Run} run
 * @param {Metric} metric
 * @returns {Column[]}
 */
export function amountColumns(run, metric) {
  const other = isCompared(run, metric) ? 1 : 3;
  /** @type {(key: Metric) => 1 | 3 | undefined} */
  const rank = (key) => (metric === key || (metric === "both" && key !== "saved") ? undefined : other);
  /** @type {Column[]} */
  const columns = [
    { key: "forward", label: "Forward", kind: "time", rank: rank("forward") },
    { key: "backward", label: "Backward", kind: "time", rank: rank("backward") },
  ];
  return run.memory ? [...columns, { key: "saved", label: "Saved", kind: "bytes", rank: rank("saved") }] : columns;
}

/** @param {Scene} scene */
export function wholeOf({ run, state }) {
  return amountOf(run.whole, state.metric);
}

/**
 * @param {number} part
 * @param {number} whole
 */
export function shareOf(part, whole) {
  return whole > 0 ? part / whole : 0;
}

/**
 * "1 row", "12 rows".
 * @param {number} count
 * @param {string} thing
 */
export function countOf(count, thing) {
  return `${formatCount(count)} ${thing}${count === 1 ? "" : "s"}`;
}
