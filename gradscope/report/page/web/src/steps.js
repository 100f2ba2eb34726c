// The steps that were measured, side by side, with those that do not count.

import { element } from "./dom.js";
import { countOf } from "./table.js";
import { formatTime } from "./format.js";

/**
 * A bar for each step, as high as it was long; null where there is nothing to compare.
 * @param {import("./run.js").Run} run
 */
export function stepStrip({ info }) {
  /** @type {{ ns: number, left_out: boolean }[]} */
  const taken = info.step.taken ?? [];
  if (taken.length < 2) return null;
  const times = taken.map((step) => step.ns);
  const longest = Math.max(...times, 1);
  const leftOut = taken.filter((step) => step.left_out).length;
  const range = `${formatTime(Math.min(...times))} to ${formatTime(longest)}`;
  const words = `${countOf(taken.length, "step")}, ${range}${leftOut ? `; ${leftOut} left out: interrupted by the system` : ""}`;
  const bars = taken.map(({ ns, left_out: out }, i) =>
    element("span", {
      class: out ? "step left-out" : "step",
      title: `step ${i + 1}: ${formatTime(ns)}${out ? ", left out" : ""}`,
      "height%": Math.max((ns / longest) * 100, 4),
    }),
  );
  return element(
    "section",
    { class: "panel steps", "aria-label": "Steps" },
    element("h2", {}, "Steps ", element("span", { class: "note" }, words)),
    element("div", { class: "strip", role: "img", "aria-label": words }, ...bars),
  );
}
