// The flame graph: a canvas, the pointer and the keys.

import { svgElement } from "./dom.js";
import { formatShare, shorten, visible } from "./format.js";
import { changeText } from "./change.js";
import { changeColour, cssColour, frameColour, mix, readPalette } from "./colours.js";
import { frameAt, layoutFrames } from "./layout.js";
import { amountOf } from "./run.js";
import { ancestry, nameWithRepeats } from "./nodes.js";

/**
 * @typedef {import("./nodes.js").Node} Node
 * @typedef {import("./layout.js").Frame} Frame
 * @typedef {import("./search.js").Found} Found
 * @typedef {import("./run.js").Metric} Metric
 * @typedef {import("./change.js").Change} Change
 *
 * @typedef {object} FlameView what is drawn
 * @property {Node} root
 * @property {Node} zoom
 * @property {Node} selected
 * @property {Metric} metric
 * @property {"type" | "ratio" | "change"} colour
 * @property {((node: Node) => Change | null) | null} changeOf null where nothing is compared
 * @property {number} largestChange
 * @property {boolean} largestFirst
 * @property {Found | null} found
 * @property {string} highlight a layer type, "" for none
 * @property {(value: number) => string} format
 *
 * @typedef {object} FlameActions
 * @property {(node: Node, how?: string) => void} zoom and select
 * @property {(node: Node, how?: string) => void} select
 * @property {(frame: Frame | null, x: number, y: number) => void} hover
 */

const ROW = 24;
const GAP = 1;
const PADDING = 6;
const FONT = '12px -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif';

