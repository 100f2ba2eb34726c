// Elements without markup: text only ever becomes text.

/**
 * @typedef {HTMLElement | SVGElement | string | null | undefined | false} Child
 */

/**
 * An element with attributes and children. `on...` attributes are listeners; false and null ones are left out.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  applyAttributes(made, attributes);
  appendChildren(made, children);
  return made;
}

/**
 * The same for SVG.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...Child} children
 */
export function svgElement(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  applyAttributes(made, attributes);
  appendChildren(made, children);
  return made;
}

/**
 * Put `children` in place of what is there.
 * @param {Element} parent
 * @param {...Child} children
 */
export function refill(parent, ...children) {
  parent.replaceChildren();
  appendChildren(parent, children);
}

/**
 * Draw, and give the keyboard's focus to what stands where it was: what is drawn anew would lose it.
 * @param {HTMLElement[]} places that are drawn anew
 * @param {() => void} draw
 */
export function keepFocus(places, draw) {
  const focused = document.activeElement;
  const place = places.find((one) => focused !== one && one.contains(focused));
  const before = place ? [...place.querySelectorAll("button")].indexOf(/** @type {any} */ (focused)) : -1;
  const key = focused?.id || focused?.getAttribute("data-sort") || focused?.textContent;
  draw();
  if (!place || before < 0) return;
  const buttons = [...place.querySelectorAll("button")];
  const same = buttons.find((button) => (button.id || button.dataset.sort || button.textContent) === key);
  (same ?? buttons[before])?.focus({ preventScroll: true });
}

/**
 * @param {Element} made
 * @param {Record<string, any>} attributes
 */
function applyAttributes(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "width%") /** @type {HTMLElement} */ (made).style.width = `${value}%`;
    else if (name === "height%") /** @type {HTMLElement} */ (made).style.height = `${value}%`;
    else if (name === "colour") /** @type {HTMLElement} */ (made).style.background = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
}

/**
 * @param {Element} parent
 * @param {Child[]} children
 */
function appendChildren(parent, children) {
  for (const child of children) if (child !== null && child !== undefined && child !== false) parent.append(child);
}
