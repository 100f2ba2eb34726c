// The steps that were measured, side by side, with those that do not count.

import { element } from "./dom.js";
import { formatTime } from "./format.js";

/**
 * A bar for each step, as high as it was long; null where there is nothing to compare.
 * @param {import("./run.js").Run} run
 */
export function stepStrip({ info }) {
  if (!info.taken) return null;
  const { words, ns: times, left_out: leftOut, each } = info.taken;
  const longest = Math.max(...times, 1);
  const bars = times.map((/** @type {number} */ ns, /** @type {number} */ i) => {
    const name = each === 1 ? `step ${i + 1}` : `the longest of steps ${i * each + 1} to ${(i + 1) * each}`;
    return element("span", {
      class: leftOut[i] > 0 && "left-out",
      title: `${name}: ${formatTime(ns)}${leftOut[i] > 0 ? ", left out" : ""}`,
      "height%": Math.max((ns / longest) * 100, 4),
    });
  });
  return element(
    "section",
    { class: "panel steps", "aria-label": "Steps" },
    element("h2", {}, "Steps ", element("span", { class: "note" }, words)),
    element("div", { class: "taken", role: "img", "aria-label": words }, ...bars),
  );
}
