"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const root = document.documentElement;
const stillness = matchMedia("(prefers-reduced-motion: reduce)");
const OPTIMIZER = 2, OPTIMIZER_SHARE = 0.03;  // its step is one moment, and must be seen
const PLAY_SECONDS = 24;                      // of a whole step at normal speed
const FADE_MS = 420;
const REPLACED = 2, MOVED = 3;                 // treatments, as the tiles have them
let drawAll = () => {};

function formatBytes(size) {
  if (Math.abs(size) < 1024) return size.toFixed(0) + " B";
  for (const unit of ["KiB", "MiB", "GiB"]) {
    size /= 1024;
    if (Math.abs(size) < 1024) return size.toFixed(2) + " " + unit;
  }
  return (size / 1024).toFixed(2) + " TiB";
}

function formatTime(us) {
  if (us < 1000) return us.toFixed(0) + " µs";
  return us < 1e6 ? (us / 1000).toFixed(us < 1e4 ? 2 : 1) + " ms" : (us / 1e6).toFixed(2) + " s";
}

/* ---- light and dark ---- */

const THEMES = ["auto", "light", "dark"];
const themeButton = byId("theme");
const colours = {};

/* A page opened from a file may have no storage. */
function storedTheme() {
  try { return THEMES.find((theme) => theme === localStorage.getItem("memfit-theme")) || "auto"; } catch { return "auto"; }
}

function storeTheme(theme) {
  try { localStorage.setItem("memfit-theme", theme); } catch { /* it holds for this visit */ }
}

function setTheme(theme) {
  if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
  themeButton.textContent = "Theme: " + theme;
  readColours();
  drawAll();
}

function readColours() {
  const style = getComputedStyle(root);
  for (const name of ["ink", "soft", "line", "grid", "card", "budget", ...data.shades.map((shade) => shade.slug)])
    colours[name] = style.getPropertyValue("--" + name).trim();
}

themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(root.dataset.theme || "auto") + 1) % THEMES.length];
  storeTheme(next);
  setTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(root.dataset.theme || "auto"));

/* ---- tables that sort and filter ---- */

for (const head of document.querySelectorAll("th[data-sort]")) {
  head.querySelector("button").addEventListener("click", () => {
    const body = head.closest("table").tBodies[0];
    const falling = head.getAttribute("aria-sort") === "descending";
    const direction = head.hasAttribute("aria-sort") ? (falling ? 1 : -1) : (head.dataset.sort === "number" ? -1 : 1);
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    const key = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent.trim();
    const compare = head.dataset.sort === "number"
      ? (one, other) => Number(key(one)) - Number(key(other))
      : (one, other) => key(one).localeCompare(key(other), "en", { numeric: true });
    body.append(...[...body.rows].sort((one, other) => direction * compare(one, other)));
  });
}

const filter = byId("filter");
if (filter) filter.addEventListener("input", () => {
  const wanted = filter.value.trim().toLowerCase();
  let count = 0;
  for (const row of byId("values").tBodies[0].rows) {
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
    count += !row.hidden;
  }
  byId("filtered").textContent = wanted ? count + " shown" : "";
});

/* ---- the two steps ---- */

/* Columns that only rise are written as what each number is more than the one before it. */
function summed(steps) {
  let sum = 0;
  return steps.map((step) => (sum += step));
}

