// The tables of the device: what launched its kernels; and of DDP: what is reduced together.

import { countOf, shareOf } from "./table.js";

/**
 * @typedef {import("./run.js").Run} Run
 * @typedef {import("./table.js").Table} Table
 * @typedef {import("./table.js").Column} Column
 * @typedef {import("./table.js").Scene} Scene
 */

/** @param {Scene} scene @returns {Table} */
export function deviceTable({ run, tree }) {
  const { whole, words, parts } = run.info.device;
  const rows = parts.map((/** @type {[string, string, string, number]} */ [key, part, meaning, ns]) => ({
    cells: { part, meaning, time: ns, share: shareOf(ns, whole) },
    note: "",
    type: "",
    node: tree.root.children.find((node) => node.kind === "part" && node.address === key) ?? null,
  }));
  /** @type {Column[]} */
  const columns = [
    { key: "part", label: "Launched by", kind: "text" },
    { key: "meaning", label: "What it is", kind: "text", isWide: true, rank: 3 },
    { key: "time", label: "Device time", kind: "time" },
    { key: "share", label: "Share", of: "all kernels and copies", kind: "share" },
  ];
  return { columns, rows, summary: words, sort: "-time" };
}

/** @param {Scene} scene @returns {Table} */
export function bucketsTable({ run, tree }) {
  const buckets = /** @type {Record<string, any>[]} */ (run.info.buckets);
  const several = new Set(buckets.map(({ model }) => model)).size > 1;
  const rows = buckets.map((bucket) => {
    const layers = /** @type {number[]} */ (bucket.layers).filter((layer) => layer >= 0);
    return {
      cells: {
        number: bucket.number,
        model: bucket.model || "(the root)",
        layers: layers.map((layer) => run.paths[layer]).join(", "),
        bytes: bucket.bytes,
        last: bucket.last_at_ns,
        sent: bucket.begun_at_ns,
        waited: bucket.exposed_ns,
      },
      note: "",
      type: "",
      node: layers.length > 0 ? tree.layerNodes[layers[0]] : null,
    };
  });
  /** @type {Column[]} */
  const columns = [
    { key: "number", label: "Bucket", kind: "number", format: String },
    ...(several ? [/** @type {Column} */ ({ key: "model", label: "Model", kind: "text", isShort: true })] : []),
    { key: "layers", label: "Gradients of", kind: "text", isWide: true },
    { key: "bytes", label: "Size", kind: "bytes", rank: 3 },
    { key: "last", label: "Last there at", kind: "time", rank: 2 },
    { key: "sent", label: "Sent at", kind: "time" },
    { key: "waited", label: "Waited", kind: "time" },
  ];
  const summary = `${countOf(rows.length, "bucket")}: gradients that are reduced together; times from the beginning of backward`;
  return { columns, rows, summary, sort: "number" };
}
