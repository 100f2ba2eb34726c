// Drawing a table: headings that sort, bars, marks of what is selected. Long tables show their first rows, and more when asked.

import { changeClass, changeText, changeWords } from "./change.js";
import { element, refill } from "./dom.js";
import {
  columnScale,
  formatBytes,
  formatScaled,
  formatShare,
  formatSigned,
  formatTime,
  shorten,
  visible,
} from "./format.js";
import { sortRows } from "./table.js";

/**
 * @typedef {import("./table.js").Table} Table
 * @typedef {import("./table.js").Row} Row
 * @typedef {import("./table.js").Column} Column
 * @typedef {import("./nodes.js").Node} Node
 */

const FIRST_ROWS = 200;
const LONGEST_NAME = 300;

export class TableView {
  /**
   * @param {HTMLElement} place
   * @param {{ sort: (key: string) => void, select: (node: Node) => void }} actions
   */
  constructor(place, actions) {
    this.place = place;
    this.actions = actions;
    this.shown = FIRST_ROWS;
    this.identity = "";
  }

  /**
   * @param {Table} table
   * @param {string} sort
   * @param {(row: Row) => boolean} isMarked
   * @param {string} identity of what is shown: another one starts at the top again
   * @param {string} caption
   */
  draw(table, sort, isMarked, identity, caption) {
    if (identity !== this.identity) {
      this.shown = FIRST_ROWS;
      this.place.scrollTop = 0;
    }
    this.identity = identity;
    const sorted = sortRows(table, sort);
    const scales = scalesOf(table);
    const largest = largestOf(table, "share");
    const head = element("tr", {}, ...table.columns.map((column) => this.heading(column, sorted.sort, scales)));
    const body = element("tbody");
    for (const row of sorted.rows.slice(0, this.shown)) {
      body.append(this.row(row, table.columns, scales, largest, isMarked(row)));
    }
    const left = sorted.rows.length - this.shown;
    const more = element("button", {
      class: "more",
      type: "button",
      onclick: () => {
        this.shown += 5 * FIRST_ROWS;
        this.draw(table, sort, isMarked, identity, caption);
      },
    });
    more.textContent = `Show more rows: ${left} left`;
    const words = element("caption", { class: "unseen" }, caption);
    refill(
      this.place,
      element("table", {}, words, element("thead", {}, head), body),
      sorted.rows.length === 0 && element("p", { class: "empty" }, "Nothing here: no row fits the search or the zoom."),
      left > 0 && more,
    );
  }

  /**
   * @param {Column} column
   * @param {string} sort
   * @param {Map<string, import("./format.js").Scale>} scales
   */
  heading(column, sort, scales) {
    const sorted = sort.replace("-", "") === column.key;
    const falling = sort.startsWith("-");
    const unit = scales.get(column.key)?.unit;
    const of = column.of && element("span", { class: "of" }, ` of ${column.of}`);
    const isText = column.kind === "text" || column.kind === "code";
    const next = sorted ? (falling ? column.key : `-${column.key}`) : isText ? column.key : `-${column.key}`;
    const arrow = element("span", { class: "arrow", "aria-hidden": "true" }, sorted ? (falling ? "▾" : "▴") : "");
    return element(
      "th",
      { scope: "col", class: classOf(column), "aria-sort": sorted ? (falling ? "descending" : "ascending") : null },
      element(
        "button",
        { type: "button", "data-sort": column.key, onclick: () => this.actions.sort(next) },
        column.label,
        unit && ` ${unit}`,
        of,
        arrow,
      ),
    );
  }

  /**
   * @param {Row} row
   * @param {Column[]} columns
   * @param {Map<string, import("./format.js").Scale>} scales
   * @param {number} largest share
   * @param {boolean} marked
   */
  row(row, columns, scales, largest, marked) {
    const { node } = row;
    const cells = columns.map((column, i) =>
      i === 0 ? this.nameCell(row, column, String(row.cells[column.key])) : valueCell(row, column, scales, largest),
    );
    return element(
      "tr",
      {
        class: `${marked ? "marked" : ""}${row.rest ? " rest" : ""} ${row.change?.status ?? ""}`,
        "aria-current": marked ? "true" : null,
        onclick: node && (() => this.actions.select(node)),
      },
      ...cells,
    );
  }

