// Buttons that several views have.
import { h } from "viewer/dom";

export function button(label, click, props = {}) {
  return h("button", { type: "button", onclick: click, ...props }, label);
}

/** Several choices of which one holds. `choices` are [value, label, title]; `change` is called with the value. */
export function choice(label, choices, chosen, change) {
  const buttons = choices.map(([value, text, title]) =>
    button(text, () => { show(value); change(value); }, { "aria-pressed": String(value === chosen), "data-value": value, title: title ?? null }));
  const show = value => { for (const one of buttons) one.setAttribute("aria-pressed", String(one.dataset.value === value)); };
  return Object.assign(h("div", { class: "segments", role: "group", "aria-label": label }, buttons), { show });
}

/** A button that puts `text()` on the clipboard and says for a moment whether that worked. */
export function copyButton(label, text, props = {}) {
  const said = button(label, async () => {
    const worked = await copied(text());
    said.focus();
    said.textContent = worked ? "Copied" : "Not allowed";
    setTimeout(() => { said.textContent = label; }, 1200);
  }, { class: "quiet", ...props });
  return said;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // no permission, or no secure context: the old way
    const area = h("textarea", { class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    return worked;
  }
}
