// The findings of a selection: what is wrong, where, why, and what to do.

import { element } from "./dom.js";
import { shorten, visible } from "./format.js";
import { layerOf } from "./nodes.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./nodes.js").Node} Node
 */

/**
 * Those of the layer and the layers below it; of the whole step, all.
 * @param {Run} run
 * @param {Node} node
 */
export function findingsOf(run, node) {
  const layer = layerOf(node);
  if (!layer && node.kind !== "all") return null;
  const paths = layer ? layer.layers.map((index) => run.paths[index]) : [""];
  /** @param {string} path */
  const isHere = (path) => paths.some((own) => own === "" || path === own || path.startsWith(`${own}.`));
  /** @type {any[]} */
  const its = run.info.findings.filter(
    (/** @type {any} */ finding) => node.kind === "all" || finding.layers.some(isHere),
  );
  if (its.length === 0) return null;
  const small = its.filter((finding) => finding.small);
  const large = its.filter((finding) => !finding.small);
  return element(
    "div",
    {},
    element("h3", {}, "Findings", element("span", { class: "note" }, " · savings are estimates")),
    large.length > 0 && element("ul", { class: "findings" }, ...large.map(findingItem)),
    small.length > 0 &&
      element(
        "details",
        { class: "small-findings" },
        element("summary", {}, `${large.length > 0 ? "and " : ""}${small.length} more: small ones, and hints`),
        element("ul", { class: "findings" }, ...small.map(findingItem)),
      ),
  );
}

/**
 * What is wrong, where, why, what to do, and what that is estimated to save.
 * @param {any} finding
 */
function findingItem(finding) {
  const place = [finding.where, finding.line].filter(Boolean).join(" · ");
  return element(
    "li",
    {},
    element("span", { class: `severity ${finding.severity}` }, finding.severity),
    " ",
    element("b", {}, visible(finding.message)),
    place !== "" && element("p", { class: "note" }, visible(shorten(place, 600))),
    finding.text !== "" && element("code", { class: "source-line" }, visible(shorten(finding.text, 300))),
    element("p", {}, visible(finding.evidence)),
    finding.advice !== "" && element("p", {}, visible(finding.advice)),
    finding.code !== "" && element("code", { class: "cure" }, ...codeLines(finding.code)),
    finding.saving !== "" && element("p", { class: "saving" }, visible(finding.saving)),
    element(
      "p",
      { class: "note" },
      visible(finding.recipe ? `rule ${finding.rule} · recipe ${finding.recipe}` : `rule ${finding.rule}`),
    ),
  );
}

/** @param {string} code */
function codeLines(code) {
  return code.split("\n").flatMap((line, i) => (i > 0 ? ["\n", visible(line)] : [visible(line)]));
}
