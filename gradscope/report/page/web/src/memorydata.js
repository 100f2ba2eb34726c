// Memory over the step that measured it, decoded: what was allocated when, as what, and which layer ran then.

/**
 * @typedef {object} Holder
 * @property {number} layer
 * @property {string} category
 * @property {number} bytes
 *
 * @typedef {object} Span one layer at work, without the layers below it
 * @property {number} layer
 * @property {string} phase "forward", "backward" or "recompute"
 * @property {number} start ns
 * @property {number} end ns
 *
 * @typedef {object} Memory
 * @property {Record<string, any>} figures single figures of RUN.json's memory
 * @property {Holder[]} holders
 * @property {number[]} times
 * @property {number[]} bytes from each of the times on
 * @property {string[]} categories none where an older version wrote RUN.json
 * @property {number[][]} parts bytes by category, and by time; at each time they add up to `bytes`
 * @property {{ name: string, bytes: number[] }[]} owners those that hold most, by time; "" is nobody
 * @property {Span[]} spans in order of time; none overlaps another
 * @property {{ phase: string, start_ns: number, end_ns: number }[]} phases
 */

// Kinds of memory in the order in which they are stacked: what stays from step to step lies below.
export const MEMORY_KINDS = /** @type {const} */ ([
  ["weights", "weights, optimizer", ["parameters", "buffers", "optimizer state"]],
  ["gradients", "gradients", ["gradients"]],
  ["saved", "saved", ["saved activations"]],
  ["temporary", "temporary", ["other activations", "activation gradients", "temporaries"]],
  ["rest", "inputs and others", ["inputs", "other tensors"]],
]);

/**
 * @param {any} memory what gradscope/report/page/memorydata.py wrote
 * @param {(number: number) => string} text
 * @returns {Memory}
 */
export function readMemory(memory, text) {
  const { at_peak: held, timeline, spans } = memory;
  return {
    figures: memory,
    holders: held.layer.map((/** @type {number} */ layer, /** @type {number} */ i) => ({
      layer,
      category: text(held.category[i]),
      bytes: held.bytes[i],
    })),
    times: sums(timeline.ns ?? []),
    bytes: timeline.bytes ?? [],
    categories: (timeline.category ?? []).map(text),
    parts: (timeline.parts ?? []).map(sums),
    owners: (timeline.owned ?? []).map((/** @type {number[]} */ owned, /** @type {number} */ i) => ({
      name: text(timeline.owner[i]),
      bytes: sums(owned),
    })),
    spans: spans ? readSpans(spans, text) : [],
    phases: memory.phases,
  };
}

/**
 * @param {any} table
 * @param {(number: number) => string} text
 * @returns {Span[]}
 */
function readSpans(table, text) {
  const starts = sums(table.start_ns);
  return starts.map((start, i) => ({
    layer: table.layer[i],
    phase: text(table.phase[i]),
    start,
    end: start + table.ns[i],
  }));
}

/**
 * Numbers from their differences.
 * @param {number[]} steps
 */
function sums(steps) {
  let sum = 0;
  return steps.map((step) => (sum += step));
}

/**
 * The kind that a category is shown as.
 * @param {string} category
 */
export function kindOf(category) {
  const kind = MEMORY_KINDS.find(([, , categories]) =>
    /** @type {readonly string[]} */ (categories).includes(category),
  );
  return kind ? kind[0] : "rest";
}

/**
 * Where a category lies in the stack, counted from below.
 * @param {string} category
 */
export function placeOf(category) {
  const categories = /** @type {readonly string[]} */ (MEMORY_KINDS.flatMap((kind) => [...kind[2]]));
  return categories.includes(category) ? categories.indexOf(category) : categories.length;
}

/**
 * Bytes of each kind at the peak; they add up to it.
 * @param {Memory} memory
 */
export function peakKinds(memory) {
  return MEMORY_KINDS.map(([key, words]) => {
    const held = memory.holders.filter((holder) => kindOf(holder.category) === key);
    return { key, words, bytes: held.reduce((sum, holder) => sum + holder.bytes, 0) };
  });
}

