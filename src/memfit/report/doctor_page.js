"use strict";
(() => {
const byId = (name) => document.getElementById(name);
const data = JSON.parse(byId("data").textContent);
const root = document.documentElement;
const THEMES = ["auto", "light", "dark"];

/* ---- theme ---- */

/* A page opened from a file may have no storage. */
function storedTheme() {
  try { return THEMES.find((theme) => theme === localStorage.getItem("memfit-theme")) || "auto"; } catch { return "auto"; }
}

function setTheme(theme) {
  if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
  byId("theme").textContent = "Theme: " + theme;
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(root.dataset.theme || "auto") + 1) % THEMES.length];
  try { localStorage.setItem("memfit-theme", next); } catch { /* it holds for this visit */ }
  setTheme(next);
});
setTheme(storedTheme());

/* ---- segments ---- */

const words = byId("segment-words");
for (const segment of document.querySelectorAll(".segments g")) {
  segment.addEventListener("pointerenter", () => { words.textContent = segment.dataset.words; });
}

/* ---- timeline ---- */

const plot = byId("plot");
if (!plot) return;
const cursor = byId("cursor");
const sizes = Array.from(document.querySelectorAll("#bands b"));
let current = data.peak;

function formatBytes(size) {
  if (Math.abs(size) < 1024) return size.toFixed(0) + " B";
  for (const unit of ["KiB", "MiB", "GiB"]) {
    size /= 1024;
    if (Math.abs(size) < 1024) return size.toFixed(2) + " " + unit;
  }
  return (size / 1024).toFixed(2) + " TiB";
}

function show(index) {
  current = Math.max(0, Math.min(data.points.length - 1, index));
  const [position, left, reserved, event, bands] = data.points[current];
  const next = current + 1 < data.points.length ? data.points[current + 1][1] : 1;
  const allocated = formatBytes(bands.reduce((sum, size) => sum + size, 0));
  cursor.style.left = 50 * (left + next) + "%";
  byId("at-allocated").textContent = allocated;
  byId("at-reserved").textContent = formatBytes(reserved);
  byId("at-position").textContent = (position + 1).toLocaleString("en") + " of " + data.count.toLocaleString("en");
  byId("at-event").textContent = event;
  sizes.forEach((element, band) => { element.textContent = formatBytes(bands[band]); });
  plot.setAttribute("aria-valuenow", current + 1);
  plot.setAttribute("aria-valuetext", allocated + ", " + event);
}

function indexAt(share) {
  let low = 0, high = data.points.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (data.points[middle][1] <= share) low = middle; else high = middle - 1;
  }
  return low;
}

function follow(event) {
  const box = plot.getBoundingClientRect();
  show(indexAt((event.clientX - box.left) / box.width));
}

const leap = Math.max(1, Math.round(data.points.length / 20));
const moves = {
  ArrowLeft: () => current - 1, ArrowRight: () => current + 1,
  ArrowDown: () => current - 1, ArrowUp: () => current + 1,
  PageDown: () => current - leap, PageUp: () => current + leap,
  Home: () => 0, End: () => data.points.length - 1, p: () => data.peak,
};
plot.addEventListener("keydown", (event) => {
  const move = moves[event.key];
  if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  show(event.shiftKey && event.key.startsWith("Arrow") ? current + leap * Math.sign(move() - current) : move());
});
plot.addEventListener("pointermove", follow);
plot.addEventListener("pointerdown", follow);
plot.addEventListener("pointerleave", (event) => {
  if (event.pointerType === "mouse" && document.activeElement !== plot) show(data.peak);
});
show(current);
})();
