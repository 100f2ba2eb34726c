// The page: one state, and everything drawn from it. Flame, table, timeline and details select the same thing.

import { drawCrumbs, drawLegend, tipLines } from "./captions.js";
import { saveFile } from "./copy.js";
import { drawDetails } from "./details.js";
import { keepFocus, refill } from "./dom.js";
import { drawFixed } from "./fixed.js";
import { drawFindings, findingFits, markFindings, nodeAbove, nodesOf } from "./findings.js";
import { Flame } from "./flame.js";
import { changeOf, isCompared } from "./change.js";
import { formatBytes, formatShare, formatTime, shorten, visible } from "./format.js";
import { drawCards } from "./header.js";
import { ancestry, isWithin, nameWithRepeats } from "./nodes.js";
import { listen, tabKey } from "./keys.js";
import { amountOf } from "./run.js";
import { drawRoofline } from "./roofline.js";
import { matcher, queryFault, search } from "./search.js";
import { LISTS, makeShell } from "./shell.js";
import { drawSource } from "./source.js";
import { addressOf, colourOf, fromHash, nodeOf, toHash } from "./state.js";
import { METRIC_WORDS, countOf, toCsv } from "./table.js";
import { makeTable, tabsOf } from "./tables.js";
import { TableView } from "./tableview.js";
import { drawTimeline, markLayers } from "./timeline.js";
import { buildTree } from "./tree.js";
import { hasEstimate, runWithout } from "./whatif.js";

/**
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./nodes.js").Tree} Tree
 * @typedef {import("./state.js").ViewState} ViewState
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./run.js").Run} Run
 */

/** @type {Record<Metric, string>} */
const WHOLE_WORDS = {
  backward: "backward pass",
  forward: "forward pass",
  both: "forward and backward",
  saved: "saved for backward",
};

// A layer that a finding leads to is shown at least this wide, as a part of the flame.
const LEAST_SHARE = 0.08;

/** @type {readonly (keyof ViewState)[]} */
const STEPS = ["tab", "select", "zoom", "whatIf"];

// Tabs that have no rows to be searched.
const UNSEARCHED = new Set(["ledger", "device", "buckets", "fixed", "source", "roofline"]);

// Tables that no estimate changes.
const MEASURED = new Set(["ledger", "device", "buckets", "peak"]);

// Nodes from which on a search takes longer than a letter may, and how long the typing has to pause then.
const MANY = 2_000;
const PAUSE_MS = 100;

// A page of A4 between its margins, in CSS pixels.
const PAPER_WIDTH = 700;

export class Page {
  /**
   * @param {HTMLElement} place
   * @param {Run} single
   * @param {Run | null} joined the run with the one before it, where the page compares
   */
  constructor(place, single, joined) {
    this.single = single;
    this.joined = joined;
    this.state = fromHash(location.hash);
    /** @type {Map<Run, Map<boolean, Tree>>} */
    this.trees = new Map();
    /** @type {{ key: string, finding: any, run: Run } | null} the run as a finding estimates it */
    this.estimated = null;
    /** @type {{ key: string, found: import("./search.js").Found | null }} */
    this.searched = { key: "", found: null };
    /** @type {Map<string, number>} */
    this.largestChanges = new Map();
    this.matchAt = -1;
    this.typing = 0; // the timer of a search that waits for the typing to pause
    this.lastChange = "";
    this.tabs = tabsOf(joined ?? single);
    this.parts = makeShell(place, joined ?? single, this.tabs, {
      change: (changes) => this.change(changes),
      query: (query) => this.changeQuery(query),
      tabKey: (event) => tabKey(this, event),
      csv: () => saveFile(this.fileName(this.tab, "csv"), toCsv(this.makeTable()), "text/csv"),
      svg: () => saveFile(this.fileName("flame", "svg"), this.flame.toSvg(), "image/svg+xml"),
      png: () => this.flame.toPng((picture) => saveFile(this.fileName("flame", "png"), picture, "image/png")),
      measured: () => this.change({ whatIf: "" }),
      theme: () => this.switchTheme(),
    });
    this.flame = new Flame(this.parts.canvas, {
      zoom: (node, how) => this.zoomTo(node, how),
      select: (node, how) => this.select(node, how),
      hover: (frame, x, y) => this.hover(frame, x, y),
    });
    this.table = new TableView(this.parts.rows, {
      sort: (sort) => this.change({ sort }),
      select: (node) => this.selectInView(node),
    });
    listen(this);
    drawFindings(this.parts.lists.findings, joined ?? single, {
      go: (paths) => this.showLayers(paths),
      light: (found) => this.flame.lightUp(found),
      say: (words) => this.say(words),
      nodes: (finding) => nodesOf(this.run, this.tree, finding),
      whatIf: (key) => this.change({ whatIf: key === this.state.whatIf ? "" : key }),
    });
    if (joined?.joined?.fixed) drawFixed(this.parts.lists.fixed, joined.joined.fixed, (words) => this.say(words));
    this.draw();
    // Below what is seen first: drawn once that is on the screen.
    window.requestAnimationFrame(() => setTimeout(() => this.drawMemory()));
  }