/**
 * Of each kind the bytes below it in the stack, and those with its own, at each time.
 * @param {Memory} memory
 */
export function stackOf(memory) {
  let low = memory.times.map(() => 0);
  return MEMORY_KINDS.map(([key]) => {
    const high = [...low];
    memory.categories.forEach((category, row) => {
      if (kindOf(category) === key) memory.parts[row].forEach((bytes, i) => (high[i] += bytes));
    });
    const layer = { key, low, high };
    low = high;
    return layer;
  });
}

// Colours of owners, by the type of layer that has them elsewhere; who comes behind these is one of the others.
const OWNER_COLOURS = ["attention", "mlp", "norm", "embedding", "loss", "conv", "recurrent", "linear", "activation"];

/**
 * What the chart stacks, from below: bytes by time, which add up to those of the chart, with a name and a colour.
 * @param {Memory} memory
 * @param {boolean} byOwner else by kind
 * @returns {{ key: string, words: string, colour: string, bytes: number[] }[]}
 */
export function partsOf(memory, byOwner) {
  if (!byOwner) {
    return MEMORY_KINDS.map(([key, words], i) => {
      const { low, high } = stackOf(memory)[i];
      return { key, words, colour: `var(--memory-${key})`, bytes: high.map((value, at) => value - low[at]) };
    });
  }
  const rest = [...memory.bytes];
  const named = memory.owners.filter((owner) => owner.name !== "").slice(0, OWNER_COLOURS.length);
  const parts = named.map(({ name, bytes }, i) => {
    bytes.forEach((value, at) => (rest[at] -= value));
    return { key: name, words: name, colour: `var(--type-${OWNER_COLOURS[i]})`, bytes };
  });
  return [{ key: "", words: "others", colour: "var(--memory-rest)", bytes: rest }, ...parts];
}

/**
 * Number of the last of `times` that is not after `time`; 0 before the first.
 * @param {number[]} times in order
 * @param {number} time
 */
export function indexAt(times, time) {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return Math.max(low - 1, 0);
}

/**
 * Number of the point of the peak.
 * @param {Memory} memory
 */
export function peakIndex(memory) {
  const { peak_ns: time, peak_bytes: bytes } = memory.figures;
  const found = memory.times.findIndex((one, i) => one === time && memory.bytes[i] === bytes);
  return found >= 0 ? found : indexAt(memory.times, time);
}

/**
 * What ran at a moment; null where no layer did.
 * @param {Memory} memory
 * @param {number} time
 */
export function spanAt(memory, time) {
  return memory.spans.find((span) => span.start <= time && time < span.end) ?? null;
}

/**
 * The phase of the step at a moment.
 * @param {Memory} memory
 * @param {number} time
 */
export function phaseAt(memory, time) {
  return memory.phases.find((phase) => phase.start_ns <= time && time < phase.end_ns)?.phase ?? "other";
}

/**
 * `layers` and every layer below them.
 * @param {number[]} layers
 * @param {number[]} parents of every layer; -1 for a root
 */
export function withDescendants(layers, parents) {
  const found = new Set(layers);
  /** @param {number} layer */
  const isBelow = (layer) => {
    for (let at = layer; at >= 0; at = parents[at]) if (found.has(at)) return true;
    return false;
  };
  parents.forEach((_, layer) => {
    if (isBelow(layer)) found.add(layer);
  });
  return found;
}

/**
 * When any of `layers` ran, by phase; what is less than `gap` apart is one band. `ns` is time at work, without gaps.
 * @param {Memory} memory
 * @param {Set<number>} layers
 * @param {number} gap ns
 */
export function bandsOf(memory, layers, gap) {
  /** @type {{ phase: string, start: number, end: number, ns: number }[]} */
  const bands = [];
  for (const { layer, phase, start, end } of memory.spans) {
    if (!layers.has(layer)) continue;
    const last = bands.at(-1);
    if (last && last.phase === phase && start - last.end <= gap) {
      last.end = end;
      last.ns += end - start;
    } else bands.push({ phase, start, end, ns: end - start });
  }
  return bands;
}
