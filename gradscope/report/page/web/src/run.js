// The data of the page, decoded: texts and paths in place of numbers, and what belongs to which layer.

import { readMemory } from "./memorydata.js";

/**
 * @typedef {number[]} Amounts forward ns, backward ns, saved bytes, in this order
 * @typedef {"backward" | "forward" | "both" | "saved"} Metric
 */
export const FORWARD = 0;
export const BACKWARD = 1;
export const SAVED = 2;

/**
 * @param {Amounts} amounts
 * @param {Metric} metric
 */
export function amountOf(amounts, metric) {
  if (metric === "backward") return amounts[BACKWARD];
  if (metric === "forward") return amounts[FORWARD];
  return metric === "both" ? amounts[FORWARD] + amounts[BACKWARD] : amounts[SAVED];
}

// Parts of the ledger that belong to no layer, and the phase of the operations in them.
export const PARTS = /** @type {const} */ ([
  ["outside_modules_ns", "backward"],
  ["communication_ns", "communication"],
  ["engine_ns", "engine"],
  ["unattributed_ns", "unattributed"],
]);

/**
 * Key, name and meaning of each part of the ledger, as every report has them.
 * @param {Run} run
 * @returns {[key: string, words: string, meaning: string][]}
 */
export function wordsOfLedger(run) {
  return run.info.ledger_words;
}

// Columns that make up a layer's backward.
const BACKWARD_COLUMNS = ["backward_self_ns", "recompute_ns", "accumulate_ns", "gradient_sum_ns", "hook_ns"];

// Phases whose operations make up a layer's backward.
export const LAYER_PHASES = new Set(["backward", "recompute", "gradient_sum", "accumulate", "hook"]);
const BACKWARD_PHASES = new Set([...LAYER_PHASES, "communication", "engine", "unattributed"]);

/**
 * What the amount of an operation counts as; -1 for phases that no metric shows (the optimizer).
 * @param {string} phase
 */
export function slotOf(phase) {
  if (phase === "forward") return FORWARD;
  if (phase === "saved") return SAVED;
  return BACKWARD_PHASES.has(phase) ? BACKWARD : -1;
}

/**
 * @typedef {object} Op one operation of one layer in one phase, a kernel, or one kind of saved tensor
 * @property {number} layer -1 outside every module
 * @property {string} phase
 * @property {string} name
 * @property {number} calls
 * @property {number} amount ns, or bytes where the phase is "saved"
 * @property {string} shape
 * @property {string} line where a saved tensor was first kept
 * @property {string} op of a kernel: the operation that launched it, "" where that was not recorded
 * @property {number} busy of a kernel: its part of that operation's time, ns
 * @property {number} was the amount in the run before; 0 where nothing is compared
 * @property {boolean} removed a row of the run before
 * @property {boolean} added a row of the run after, while two are compared
 *
 * @typedef {object} Line
 * @property {string} file
 * @property {number} line
 * @property {string} function
 * @property {string} text
 * @property {number} layer
 * @property {Amounts} amounts
 * @property {Amounts} was in the run before
 * @property {import("./change.js").Status} status
 *
 * @typedef {import("./memorydata.js").Holder} Holder
 * @typedef {import("./memorydata.js").Memory} Memory
 *
 * @typedef {object} Run
 * @property {Record<string, any>} info single figures and lists that are not tables
 * @property {string[]} paths
 * @property {string[]} names
 * @property {string[]} classes
 * @property {string[]} sources
 * @property {string[]} bounds what limits each layer, "" where that is not known
 * @property {number[]} parents -1 for a root
 * @property {number[]} calls
 * @property {number[]} parameters
 * @property {number[][]} steps own backward nodes in each measured step
 * @property {Amounts[]} own
 * @property {Record<string, number[]>} columns the other columns of numbers
 * @property {Record<string, string[]>} tied
 * @property {Op[][]} ops by layer; the last entry is of no layer
 * @property {Op[][]} kernels likewise
 * @property {Op[][]} saved likewise
 * @property {Line[]} lines
 * @property {Memory | null} memory
 * @property {Amounts} whole forward, backward and saved of the whole step
 * @property {Map<string, number>} byPath
 * @property {boolean} [estimated] it is what a finding estimates
 * @property {Run | null} baseline the run that this one is compared with
 * @property {import("./joined.js").Joined | null} joined what is known of the layers in that run
 */

/**
 * @param {any} record what gradscope/report/page/data.py wrote
 * @param {number} index of the run
 * @returns {Run}
 */