  /**
   * @param {Row} row
   * @param {Column} column
   * @param {string} name
   */
  nameCell(row, column, name) {
    const { node } = row;
    const whole = visible(shorten(name, LONGEST_NAME));
    const shown = row.shown === undefined ? whole : visible(shorten(row.shown, LONGEST_NAME));
    const kind = `name${column.isPath ? " front" : ""}${column.key === "line" ? " whole" : ""}`;
    const text = element("bdi", {}, shown);
    const words = node
      ? element("button", { type: "button", class: kind }, text)
      : element("span", { class: kind }, text);
    return element(
      "th",
      { scope: "row", title: whole, "data-value": name },
      element(
        "span",
        { class: "cell" },
        row.type !== "" && element("span", { class: `swatch type-${row.type}`, "aria-hidden": "true" }),
        row.change &&
          row.change.status !== "matched" &&
          element("span", { class: `tag tag-${row.change.status}` }, row.change.status),
        words,
        row.count && element("span", { class: "note count" }, row.count),
        row.note !== "" && element("span", { class: "note" }, visible(shorten(row.note, 120))),
      ),
    );
  }
}

/**
 * @param {Row} row
 * @param {Column} column
 * @param {Map<string, import("./format.js").Scale>} scales
 * @param {number} largest
 */
function valueCell(row, column, scales, largest) {
  const value = row.cells[column.key];
  if (typeof value === "string") {
    const shown = visible(shorten(value, LONGEST_NAME));
    return element("td", { class: classOf(column), title: shown, "data-value": value }, element("bdi", {}, shown));
  }
  if (column.kind === "change") return changeCell(row, column, scales);
  const attributes = { class: classOf(column), "data-value": value };
  if (column.kind === "share") {
    const share = Number(value);
    const bar = element("span", {
      class: "bar",
      "aria-hidden": "true",
      "width%": largest > 0 ? (share / largest) * 100 : 0,
    });
    return element("td", attributes, element("span", { class: "track" }, bar), formatShare(share));
  }
  const scale = scales.get(column.key);
  if (scale) return element("td", attributes, formatScaled(value, scale));
  return element("td", attributes, value === null || !column.format ? "–" : column.format(value));
}

/** @param {Column} column */
function classOf({ kind, isShort, isWide, isPath, rank }) {
  return [kind, isShort && "short", isWide && "wide", isPath && "front", rank && `drop-${rank}`]
    .filter(Boolean)
    .join(" ");
}

/**
 * The exact difference is in the cell whatever it shows.
 * @param {Row} row
 * @param {Column} column
 * @param {Map<string, import("./format.js").Scale>} scales
 */
function changeCell({ change }, column, scales) {
  if (!change) return element("td", { class: "change" }, "–");
  const scale = scales.get(column.key);
  const format = column.inBytes ? formatBytes : formatTime;
  const words = `${formatSigned(change.difference, format)}: ${changeWords(change, format)}`;
  /** @param {number} value */
  const scaled = (value) => (scale ? formatScaled(value, scale) : String(value));
  return element(
    "td",
    { class: `change ${changeClass(change)}`, "data-value": change.difference, title: words },
    changeText(change, scaled),
  );
}

/**
 * One unit for all times of a table, and one for all bytes: what stands side by side can be compared.
 * @param {Table} table
 */
function scalesOf(table) {
  const scales = new Map();
  for (const isBytes of [false, true]) {
    const family = table.columns.filter(
      ({ kind, inBytes }) =>
        kind === (isBytes ? "bytes" : "time") || (kind === "change" && Boolean(inBytes) === isBytes),
    );
    const scale = columnScale(Math.max(0, ...family.map((column) => largestOf(table, column.key))), isBytes);
    for (const column of family) scales.set(column.key, scale);
  }
  return scales;
}

/**
 * @param {Table} table
 * @param {string} key
 */
function largestOf(table, key) {
  return table.rows.reduce((most, row) => Math.max(most, Math.abs(Number(row.cells[key] ?? 0))), 0);
}
