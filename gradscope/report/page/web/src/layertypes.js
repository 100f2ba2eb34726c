// What kind of layer a class is, from its name: what the flame's colours mean.

/** @typedef {{ key: string, words: string, pattern: RegExp | null, encloses: boolean }} LayerType */

/** @type {LayerType[]} in the order in which they claim a class; those that enclose also claim the layers below */
export const LAYER_TYPES = [
  { key: "attention", words: "Attention", pattern: /attention|attn/i, encloses: true },
  { key: "mlp", words: "MLP", pattern: /mlp|feed_?forward|ffn|swiglu|geglu|experts?$/i, encloses: true },
  { key: "norm", words: "Norm", pattern: /norm/i, encloses: false },
  { key: "embedding", words: "Embedding", pattern: /embed/i, encloses: false },
  { key: "loss", words: "Loss", pattern: /loss|criterion/i, encloses: false },
  { key: "conv", words: "Convolution", pattern: /conv/i, encloses: false },
  { key: "recurrent", words: "Recurrent", pattern: /rnn|lstm|gru/i, encloses: true },
  { key: "linear", words: "Linear", pattern: /linear|dense$|head$|proj/i, encloses: false },
  {
    key: "activation",
    words: "Activation, dropout, pooling",
    pattern: /elu|gelu|relu|silu|mish|sigmoid|tanh|softmax|activation|dropout|droppath|pool/i,
    encloses: false,
  },
  { key: "other", words: "Other layers", pattern: null, encloses: false },
  { key: "outside", words: "Outside the layers", pattern: null, encloses: false },
];

const ENCLOSING = new Set(LAYER_TYPES.filter((type) => type.encloses).map((type) => type.key));

/**
 * @param {string} className
 * @returns {string} key of a layer type
 */
export function typeOfClass(className) {
  return LAYER_TYPES.find((type) => type.pattern?.test(className))?.key ?? "other";
}

/**
 * The type by class, and of a container (a Sequential named mlp) by its name.
 * @param {string} className
 * @param {string} name last part of the path
 */
export function typeOfLayer(className, name) {
  const type = typeOfClass(className);
  const named = type === "other" ? typeOfClass(name) : type;
  return type === "other" && !ENCLOSING.has(named) ? type : named;
}

/**
 * The type of a layer inside another: what is inside attention counts as attention.
 * @param {string} above
 * @param {string} own
 */
export function typeWithin(above, own) {
  return ENCLOSING.has(above) ? above : own;
}