function prepare(story) {
  const word = (number) => story.words[number];
  const values = story.values;
  values.group = values.module.map((module) => word(module).split(".").slice(0, data.depth).join("."));
  const tracks = [story.planned, story.unplanned];
  for (const track of tracks) {
    const count = track.label.length, lives = track.lives;
    track.place = summed(track.place);
    lives.start = summed(lives.start);
    track.count = count;
    track.sums = data.shades.map(() => new Float64Array(count + 1));
    track.total = new Float64Array(count);
    track.livesOf = new Map();
    for (let life = 0; life < lives.value.length; life++) {
      const value = lives.value[life], start = lives.start[life], stop = start + lives.length[life];
      const column = track.sums[(lives.again[life] ? values.again : values.shade)[value]];
      column[start] += values.size[value];
      column[stop] -= values.size[value];
      if (!track.livesOf.has(value)) track.livesOf.set(value, []);
      track.livesOf.get(value).push([start, stop, lives.again[life]]);
    }
    track.sums.forEach((column, shade) => {
      const base = track.base[shade] || 0;
      for (let index = 0, live = 0; index < count; index++) { live += column[index]; column[index] = live + base; }
    });
    const workspaces = track.sums[data.shades.length - 1];
    for (let index = 0; index < count; index++) workspaces[index] = track.workspace[index];
    for (const column of track.sums)
      for (let index = 0; index < count; index++) track.total[index] += column[index];
    track.ends = track.phase[count - 1] === OPTIMIZER;
    track.clock = new Float64Array(count + 1);
    for (let index = 0; index < count; index++) track.clock[index + 1] = track.clock[index] + track.time[index];
  }
  const last = tracks.some((track) => track.ends) ? OPTIMIZER_SHARE : 0;
  const longest = Math.max(...tracks.map((track) => track.clock[track.count])) || 1;
  for (const track of tracks) {
    const byPlace = new Float64Array(track.count + 1), byTime = new Float64Array(track.count + 1);
    for (let index = 1; index < track.count; index++) {
      byPlace[index] = (1 - last) * track.place[index] / Math.max(1, story.places - (last ? 1 : 0));
      byTime[index] = (1 - last) * track.clock[index] / longest;
    }
    byPlace[track.count] = 1;
    byTime[track.count] = track.ends ? byTime[track.count - 1] + last : (1 - last) * track.clock[track.count] / longest;
    track.edges = { place: byPlace, time: byTime };
  }
  story.half = 0.5 * (1 - last) / Math.max(1, story.places);
  story.highest = Math.max(data.budget || 0, ...tracks.map((track) => track.total[track.peak])) * 1.12;
  story.longest = longest;
  story.last = last;
  return story;
}

if (!data.stories.length) {
  setTheme(storedTheme());
  return;
}

const plot = byId("plot"), chart = byId("chart"), cursor = byId("cursor"), slider = byId("slider");
const playButton = byId("play"), speed = byId("speed");
let story = prepare(data.stories[0]);
let axis = "place", front = "planned", share = 0, frame = 0;
const place = { planned: 0, unplanned: 0 };

function indexAt(edges, count, at) {
  let low = 0, high = count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edges[middle] <= at) low = middle; else high = middle - 1;
  }
  return low;
}

function moveTo(at) {
  share = Math.max(0, Math.min(1, at));
  for (const name of ["planned", "unplanned"])
    place[name] = indexAt(story[name].edges[axis], story[name].count, share);
  show();
}

function moveToMoment(index) {
  const edges = story.planned.edges[axis];
  index = Math.max(0, Math.min(story.planned.count - 1, index));
  moveTo(edges[index] + Math.min(story.half, (edges[index + 1] - edges[index]) / 2));
  place.planned = index;  // a moment that takes no time has no width of its own
  show();
}

/* ---- the chart ---- */

const box = { left: 64, right: 10, top: 20, bottom: 30 };