  /** What is shown: the run alone, or beside the one before. */
  get run() {
    if (this.whatIf) return this.whatIf.run;
    return (this.state.compare && this.joined) || this.single;
  }

  /** The finding whose estimate is cut out, and the run without it; null: the step as it was measured. */
  get whatIf() {
    const key = this.state.whatIf;
    if (key !== (this.estimated?.key ?? "")) {
      if (this.estimated) this.trees.delete(this.estimated.run);
      const { findings } = this.single.info;
      const finding = findings.find((/** @type {any} */ one) => hasEstimate(this.single, one) && one.key === key);
      this.estimated = finding ? { key, finding, run: runWithout(this.single, finding) } : null;
    }
    return this.estimated;
  }

  get tree() {
    return this.treeOf(this.state.merged);
  }

  /** @param {boolean} merged */
  treeOf(merged) {
    const trees = this.trees.get(this.run) ?? new Map();
    this.trees.set(this.run, trees);
    if (!trees.has(merged)) trees.set(merged, buildTree(this.run, merged));
    return trees.get(merged);
  }

  get zoom() {
    return nodeOf(this.state.zoom, this.tree, this.run.byPath);
  }

  get selected() {
    return nodeOf(this.state.select, this.tree, this.run.byPath);
  }

  get found() {
    const { query, metric, merged, compare } = this.state;
    const key = `${compare} ${merged} ${metric} ${this.state.whatIf} ${query}`;
    if (key !== this.searched.key)
      this.searched = { key, found: search(this.tree.root, query, metric, this.run.paths, this.nodesOfLines(query)) };
    return this.searched.found;
  }

  /**
   * The layers of source lines of which the text fits.
   * @param {string} query
   */
  nodesOfLines(query) {
    const fits = matcher(query);
    const lines = this.run.lines.filter((line) => line.layer >= 0 && fits(`${line.file}:${line.line} ${line.text}`));
    return [...new Set(lines.map((line) => this.tree.layerNodes[line.layer]))];
  }

  /** The tab that is open. */
  get tab() {
    const { tab } = this.state;
    if (this.tabs.some(([key]) => key === tab)) return tab;
    return this.joined && !this.joined.joined?.fixed ? "layers" : this.tabs[0][0];
  }

  /** Light or dark: as chosen, or as the system has it. */
  get theme() {
    if (this.flame.width) return "light"; // on paper
    return this.state.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }

  get format() {
    return this.state.metric === "saved" ? formatBytes : formatTime;
  }

  /**
   * @param {Partial<ViewState>} changes
   * @param {string} [how] changes of one kind in a row, as by arrow keys, are one step of the history
   */
  change(changes, how = "") {
    const { compare: compared, merged, select: selected, owners, whatIf } = this.state;
    const before = this.state;
    this.state = { ...before, ...changes };
    const address = toHash(this.state) || location.pathname + location.search;
    // The Back button undoes a change of what is looked at, not of how.
    const goes = STEPS.some((key) => this.state[key] !== before[key]) && (how === "" || how !== this.lastChange);
    this.lastChange = how;
    if (goes) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
    const { cards, crumbs, legend, rows, details, lists, timeline } = this.parts;
    keepFocus([cards, crumbs, legend, rows, details, lists.source, timeline], () => {
      this.draw(Object.keys(changes).join() === "query");
      const { compare, merged: folded, owners: byOwner } = this.state;
      if (compared !== compare || merged !== folded || owners !== byOwner) this.drawMemory();
    });
    if (selected !== this.state.select) this.say(this.describe(this.selected));
    if (whatIf === this.state.whatIf) return;
    this.flame.lightUp(null); // what was lit are frames of the other tree
    this.say(this.parts.whatIfWords.textContent || "As measured");
  }

