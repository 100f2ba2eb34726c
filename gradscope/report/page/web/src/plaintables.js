// Tables that the report makes as they are shown: of the device, and of what DDP reduces together.

/**
 * @param {string} tab
 * @param {import("./table.js").Scene} scene
 * @returns {import("./table.js").Table}
 */
export function plainTable(tab, { run, tree }) {
  const table = run.info.tables[tab];
  const rows = table.rows.map((/** @type {[Record<string, any>, number | string]} */ [cells, place]) => ({
    cells,
    note: "",
    type: "",
    node:
      (typeof place === "number"
        ? tree.layerNodes[place]
        : tree.root.children.find((node) => node.kind === "part" && node.address === place)) ?? null,
  }));
  return { ...table, rows };
}