function canvasContext(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

/* One segment a moment, or where there are more moments than pixels, one a pixel: the highest moment in it. */
function segments(track, width) {
  const edges = track.edges[axis], found = [];
  if (track.count <= width) {
    for (let index = 0; index < track.count; index++) found.push([edges[index] * width, edges[index + 1] * width, index]);
    return found;
  }
  for (let index = 0; index < track.count; index++) {
    const left = Math.floor(edges[index] * width), right = Math.max(left + 1, Math.floor(edges[index + 1] * width));
    const previous = found[found.length - 1];
    if (previous && left < previous[1]) {
      if (track.total[index] > track.total[previous[2]]) previous[2] = index;
      previous[1] = Math.max(previous[1], right);
    } else found.push([left, right, index]);
  }
  return found;
}

function ticks(highest) {
  const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const [unit, size] = units.find(([, bytes]) => highest >= bytes) || units[4];
  const most = highest / size;
  let step = 10 ** Math.floor(Math.log10(most / 4));
  step *= [1, 2, 5, 10].find((factor) => most / (step * factor) <= 6);
  const found = [];
  for (let number = 0; number * step <= most; number++)
    found.push([number * step * size, number ? +(number * step).toPrecision(6) + " " + unit : "0"]);
  return found;
}

function drawChart() {
  const width = chart.clientWidth, height = chart.clientHeight;
  if (!width) return;
  const small = width < 560;
  box.left = small ? 52 : 64;
  const wide = width - box.left - box.right, high = height - box.top - box.bottom;
  const pen = canvasContext(chart, width, height);
  const y = (bytes) => box.top + high * (1 - bytes / story.highest);
  const font = getComputedStyle(document.body).fontFamily;
  pen.font = (small ? 11 : 12) + "px " + font;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const [bytes, label] of ticks(story.highest)) {
    const at = Math.round(y(bytes)) + 0.5;
    pen.strokeStyle = colours.grid;
    pen.beginPath(); pen.moveTo(box.left, at); pen.lineTo(box.left + wide, at); pen.stroke();
    pen.fillStyle = colours.soft;
    pen.fillText(label, box.left - 8, at);
  }
  const behind = front === "planned" ? "unplanned" : "planned";
  drawStack(pen, story[front], wide, y);
  drawOutline(pen, story[behind], wide, y);
  drawPasses(pen, wide, high, small);
  if (data.budget) drawBudget(pen, wide, y);
  drawPeak(pen, front, wide, y);
  drawPeak(pen, behind, wide, y);
  moveCursor();
}

function drawStack(pen, track, wide, y) {
  const found = segments(track, wide);
  let lower = new Float64Array(found.length);
  data.shades.forEach((shade, number) => {
    const upper = found.map(([, , index], at) => lower[at] + track.sums[number][index]);
    pen.beginPath();
    found.forEach(([left, right], at) => {
      if (!at) pen.moveTo(box.left + left, y(upper[at])); else pen.lineTo(box.left + left, y(upper[at]));
      pen.lineTo(box.left + right, y(upper[at]));
    });
    for (let at = found.length - 1; at >= 0; at--) {
      pen.lineTo(box.left + found[at][1], y(lower[at]));
      pen.lineTo(box.left + found[at][0], y(lower[at]));
    }
    pen.closePath();
    pen.fillStyle = colours[shade.slug];
    pen.fill();
    lower = upper;
  });
}

function drawOutline(pen, track, wide, y) {
  pen.beginPath();
  segments(track, wide).forEach(([left, right, index], at) => {
    const height = y(track.total[index]);
    if (!at) pen.moveTo(box.left + left, height); else pen.lineTo(box.left + left, height);
    pen.lineTo(box.left + right, height);
  });
  pen.lineJoin = "round";
  pen.strokeStyle = colours.card; pen.lineWidth = 4; pen.globalAlpha = 0.65; pen.stroke();
  pen.globalAlpha = 1; pen.strokeStyle = colours.ink; pen.lineWidth = 1.5; pen.stroke();
  pen.lineWidth = 1;
}

function drawPasses(pen, wide, high, small) {
  const track = story[front], edges = track.edges[axis], bottom = box.top + high;
  pen.strokeStyle = colours.soft;
  pen.beginPath(); pen.moveTo(box.left, bottom + 0.5); pen.lineTo(box.left + wide, bottom + 0.5); pen.stroke();
  pen.fillStyle = colours.again;
  const planned = story.planned, places = planned.edges[axis];
  for (let index = 0; index < planned.count; index++)
    if (planned.again[index])
      pen.fillRect(box.left + places[index] * wide, bottom + 3, Math.max(1.5, (places[index + 1] - places[index]) * wide), 4);
  for (let start = 0; start < track.count;) {
    let stop = start;
    while (stop < track.count && track.phase[stop] === track.phase[start]) stop++;
    const left = box.left + edges[start] * wide, right = box.left + edges[stop] * wide;
    if (start) {
      pen.setLineDash([3, 4]); pen.strokeStyle = colours.soft; pen.globalAlpha = 0.6;
      pen.beginPath(); pen.moveTo(Math.round(left) + 0.5, box.top); pen.lineTo(Math.round(left) + 0.5, bottom); pen.stroke();
      pen.setLineDash([]); pen.globalAlpha = 1;
    }
    const label = data.phases[track.phase[start]], narrow = right - left < pen.measureText(label).width + 8;
    pen.fillStyle = colours.soft;
    pen.textAlign = narrow ? "right" : "center";
    if (!narrow || !small) pen.fillText(label, narrow ? right : (left + right) / 2, bottom + 19);
    start = stop;
  }
}