  readAddress() {
    this.state = fromHash(location.hash);
    this.lastChange = "";
    this.flame.lightUp(null);
    this.draw();
    this.drawMemory();
  }

  /**
   * Search; in a large tree once the typing pauses, for a letter must not wait for the one before it.
   * @param {string} query
   */
  changeQuery(query) {
    window.clearTimeout(this.typing);
    if (query === "" || this.tree.nodes.length < MANY) this.searchFor(query);
    else this.typing = setTimeout(() => this.searchFor(query), PAUSE_MS);
  }

  /** @param {string} query */
  searchFor(query) {
    this.typing = 0;
    this.matchAt = -1;
    this.change({ query });
  }

  /**
   * @param {Node} node
   * @param {string} [how]
   */
  zoomTo(node, how) {
    const address = addressOf(node, this.run.paths);
    this.change({ zoom: address, select: address }, how);
  }

  /**
   * @param {Node} node
   * @param {string} [how]
   */
  select(node, how) {
    this.change({ select: addressOf(node, this.run.paths) }, how);
  }

  /**
   * Select, and zoom out as far as is needed to see it.
   * @param {Node} node
   */
  selectInView(node) {
    let { zoom } = this;
    while (!isWithin(node, zoom) && zoom.parent) zoom = zoom.parent;
    this.change({ select: addressOf(node, this.run.paths), zoom: addressOf(zoom, this.run.paths) });
  }

  /** Say that an estimate is shown, and of what. */
  drawWhatIf() {
    const { whatIf, parts } = this;
    const { message = "", saving = "" } = whatIf?.finding ?? {};
    parts.whatIf.hidden = !whatIf;
    parts.whatIfWords.textContent = whatIf
      ? `What if: ${visible(message)} (${visible(saving)}). Estimated; limits, roofline, ledger and memory over time are as measured.`
      : "";
    parts.compare.disabled = whatIf !== null;
    for (const button of parts.lists.findings.querySelectorAll(".what-if"))
      button.setAttribute("aria-pressed", String(button.getAttribute("data-finding") === whatIf?.key));
  }

  /** @param {boolean} [searching] nothing but the query has changed, which the details do not know of */
  draw(searching = false) {
    const { parts, run, state } = this;
    document.documentElement.dataset.theme = this.theme;
    if (state.metric === "saved" && !run.memory) state.metric = "backward";
    this.drawWhatIf();
    drawCards(parts.cards, run, state.metric, this.whatIf?.finding ?? null, {
      metric: (metric) => this.change({ metric }),
      peak: () => this.showPeak(),
    });
    this.drawFlame();
    this.drawTable();
    if (!searching) this.drawSelection();
  }

  drawMemory() {
    drawTimeline(this.parts.timeline, this.run, this.tree, this.state.owners, {
      select: (node) => this.selectInView(node),
      owners: (owners) => this.change({ owners }),
    });
    markLayers(this.parts.timeline, this.run, this.selected.layers);
  }

  drawFlame() {
    const { parts, state, run, found } = this;
    const compared = isCompared(run, state.metric);
    const colour = colourOf(state, compared);
    const largestChange = compared ? this.largestChange() : 0;
    this.tree.root.label = `${WHOLE_WORDS[state.metric]}${this.whatIf ? ", estimated" : ""}`;
    const words = METRIC_WORDS[state.metric];
    parts.title.textContent = `${words[0].toUpperCase()}${words.slice(1)}${state.metric === "saved" ? "" : " time"} by layer`;
    parts.merged.checked = state.merged;
    parts.compare.checked = state.compare;
    parts.colour.value = colour;
    parts.order.value = state.order;
    if (parts.query.value !== state.query && !this.typing) parts.query.value = state.query;
    const whole = amountOf(run.whole, state.metric);
    const matches = countOf(found?.list.length ?? 0, "match").replace("matchs", "matches");
    const share = formatShare(found && whole > 0 ? found.amount / whole : 0);
    parts.found.textContent = found
      ? `${matches} · ${(found.list.length === 0 && queryFault(state.query)) || share}`
      : "";
    drawCrumbs(parts.crumbs, this.zoom, (node) => this.zoomTo(node));
    drawLegend(parts.legend, run, this.tree, state, colour, largestChange, (highlight) => this.change({ highlight }));
    this.flame.draw({
      root: this.tree.root,
      zoom: this.zoom,
      selected: this.selected,
      metric: state.metric,
      colour,
      changeOf: compared ? (node) => changeOf(run, node, state.metric, false) : null,
      largestChange,
      largestFirst: state.order === "largest",
      found,
      highlight: state.highlight,
      format: this.format,
    });
    parts.canvas.setAttribute("aria-label", `Flame graph of ${words}; selected: ${this.describe(this.selected)}`);
  }

