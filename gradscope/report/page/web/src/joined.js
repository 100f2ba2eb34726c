// Two runs as one: the layers of both, matched by path, with the amounts of the run after and, beside them, of the run
// before. Layers that only the run before has come last and have no amounts of their own.

import { groupKey } from "./change.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./run.js").Amounts} Amounts
 * @typedef {import("./run.js").Op} Op
 * @typedef {import("./run.js").Line} Line
 * @typedef {import("./change.js").Status} Status
 *
 * @typedef {object} Joined
 * @property {[string, string]} names of the runs before and after
 * @property {string[]} warnings what the runs differ in besides their code
 * @property {string[]} notes
 * @property {{ sections: any[], diff: string } | null} fixed what a fix replaced between the two
 * @property {Amounts} whole of the step before
 * @property {Amounts[]} was own amounts before, by layer
 * @property {Status[]} statuses by layer
 * @property {string[]} classesBefore "" where the run before lacks the layer
 * @property {Record<string, (number | null)[]>} noise limits by metric, then by layer of the run after
 * @property {Map<string, Record<string, number | null>>} groups limits of repeats as one, by their numbers
 * @property {Record<string, number | null>} totals limits of the step and of the ledger's rows
 */

/**
 * @param {Run} after
 * @param {Run} before
 * @param {any} comparison what gradscope/compare/page.py wrote
 * @returns {Run}
 */
export function joinRuns(after, before, comparison) {
  const removed = before.paths.map((_, i) => i).filter((i) => !after.byPath.has(before.paths[i]));
  const byPath = new Map(after.byPath);
  for (const i of removed) byPath.set(before.paths[i], byPath.size);
  const numbers = before.paths.map((path) => byPath.get(path) ?? -1);
  const count = byPath.size;
  /** @template Value @param {Value[]} values @param {Value[]} others */
  const append = (values, others) => [...values, ...removed.map((i) => others[i])];
  const paths = append(after.paths, before.paths);
  const inBefore = paths.map((path) => before.byPath.get(path) ?? -1);
  const parents = [...after.parents, ...removed.map((i) => (before.parents[i] < 0 ? -1 : numbers[before.parents[i]]))];
  return {
    ...after,
    paths,
    byPath,
    parents,
    names: append(after.names, before.names),
    classes: append(after.classes, before.classes),
    sources: append(after.sources, before.sources),
    calls: [...after.calls, ...removed.map(() => 0)],
    parameters: append(after.parameters, before.parameters),
    steps: [...after.steps, ...removed.map(() => [])],
    own: [...after.own, ...removed.map(() => [0, 0, 0])],
    ops: joinOps(after.ops, before.ops, numbers, count),
    kernels: joinOps(after.kernels, before.kernels, numbers, count),
    saved: joinOps(after.saved, before.memory && after.memory ? before.saved : [], numbers, count),
    lines: joinLines(after.lines, before.lines, numbers),
    baseline: before,
    joined: {
      names: comparison.names,
      warnings: comparison.warnings,
      notes: comparison.notes,
      fixed: comparison.fix ?? null,
      whole: before.whole,
      was: inBefore.map((i) => (i < 0 ? [0, 0, 0] : before.own[i])),
      statuses: paths.map((path, i) =>
        i >= after.paths.length ? "removed" : before.byPath.has(path) ? "matched" : "new",
      ),
      classesBefore: inBefore.map((i) => (i < 0 ? "" : before.classes[i])),
      noise: comparison.noise,
      groups: new Map(comparison.groups.map((/** @type {any} */ group) => [groupKey(group.layers), group])),
      totals: comparison.totals,
    },
  };
}

/**
 * Rows of both runs; nodes of the tree sum those of equal name and phase.
 * @param {Op[][]} after
 * @param {Op[][]} before
 * @param {number[]} numbers of the layers before in both
 * @param {number} count of layers of both
 * @returns {Op[][]}
 */
function joinOps(after, before, numbers, count) {
  /** @type {Op[][]} */
  const lists = Array.from({ length: count + 1 }, () => []);
  after.forEach((list, layer) => {
    const place = layer === after.length - 1 ? count : layer;
    for (const op of list) lists[place].push({ ...op, added: true });
  });
  for (const op of before.flat()) {
    const layer = op.layer < 0 ? -1 : numbers[op.layer];
    const none = { amount: 0, calls: 0, busy: 0 };
    lists[layer < 0 ? count : layer].push({ ...op, ...none, layer, was: op.amount, removed: true });
  }
  return lists;
}

/**
 * A line is the same where file, function and text are, even if it moved; without its text, where the number is.
 * @param {Line[]} after
 * @param {Line[]} before
 * @param {number[]} numbers
 * @returns {Line[]}
 */
function joinLines(after, before, numbers) {
  /** @type {Line[]} */
  const lines = after.map((line) => ({ ...line, status: "new" }));
  const left = new Set(before);
  for (const keyOf of [keyByPlace, keyByText]) {
    /** @type {Map<string, Line[]>} */
    const waiting = new Map();
    for (const line of left) waiting.set(keyOf(line), [...(waiting.get(keyOf(line)) ?? []), line]);
    for (const line of lines) {
      const match = line.status === "new" && keyOf(line) !== "" ? waiting.get(keyOf(line))?.shift() : undefined;
      if (!match) continue;
      left.delete(match);
      line.was = match.amounts;
      line.status = "matched";
    }
  }
  for (const line of left) {
    const layer = line.layer < 0 ? -1 : numbers[line.layer];
    lines.push({ ...line, layer, amounts: [0, 0, 0], was: line.amounts, status: "removed" });
  }
  return lines;
}

/** @param {Line} line */
function keyByPlace(line) {
  return [line.file, line.function, line.text, line.line].join("\n");
}

/** @param {Line} line "" where it cannot be known by its text */
function keyByText(line) {
  return line.text === "" ? "" : [line.file, line.function, line.text].join("\n");
}