function drawBudget(pen, wide, y) {
  const at = Math.round(y(data.budget)) + 0.5;
  pen.strokeStyle = colours.budget; pen.lineWidth = 2; pen.setLineDash([7, 5]);
  pen.beginPath(); pen.moveTo(box.left, at); pen.lineTo(box.left + wide, at); pen.stroke();
  pen.setLineDash([]); pen.lineWidth = 1;
  chip(pen, "budget " + formatBytes(data.budget), box.left + 6, at - 12, "left", colours.budget, wide);
}

function drawPeak(pen, name, wide, y) {
  const track = story[name], edges = track.edges[axis];
  const x = box.left + wide * (edges[track.peak] + edges[track.peak + 1]) / 2, at = y(track.total[track.peak]);
  pen.beginPath(); pen.arc(x, at, 4, 0, 7);
  pen.fillStyle = name === front ? colours.ink : colours.card; pen.fill();
  pen.strokeStyle = name === front ? colours.card : colours.ink; pen.lineWidth = 1.5; pen.stroke(); pen.lineWidth = 1;
  const words = name + " " + formatBytes(track.total[track.peak]);
  const near = data.budget && Math.abs(at - y(data.budget)) < 24;  // leave the budget's own words alone
  const above = !(near && name === "planned");
  chip(pen, words, x + (x > box.left + wide / 2 ? -6 : 6), above ? at - 15 : at + 17, x > box.left + wide / 2 ? "right" : "left", colours.ink, wide);
}

/* Words on a plate, so that they can be read over anything. */
function chip(pen, words, x, y, side, colour, wide) {
  const width = pen.measureText(words).width + 10;
  let left = side === "left" ? x : x - width;
  left = Math.max(box.left + 2, Math.min(left, box.left + wide - width));
  y = Math.max(10, y);
  pen.fillStyle = colours.card; pen.globalAlpha = 0.88;
  pen.beginPath(); pen.roundRect(left, y - 9, width, 18, 4); pen.fill();
  pen.globalAlpha = 1; pen.fillStyle = colour; pen.textAlign = "left";
  pen.fillText(words, left + 5, y + 0.5);
}

function moveCursor() {
  const wide = chart.clientWidth - box.left - box.right;
  cursor.style.transform = "translateX(" + (box.left + share * wide) + "px)";
}

/* ---- what is live at the place ---- */

const kindRows = [...document.querySelectorAll("#kinds tr")].map((row) => ({
  row, planned: row.querySelector(".planned"), unplanned: row.querySelector(".unplanned"),
}));
const ownerRows = [...document.querySelectorAll("#owners li")].map((row) => ({
  row, name: row.querySelector(".name"), size: row.querySelector(".size"), bar: row.querySelector(".meter div"),
}));

function owners(track, index) {
  const sizes = new Map(), lives = track.lives, values = story.values;
  for (let life = 0; life < lives.value.length; life++) {
    if (lives.start[life] > index) break;  // they are in the order of their starts
    if (index >= lives.start[life] + lives.length[life]) continue;
    const group = values.group[lives.value[life]];
    sizes.set(group, (sizes.get(group) || 0) + values.size[lives.value[life]]);
  }
  return [...sizes].sort((one, other) => other[1] - one[1]).slice(0, ownerRows.length);
}

function momentWords(track, index) {
  const phase = data.phases[track.phase[index]];
  if (track.phase[index] === OPTIMIZER) return phase;
  return track.again[index] ? phase + ", computed again" : phase;
}

