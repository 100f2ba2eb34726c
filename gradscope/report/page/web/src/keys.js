// The keyboard, and what else the browser reports: changes of the address, of the window and of the system's theme.

/** @typedef {import("./page.js").Page} Page */

const METRICS = /** @type {const} */ (["backward", "forward", "both", "saved"]);

/**
 * @param {Page} page
 */
export function listen(page) {
  document.addEventListener("keydown", (event) => pageKey(page, event));
  page.parts.query.addEventListener("keydown", (event) => searchKey(page, event));
  window.addEventListener("hashchange", () => page.readAddress());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.draw());
  window.addEventListener("beforeprint", () => page.print(true));
  window.addEventListener("afterprint", () => page.print(false));
  let width = 0; // not yet known: to ask for it here would lay the page out before it is drawn
  window.addEventListener("resize", () => {
    page.drawFlame();
    if (width !== window.innerWidth) page.drawMemory();
    width = window.innerWidth;
  });
}

/**
 * @param {Page} page
 * @param {KeyboardEvent} event
 */
function pageKey(page, event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey || page.parts.help.open) return;
  if (target.tagName === "INPUT" && target.getAttribute("type") === "search") return;
  if (target.tagName === "SELECT") return;
  const metric = METRICS[Number(event.key) - 1];
  if (event.key === "/") page.parts.query.focus();
  else if (event.key === "?") page.parts.help.showModal();
  else if (event.key === "m") page.change({ merged: !page.state.merged });
  else if (event.key === "c" && page.joined && !page.whatIf) page.change({ compare: !page.state.compare, sort: "" });
  else if (metric && (metric !== "saved" || page.run.memory)) page.change({ metric });
  else return;
  event.preventDefault();
}

/**
 * @param {Page} page
 * @param {KeyboardEvent} event
 */
function searchKey(page, event) {
  if (event.key === "Escape") {
    page.changeQuery("");
    page.parts.canvas.focus();
  } else if (event.key === "Enter") page.nextMatch(event.shiftKey ? -1 : 1);
  else return;
  event.preventDefault();
}

/**
 * @param {Page} page
 * @param {KeyboardEvent} event
 */
export function tabKey(page, event) {
  const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  if (step === 0) return;
  const at = page.tabs.findIndex(([key]) => key === page.tab);
  const [key] = page.tabs[(at + step + page.tabs.length) % page.tabs.length];
  page.change({ tab: key, sort: "" });
  document.getElementById(`tab-${key}`)?.focus();
  event.preventDefault();
}
