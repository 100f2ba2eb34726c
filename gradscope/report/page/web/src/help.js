// The help: keys, and how to read the page.

import { element } from "./dom.js";

const KEYS = /** @type {const} */ ([
  ["/", "search layers, operations, kernels and lines, /…/ by a regular expression; Enter: next match, Esc: clear"],
  ["1 2 3 4", "backward, forward, both, saved memory"],
  ["m", "merge repeated layers, or show each"],
  ["c", "compare with the run before, or show this one alone"],
  ["← → ↑ ↓", "in the flame: go from frame to frame"],
  ["Enter", "in the flame: zoom to the selected frame"],
  ["Esc", "in the flame: zoom out by one"],
  ["Home", "in the flame: the whole step"],
  ["Ctrl + wheel", "on the flame: zoom, as does the wheel alone once the flame was clicked"],
  ["Back", "what was selected, zoomed to or open before"],
  ["?", "this help"],
]);

const READING = [
  "A frame’s width is its part of the metric above: a layer, the layers below it, then its own operations, lighter, and device kernels, lightest.",
  "Layers own what they do themselves; the table’s rows add up to 100 % of the ledger unless “include sub-layers” is on.",
  "Backward over forward near 2 is usual for matrix products; far above is worth a look.",
  "Limit is what a layer’s own operations would take at this machine’s limits; Bound by says what holds them back.",
  "A grey frame is a run of frames thinner than a pixel: zoom in to see them.",
  "The address keeps what you look at: copy it with the file’s place to show it to somebody.",
];

export function makeHelp() {
  const rows = KEYS.map(([keys, words]) =>
    element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, keys)), element("td", {}, words)),
  );
  const dialog = element(
    "dialog",
    { "aria-labelledby": "help-title" },
    element("h2", { id: "help-title" }, "Keys and how to read this page"),
    element("table", {}, element("tbody", {}, ...rows)),
    element("ul", {}, ...READING.map((text) => element("li", {}, text))),
    element("form", { method: "dialog" }, element("button", {}, "Close")),
  );
  return dialog;
}