function show() {
  const track = story[front], index = place[front], planned = story.planned.total[place.planned];
  const unplanned = story.unplanned.total[place.unplanned];
  byId("at-planned").textContent = formatBytes(planned);
  byId("at-unplanned").textContent = formatBytes(unplanned);
  byId("at-pass").textContent = momentWords(track, index);
  byId("at-operation").textContent = story.words[track.target[index]];
  byId("at-module").textContent = story.words[track.module[index]] || "–";
  byId("at-position").textContent = (index + 1) + " of " + track.count + (axis === "time" ? ", at " + formatTime(track.clock[index]) : "");
  kindRows.forEach(({ row, planned: here, unplanned: there }, shade) => {
    if (row.hidden) return;
    here.textContent = formatBytes(story.planned.sums[shade][place.planned]);
    there.textContent = formatBytes(story.unplanned.sums[shade][place.unplanned]);
  });
  const found = owners(track, index), most = found.length ? found[0][1] : 1;
  ownerRows.forEach(({ row, name, size, bar }, number) => {
    row.style.visibility = number < found.length ? "visible" : "hidden";
    if (number >= found.length) return;
    name.textContent = found[number][0] || "outside of modules";
    size.textContent = formatBytes(found[number][1]);
    bar.style.width = 100 * found[number][1] / most + "%";
  });
  const words = formatBytes(planned) + " planned, " + formatBytes(unplanned) + " unplanned, "
    + [momentWords(track, index), story.words[track.label[index]], story.words[track.module[index]]].filter(Boolean).join(", ");
  for (const control of [plot, slider]) control.setAttribute("aria-valuetext", words);
  plot.setAttribute("aria-valuenow", place.planned + 1);
  slider.value = place.planned;
  slider.style.setProperty("--done", 100 * place.planned / Math.max(1, story.planned.count - 1) + "%");
  moveCursor();
  drawTiles();
}

/* ---- the animation: every value is a tile as wide as it is big ---- */

const STATES = ["waiting", "kept", "again", "dropped", "replaced", "moved", "done"];
const [WAITING, LIVE, BACK, DROPPED, SMALL, OUT, DONE] = STATES.keys();
const maps = ["unplanned", "planned"].map((name) => ({
  name, canvas: byId("map-" + name), figure: byId("map-bytes-" + name), words: byId("map-words-" + name), states: [], since: [],
}));
let layout = [], layoutWidth = 0, rowHeight = 22, pointedTile = -1;

function layTiles(width) {
  const tiles = story.tiles, sizes = tiles.map(([value]) => story.values.size[value]);
  const total = sizes.reduce((sum, size) => sum + size, 0) || 1;
  const rows = Math.max(3, Math.min(9, Math.ceil(tiles.length / 12))), gap = 2;
  const target = width * rows / total;
  layout = [];
  let row = [], used = 0;
  const finish = (isLast) => {
    const stretch = isLast && used < 0.7 * width ? 1 : (width - gap * (row.length - 1)) / Math.max(1, used - gap * (row.length - 1));
    let left = 0;
    for (const [number, wide] of row) {
      layout[number] = { left, width: Math.max(2, wide * stretch), row: layout.rows };
      left += wide * stretch + gap;
    }
    layout.rows += 1;
    row = []; used = 0;
  };
  layout.rows = 0;
  sizes.forEach((size, number) => {
    const wide = Math.max(5, Math.min(width, size * target));
    if (row.length && used + wide > width) finish(false);
    row.push([number, wide]);
    used += wide + gap;
  });
  if (row.length) finish(true);
  layoutWidth = width;
  for (const map of maps) { map.canvas.style.height = layout.rows * (rowHeight + 3) + "px"; map.states = []; }
}

function stateOf(map, [value, treatment]) {
  const track = story[map.name], index = place[map.name], lives = track.livesOf.get(value) || [];
  if (!lives.length) return WAITING;
  if (index < lives[0][0]) return WAITING;
  for (const [start, stop, again] of lives)
    if (start <= index && index < stop) return again ? BACK : LIVE;
  if (map.name === "unplanned") return lives.some(([start]) => start > index) ? DROPPED : DONE;
  const eager = story.unplanned.livesOf.get(value) || [];
  const needed = eager.length ? eager[eager.length - 1][1] : 0;
  if (lives.every(([start]) => start <= index) && place.unplanned >= needed) return DONE;
  if (treatment === MOVED) return OUT;
  if (treatment === REPLACED) return SMALL;
  return lives.some(([start]) => start > index) ? DROPPED : DONE;
}

