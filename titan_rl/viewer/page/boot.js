// Runs before anything is painted, so that the wrong theme does not flash. "theme" in the storage is "light" or "dark"; if missing, the system decides.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    let theme = null;
    try {
      theme = localStorage.getItem("titan-rl-theme");
    } catch {
      // storage may be forbidden; then the system's theme is used
    }
    document.documentElement.dataset.theme = theme ?? (dark.matches ? "dark" : "light");
    document.dispatchEvent(new Event("theme"));
  };
  dark.addEventListener("change", apply);
  document.addEventListener("choose-theme", apply);
  apply();
})();