  /** The largest real change, which has the full colour. */
  largestChange() {
    const { run, tree, state } = this;
    const key = `${state.merged} ${state.metric}`;
    let largest = this.largestChanges.get(key);
    if (largest === undefined) {
      largest = 0;
      for (const node of tree.nodes) {
        const change = changeOf(run, node, state.metric, false);
        if (change?.real && change.status !== "removed") largest = Math.max(largest, Math.abs(change.difference));
      }
      this.largestChanges.set(key, largest);
    }
    return largest;
  }

  makeTable(tab = this.tab) {
    const { run, tree, state, zoom, found } = this;
    return makeTable(tab, { run, tree, state, zoom, found });
  }

  /**
   * How many of a tab's rows fit the search.
   * @param {string} tab
   * @param {(text: string) => boolean} fits
   */
  countIn(tab, fits) {
    const { findings } = this.run.info;
    if (tab === "findings") return findings.filter((/** @type {any} */ one) => findingFits(one, fits)).length;
    return this.makeTable(tab).rows.filter((row) => !row.rest).length;
  }

  drawTable() {
    const { parts, state, zoom, tab } = this;
    const fits = state.query.trim() ? matcher(state.query) : null;
    for (const [key, words] of this.tabs) {
      const button = document.getElementById(`tab-${key}`);
      const count = fits && !UNSEARCHED.has(key) ? ` ${this.countIn(key, fits)}` : "";
      if (button) button.textContent = words + count;
      button?.setAttribute("aria-selected", String(key === tab));
      button?.setAttribute("tabindex", key === tab ? "0" : "-1");
    }
    const isList = LISTS.has(tab);
    for (const key of LISTS) parts.lists[key].hidden = key !== tab;
    if (tab === "source") this.drawSource();
    if (tab === "roofline")
      drawRoofline(parts.lists.roofline, this.run, this.tree, this.selected, (node) => this.selectInView(node));
    parts.rows.hidden = isList;
    parts.csv.hidden = isList;
    parts.summary.hidden = isList;
    parts.subtree.checked = state.subtree;
    parts.zoomedOnly.checked = state.zoomedOnly;
    parts.subtree.parentElement?.toggleAttribute("hidden", tab !== "layers");
    const fixed = zoom.kind === "all" || UNSEARCHED.has(tab) || isList;
    parts.zoomedOnly.parentElement?.toggleAttribute("hidden", fixed);
    markFindings(parts.lists.findings, this.run, this.tree, this.selected, fits);
    if (isList) return;
    parts.rows.setAttribute("aria-labelledby", `tab-${tab}`);
    const table = this.makeTable();
    parts.summary.textContent = table.summary;
    const chosen = this.selected;
    const identity = [
      tab,
      state.compare,
      state.whatIf,
      state.query,
      state.merged,
      state.metric,
      state.sort,
      state.subtree,
      state.zoomedOnly && state.zoom,
    ].join(" ");
    /** @param {import("./table.js").Row} row */
    const isMarked = (row) =>
      chosen.kind !== "all" &&
      row.node !== null &&
      (isWithin(row.node, chosen) || (row.node === chosen.parent && chosen.kind === "op"));
    this.table.draw(table, state.sort, isMarked, identity, `${tab}: ${table.summary}`);
  }

  drawSource() {
    const { parts, run, tree, state, selected } = this;
    const select = (/** @type {Node} */ node) => this.selectInView(node);
    drawSource(parts.lists.source, run, tree, state.metric, selected, this.format, select);
  }

