// Draws the step stream: only what is in view, and bars that share a pixel once.

import { colour } from "../theme.js";

const LEFT = 108; // for names
const LEFT_NARROW = 76;
const TOP = 22; // for the time
const MOST_ARROWS = 700; // in view: of more none are drawn

export function layoutOf(rows) {
  const side = rows <= 8 ? 44 : rows <= 20 ? 30 : rows <= 64 ? 16 : 9;
  return { side, left: leftOf(innerWidth), top: TOP, height: TOP + Math.max(1, rows) * side + 6 };
}

const leftOf = (width) => (width < 640 ? LEFT_NARROW : LEFT);

/** The step under the pointer: {row, begunMs}, null: none. */
export function stepAt(log, rows, { width, endMs, spanMs }, canvas, event) {
  const box = canvas.getBoundingClientRect();
  const { side, left, top } = layoutOf(rows.length);
  const row = Math.floor((event.clientY - box.top - top) / side);
  const steps = log.workers.get(rows[row]?.instance);
  if (!steps) return null;
  const ms = endMs - spanMs + ((event.clientX - box.left - left) / (width - left)) * spanMs;
  const index = steps.indexAt(ms);
  const slack = (spanMs / (width - left)) * 2;
  return index < steps.end && steps.begunMs[index] - slack <= ms ? { row, begunMs: steps.begunMs[index] } : null;
}

export function draw(canvas, log, scene) {
  const { width, height, rows } = scene;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const to = canvas.getContext("2d");
  to.setTransform(scale, 0, 0, scale, 0, 0);
  to.clearRect(0, 0, width, height);
  const { side, left } = layoutOf(rows.length);
  const beginMs = scene.endMs - scene.spanMs;
  if (!log.headMs) {
    note(to, "No step is known yet", width, 0);
    return;
  }
  const at = { ...scene, side, left, beginMs, x: (ms) => left + ((ms - beginMs) / scene.spanMs) * (width - left) };
  grid(to, at);
  to.save();
  to.beginPath();
  to.rect(left, 0, width - left, height);
  to.clip();
  rows.forEach((row, index) => bars(to, log.workers.get(row.instance), TOP + index * side, at));
  arrows(to, log, at);
  mark(to, log, at);
  to.restore();
  names(to, at);
}

function grid(to, { rows, side, left, width, height, beginMs, spanMs, x }) {
  to.font = "11px ui-sans-serif, system-ui, sans-serif";
  to.textBaseline = "middle";
  const every = [50, 100, 250, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000].find((ms) => (ms / spanMs) * (width - left) > 76) ?? 120_000;
  for (let ms = Math.ceil(beginMs / every) * every; ms < beginMs + spanMs; ms += every) {
    const place = Math.round(x(ms)) + 0.5;
    to.strokeStyle = colour("--line");
    line(to, place, TOP - 4, place, height);
    if (place > width - 40) continue;
    to.fillStyle = colour("--ink-3");
    to.textAlign = "center";
    to.fillText(timeWords(ms, every), place, 8);
  }
  to.strokeStyle = colour("--line");
  for (let row = 0; row <= rows.length; row++) line(to, side < 12 ? left : 0, TOP + row * side + 0.5, width, TOP + row * side + 0.5);
}

function timeWords(ms, every) {
  const words = new Date(ms).toLocaleTimeString("en-GB");
  return every < 1000 ? `${words.slice(6)}.${String(Math.round(ms % 1000)).padStart(3, "0")}` : words;
}

function line(to, x0, y0, x1, y1) {
  to.beginPath();
  to.moveTo(x0, y0);
  to.lineTo(x1, y1);
  to.stroke();
}

/** Prompts above, outputs below: a step that has both fills its row. Bars begin and end on whole pixels. */
function bars(to, steps, y, { side, endMs, beginMs, x }) {
  if (!steps) return;
  const half = Math.floor((side - 4) / 2);
  const first = steps.indexAt(beginMs);
  const lanes = [[steps.prompt, y + 2, colour("--prefill")], [steps.output, y + 2 + half, colour("--decode")]];
  for (const [tokens, top, fill] of lanes) {
    to.fillStyle = fill;
    let from = 0;
    let until = -1;
    for (let index = first; index < steps.end && steps.begunMs[index] < endMs; index++) {
      if (!tokens[index]) continue;
      const begin = Math.round(x(steps.begunMs[index]));
      const reach = Math.round(x(steps.begunMs[index] + steps.ms[index]));
      const end = Math.max(begin + 1, reach - begin > 3 ? reach - 1 : reach); // a line between bars, where there is room
      if (begin <= until) {
        until = Math.max(until, end);
        continue;
      }
      if (until > from) to.fillRect(from, top, until - from, half);
      [from, until] = [begin, end];
    }
    if (until > from) to.fillRect(from, top, until - from, half);
  }
}

