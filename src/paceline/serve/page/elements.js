// Small ways to make elements. Text only ever becomes a text node.
"use strict";

const byId = (id) => document.getElementById(id);

/** A new element with properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

/** A new SVG element with attributes. */
function drawing(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** An icon of the sheet in the document. */
function icon(name) {
  return drawing("svg", { "aria-hidden": "true" }, drawing("use", { href: `#icon-${name}` }));
}

/** A button that shows an icon and is named by a text. */
function iconButton(name, key, onclick, values = {}) {
  return label(make("button", { type: "button", className: "icon", onclick }, icon(name)), key, values);
}

/** A button that shows a text. */
function textButton(key, onclick, className = "plain") {
  return say(make("button", { type: "button", className, onclick }), key);
}

/** Has the reader write on; not where that would bring up a keyboard on the screen. */
function focusBox() {
  if (matchMedia("(pointer: fine)").matches) byId("box").focus();
}

/** Copies a text and says so on the button for a moment. */
async function copyFrom(button, text) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copyBySelection(text);
  const key = button.dataset.label;
  label(button, "copied");
  button.classList.add("is-done");
  setTimeout(() => {
    label(button, key);
    button.classList.remove("is-done");
  }, 1500);
}

/** The only way to copy that a page has which came over plain HTTP from another machine. */
function copyBySelection(text) {
  const carrier = make("textarea", { value: text, readOnly: true });
  document.body.append(carrier);
  carrier.select();
  document.execCommand("copy");
  carrier.remove();
}

/** Shows a line at the foot of the page for a while, perhaps with something to do about it. */
function notify(key, values = {}, action = null) {
  const notice = byId("notice");
  const parts = [say(make("span"), key, values)];
  if (action) parts.push(textButton(action.key, () => (notice.replaceChildren(), action.run()), "link"));
  notice.replaceChildren(...parts);
  clearTimeout(notify.timer);
  notify.timer = setTimeout(() => notice.replaceChildren(), 8000);
}