  drawSelection() {
    const { selected } = this;
    markLayers(this.parts.timeline, this.run, selected.layers);
    drawDetails(this.parts.details, this.run, selected, this.repeatsOf(selected), this.state.metric, {
      select: (node) => this.selectInView(node),
      selectRepeat: (layer) => this.change({ merged: false, select: `layer/${this.run.paths[layer]}`, zoom: "all" }),
      finding: (index) => this.showFinding(index),
      close: () => this.change({ select: "all" }),
    });
  }

  /**
   * The layers that a node is one of: those it is folded from, or would be.
   * @param {Node} node
   */
  repeatsOf(node) {
    if (node.kind !== "layer" || node.layers.length > 1) return node.layers;
    const folded = this.treeOf(true);
    return folded.layerNodes[node.layers[0]]?.layers.includes(node.layers[0])
      ? folded.layerNodes[node.layers[0]].layers
      : node.layers;
  }

  /**
   * Select what holds all of these layers, folded, and bring it into sight.
   * @param {string[]} paths
   */
  showLayers(paths) {
    if (!this.state.merged) this.change({ merged: true });
    const node = nodeAbove(this.run, this.tree, paths);
    // A frame that is too thin to see has to be zoomed to.
    let zoom = isWithin(node, this.zoom) ? this.zoom : this.tree.root;
    const line = ancestry(node);
    const amount = amountOf(node.total, this.state.metric);
    while (zoom !== node && amount < LEAST_SHARE * amountOf(zoom.total, this.state.metric))
      zoom = line[line.indexOf(zoom) + 1];
    this.change({ select: addressOf(node, this.run.paths), zoom: addressOf(zoom, this.run.paths) });
    this.parts.canvas.closest(".flame")?.scrollIntoView({ block: "nearest" });
  }

  /** @param {number} index */
  showFinding(index) {
    this.change({ tab: "findings", sort: "" });
    const item = document.getElementById(`finding-${index}`);
    item?.closest("details")?.setAttribute("open", "");
    item?.scrollIntoView({ block: "nearest" });
    item?.querySelector("button")?.focus({ preventScroll: true });
  }

  /** @param {string} words for screen readers */
  say(words) {
    this.parts.said.textContent = words;
  }

  showPeak() {
    const { memory } = this.run;
    const layer = memory ? memory.figures.peak_layer : -1;
    const node = layer >= 0 ? this.tree.layerNodes[layer] : this.tree.root;
    this.change({ tab: "peak", sort: "" });
    this.selectInView(node);
  }

  /** @param {Node} node */
  describe(node) {
    const whole = amountOf(this.run.whole, this.state.metric);
    const value = amountOf(node.total, this.state.metric);
    return `${visible(shorten(nameWithRepeats(node), 200))}, ${this.format(value)}, ${formatShare(whole > 0 ? value / whole : 0)}`;
  }

  /**
   * @param {import("./layout.js").Frame | null} frame
   * @param {number} x
   * @param {number} y
   */
  hover(frame, x, y) {
    const { tip } = this.parts;
    tip.hidden = frame === null;
    if (!frame) return;
    refill(tip, ...tipLines(this.run, frame, this.format));
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > window.innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
  }

  /** @param {boolean} begins to be printed, or is again on the screen */
  print(begins) {
    this.flame.width = begins ? PAPER_WIDTH : 0;
    this.draw();
  }

  switchTheme() {
    this.change({ theme: this.theme === "dark" ? "light" : "dark" });
  }

  /**
   * @param {string} what
   * @param {string} kind
   */
  fileName(what, kind) {
    return `gradscope-${what}${this.whatIf && !MEASURED.has(what) ? "-what-if" : ""}.${kind}`;
  }

  /** @param {number} step */
  nextMatch(step) {
    if (this.typing) {
      window.clearTimeout(this.typing);
      this.searchFor(this.parts.query.value);
    }
    const list = this.found?.list ?? [];
    if (list.length === 0) return;
    this.matchAt = this.matchAt < 0 && step < 0 ? list.length - 1 : (this.matchAt + step + list.length) % list.length;
    this.selectInView(list[this.matchAt]);
  }
}
