// The findings: each in full in a tab of its own, and by name beside the details of a selection.

import { copyButton } from "./copy.js";
import { element, refill } from "./dom.js";
import { formatShare, shorten, visible } from "./format.js";
import { ledgerParts } from "./linetables.js";
import { ancestry, isWithin, layerOf } from "./nodes.js";
import { BACKWARD } from "./run.js";
import { lightOf } from "./search.js";
import { hasEstimate } from "./whatif.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./nodes.js").Tree} Tree
 *
 * @typedef {object} FindingsActions
 * @property {(paths: string[]) => void} go to the layers
 * @property {(found: import("./search.js").Found | null) => void} light the frames of layers
 * @property {(words: string) => void} say
 * @property {(finding: any) => Node[]} nodes of its layers
 * @property {(key: string) => void} whatIf draw the step without what a finding costs, or with it again
 */

/**
 * Whether a run has something to say of findings, were it only that there are none.
 * @param {Run} run
 */
export function hasFindings({ info }) {
  return info.findings.length > 0 || info.nothing_found.length > 0;
}

/**
 * Whether a finding fits a search.
 * @param {any} finding
 * @param {(text: string) => boolean} fits
 */
export function findingFits(finding, fits) {
  const { rule, message, where, line, text, evidence, advice, recipe } = finding;
  return fits([rule, message, where, line, text, evidence, advice, recipe, ...finding.layers].join(" "));
}

/**
 * Draw all of them, once: what depends on the view is marked by `markFindings`.
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {FindingsActions} actions
 */
export function drawFindings(place, run, actions) {
  if (!hasFindings(run)) return;
  /** @type {any} */
  const { findings, nothing_found: nothing, comment } = run.info;
  const items = findings.map((/** @type {any} */ finding, /** @type {number} */ i) =>
    findingItem(run, finding, i, actions),
  );
  const large = items.filter((/** @type {HTMLElement} */ _, /** @type {number} */ i) => !findings[i].small);
  const small = items.filter((/** @type {HTMLElement} */ _, /** @type {number} */ i) => findings[i].small);
  refill(
    place,
    element(
      "div",
      { class: "verdict" },
      element(
        "p",
        {},
        nothing.length > 0
          ? visible(nothing.join(" "))
          : `Savings are estimates${findings.some((/** @type {any} */ one) => one.recipe) ? "; gradscope fix measures those of recipes" : ""}.`,
      ),
      copyButton(nothing.length > 0 ? "Copy as GitHub comment" : "Copy all as GitHub comment", comment, actions.say),
    ),
    nothing.length > 0 && ledgerBar(run),
    large.length > 0 && element("ol", { class: "findings" }, ...large),
    small.length > 0 &&
      element(
        "details",
        { class: "small-findings" },
        element("summary", {}, `${large.length > 0 ? "and " : ""}${small.length} more: small ones, and hints`),
        element("ol", { class: "findings" }, ...small),
      ),
    element("p", { class: "empty", hidden: true }, "No finding fits the search."),
  );
}

/**
 * Show those that fit the search, and mark those of the selection.
 * @param {HTMLElement} place
 * @param {Run} run
 * @param {Tree} tree
 * @param {Node} selected
 * @param {((text: string) => boolean) | null} fits
 */
export function markFindings(place, run, tree, selected, fits) {
  let shown = 0;
  for (const item of /** @type {NodeListOf<HTMLElement>} */ (place.querySelectorAll(".findings > li"))) {
    const finding = run.info.findings[Number(item.dataset.finding)];
    item.hidden = fits !== null && !findingFits(finding, fits);
    shown += Number(!item.hidden);
    const here = selected.kind !== "all" && nodesOf(run, tree, finding).some((node) => isWithin(node, selected));
    item.classList.toggle("marked", here);
  }
  const small = /** @type {HTMLDetailsElement | null} */ (place.querySelector(".small-findings"));
  if (small && fits) small.open = true;
  place.querySelector(":scope > .empty")?.toggleAttribute("hidden", shown > 0 || fits === null);
}

/**
 * What is wrong, where, why, what to do, and what that is estimated to gain.
 * @param {Run} run
 * @param {any} finding
 * @param {number} index
 * @param {FindingsActions} actions
 */