function paintTile(pen, state, x, y, width, height) {
  pen.beginPath(); pen.roundRect(x, y, width, height, Math.min(3, width / 2));
  if (state === LIVE) { pen.fillStyle = colours.activation; pen.fill(); return; }
  if (state === BACK) { pen.fillStyle = colours.again; pen.fill(); return; }
  if (state === SMALL || state === OUT) {
    const colour = state === SMALL ? colours.output : colours.gradient;
    pen.globalAlpha *= 0.22; pen.fillStyle = colour; pen.fill(); pen.globalAlpha /= 0.22;
    pen.fillStyle = colour; pen.fillRect(x, y + height - 4, width, 4);
    return;
  }
  if (state === DROPPED) {
    pen.save(); pen.clip(); pen.strokeStyle = colours.again; pen.globalAlpha *= 0.75; pen.lineWidth = 1;
    pen.beginPath();
    for (let at = x - height; at < x + width; at += 5) { pen.moveTo(at, y + height); pen.lineTo(at + height, y); }
    pen.stroke(); pen.restore();
    pen.strokeStyle = colours.again; pen.beginPath(); pen.roundRect(x + 0.5, y + 0.5, Math.max(1, width - 1), height - 1, Math.min(3, width / 2)); pen.stroke();
    return;
  }
  pen.fillStyle = state === DONE ? colours.grid : colours.line;
  if (state === DONE) { pen.fill(); return; }
  pen.strokeStyle = colours.line; pen.beginPath();
  pen.roundRect(x + 0.5, y + 0.5, Math.max(1, width - 1), height - 1, Math.min(3, width / 2)); pen.stroke();
}

function drawTiles() {
  const width = maps[0].canvas.clientWidth, now = performance.now();
  if (!width) return;
  if (width !== layoutWidth) layTiles(width);
  let moving = false;
  for (const map of maps) {
    const pen = canvasContext(map.canvas, width, layout.rows * (rowHeight + 3));
    const counts = STATES.map(() => 0);
    story.tiles.forEach((tile, number) => {
      const state = stateOf(map, tile), known = map.states[number];
      if (known === undefined) map.states[number] = { state, before: state, since: -FADE_MS };
      else if (known.state !== state) map.states[number] = { state, before: known.state, since: now };
      const { before, since } = map.states[number];
      const { left, row, width: wide } = layout[number], top = row * (rowHeight + 3);
      const faded = stillness.matches ? 1 : Math.min(1, (now - since) / FADE_MS);
      counts[state] += 1;
      if (faded < 1) { moving = true; pen.globalAlpha = 1 - faded; paintTile(pen, before, left, top, wide, rowHeight); }
      pen.globalAlpha = faded;
      paintTile(pen, state, left, top, wide, rowHeight);
      pen.globalAlpha = 1;
      if (number === pointedTile) { pen.strokeStyle = colours.ink; pen.lineWidth = 2; pen.strokeRect(left + 1, top + 1, wide - 2, rowHeight - 2); pen.lineWidth = 1; }
    });
    map.figure.textContent = formatBytes(story[map.name].total[place[map.name]]);
    const named = [[LIVE, "kept"], [BACK, "computed again"], [DROPPED, "dropped"], [SMALL, "in a smaller form"], [OUT, "sent out"]];
    const words = named.filter(([state]) => counts[state]).map(([state, label]) => counts[state] + " " + label).join(", ") || "none yet";
    map.words.textContent = words;
    map.canvas.setAttribute("aria-label", "Values of the " + map.name + " step: " + words);
  }
  if (moving && !frame) requestAnimationFrame(() => { if (!frame) drawTiles(); });
}

function pointAtTile(event) {
  const area = event.target.getBoundingClientRect();
  const x = event.clientX - area.left, row = Math.floor((event.clientY - area.top) / (rowHeight + 3));
  pointedTile = layout.findIndex((tile) => tile.row === row && tile.left <= x && x < tile.left + tile.width + 2);
  const tile = story.tiles[pointedTile];
  byId("tile").textContent = tile
    ? [story.words[story.values.module[tile[0]]], story.words[story.values.name[tile[0]]], story.words[story.values.shape[tile[0]]],
       formatBytes(story.values.size[tile[0]]), ["kept", "computed again", "replaced", "sent out"][tile[1]] + " by the plan"].filter(Boolean).join(" · ")
    : byId("tile").dataset.hint;
  drawTiles();
}

