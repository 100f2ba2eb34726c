// The page: one state, and everything drawn from it. Flame, table, timeline and details select the same thing.

import { drawCrumbs, drawLegend, tipLines } from "./captions.js";
import { drawDetails } from "./details.js";
import { element, keepFocus, refill } from "./dom.js";
import { Flame } from "./flame.js";
import { formatBytes, formatShare, formatTime, shorten, visible } from "./format.js";
import { drawCards, drawFirstLook } from "./header.js";
import { isWithin, nameWithRepeats } from "./nodes.js";
import { amountOf, readRun } from "./run.js";
import { search } from "./search.js";
import { makeShell } from "./shell.js";
import { addressOf, fromHash, nodeOf, toHash } from "./state.js";
import { METRIC_WORDS, countOf, toCsv } from "./table.js";
import { makeTable, tabsOf } from "./tables.js";
import { TableView } from "./tableview.js";
import { drawTimeline, markLayers } from "./timeline.js";
import { buildTree } from "./tree.js";

/**
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./nodes.js").Tree} Tree
 * @typedef {import("./state.js").ViewState} ViewState
 * @typedef {import("./run.js").Metric} Metric
 */

const METRICS = /** @type {const} */ (["backward", "forward", "both", "saved"]);

/** @type {Record<Metric, string>} */
const WHOLE_WORDS = {
  backward: "backward pass",
  forward: "forward pass",
  both: "forward and backward",
  saved: "saved for backward",
};

/** The page of one run. */
class Page {
  /**
   * @param {HTMLElement} place
   * @param {import("./run.js").Run} run
   */
  constructor(place, run) {
    this.run = run;
    this.state = fromHash(location.hash);
    /** @type {Map<boolean, Tree>} */
    this.trees = new Map();
    /** @type {{ key: string, found: import("./search.js").Found | null }} */
    this.searched = { key: "", found: null };
    this.matchAt = -1;
    this.tabs = tabsOf(run);
    this.parts = makeShell(place, run, this.tabs, {
      change: (changes) => this.change(changes),
      query: (query) => this.changeQuery(query),
      tabKey: (event) => this.tabKey(event),
      csv: () => this.saveCsv(),
      theme: () => this.switchTheme(),
    });
    this.flame = new Flame(this.parts.canvas, {
      zoom: (node) => this.zoomTo(node),
      select: (node) => this.select(node),
      hover: (frame, x, y) => this.hover(frame, x, y),
    });
    this.table = new TableView(this.parts.rows, {
      sort: (sort) => this.change({ sort }),
      select: (node) => this.selectInView(node),
    });
    this.listen();
    this.draw();
    drawTimeline(this.parts.timeline, run, (layer) => this.selectInView(this.tree.layerNodes[layer]));
  }

  get tree() {
    let tree = this.trees.get(this.state.merged);
    if (!tree) {
      tree = buildTree(this.run, this.state.merged);
      this.trees.set(this.state.merged, tree);
    }
    return tree;
  }

  get zoom() {
    return nodeOf(this.state.zoom, this.tree, this.run.byPath);
  }

  get selected() {
    return nodeOf(this.state.select, this.tree, this.run.byPath);
  }

  get found() {
    const { query, metric, merged } = this.state;
    const key = `${merged} ${metric} ${query}`;
    if (key !== this.searched.key)
      this.searched = { key, found: search(this.tree.root, query, metric, this.run.paths) };
    return this.searched.found;
  }

  get format() {
    return this.state.metric === "saved" ? formatBytes : formatTime;
  }

  /** @param {Partial<ViewState>} changes */
  change(changes) {
    this.state = { ...this.state, ...changes };
    history.replaceState(null, "", toHash(this.state) || location.pathname + location.search);
    const { cards, first, crumbs, legend, rows, details } = this.parts;
    keepFocus([cards, first, crumbs, legend, rows, details], () => this.draw());
  }

  /** @param {string} query */
  changeQuery(query) {
    this.matchAt = -1;
    this.change({ query });
  }

  /** @param {Node} node */
  zoomTo(node) {
    const address = addressOf(node, this.run.paths);
    this.change({ zoom: address, select: address });
  }

