// The parts of the page and where they stand; what is in them is drawn by others.

import { element, refill } from "./dom.js";
import { shorten, visible } from "./format.js";
import { makeHeader, warningsOf } from "./header.js";
import { makeHelp } from "./help.js";
import { stepStrip } from "./steps.js";
import { countOf } from "./table.js";

/**
 * @typedef {import("./run.js").Run} Run
 *
 * @typedef {object} ShellActions
 * @property {(changes: Partial<import("./state.js").ViewState>) => void} change
 * @property {(query: string) => void} query
 * @property {(event: KeyboardEvent) => void} tabKey
 * @property {() => void} csv
 * @property {() => void} svg
 * @property {() => void} png
 * @property {() => void} measured
 * @property {() => void} theme
 */

// Tabs that are no table.
export const LISTS = new Set(["fixed", "findings", "source", "roofline"]);

/**
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {[key: string, words: string][]} tabs
 * @param {ShellActions} actions
 */
export function makeShell(place, run, tabs, actions) {
  const help = makeHelp();
  const fixed = run.joined?.fixed;
  const parts = {
    cards: element("div", { class: "cards", role: "group", "aria-label": "What is shown" }),
    headline: element(
      "button",
      {
        type: "button",
        class: "headline",
        id: "headline",
        onclick: () => actions.change({ tab: fixed ? "fixed" : "findings", sort: "" }),
      },
      visible(shorten(fixed ? fixed.sections[0].blocks[0].text : run.info.headline, 160)),
    ),
    said: element("p", { class: "unseen", id: "said", role: "status" }),
    lists: Object.fromEntries([...LISTS].map((key) => [key, listPanel(key)])),
    title: element("h2", {}),
    crumbs: element("nav", { class: "crumbs", "aria-label": "Zoom" }),
    legend: element("div", { class: "legend-bar" }),
    canvas: element("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "flame graph",
      "aria-describedby": "flame-help",
    }),
    merged: element("input", {
      type: "checkbox",
      id: "merged",
      onchange: () => actions.change({ merged: parts.merged.checked }),
    }),
    compare: element("input", {
      type: "checkbox",
      id: "compare",
      onchange: () => actions.change({ compare: parts.compare.checked, sort: "" }),
    }),
    colour: element("select", {
      id: "colour",
      onchange: () => {
        const usual = run.joined && parts.compare.checked ? "change" : "type";
        const chosen = /** @type {any} */ (parts.colour.value);
        actions.change({ colour: chosen === usual ? "" : chosen, highlight: "" });
      },
    }),
    order: element("select", {
      id: "order",
      onchange: () => actions.change({ order: /** @type {any} */ (parts.order.value) }),
    }),
    query: element("input", {
      type: "search",
      id: "query",
      placeholder: "Search layers, ops, lines  ( / )",
      "aria-label": "Search layers, operations, kernels and lines",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => actions.query(parts.query.value),
    }),
    found: element("span", { class: "found", id: "found", role: "status" }),
    tabs: element("div", { class: "tabs", role: "tablist", "aria-label": "Tables" }),
    subtree: element("input", {
      type: "checkbox",
      id: "subtree",
      onchange: () => actions.change({ subtree: parts.subtree.checked }),
    }),
    zoomedOnly: element("input", {
      type: "checkbox",
      id: "zoomed",
      onchange: () => actions.change({ zoomedOnly: parts.zoomedOnly.checked }),
    }),
    summary: element("span", { class: "note", id: "summary" }),
    svg: element("button", { type: "button", id: "svg", title: "Save as SVG", onclick: () => actions.svg() }, "SVG"),
    png: element("button", { type: "button", id: "png", title: "Save as PNG", onclick: () => actions.png() }, "PNG"),
    whatIfWords: element("span", {}),
    csv: element("button", { type: "button", id: "csv", onclick: () => actions.csv() }, "CSV"),
    rows: element("div", { class: "rows", tabindex: "0", role: "tabpanel", id: "rows" }),
    timeline: element("section", { class: "panel timeline", "aria-label": "Memory over the step" }),
    details: element("section", { class: "panel details", "aria-label": "The selection", tabindex: "-1" }),
    tip: element("div", { class: "tip", role: "tooltip", hidden: true }),
  };
  const whatIf = element(
    "p",
    { class: "what-if-line", hidden: true },
    parts.whatIfWords,
    " ",
    element("button", { type: "button", onclick: () => actions.measured() }, "Show what was measured"),
  );
  parts.colour.append(
    element("option", { value: "type" }, "layer type"),
    element("option", { value: "ratio" }, "backward ÷ forward"),
  );
  if (run.joined) parts.colour.append(element("option", { value: "change" }, "change"));
  parts.order.append(
    element("option", { value: "model" }, "model order"),
    element("option", { value: "largest" }, "largest first"),
  );
  const warnings = warningsOf(run);
  refill(
    place,
    makeHeader(run, { theme: () => actions.theme(), help: () => help.showModal() }),
    element(
      "main",
      {},
      warnings.length > 0 &&
        element(
          "ul",
          { class: "warnings", tabindex: "0", "aria-label": "What was not measured, and why" },
          ...warnings.map((text) => element("li", {}, visible(text))),
        ),
      element("div", { class: "top" }, parts.cards, run.info.headline !== "" && parts.headline),
      flamePanel({ ...parts, whatIf }, run),
      element(
        "div",
        { class: "bottom" },
        tablePanel(parts, tabs, actions),
        element("div", { class: "side" }, parts.details, parts.timeline, stepStrip(run)),
      ),
    ),
    makeFooter(run),
    parts.tip,
    parts.said,
    help,
  );
  return { ...parts, whatIf, help };
}

