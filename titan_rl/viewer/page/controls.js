// Buttons that several views share.
import { h } from "viewer/dom";

export function button(label, click, props = {}) {
  return h("button", { type: "button", onclick: click, ...props }, label);
}

/** A choice between several values. `choices` are [value, label, title]; `change` is called with the chosen value. */
export function choice(label, choices, chosen, change) {
  const buttons = choices.map(([value, text, title]) =>
    button(text, () => { show(value); change(value); }, { "aria-pressed": String(value === chosen), "data-value": value, title: title ?? null }));
  const show = value => { for (const one of buttons) one.setAttribute("aria-pressed", String(one.dataset.value === value)); };
  return Object.assign(h("div", { class: "segments", role: "group", "aria-label": label }, buttons), { show });
}

/** A button that copies `text()` to the clipboard and briefly shows whether that worked. */
export function copyButton(label, text, props = {}) {
  const copy = button(label, async () => {
    const worked = await copied(text());
    copy.focus();
    copy.textContent = worked ? "Copied" : "Not allowed";
    setTimeout(() => { copy.textContent = label; }, 1200);
  }, { class: "quiet", ...props });
  return copy;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // without permission or a secure context, the older method is used
    const area = h("textarea", { class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    return worked;
  }
}
