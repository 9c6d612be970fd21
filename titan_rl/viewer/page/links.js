// Links within the page: the current hash with another tab and other values of that tab.
import { h } from "viewer/dom";

/** The hash that opens a tab with these values. Former values of the tab are dropped. `values`: {"rollouts.status": "error_parse"}. */
function hashOf(tab, values = {}) {
  const hash = new URLSearchParams(location.hash.slice(1));
  for (const name of [...hash.keys()]) if (name.startsWith(`${tab}.`)) hash.delete(name);
  hash.set("tab", tab);
  for (const [name, value] of Object.entries(values)) hash.set(name, value);
  return `#${hash}`;
}

/** A link whose hash is computed when it is followed. */
export function link(label, tab, values = {}, props = {}) {
  const refresh = event => { event.currentTarget.href = hashOf(tab, values); };
  return h("a", { href: hashOf(tab, values), onpointerdown: refresh, onclick: refresh, onfocus: refresh, ...props }, label);
}