function arrows(to, log, { rows, cursor, side, x, beginMs, endMs, width, left }) {
  const places = new Map(rows.map((row, index) => [row.instance, index]));
  const seen = [];
  for (let index = log.arrows.length - 1; index >= 0; index--) {
    const arrow = log.arrows[index];
    if (arrow.toMs < beginMs - 5000) break;
    if (arrow.toMs >= beginMs && arrow.fromMs <= endMs && places.has(arrow.from) && places.has(arrow.to)) seen.push(arrow);
  }
  if (seen.length > MOST_ARROWS) return note(to, "Hand-offs are drawn when less time is shown", width, left);
  const looked = rows[cursor?.row]?.instance;
  const isBusy = seen.length > 80;
  to.strokeStyle = to.fillStyle = colour("--ink");
  for (const arrow of seen) {
    const isLooked = arrow.from === looked || arrow.to === looked;
    to.lineWidth = isBusy && !isLooked ? 0.5 : 1;
    to.globalAlpha = isLooked ? 0.9 : looked ? 0.12 : isBusy ? 0.4 : 0.75;
    handOff(to, x(arrow.fromMs), middle(places.get(arrow.from), side), x(arrow.toMs), middle(places.get(arrow.to), side), isLooked || !isBusy);
  }
  to.globalAlpha = 1;
  to.lineWidth = 1;
}

const middle = (row, side) => TOP + (row + 0.5) * side;

function handOff(to, x0, y0, x1, y1, hasHead) {
  const bend = Math.max(6, Math.abs(x1 - x0) / 2);
  to.beginPath();
  to.moveTo(x0, y0);
  to.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  to.stroke();
  if (!hasHead) return;
  to.beginPath();
  to.arc(x0, y0, 2, 0, 7);
  to.fill();
  to.beginPath();
  to.moveTo(x1, y1);
  to.lineTo(x1 - 6, y1 - 3.5);
  to.lineTo(x1 - 6, y1 + 3.5);
  to.fill();
}

function note(to, words, width, left) {
  to.fillStyle = colour("--ink-2");
  to.font = "12.5px ui-sans-serif, system-ui, sans-serif";
  to.textAlign = "left";
  to.fillText(words, left + 8, TOP + 10, width - left - 16);
}

function mark(to, log, { rows, cursor, side, x }) {
  const steps = cursor && log.workers.get(rows[cursor.row]?.instance);
  const index = steps ? steps.indexOf(cursor.begunMs) : -1;
  if (index < 0) return;
  const begin = x(steps.begunMs[index]);
  to.strokeStyle = colour("--ink");
  to.lineWidth = 2;
  to.strokeRect(begin - 1, TOP + cursor.row * side + 1, Math.max(3, x(steps.begunMs[index] + steps.ms[index]) - begin + 1), side - 2);
  to.lineWidth = 1;
}

function names(to, { rows, side, left, cursor }) {
  to.textAlign = "left";
  rows.forEach(({ name, role }, row) => {
    if (role) {
      to.fillStyle = colour(`--${role}`);
      to.fillRect(0, TOP + row * side + 2, 3, side - 3);
    }
    if (side < 12 && row !== cursor?.row) return;
    to.font = `${row === cursor?.row ? "600 " : ""}${side < 20 ? 10.5 : 12.5}px ui-sans-serif, system-ui, sans-serif`;
    to.fillStyle = colour("--ink");
    to.fillText(fitted(to, name, left - 14), 9, middle(row, side));
  });
}

/** The end of a name tells workers apart, so its beginning is left out. */
function fitted(to, name, room) {
  if (to.measureText(name).width <= room) return name;
  let cut = name;
  while (cut.length > 1 && to.measureText(`\u2026${cut}`).width > room) cut = cut.slice(1);
  return `\u2026${cut}`;
}
