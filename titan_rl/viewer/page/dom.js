// Elements without HTML in strings, so that text always stays text.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Makes an element. `props` are attributes, except `class`, `style` (an object of CSS properties), `data` (an object) and functions
 * under `on...` (listeners); null and false leave an attribute out.
 * Children are nodes, strings, arrays of these, or null.
 */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Makes an SVG element; see `h`. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value == null || value === false) continue;
    if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child != null && child !== false));
  return element;
}

/** The value of a CSS variable in the current theme, in a form that a canvas accepts. `name`: "--ink" or "var(--ink)". */
export function css(name) {
  const variable = name.replace(/^var\((.*)\)$/, "$1");
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

/** A function that calls `then` once, `milliseconds` after the last of several calls. */
export function settled(then, milliseconds = 120) {
  let timer;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => then(...args), milliseconds);
  };
}