/**
 * @param {any} parts
 * @param {Run} run
 */
function flamePanel(parts, run) {
  const before = visible(shorten(run.joined?.names[0] ?? "", 300));
  const name = element("b", { title: before }, element("bdi", {}, shorten(before.split("/").at(-1) ?? "", 40)));
  return element(
    "section",
    { class: "panel flame", "aria-label": "Flame graph" },
    element(
      "div",
      { class: "toolbar" },
      parts.title,
      element("label", {}, parts.merged, "Merge repeated layers"),
      run.joined && element("label", {}, parts.compare, "Compare with ", name),
      element("label", {}, "Colour ", parts.colour),
      element("label", {}, "Order ", parts.order),
      element("span", { class: "search" }, parts.query, parts.found),
      element("span", { class: "save" }, parts.svg, parts.png),
    ),
    parts.whatIf,
    element("div", { class: "under" }, parts.crumbs, parts.legend),
    element("div", { class: "canvas" }, parts.canvas),
    element(
      "p",
      { class: "unseen", id: "flame-help" },
      "Arrow keys go from frame to frame, Enter zooms in, Escape zooms out. The table below holds the same numbers.",
    ),
  );
}

/**
 * @param {any} parts
 * @param {[key: string, words: string][]} tabs
 * @param {ShellActions} actions
 */
function tablePanel(parts, tabs, actions) {
  for (const [key, words] of tabs) {
    parts.tabs.append(
      element(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${key}`,
          "aria-controls": LISTS.has(key) ? key : "rows",
          onclick: () => actions.change({ tab: key, sort: "" }),
          onkeydown: (/** @type {KeyboardEvent} */ event) => actions.tabKey(event),
        },
        words,
      ),
    );
  }
  return element(
    "section",
    { class: "panel tables", "aria-label": "Tables" },
    element(
      "div",
      { class: "toolbar" },
      parts.tabs,
      element("label", { class: "for-layers" }, parts.subtree, "include sub-layers"),
      element("label", {}, parts.zoomedOnly, "zoomed part only"),
      parts.summary,
      parts.csv,
    ),
    ...Object.values(parts.lists),
    parts.rows,
  );
}

/**
 * The panel of one of these tabs.
 * @param {string} key
 */
function listPanel(key) {
  const about = { tabindex: "0", role: "tabpanel", id: key, "aria-labelledby": `tab-${key}` };
  return element("div", { class: "rows list", ...about });
}

/** @param {Run} run */
function makeFooter(run) {
  const { info } = run;
  const { source, gradscope } = info;
  const own = run.lines.filter((line) => line.text !== "").map((line) => `${line.file}:${line.line}`);
  const around = info.functions.flatMap((/** @type {any} */ { file, first, lines: texts }) =>
    texts.map((/** @type {string} */ _, /** @type {number} */ i) => `${file}:${first + i}`),
  );
  const lines = new Set([...own, ...around]).size;
  const words =
    source && lines > 0
      ? `This file holds the text of ${countOf(lines, "line")} of your source code; gradscope … --no-source leaves it out.`
      : "No text of your source code is in this file.";
  return element(
    "footer",
    {},
    `Written by gradscope ${visible(gradscope)}. ${words} It works offline and makes no network requests.`,
  );
}
