// The theme that is chosen: "system", "light" or "dark". Views hear of a change by update({theme: true}).

const KEY = "titan-rl-theme";
export const THEMES = ["system", "light", "dark"];

export function chosenTheme() {
  try {
    return localStorage.getItem(KEY) ?? "system";
  } catch {
    return "system";
  }
}

export function chooseTheme(theme) {
  try {
    if (theme === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, theme);
  } catch {
    // not remembered, then
  }
  document.dispatchEvent(new Event("choose-theme"));
}
