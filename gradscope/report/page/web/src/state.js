// What the reader is looking at, and its form in the address: by layer path, so that it holds for another run too.

/**
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./nodes.js").Tree} Tree
 *
 * @typedef {object} ViewState
 * @property {Metric} metric
 * @property {boolean} merged
 * @property {"" | "type" | "ratio" | "change"} colour "" is by change while two runs are compared, else by type
 * @property {boolean} compare show the run before beside the run after, where the page has it
 * @property {"model" | "largest"} order
 * @property {string} query
 * @property {string} tab "" is the first: the findings, or while two runs are compared the layers
 * @property {boolean} subtree rows of layers count what is below them
 * @property {boolean} zoomedOnly
 * @property {string} sort column of the table, "-" before it for the largest first; "" is the tab's own order
 * @property {string} zoom address of a node, see addressOf
 * @property {string} select
 * @property {string} highlight a layer type
 * @property {boolean} owners memory is stacked by who owns it, not by what it is
 * @property {string} whatIf the finding whose estimate is cut out, by its key; "" is the step as measured
 * @property {"" | "light" | "dark"} theme "" is the system's
 */

/** @type {Readonly<ViewState>} */
export const START = {
  metric: "backward",
  merged: true,
  colour: "",
  compare: true,
  order: "model",
  query: "",
  tab: "",
  subtree: false,
  zoomedOnly: false,
  sort: "",
  zoom: "all",
  select: "all",
  highlight: "",
  owners: false,
  whatIf: "",
  theme: "",
};

/** @type {Record<string, readonly string[]>} */
const CHOICES = {
  metric: ["backward", "forward", "both", "saved"],
  colour: ["", "type", "ratio", "change"],
  order: ["model", "largest"],
  theme: ["", "light", "dark"],
};

/**
 * By what the flame is coloured.
 * @param {ViewState} state
 * @param {boolean} compared whether the metric is compared
 * @returns {"type" | "ratio" | "change"}
 */
export function colourOf(state, compared) {
  if (state.colour === "" || state.colour === "change") return compared ? "change" : "type";
  return state.colour;
}

/**
 * Only what differs from the start.
 * @param {ViewState} state
 */
export function toHash(state) {
  const parts = [];
  for (const key of /** @type {(keyof ViewState)[]} */ (Object.keys(START))) {
    if (state[key] === START[key]) continue;
    // Half of a surrogate pair cannot be in an address.
    const text = String(state[key]).replace(/[\ud800-\udfff]/gu, "\ufffd");
    parts.push(`${key}=${encodeURIComponent(text).replace(/%2F/g, "/")}`);
  }
  return parts.length > 0 ? `#${parts.join("&")}` : "";
}

/**
 * What is missing or has no meaning is as at the start.
 * @param {string} hash
 * @returns {ViewState}
 */
export function fromHash(hash) {
  /** @type {Record<string, any>} */
  const state = { ...START };
  for (const part of hash.replace(/^#/, "").split("&")) {
    const [key, raw] = [part.slice(0, part.indexOf("=")), part.slice(part.indexOf("=") + 1)];
    if (!Object.hasOwn(START, key)) continue;
    const value = decode(raw);
    if (typeof state[key] === "boolean") state[key] = value === "true";
    else if (!CHOICES[key] || CHOICES[key].includes(value)) state[key] = value;
  }
  return /** @type {ViewState} */ (state);
}

/** @param {string} text */
function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

/**
 * "all", "layer/transformer.h.0", "op/transformer.h.0/backward/MulBackward0" or "part/engine_ns"; a folded node goes by
 * the path of its first layer (an operation, of the first that has it), and is found again by it whether repeats are folded or not.
 * @param {Node} node
 * @param {string[]} paths
 * @returns {string}
 */
export function addressOf(node, paths) {
  if (node.kind === "all") return "all";
  if (node.kind === "part") return `part/${node.address}`;
  if (node.kind === "layer") return `layer/${paths[node.layers[0]]}`;
  const owner = node.rows[0].layer;
  const path = escapePart(owner < 0 ? node.address : paths[owner]);
  if (node.kind === "op") return `op/${path}/${node.phase}/${node.label}`;
  const launcher = node.parent?.kind === "op" ? escapePart(node.parent.label) : "";
  return `kernel/${path}/${node.phase}/${launcher}/${node.label}`;
}

/**
 * The node of an address; the root where there is none.
 * @param {string} address
 * @param {Tree} tree
 * @param {Map<string, number>} byPath
 * @returns {Node}
 */
export function nodeOf(address, tree, byPath) {
  const [kind, rest] = [address.slice(0, address.indexOf("/")), address.slice(address.indexOf("/") + 1)];
  if (kind === "part")
    return tree.root.children.find((node) => node.kind === "part" && node.address === rest) ?? tree.root;
  if (kind === "layer") return layerAt(rest, tree, byPath) ?? tree.root;
  if (kind !== "op" && kind !== "kernel") return tree.root;
  const match = (kind === "op" ? /^([^/]*)\/([a-z_]+)()\/(.*)$/s : /^([^/]*)\/([a-z_]+)\/([^/]*)\/(.*)$/s).exec(rest);
  if (!match) return tree.root;
  const [path, phase, launcher, name] = [decode(match[1]), match[2], decode(match[3]), match[4]];
  const part = tree.root.children.find((node) => node.kind === "part" && node.address === path);
  const owner = layerAt(path, tree, byPath) ?? part;
  /** @param {Node[] | undefined} among @param {string} label */
  const find = (among, label) =>
    among?.find((node) => node.kind !== "layer" && node.phase === phase && node.label === label);
  if (kind === "op") return find(owner?.children, name) ?? tree.root;
  return find((launcher ? find(owner?.children, launcher) : owner)?.kernels, name) ?? tree.root;
}

/** @param {string} text */
function escapePart(text) {
  return text.replaceAll("%", "%25").replaceAll("/", "%2F");
}

/**
 * @param {string} path
 * @param {Tree} tree
 * @param {Map<string, number>} byPath
 */
function layerAt(path, tree, byPath) {
  const layer = byPath.get(path);
  return layer === undefined ? undefined : tree.layerNodes[layer];
}