export class Flame {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {FlameActions} actions
   */
  constructor(canvas, actions) {
    this.canvas = canvas;
    this.actions = actions;
    /** @type {Frame[]} */
    this.frames = [];
    /** @type {Frame | null} */
    this.hovered = null;
    /** @type {FlameView | null} */
    this.view = null;
    /** @type {Found | null} in front of what the view found */
    this.light = null;
    this.turned = 0; // pixels of the wheel since the last step of the zoom
    this.width = 0; // of the canvas; 0 is as wide as there is room
    /** @type {Map<string, number>} */
    this.widths = new Map();
    canvas.addEventListener("mousemove", (event) => this.hover(this.frameUnder(event), event.clientX, event.clientY));
    canvas.addEventListener("mouseleave", () => this.hover(null, 0, 0));
    canvas.addEventListener("click", (event) => {
      const frame = this.frameUnder(event);
      if (frame) this.activate(frame);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  /**
   * Light these frames for a while.
   * @param {Found | null} light
   */
  lightUp(light) {
    if (light === this.light) return;
    this.light = light;
    this.paint(parseFloat(this.canvas.style.width), parseFloat(this.canvas.style.height));
  }

  /** @param {FlameView} view */
  draw(view) {
    this.view = view;
    const width = this.width || Math.max(this.canvas.parentElement?.clientWidth ?? 0, 50);
    this.frames = layoutFrames(view.zoom, view.metric, width, view.largestFirst);
    const rows = 1 + this.frames.reduce((most, frame) => Math.max(most, frame.row), 0);
    this.paint(width, rows * ROW);
  }

  /**
   * @param {number} width
   * @param {number} height
   */
  paint(width, height) {
    const { canvas, view } = this;
    const context = canvas.getContext("2d");
    if (!context || !view) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = FONT;
    context.textBaseline = "middle";
    const palette = readPalette(canvas);
    for (const frame of this.frames) this.paintFrame(context, frame, palette, view);
    this.outline(context, palette, view);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   * @param {import("./colours.js").Palette} palette
   * @param {FlameView} view
   */
  paintFrame(context, frame, palette, view) {
    const { node, hidden } = frame;
    const colour = this.shadeOf(frame, palette, view);
    const dimmed = this.isDimmed(frame, view);
    const width = Math.max(frame.width - (frame.width > 3 ? GAP : 0), 0.6);
    context.fillStyle = cssColour(colour);
    context.beginPath();
    context.roundRect(frame.x, frame.row * ROW, width, ROW - GAP - 1, frame.width > 6 ? 2 : 0);
    context.fill();
    if (hidden === 0 && view.changeOf && node.status === "new") this.hatch(context, frame, width, palette);
    if (hidden === 0 && width > 24) this.label(context, frame, width, view, dimmed ? palette.textFaint : palette.text);
  }

  /**
   * The colour as it is drawn: fainter above the zoom, and where a search or a highlight leaves the frame out.
   * @param {Frame} frame
   * @param {import("./colours.js").Palette} palette
   * @param {FlameView} view
   */
  shadeOf(frame, palette, view) {
    const colour = this.colourOf(frame, palette, view);
    const shade = frame.above ? mix(colour, palette.background, 0.55) : colour;
    return this.isDimmed(frame, view) ? mix(shade, palette.background, 0.8) : shade;
  }

  /**
   * @param {Frame} frame
   * @param {import("./colours.js").Palette} palette
   * @param {FlameView} view
   */
  colourOf({ node, hidden }, palette, view) {
    const byChange = view.colour === "change";
    if (hidden > 0) return byChange ? palette.same : (palette.types.get("other") ?? palette.middle);
    if (byChange) return changeColour(view.changeOf?.(node) ?? null, view.largestChange, palette);
    return frameColour(node, view.colour === "ratio" ? "ratio" : "type", palette);
  }

  /**
   * Stripes over a frame that the run before has not.
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   * @param {number} width
   * @param {import("./colours.js").Palette} palette
   */
  hatch(context, frame, width, palette) {
    const [top, height] = [frame.row * ROW, ROW - GAP - 1];
    context.save();
    context.beginPath();
    context.rect(frame.x, top, width, height);
    context.clip();
    context.strokeStyle = cssColour(palette.background);
    context.globalAlpha = 0.35;
    context.lineWidth = 1.5;
    context.beginPath();
    for (let x = frame.x - height; x < frame.x + width; x += 7) {
      context.moveTo(x, top + height);
      context.lineTo(x + height, top);
    }
    context.stroke();
    context.restore();
  }

  /**
   * Name on the left, amount and share on the right as far as there is room.
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   * @param {number} width
   * @param {FlameView} view
   * @param {string} colour
   */
  label(context, frame, width, view, colour) {
    const { node } = frame;
    const room = width - 2 * PADDING;
    const middle = frame.row * ROW + (ROW - GAP) / 2;
    const change = view.changeOf?.(node) ?? null;
    const tag = change?.status === "new" ? "new · " : "";
    const name = visible(shorten(tag + nameWithRepeats(node), 300));
    context.fillStyle = colour;
    context.font = node.kind === "op" || node.kind === "kernel" ? FONT : `600 ${FONT}`;
    const nameWidth = this.measure(context, name);
    context.fillText(nameWidth <= room ? name : this.cut(context, name, room), frame.x + PADDING, middle);
    const whole = amountOf(view.root.total, view.metric);
    const amount = view.format(frame.value);
    const share = `${amount}  ${formatShare(whole > 0 ? frame.value / whole : 0)}`;
    context.font = FONT;
    const texts = change && view.colour === "change" ? differenceTexts(change, amount, view.format) : [share, amount];
    for (const text of texts) {
      const textWidth = this.measure(context, text);
      if (nameWidth + textWidth + 12 > room) continue;
      context.fillText(text, frame.x + width - PADDING - textWidth, middle);
      return;
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {string} text
   */
  measure(context, text) {
    const key = `${context.font}\n${text}`;
    let width = this.widths.get(key);
    if (width === undefined) {
      width = context.measureText(text).width;
      if (this.widths.size > 20_000) this.widths.clear();
      this.widths.set(key, width);
    }
    return width;
  }

  /**
   * The text cut to a width, with an ellipsis; nothing where not even two characters fit.
   * @param {CanvasRenderingContext2D} context
   * @param {string} text
   * @param {number} room
   */
  cut(context, text, room) {
    let [fits, most] = [0, Math.min(text.length, Math.ceil(room / 3))];
    while (fits < most) {
      const middle = Math.ceil((fits + most) / 2);
      if (context.measureText(`${text.slice(0, middle)}…`).width <= room) fits = middle;
      else most = middle - 1;
    }
    return fits < 2 ? "" : `${text.slice(0, fits)}…`;
  }

  /**
   * @param {Frame} frame
   * @param {FlameView} view
   */
  isDimmed(frame, view) {
    const found = this.light ?? view.found;
    if (found && (frame.hidden > 0 ? !this.anyMatch(frame, found) : !found.lit.has(frame.node))) return true;
    return view.highlight !== "" && (frame.hidden > 0 || frame.node.type !== view.highlight);
  }

  /**
   * @param {Frame} frame
   * @param {Found} found
   */
  anyMatch(frame, found) {
    return frame.node.children.some((child) => found.lit.has(child));
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {import("./colours.js").Palette} palette
   * @param {FlameView} view
   */
  outline(context, palette, view) {
    for (const frame of this.frames) {
      if (frame.hidden > 0) continue;
      const selected = frame.node === view.selected && view.selected.kind !== "all";
      const matched = (this.light ?? view.found)?.matches.has(frame.node) ?? false;
      if (!selected && !matched && frame !== this.hovered) continue;
      context.strokeStyle = selected || frame === this.hovered ? palette.accent : palette.text;
      context.lineWidth = selected || (matched && this.light) ? 2 : 1;
      const inset = context.lineWidth / 2;
      const width = Math.max(frame.width - GAP - 2 * inset, 0.5);
      context.strokeRect(frame.x + inset, frame.row * ROW + inset, width, ROW - GAP - 1 - 2 * inset);
    }
  }

  /** @param {MouseEvent} event */
  frameUnder(event) {
    const box = this.canvas.getBoundingClientRect();
    return frameAt(this.frames, event.clientX - box.left, Math.floor((event.clientY - box.top) / ROW));
  }

  /**
   * @param {Frame | null} frame
   * @param {number} x
   * @param {number} y
   */
  hover(frame, x, y) {
    const changed = frame !== this.hovered;
    this.hovered = frame;
    this.canvas.style.cursor = frame ? "pointer" : "default";
    if (changed) this.paint(parseFloat(this.canvas.style.width), parseFloat(this.canvas.style.height));
    this.actions.hover(frame, x, y);
  }

  /** @param {Frame} frame */
  activate(frame) {
    if (frame.node.kind === "op" || frame.node.kind === "kernel") this.actions.select(frame.node);
    else this.actions.zoom(frame.node);
  }

  /**
   * One level nearer to what is under the pointer, or one back: with Ctrl, a pinch, or while the flame has the focus.
   * Else, and where there is no further level, the wheel scrolls.
   * @param {WheelEvent} event
   */
  wheel(event) {
    if (!this.view || !(event.ctrlKey || event.metaKey || document.activeElement === this.canvas)) return;
    const { zoom } = this.view;
    const under = this.frameUnder(event);
    const line = under ? ancestry(under.node).filter((node) => node.kind !== "op" && node.kind !== "kernel") : [];
    const next = event.deltaY < 0 ? line[line.indexOf(zoom) + 1] : zoom.parent;
    if (!next || (event.deltaY < 0 && !line.includes(zoom))) {
      if (event.ctrlKey || event.metaKey) event.preventDefault(); // it would zoom the whole window
      return;
    }
    event.preventDefault();
    this.turned += event.deltaY;
    if (Math.abs(this.turned) < (event.ctrlKey ? 8 : 50)) return;
    this.turned = 0;
    this.actions.zoom(next, "wheel");
  }

  /** What is drawn, as a picture that scales. */
  toSvg() {
    const { view } = this;
    const context = this.canvas.getContext("2d");
    const [width, height] = [parseFloat(this.canvas.style.width), parseFloat(this.canvas.style.height)];
    const size = { width, height, viewBox: `0 0 ${width} ${height}` };
    const picture = svgElement("svg", { ...size, "font-family": "sans-serif", "font-size": 12 });
    if (!view || !context) return "";
    const palette = readPalette(this.canvas);
    picture.append(svgElement("rect", { width, height, fill: cssColour(palette.background) }));
    for (const frame of this.frames) {
      const colour = this.shadeOf(frame, palette, view);
      const [y, wide] = [frame.row * ROW, Math.max(frame.width - GAP, 0.6)];
      const fill = cssColour(colour).replaceAll(" ", ",");
      const box = svgElement("rect", {
        x: frame.x.toFixed(2),
        y,
        width: wide.toFixed(2),
        height: ROW - GAP - 1,
        rx: 2,
        fill,
      });
      const name = visible(shorten(nameWithRepeats(frame.node), 300));
      const words = frame.hidden > 0 ? `${frame.hidden} thin frames` : name;
      const group = svgElement("g", {}, svgElement("title", {}, `${words}: ${view.format(frame.value)}`), box);
      context.font = FONT;
      const label =
        frame.hidden > 0 || wide < 24
          ? ""
          : this.cut(context, `${name}  ${view.format(frame.value)}`, wide - 2 * PADDING);
      if (label)
        group.append(svgElement("text", { x: (frame.x + PADDING).toFixed(2), y: y + 15, fill: palette.text }, label));
      picture.append(group);
    }
    return new XMLSerializer().serializeToString(picture);
  }

  /**
   * The flame as it is drawn, on the page's background.
   * @param {(picture: Blob) => void} done
   */
  toPng(done) {
    const { width, height } = this.canvas;
    const copy = Object.assign(document.createElement("canvas"), { width, height });
    const context = copy.getContext("2d");
    if (!context) return;
    context.fillStyle = cssColour(readPalette(this.canvas).background);
    context.fillRect(0, 0, width, height);
    context.drawImage(this.canvas, 0, 0);
    copy.toBlob((picture) => picture && done(picture), "image/png");
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (!this.view || event.ctrlKey || event.metaKey || event.altKey) return;
    const { selected, zoom, root } = this.view;
    if (event.key === "Enter")
      this.actions.zoom(selected.kind === "op" || selected.kind === "kernel" ? (selected.parent ?? root) : selected);
    else if (event.key === "Escape" || event.key === "Backspace") this.actions.zoom(zoom.parent ?? root);
    else if (event.key === "Home") this.actions.zoom(root);
    else if (event.key.startsWith("Arrow")) this.move(event.key);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /**
   * Up and down change the row, left and right go to the next frame of the row.
   * @param {string} key
   */
  move(key) {
    const frames = this.frames.filter((frame) => frame.hidden === 0);
    const at = frames.find((frame) => frame.node === this.view?.selected) ?? frames[0];
    const step = key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0;
    let next;
    if (step !== 0) {
      // From a frame to the widest below it, or to the one that it lies below.
      const inside = frames.filter((frame) => frame.row === at.row + step && overlaps(frame, at));
      next = inside.sort((a, b) => b.width - a.width)[0];
    } else {
      const row = frames.filter((frame) => frame.row === at.row).sort((a, b) => a.x - b.x);
      next = row[row.indexOf(at) + (key === "ArrowRight" ? 1 : -1)];
    }
    if (next) this.actions.select(next.node, "keys");
  }
}

/**
 * What a frame says of its change, the longer text first: the difference, or within noise the plain value.
 * @param {Change} change
 * @param {string} amount
 * @param {(value: number) => string} format
 */
function differenceTexts(change, amount, format) {
  if (change.difference === 0) return [amount];
  if (change.real === false) return [`≈ ${amount}`, "≈"];
  return [changeText(change, format)];
}

/**
 * @param {Frame} one
 * @param {Frame} other
 */
function overlaps(one, other) {
  return one.x < other.x + other.width - 0.01 && other.x < one.x + one.width - 0.01;
}