  /** @param {Node} node */
  select(node) {
    this.change({ select: addressOf(node, this.run.paths) });
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

  draw() {
    const { parts, run, state } = this;
    document.documentElement.dataset.theme = state.theme;
    if (state.metric === "saved" && !run.memory) state.metric = "backward";
    if (!this.tabs.some(([key]) => key === state.tab)) state.tab = "layers";
    drawCards(parts.cards, run, state.metric, {
      metric: (metric) => this.change({ metric }),
      peak: () => this.showPeak(),
    });
    drawFirstLook(parts.first, run, {
      select: (path) => this.selectInView(this.tree.layerNodes[run.byPath.get(path) ?? -1] ?? this.tree.root),
      tab: (tab) => this.change({ tab, sort: "" }),
    });
    this.drawFlame();
    this.drawTable();
    this.drawSelection();
  }

  drawFlame() {
    const { parts, state, run, found } = this;
    this.tree.root.label = WHOLE_WORDS[state.metric];
    const words = METRIC_WORDS[state.metric];
    parts.title.textContent = `${words[0].toUpperCase()}${words.slice(1)}${state.metric === "saved" ? "" : " time"} by layer`;
    parts.merged.checked = state.merged;
    parts.colour.value = state.colour;
    parts.order.value = state.order;
    if (parts.query.value !== state.query) parts.query.value = state.query;
    const whole = amountOf(run.whole, state.metric);
    parts.found.textContent = found
      ? `${countOf(found.list.length, "match").replace("matchs", "matches")} · ${formatShare(whole > 0 ? found.amount / whole : 0)}`
      : "";
    drawCrumbs(parts.crumbs, this.zoom, (node) => this.zoomTo(node));
    drawLegend(parts.legend, run, this.tree, state, (highlight) => this.change({ highlight }));
    this.flame.draw({
      root: this.tree.root,
      zoom: this.zoom,
      selected: this.selected,
      metric: state.metric,
      colour: state.colour,
      largestFirst: state.order === "largest",
      found,
      highlight: state.highlight,
      format: this.format,
    });
    parts.canvas.setAttribute("aria-label", `Flame graph of ${words}; selected: ${this.describe(this.selected)}`);
  }

  makeTable() {
    const { run, tree, state, zoom, found } = this;
    return makeTable(state.tab, { run, tree, state, zoom, found });
  }

  drawTable() {
    const { parts, state, zoom } = this;
    for (const [key] of this.tabs) {
      const button = document.getElementById(`tab-${key}`);
      button?.setAttribute("aria-selected", String(key === state.tab));
      button?.setAttribute("tabindex", key === state.tab ? "0" : "-1");
    }
    parts.rows.setAttribute("aria-labelledby", `tab-${state.tab}`);
    parts.subtree.checked = state.subtree;
    parts.zoomedOnly.checked = state.zoomedOnly;
    parts.subtree.parentElement?.toggleAttribute("hidden", state.tab !== "layers");
    parts.zoomedOnly.parentElement?.toggleAttribute("hidden", zoom.kind === "all" || state.tab === "ledger");
    const table = this.makeTable();
    parts.summary.textContent = table.summary;
    const chosen = this.selected;
    const identity = [
      state.tab,
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
    this.table.draw(table, state.sort, isMarked, identity, `${state.tab}: ${table.summary}`);
  }

  drawSelection() {
    const { selected } = this;
    markLayers(this.parts.timeline, this.run, selected.layers);
    drawDetails(this.parts.details, this.run, selected, this.repeatsOf(selected), this.state.metric, {
      select: (node) => this.selectInView(node),
      selectRepeat: (layer) => this.change({ merged: false, select: `layer/${this.run.paths[layer]}`, zoom: "all" }),
    });
  }

  /**
   * The layers that a node is one of: those it is folded from, or would be.
   * @param {Node} node
   */
  repeatsOf(node) {
    if (node.kind !== "layer" || node.layers.length > 1) return node.layers;
    let folded = this.trees.get(true);
    if (!folded) {
      folded = buildTree(this.run, true);
      this.trees.set(true, folded);
    }
    return folded.layerNodes[node.layers[0]]?.layers.includes(node.layers[0])
      ? folded.layerNodes[node.layers[0]].layers
      : node.layers;
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

  switchTheme() {
    const dark = this.state.theme ? this.state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.change({ theme: dark ? "light" : "dark" });
  }

  saveCsv() {
    const url = URL.createObjectURL(new Blob([toCsv(this.makeTable())], { type: "text/csv;charset=utf-8" }));
    const link = element("a", { href: url, download: `gradscope-${this.state.tab}.csv` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  listen() {
    document.addEventListener("keydown", (event) => this.key(event));
    this.parts.query.addEventListener("keydown", (event) => this.searchKey(event));
    window.addEventListener("hashchange", () => {
      this.state = fromHash(location.hash);
      this.draw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawFlame());
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      this.drawFlame();
      if (width !== window.innerWidth)
        drawTimeline(this.parts.timeline, this.run, (layer) => this.selectInView(this.tree.layerNodes[layer]));
      width = window.innerWidth;
    });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || this.parts.help.open) return;
    if (target.tagName === "INPUT" && target.getAttribute("type") === "search") return;
    if (target.tagName === "SELECT") return;
    const metric = METRICS[Number(event.key) - 1];
    if (event.key === "/") this.parts.query.focus();
    else if (event.key === "?") this.parts.help.showModal();
    else if (event.key === "m") this.change({ merged: !this.state.merged });
    else if (metric && (metric !== "saved" || this.run.memory)) this.change({ metric });
    else return;
    event.preventDefault();
  }

  /** @param {KeyboardEvent} event */
  searchKey(event) {
    if (event.key === "Escape") {
      this.changeQuery("");
      this.parts.canvas.focus();
    } else if (event.key === "Enter") this.nextMatch(event.shiftKey ? -1 : 1);
    else return;
    event.preventDefault();
  }

  /** @param {number} step */
  nextMatch(step) {
    const list = this.found?.list ?? [];
    if (list.length === 0) return;
    this.matchAt = this.matchAt < 0 && step < 0 ? list.length - 1 : (this.matchAt + step + list.length) % list.length;
    this.selectInView(list[this.matchAt]);
  }

  /** @param {KeyboardEvent} event */
  tabKey(event) {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (step === 0) return;
    const at = this.tabs.findIndex(([key]) => key === this.state.tab);
    const [key] = this.tabs[(at + step + this.tabs.length) % this.tabs.length];
    this.change({ tab: key, sort: "" });
    document.getElementById(`tab-${key}`)?.focus();
    event.preventDefault();
  }
}

function start() {
  const [place, data] = [document.getElementById("app"), document.getElementById("data")];
  if (place && data) new Page(place, readRun(JSON.parse(data.textContent ?? ""), 0));
}

start();
