// The chosen theme: "system", "light" or "dark". Views are notified of a change by update({theme: true}).

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
    // then it is not remembered
  }
  document.dispatchEvent(new Event("choose-theme"));
}
