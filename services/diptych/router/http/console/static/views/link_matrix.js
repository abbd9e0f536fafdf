// Links of many workers: a cell for each prefill worker (row) and decode worker (column).

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { workerName } from "../format.js";
import { colour, onTheme } from "../theme.js";
import { linkWords } from "./hinge.js";
import { linkBetween } from "./fleet_model.js";

const MARGIN = 2;

/** The side of a cell, so that the matrix fits into `room` pixels. */
export const cellSide = (room, rows, columns) => Math.max(3, Math.min(26, Math.floor((room - 2 * MARGIN) / Math.max(rows, columns, 1))));

export function LinkMatrix({ senders, receivers, workers, selected, room, onSelect }) {
  const canvas = useRef(null);
  const [cursor, setCursor] = useState(null); // {row, column}
  const [, redraw] = useState(0);
  const side = cellSide(room, senders.length, receivers.length);
  const width = receivers.length * side + 2 * MARGIN;
  const height = senders.length * side + 2 * MARGIN;

  useEffect(() => onTheme(() => redraw((n) => n + 1)), []);
  useLayoutEffect(() => draw(canvas.current, { senders, receivers, workers, selected, cursor, side, width, height }));

  const bounded = ({ row, column }) => ({
    row: Math.max(0, Math.min(senders.length - 1, row)), column: Math.max(0, Math.min(receivers.length - 1, column)),
  });
  function cellAt(event) {
    const box = canvas.current.getBoundingClientRect();
    return bounded({
      row: Math.floor((event.clientY - box.top - MARGIN) / side), column: Math.floor((event.clientX - box.left - MARGIN) / side),
    });
  }
  function onKey(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e6], End: [0, 1e6] }[event.key];
    if (step) {
      event.preventDefault();
      const at = cursor ?? { row: 0, column: 0 };
      setCursor(bounded({ row: at.row + step[0], column: at.column + step[1] }));
    } else if (cursor && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      onSelect(event.shiftKey ? receivers[cursor.column][0] : senders[cursor.row][0]);
    }
  }
  return html`
    <div class="matrix">
      <p class="quiet axis">prefill \u2193 \u00a0 decode \u2192</p>
      <canvas ref=${canvas} style=${{ width: `${width}px`, height: `${height}px` }} tabindex="0" role="application"
        aria-roledescription="matrix of links" aria-label=${`Links from ${senders.length} prefill to ${receivers.length} decode workers. Arrow keys move, Enter opens the prefill worker, Shift and Enter the decode worker.`}
        aria-describedby="matrix-words" onKeyDown=${onKey} onMouseMove=${(event) => setCursor(cellAt(event))}
        onMouseLeave=${() => setCursor(null)} onFocus=${() => setCursor((at) => at ?? { row: 0, column: 0 })} onBlur=${() => setCursor(null)}
        onClick=${(event) => onSelect(senders[cellAt(event).row][0])}></canvas>
      <p class="matrix-words" id="matrix-words" role="status">${cursor ? cellWords(cursor, senders, receivers, workers) : "\u00a0"}</p>
    </div>`;
}

function cellWords({ row, column }, senders, receivers, workers) {
  const from = senders[row]?.[0];
  const to = receivers[column]?.[0];
  if (!from || !to) return "\u00a0";
  const link = linkBetween(workers, from, to);
  return html`<b>${workerName(from, workers)} \u2192 ${workerName(to, workers)}</b> ${link ? linkWords(link) : untoldWords(workers, from)}`;
}

const untoldWords = (workers, from) =>
  (workers[from].num_links_up == null ? "nothing is told of this link" : "up and quiet, or none: only links with traffic or trouble are told of");

/** The shape of a cell tells as much as its colour: a dot, a square as big as the traffic, a cross, a bar, a ring. */
function draw(canvas, { senders, receivers, workers, selected, cursor, side, width, height }) {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const to = canvas.getContext("2d");
  to.setTransform(scale, 0, 0, scale, 0, 0);
  to.clearRect(0, 0, width, height);
  to.translate(MARGIN, MARGIN);
  const band = colour("--line");
  senders.forEach(([from], row) => {
    if (from !== selected && row !== cursor?.row) return;
    to.fillStyle = band;
    to.fillRect(0, row * side, receivers.length * side, side);
  });
  receivers.forEach(([instance], column) => {
    if (instance !== selected && column !== cursor?.column) return;
    to.fillStyle = band;
    to.fillRect(column * side, 0, side, senders.length * side);
  });
  senders.forEach(([from], row) => receivers.forEach(([instance], column) => {
    cell(to, linkBetween(workers, from, instance), column * side, row * side, side);
  }));
  if (cursor) {
    to.strokeStyle = colour("--focus");
    to.lineWidth = 1.5;
    to.strokeRect(cursor.column * side - 0.75, cursor.row * side - 0.75, side + 1.5, side + 1.5);
  }
}

function cell(to, link, x, y, side) {
  const inner = side - (side > 5 ? 2 : 1);
  if (!link || (link.state === "up" && !(link.bytes_per_s > 0))) {
    const dot = Math.max(1, inner * 0.28);
    to.fillStyle = colour(link ? "--line-strong" : "--line");
    to.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
  } else if (link.state === "up") {
    const ratio = link.tested_bytes_per_s ? Math.min(1, link.bytes_per_s / link.tested_bytes_per_s) : 0.5;
    const square = inner * (0.45 + 0.55 * Math.sqrt(ratio));
    to.fillStyle = colour("--prefill");
    to.fillRect(x + (side - square) / 2, y + (side - square) / 2, square, square);
  } else {
    broken(to, link.state, x + (side - inner) / 2, y + (side - inner) / 2, inner);
  }
}

function broken(to, state, x, y, size) {
  to.strokeStyle = to.fillStyle = colour(state === "down" || state === "refused" ? "--bad" : "--warn");
  to.lineWidth = Math.max(1, size / 6);
  if (state === "refused") {
    to.fillRect(x, y + size * 0.35, size, Math.max(1.5, size * 0.3));
  } else if (state === "down") {
    to.beginPath();
    to.moveTo(x, y);
    to.lineTo(x + size, y + size);
    to.moveTo(x + size, y);
    to.lineTo(x, y + size);
    to.stroke();
  } else to.strokeRect(x + size * 0.15, y + size * 0.15, size * 0.7, size * 0.7);
}
