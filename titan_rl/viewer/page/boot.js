// Runs before anything is painted, so that no other theme flashes. "theme" of the storage is "light", "dark" or nothing: the system's.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    let theme = null;
    try {
      theme = localStorage.getItem("titan-rl-theme");
    } catch {
      // storage may be forbidden: the system's theme it is
    }
    document.documentElement.dataset.theme = theme ?? (dark.matches ? "dark" : "light");
    document.dispatchEvent(new Event("theme"));
  };
  dark.addEventListener("change", apply);
  document.addEventListener("choose-theme", apply);
  apply();
})();