for (const map of maps) {
  map.canvas.addEventListener("pointermove", pointAtTile);
  map.canvas.addEventListener("pointerdown", pointAtTile);
  map.canvas.addEventListener("pointerleave", () => { pointedTile = -1; byId("tile").textContent = byId("tile").dataset.hint; drawTiles(); });
}

/* ---- play, drag, keys ---- */

let played = 0, playedAt = 0;

function play(wanted) {
  if (wanted === Boolean(frame)) return;
  playButton.textContent = wanted ? "Pause" : "Play";
  playButton.classList.toggle("playing", wanted);
  if (!wanted) { cancelAnimationFrame(frame); frame = 0; drawTiles(); return; }
  if (place.planned >= story.planned.count - 1) moveToMoment(0);
  played = place.planned;
  playedAt = performance.now();
  frame = requestAnimationFrame(tick);
}

function tick(now) {
  const count = story.planned.count;
  played += Math.max(0, now - playedAt) / 1000 / PLAY_SECONDS * count * Number(speed.value);
  playedAt = now;
  if (Math.floor(played) !== place.planned) moveToMoment(Math.floor(played)); else drawTiles();
  if (played >= count - 1) { play(false); return; }
  frame = requestAnimationFrame(tick);
}

const leap = () => Math.max(1, Math.round(story.planned.count / 20));
const moves = {
  ArrowLeft: () => place.planned - 1, ArrowDown: () => place.planned - 1,
  ArrowRight: () => place.planned + 1, ArrowUp: () => place.planned + 1,
  PageDown: () => place.planned - leap(), PageUp: () => place.planned + leap(),
  Home: () => 0, End: () => story.planned.count - 1, p: () => story.planned.peak, P: () => story.planned.peak,
};

function keyed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " ") { event.preventDefault(); play(!frame); return; }
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  play(false);
  const wanted = move();
  moveToMoment(event.shiftKey && event.key.startsWith("Arrow") ? place.planned + leap() * Math.sign(wanted - place.planned) : wanted);
}

function follow(event) {
  if (frame && !event.buttons) return;
  play(false);
  const area = chart.getBoundingClientRect();
  moveTo((event.clientX - area.left - box.left) / (area.width - box.left - box.right));
}

plot.addEventListener("keydown", keyed);
slider.addEventListener("keydown", keyed);
plot.addEventListener("pointerdown", (event) => { plot.setPointerCapture(event.pointerId); follow(event); });
plot.addEventListener("pointermove", follow);
slider.addEventListener("input", () => { play(false); moveToMoment(Number(slider.value)); });
playButton.addEventListener("click", () => play(!frame));
byId("to-peak").addEventListener("click", () => { play(false); moveToMoment(story.planned.peak); });
for (const input of document.querySelectorAll("input[name=front]"))
  input.addEventListener("change", () => { front = input.value; drawChart(); show(); });
for (const input of document.querySelectorAll("input[name=axis]"))
  input.addEventListener("change", () => { const index = place.planned; axis = input.value; drawChart(); moveToMoment(index); });

function open(number) {
  play(false);
  story = data.stories[number].half === undefined ? prepare(data.stories[number]) : data.stories[number];
  layoutWidth = 0;
  slider.max = story.planned.count - 1;
  plot.setAttribute("aria-valuemax", story.planned.count);
  kindRows.forEach(({ row }, shade) => {
    row.hidden = ![story.planned, story.unplanned].some((track) => track.sums[shade].some((size, index) => size && index < track.count));
  });
  drawChart();
  moveToMoment(story.planned.peak);
}

const chooser = byId("story");
if (chooser) chooser.addEventListener("change", () => open(Number(chooser.value)));

drawAll = () => { if (chart.clientWidth) { drawChart(); drawTiles(); } };
new ResizeObserver(() => drawAll()).observe(plot);
let beforePrint;
addEventListener("beforeprint", () => { beforePrint = root.dataset.theme || "auto"; setTheme("light"); });
addEventListener("afterprint", () => setTheme(beforePrint));
readColours();
open(0);
setTheme(storedTheme());
})();