export function readRun(record, index) {
  const raw = record.runs[index];
  /** @type {string[]} */
  const strings = record.strings;
  /** @param {number} number */
  const text = (number) => (number < 0 ? "" : strings[number]);
  const { layers, memory } = raw;
  const count = layers.parent.length;
  const names = layers.name.map(text);
  const paths = readPaths(names, layers.parent);
  const saved = layers.saved_bytes;
  /** @type {Amounts[]} */
  const own = names.map((/** @type {string} */ _, /** @type {number} */ i) => [
    layers.forward_self_ns[i],
    BACKWARD_COLUMNS.reduce((sum, column) => sum + layers[column][i], 0),
    saved ? (saved[i] ?? 0) : 0,
  ]);
  return {
    info: raw,
    paths,
    names,
    classes: layers.class.map(text),
    sources: layers.source.map(text),
    bounds: layers.bound_by?.map(text) ?? [],
    parents: layers.parent,
    calls: layers.calls ?? [],
    parameters: layers.parameters ?? [],
    steps: layers.steps_ns,
    own,
    columns: layers,
    tied: layers.tied,
    ops: byLayer(readOps(raw.ops, text, "self_ns"), count),
    kernels: byLayer(readOps(raw.kernels, text, "device_ns"), count),
    saved: byLayer(memory ? readSaved(memory.saved, text) : [], count),
    lines: readLines(raw.lines, text),
    memory: memory ? readMemory(memory, text) : null,
    whole: [raw.step.forward_ns, raw.ledger.backward_ns, memory ? memory.saved_bytes : 0],
    byPath: new Map(paths.map((path, i) => [path, i])),
    baseline: null,
    joined: null,
  };
}

/**
 * A path is its parent's path, a dot, and its name.
 * @param {string[]} names
 * @param {number[]} parents
 */
function readPaths(names, parents) {
  /** @type {string[]} */
  const paths = new Array(names.length);
  /** @param {number} i @returns {string} */
  const pathOf = (i) => {
    if (paths[i] === undefined) {
      const above = parents[i] < 0 ? "" : pathOf(parents[i]);
      paths[i] = above ? `${above}.${names[i]}` : names[i];
    }
    return paths[i];
  };
  for (let i = 0; i < names.length; i++) pathOf(i);
  return paths;
}

/**
 * @param {any} table
 * @param {(number: number) => string} text
 * @param {string} column
 * @returns {Op[]}
 */
function readOps(table, text, column) {
  return table.layer.map((/** @type {number} */ layer, /** @type {number} */ i) => ({
    layer,
    phase: text(table.phase[i]),
    name: text(table.name[i]),
    calls: table.calls[i],
    amount: table[column][i],
    shape: table.shape ? text(table.shape[i]) : "",
    line: "",
    op: table.op ? text(table.op[i]) : "",
    busy: table.busy_ns ? (table.busy_ns[i] ?? 0) : 0,
    was: 0,
    removed: false,
    added: false,
  }));
}

/**
 * @param {any} table
 * @param {(number: number) => string} text
 * @returns {Op[]}
 */
function readSaved(table, text) {
  return table.layer.map((/** @type {number} */ layer, /** @type {number} */ i) => ({
    layer,
    phase: "saved",
    name: `${text(table.node[i])} · ${text(table.what[i])}`,
    calls: table.count[i],
    amount: table.bytes[i],
    shape: `${text(table.shape[i])} ${text(table.dtype[i])}`,
    line: text(table.line[i]),
    op: "",
    busy: 0,
    was: 0,
    removed: false,
    added: false,
  }));
}

/**
 * @param {any} table
 * @param {(number: number) => string} text
 * @returns {Line[]}
 */
function readLines(table, text) {
  return table.file.map((/** @type {number} */ file, /** @type {number} */ i) => ({
    file: text(file),
    line: table.line[i],
    function: text(table.function[i]),
    text: text(table.text[i]),
    layer: table.layer[i],
    amounts: [table.forward_ns[i], table.backward_ns[i], table.saved_bytes ? (table.saved_bytes[i] ?? 0) : 0],
    was: [0, 0, 0],
    status: "matched",
  }));
}

/**
 * @param {Op[]} ops
 * @param {number} count of layers
 * @returns {Op[][]}
 */
function byLayer(ops, count) {
  /** @type {Op[][]} */
  const lists = Array.from({ length: count + 1 }, () => []);
  for (const op of ops) lists[op.layer < 0 ? count : op.layer].push(op);
  return lists;
}
