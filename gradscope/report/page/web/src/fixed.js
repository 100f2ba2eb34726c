// What a fix replaced: the document that the terminal prints, and its diff.

import { copyButton } from "./copy.js";
import { element, refill } from "./dom.js";
import { visible } from "./format.js";

/**
 * @param {HTMLElement} place
 * @param {{ sections: any[], diff: string }} fixed
 * @param {(words: string) => void} say for screen readers
 */
export function drawFixed(place, { sections, diff }, say) {
  const box = (/** @type {string} */ title, /** @type {string} */ about, /** @type {any[]} */ ...parts) =>
    element(
      "section",
      {},
      element("h3", {}, visible(title), about && element("span", { class: "note" }, ` ${visible(about)}`)),
      ...parts,
    );
  const drawn = sections.map((section) =>
    box(section.title, section.about, ...section.blocks.map((/** @type {any} */ block) => blockOf(block, say))),
  );
  const last = sections.findIndex((section) => section.key === "notes");
  const lines = diff.split("\n").map((line) => element("span", { class: lineKind(line) }, `${visible(line)}\n`));
  if (diff)
    drawn.splice(
      last < 0 ? drawn.length : last,
      0,
      box(
        "Diff",
        "for patch -p1",
        copyButton("Copy", diff, say),
        element("pre", { class: "diff", tabindex: "0" }, ...lines),
      ),
    );
  refill(place, ...drawn);
}

/**
 * @param {any} block what gradscope/document/record.py makes of one
 * @param {(words: string) => void} say
 */
function blockOf(block, say) {
  if (block.kind === "words") return element("p", { class: block.style }, visible(block.text));
  if (block.kind === "list")
    return element("ul", {}, ...block.items.map((/** @type {string} */ item) => element("li", {}, visible(item))));
  if (block.kind === "copy")
    return element(
      "div",
      { class: "code-box" },
      element("code", {}, visible(block.text)),
      element("span", { class: "note" }, visible(block.label)),
      copyButton("Copy", block.text, say),
    );
  const { columns, rows } = block;
  const named = columns.some((/** @type {any} */ column) => column.title);
  const cell = (/** @type {"td" | "th"} */ tag, /** @type {string} */ text, /** @type {number} */ i) =>
    element(
      text ? tag : "td", // a heading without words is none
      {
        class: columns[i].align,
        "data-title": tag === "td" && text !== "" && columns[i].title,
        scope: tag === "th" && text !== "" && "col",
      },
      element("bdi", {}, visible(text)),
    );
  const row = (/** @type {any} */ { cells, note }) => [
    element("tr", {}, ...cells.map((/** @type {string} */ text, /** @type {number} */ i) => cell("td", text, i))),
    note && element("tr", {}, element("td", { class: "note", colspan: columns.length }, visible(note))),
  ];
  const titles = columns.map((/** @type {any} */ column, /** @type {number} */ i) => cell("th", column.title, i));
  return element(
    "table",
    {},
    named && element("thead", {}, element("tr", {}, ...titles)),
    element("tbody", {}, ...rows.flatMap(row)),
  );
}

/**
 * The class of a diff's line.
 * @param {string} line
 */
function lineKind(line) {
  if (/^(---|\+\+\+|@@)/.test(line)) return "diff-head";
  return line.startsWith("+") ? "diff-new" : line.startsWith("-") ? "diff-old" : "";
}
