// Light, dark, or as the system is; and colours for canvases, which cannot read custom properties.

const KEY = "diptych-theme";
export const THEMES = ["auto", "light", "dark"];

let found = new Map();
const listeners = new Set();
const forget = () => {
  found = new Map();
  for (const listener of listeners) listener();
};

export function theme() {
  const kept = localStorage.getItem(KEY);
  return THEMES.includes(kept) ? kept : "auto";
}

export function setTheme(name) {
  localStorage.setItem(KEY, name);
  apply();
}

function apply() {
  const name = theme();
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  forget();
}

/** Return the colour that a custom property has now: colour("--prefill"). */
export function colour(property) {
  if (!found.has(property)) {
    const probe = document.createElement("i");
    probe.style.color = `var(${property})`;
    document.body.append(probe);
    found.set(property, getComputedStyle(probe).color);
    probe.remove();
  }
  return found.get(property);
}

/** Call `listener` when colours change; return what ends that. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export const prefersStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);
apply();