function findingItem(run, finding, index, actions) {
  const light = () => actions.light(lightOf(actions.nodes(finding)));
  const dark = () => actions.light(null);
  const known = finding.layers.some((/** @type {string} */ path) => run.byPath.has(path));
  const where = element("bdi", {}, visible(shorten(finding.where, 600)));
  return element(
    "li",
    {
      id: `finding-${index}`,
      "data-finding": index,
      onmouseenter: light,
      onmouseleave: dark,
      onfocusin: light,
      onfocusout: dark,
    },
    element(
      "h3",
      {},
      element("span", { class: `severity ${finding.severity}` }, finding.severity),
      ` ${visible(finding.message)}`,
    ),
    element(
      "p",
      { class: "where" },
      known
        ? element("button", { type: "button", class: "link", onclick: () => actions.go(finding.layers) }, where)
        : where,
      finding.line !== "" && element("span", { class: "note" }, ` ${visible(finding.line)}`),
    ),
    finding.text !== "" && element("code", { class: "source-line" }, visible(shorten(finding.text, 300))),
    element("p", {}, visible(finding.evidence)),
    finding.saving !== "" &&
      element(
        "ul",
        { class: "gains" },
        ...finding.saving.split(" · ").map((/** @type {string} */ gain) => element("li", {}, visible(gain))),
      ),
    finding.advice !== "" && element("p", {}, visible(finding.advice)),
    finding.code !== "" && codeBox("cure", finding.code, actions.say),
    finding.command !== "" && codeBox("command", finding.command, actions.say),
    element(
      "p",
      { class: "note foot" },
      visible(finding.recipe ? `rule ${finding.rule} · recipe ${finding.recipe}` : `rule ${finding.rule}`),
      hasEstimate(run, finding) &&
        element(
          "button",
          {
            type: "button",
            class: "what-if",
            "aria-pressed": "false",
            "data-finding": finding.key,
            onclick: () => actions.whatIf(finding.key),
          },
          "What if",
        ),
      copyButton("Copy as GitHub comment", finding.comment, actions.say),
    ),
  );
}

/**
 * Code to copy, with the button that does it.
 * @param {string} kind
 * @param {string} code
 * @param {(words: string) => void} say
 */
function codeBox(kind, code, say) {
  const lines = code.split("\n").map(visible).join("\n");
  return element("div", { class: "code-box" }, element("code", { class: kind }, lines), copyButton("Copy", code, say));
}

/**
 * The nodes of a finding's layers; none for what is not of a layer.
 * @param {Run} run
 * @param {Tree} tree
 * @param {any} finding
 * @returns {Node[]}
 */
export function nodesOf(run, tree, finding) {
  return finding.layers.flatMap((/** @type {string} */ path) => tree.layerNodes[run.byPath.get(path) ?? -1] ?? []);
}

/**
 * The smallest node that holds all layers of these paths; the root where there are none.
 * @param {Run} run
 * @param {Tree} tree
 * @param {string[]} paths
 */
export function nodeAbove(run, tree, paths) {
  const nodes = nodesOf(run, tree, { layers: paths });
  const line = nodes.length > 0 ? ancestry(nodes[0]).reverse() : [];
  return line.find((node) => nodes.every((one) => isWithin(one, node))) ?? tree.root;
}

/**
 * Findings of the layer and the layers below it by name, or of the whole step all of them; a click opens one.
 * @param {Run} run
 * @param {Node} node
 * @param {(index: number) => void} open
 */
export function findingLinks(run, node, open) {
  const layer = layerOf(node);
  if (!layer) return null;
  const paths = layer.layers.map((index) => run.paths[index]);
  /** @param {string} path */
  const isHere = (path) => paths.some((own) => own === "" || path === own || path.startsWith(`${own}.`));
  const items = run.info.findings.flatMap((/** @type {any} */ finding, /** @type {number} */ i) => {
    if (!finding.layers.some(isHere)) return [];
    const words = element(
      "button",
      { type: "button", class: "link", onclick: () => open(i) },
      visible(finding.message),
    );
    const severity = element("span", { class: `severity ${finding.severity}` }, finding.severity);
    return element(
      "li",
      {},
      severity,
      " ",
      words,
      finding.worth && element("span", { class: "note" }, ` ${finding.worth}`),
    );
  });
  return (
    items.length > 0 &&
    element("div", {}, element("h3", {}, "Findings"), element("ul", { class: "finding-links" }, ...items))
  );
}

/**
 * What the backward pass is made of, as one bar.
 * @param {Run} run
 */
function ledgerBar(run) {
  const whole = run.whole[BACKWARD];
  const bar = element("div", { class: "stack", "aria-hidden": "true" });
  const list = element("ul", { class: "legend" });
  for (const { key, words, meaning, ns } of ledgerParts(run).filter((part) => part.ns > 0)) {
    const [share, type] = [whole > 0 ? ns / whole : 0, `ledger-${key.replace("_ns", "")}`];
    bar.append(element("span", { class: type, "width%": share * 100 }));
    const swatch = element("span", { class: `swatch ${type}` });
    list.append(element("li", { title: meaning }, swatch, `${words} ${formatShare(share)}`));
  }
  return element("div", { class: "made-of" }, bar, list);
}
