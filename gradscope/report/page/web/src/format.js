// Numbers to text, by the rules of gradscope/units.py: three significant digits and a unit, multiples of 1000.

/** @typedef {readonly (readonly [string, number])[]} Units */

export const NOT_MEASURED = "–";

/** @type {Units} */
const TIME_UNITS = [
  ["ns", 1],
  ["µs", 1e3],
  ["ms", 1e6],
  ["s", 1e9],
];
/** @type {Units} */
const BYTE_UNITS = [
  ["B", 1],
  ["kB", 1e3],
  ["MB", 1e6],
  ["GB", 1e9],
  ["TB", 1e12],
];
/** @type {Units} */
const COUNT_UNITS = [
  ["", 1],
  ["k", 1e3],
  ["M", 1e6],
  ["G", 1e9],
  ["T", 1e12],
];

/**
 * Nanoseconds as "540 ns", "12.3 µs", "1.24 ms".
 * @param {number | null | undefined} value
 */
export function formatTime(value) {
  return scaled(value, TIME_UNITS);
}

/**
 * Bytes as "512 B", "33.6 MB".
 * @param {number | null | undefined} value
 */
export function formatBytes(value) {
  return scaled(value, BYTE_UNITS);
}

/**
 * A number of things as "12", "3.26 M"; whole numbers below 10,000 are spelled out.
 * @param {number | null | undefined} value
 */
export function formatCount(value) {
  if (value != null && Math.abs(value) < 10_000 && Number.isInteger(value)) return String(value);
  return scaled(value, COUNT_UNITS).trimEnd();
}

/**
 * Calls per step: "12", or "0.5" where a step makes a call only now and then.
 * @param {number | null | undefined} value
 */
export function formatCalls(value) {
  if (value == null) return NOT_MEASURED;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value >= 0.1 ? value.toFixed(1) : value.toPrecision(2);
}

/**
 * A factor as "×2.10", "×350".
 * @param {number | null | undefined} value
 */
export function formatRatio(value) {
  return value == null ? NOT_MEASURED : `×${threeDigits(value)}`;
}

/**
 * A share of one as "12.3 %"; what is there but rounds to nothing reads "<0.1 %".
 * @param {number | null | undefined} share
 */
export function formatShare(share) {
  if (share == null) return NOT_MEASURED;
  if (share > 0 && share * 100 < 0.05) return "<0.1 %";
  return `${(share * 100).toFixed(1)} %`;
}

/**
 * A difference with its sign: "+1.24 ms", "−8.62 ms", "0".
 * @param {number} value
 * @param {(value: number) => string} format of its size
 */
export function formatSigned(value, format) {
  return value === 0 ? "0" : `${value > 0 ? "+" : "−"}${format(Math.abs(value))}`;
}

/**
 * One unit and number of decimals for a whole column, so that its digits line up.
 * @typedef {{ unit: string, factor: number, decimals: number }} Scale
 * @param {number} largest
 * @param {boolean} bytes
 * @returns {Scale}
 */
export function columnScale(largest, bytes) {
  const [unit, factor] = unitOf(largest / 10, bytes ? BYTE_UNITS : TIME_UNITS);
  return { unit, factor, decimals: factor === 1 ? 0 : largest / factor >= 100 ? 1 : 2 };
}

/**
 * A value in its column's unit, without it.
 * @param {number | null | undefined} value
 * @param {Scale} scale
 */
export function formatScaled(value, scale) {
  if (value == null) return NOT_MEASURED;
  if (value === 0) return "0";
  const least = 10 ** -scale.decimals;
  const shown = value / scale.factor;
  return shown > 0 && shown < least / 2 ? `<${least.toFixed(scale.decimals)}` : shown.toFixed(scale.decimals);
}

/**
 * Text from outside as it may be shown: control characters and marks that change the direction of writing are made
 * visible, so that a name cannot pass for another.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(HIDDEN_CHARACTERS, (char) => {
    const code = char.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// Control characters are the point here.
// eslint-disable-next-line no-control-regex
const HIDDEN_CHARACTERS = /[\0-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/**
 * @param {string} text
 * @param {number} most characters
 */
export function shorten(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

/**
 * @param {number | null | undefined} value
 * @param {Units} units
 */
function scaled(value, units) {
  if (value == null) return NOT_MEASURED;
  const [unit, factor] = unitOf(value, units);
  const shown = value / factor;
  return `${factor === 1 && Number.isInteger(value) ? shown.toFixed(0) : threeDigits(shown)} ${unit}`;
}

/**
 * The largest unit of which the value is at least one, after rounding: 999,950 ns is 1.00 ms, not 1000 µs.
 * @param {number} value
 * @param {Units} units
 * @returns {readonly [string, number]}
 */
function unitOf(value, units) {
  let chosen = units[0];
  for (const unit of units) if (Math.abs(value) >= unit[1] * 0.9995) chosen = unit;
  return chosen;
}

/** @param {number} value */
function threeDigits(value) {
  const magnitude = Math.abs(value);
  if (magnitude >= 99.95) return value.toFixed(0);
  return magnitude >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}
