// Help texts of elements with data-help, shown while they are pointed at or focused.
import { h } from "viewer/dom";

export function showHelp(root) {
  const tip = h("div", { id: "help", role: "tooltip", hidden: true });
  root.append(tip);
  const show = event => {
    const button = event.target.closest?.("[data-help]");
    tip.hidden = !button;
    if (!button) return;
    tip.textContent = button.dataset.help;
    const at = button.getBoundingClientRect();
    const left = Math.min(at.left + scrollX, scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(left, 8)}px`;
    tip.style.top = `${at.bottom + scrollY + 6}px`;
  };
  for (const event of ["mouseover", "focusin"]) root.addEventListener(event, show);
  for (const event of ["mouseleave", "focusout"]) root.addEventListener(event, () => (tip.hidden = true));
  root.addEventListener("keydown", event => event.key === "Escape" && (tip.hidden = true));
}
