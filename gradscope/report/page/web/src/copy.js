// Texts and pictures that leave the page: by the clipboard, or as a file.

import { element } from "./dom.js";

/**
 * A button that copies `text`, and says so.
 * @param {string} words
 * @param {string} text
 * @param {(words: string) => void} say for screen readers
 */
export function copyButton(words, text, say) {
  const button = element("button", {
    type: "button",
    class: "copy",
    "data-copy": text,
    onclick: async () => {
      const done = (await copy(text)) ? "Copied" : "Press Ctrl+C to copy";
      button.textContent = done;
      say(done);
      setTimeout(() => (button.textContent = words), 2_000);
    },
  });
  button.textContent = words;
  return button;
}

/**
 * Copy, or where the browser refuses, leave the text selected.
 * @param {string} text
 */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = element("textarea", { class: "unseen", "aria-label": "Text to copy" });
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    if (done) box.remove();
    else box.addEventListener("blur", () => box.remove());
    return done;
  }
}

/**
 * @param {string} name
 * @param {string | Blob} content
 * @param {string} type
 */
export function saveFile(name, content, type) {
  const isText = typeof content === "string";
  const url = URL.createObjectURL(new Blob([content], { type: isText ? `${type};charset=utf-8` : type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
