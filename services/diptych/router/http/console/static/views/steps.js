// The step stream: a row for each worker, its steps as bars, and hand-offs as arrows from bar to bar.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { count, duration, number, share, workerName } from "../format.js";
import { WINDOW_MS } from "../step_log.js";
import { onTheme } from "../theme.js";
import { byRole } from "./fleet_model.js";
import { draw, layoutOf, stepAt } from "./step_canvas.js";

export const title = "Steps";

const SPANS_MS = [1000, 2000, 5000, 10_000, 30_000, 60_000, 120_000, WINDOW_MS];
const TABLE_MS = 30_000; // that the table is of: each of many workers tells some seconds late

export default function Steps({ store, route }) {
  const state = store.use("fleet");
  const log = store.useSteps();
  const workers = state?.workers ?? {};
  const roles = byRole(workers);
  const rows = [...roles.prefill, ...roles.unified, ...roles.decode].map(([instance, card]) => ({ instance, role: card.role, name: workerName(instance, workers) }));
  for (const instance of log.workers.keys()) if (!workers[instance]) rows.push({ instance, role: "", name: workerName(instance) });
  const only = route.id;
  const shown = only ? rows.filter(({ instance }) => instance === only) : rows;
  return html`
    <div class="steps">
      <${Stream} log=${log} rows=${shown} only=${only} />
      <${Table} log=${log} rows=${rows} />
    </div>`;
}

/** What of the log is in view. `endMs` is null while it follows the newest steps. */
function useView(log) {
  const view = useRef({ spanMs: 10_000, endMs: null, top: 0 }).current;
  const [, redraw] = useState(0);
  const change = (values) => { Object.assign(view, values); redraw((n) => n + 1); };
  const end = () => view.endMs ?? log.clock.now();
  const clamp = (ms) => Math.max(log.headMs - WINDOW_MS + view.spanMs, Math.min(log.headMs + view.spanMs * 0.1, ms));
  return {
    view, change, end,
    pan: (ms) => change({ endMs: clamp(end() + ms) }),
    zoom(factor, at = 1) {
      const spanMs = Math.max(200, Math.min(WINDOW_MS, view.spanMs * factor));
      const fixed = end() - view.spanMs * (1 - at);
      change({ spanMs, endMs: view.endMs === null ? null : clamp(fixed + spanMs * (1 - at)) });
    },
    pause: () => change({ endMs: view.endMs === null ? end() : null }),
  };
}

function Stream({ log, rows, only }) {
  const canvas = useRef(null);
  const moves = useView(log);
  const { view } = moves;
  const [cursor, setCursor] = useState(null); // {row, index}: a step, of the row's worker, by the moment it began
  const size = useRef({ width: 0, height: 0 });
  const latest = useRef({});
  latest.current = { rows, cursor };
  const layout = layoutOf(rows.length);

  useEffect(() => {
    const element = canvas.current;
    let frame = 0;
    let last = { key: "" };
    const observer = new ResizeObserver(() => {
      size.current = { width: element.clientWidth, height: element.clientHeight };
      last = { key: "" };
    });
    observer.observe(element);
    const untheme = onTheme(() => { last = { key: "" }; });
    const isSeen = { now: true };
    const seer = new IntersectionObserver(([entry]) => { isSeen.now = entry.isIntersecting; });
    seer.observe(element);
    let idleUntil = 0; // drawing takes a quarter of the time at most
    function tick(nowMs) {
      frame = requestAnimationFrame(tick);
      if (!isSeen.now || !size.current.width || nowMs < idleUntil) return;
      const msOfPixel = view.spanMs / (size.current.width - layoutOf(0).left);
      const endMs = Math.round(moves.end() / msOfPixel) * msOfPixel;
      const key = [endMs, view.spanMs, log.version, latest.current.rows.length, JSON.stringify(latest.current.cursor)].join();
      if (key === last.key) return;
      last = { key };
      draw(element, log, { ...latest.current, ...size.current, endMs, spanMs: view.spanMs });
      idleUntil = nowMs + 4 * (performance.now() - nowMs);
    }
    frame = requestAnimationFrame(tick);
    return () => { cancelAnimationFrame(frame); observer.disconnect(); seer.disconnect(); untheme(); };
  }, []);

  useEffect(() => { // wheel: a passive listener could not keep the page where it is
    const element = canvas.current;
    const onWheel = (event) => {
      if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY) && !event.altKey && document.activeElement !== element) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) moves.pan(((event.deltaX || event.deltaY) / element.clientWidth) * view.spanMs);
      else moves.zoom(event.deltaY > 0 ? 1.15 : 1 / 1.15, partOf(event));
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  }, []);

  const partOf = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left - layout.left) / (box.width - layout.left)));
  };
  const find = (event) => stepAt(log, rows, { ...size.current, endMs: moves.end(), spanMs: view.spanMs }, canvas.current, event);
  const drag = useRef(null);
  function onDown(event) {
    canvas.current.setPointerCapture(event.pointerId);
    drag.current = { x: event.clientX, endMs: moves.end(), moved: false };
  }
  function onMove(event) {
    if (!drag.current) {
      setCursor(find(event));
      return;
    }
    const dx = event.clientX - drag.current.x;
    if (Math.abs(dx) > 3) drag.current.moved = true;
    if (drag.current.moved) {
      view.endMs = drag.current.endMs;
      moves.pan((-dx / Math.max(1, size.current.width - layout.left)) * view.spanMs);
    }
  }

  function onKey(event) {
    const key = event.key;
    const has = cursor && rows[cursor.row];
    if (key === " ") moves.pause();
    else if (key === "+" || key === "=") moves.zoom(1 / 1.5, 0.5);
    else if (key === "-") moves.zoom(1.5, 0.5);
    else if (key === "Escape") setCursor(null);
    else if (key === "End") moves.change({ endMs: null });
    else if (key === "Home") moves.pan(-WINDOW_MS);
    else if (key === "ArrowUp" || key === "ArrowDown") setCursor(rowCursor(log, rows, (cursor?.row ?? -1) + (key === "ArrowUp" ? -1 : 1), cursor, moves.end()));
    else if (key === "ArrowLeft" || key === "ArrowRight") {
      if (has && !event.shiftKey) setCursor(nextStep(log, rows, cursor, key === "ArrowLeft" ? -1 : 1, moves));
      else moves.pan((key === "ArrowLeft" ? -0.1 : 0.1) * view.spanMs);
    } else return;
    event.preventDefault();
  }

  const isPaused = view.endMs !== null;
  return html`
    <div class="steps-bar">
      <h1>Steps</h1>
      <button type="button" aria-pressed=${isPaused} onClick=${moves.pause}>${isPaused ? "Follow" : "Pause"}</button>
      <span class="together">
        <button type="button" aria-label="Show less time" onClick=${() => moves.zoom(1 / 1.5, 0.5)}>+</button>
        <button type="button" aria-label="Show more time" onClick=${() => moves.zoom(1.5, 0.5)}>\u2212</button>
      </span>
      <label class="span">Shows <select value=${SPANS_MS.find((ms) => ms >= view.spanMs * 0.99)} onChange=${(event) => moves.change({ spanMs: Number(event.target.value) })}>
        ${SPANS_MS.map((ms) => html`<option key=${ms} value=${ms}>${duration(ms / 1000)}</option>`)}</select></label>
      ${only && html`<a href="#/steps">Show all workers</a>`}
      <ul class="steps-legend" aria-label="Legend">
        <li><i data-step="prompt" aria-hidden="true"></i>prompt</li><li><i data-step="output" aria-hidden="true"></i>output</li>
        <li><i data-step="mixed" aria-hidden="true"></i>both</li><li><i data-step="idle" aria-hidden="true"></i>idle</li>
        <li><i data-step="arrow" aria-hidden="true"></i>hand-off</li>
      </ul>
    </div>
    <canvas class="stream" ref=${canvas} style=${{ height: `${layout.height}px` }} tabindex="0" role="application" aria-roledescription="step stream"
      aria-label=${`Steps of ${count(rows.length, "worker")}. Space pauses, plus and minus zoom, up and down choose a worker, left and right a step, or the time when none is chosen.`}
      aria-describedby="step-words" onKeyDown=${onKey} onPointerDown=${onDown} onPointerMove=${onMove}
      onPointerUp=${() => { drag.current = null; }} onPointerCancel=${() => { drag.current = null; }} onPointerLeave=${() => !drag.current && setCursor(null)}></canvas>
    <p id="step-words" class="step-words" role="status">${cursor ? html`<${StepWords} log=${log} rows=${rows} cursor=${cursor} />` : rows.length ? html`<span class="quiet">Point at a step, or choose one with the arrow keys. Drag to move; click, then turn the wheel to zoom.</span>` : html`<span class="quiet">No worker has joined yet.</span>`}</p>`;
}

/** The cursor in another row, at the same moment or at the newest step. */
function rowCursor(log, rows, wanted, cursor, endMs) {
  if (!rows.length) return null;
  const row = Math.max(0, Math.min(rows.length - 1, wanted));
  const steps = log.workers.get(rows[row].instance);
  if (!steps || steps.first === steps.end) return { row, begunMs: 0 };
  const index = Math.min(steps.end - 1, steps.indexAt(cursor?.begunMs || endMs));
  return { row, begunMs: steps.begunMs[index] };
}

function nextStep(log, rows, cursor, by, moves) {
  const steps = log.workers.get(rows[cursor.row].instance);
  if (!steps) return cursor;
  const index = Math.max(steps.first, Math.min(steps.end - 1, steps.indexOf(cursor.begunMs) + by));
  const begunMs = steps.begunMs[index];
  const { view } = moves;
  if (view.endMs === null) moves.pause();
  if (begunMs < moves.end() - view.spanMs) moves.pan(begunMs - moves.end() + view.spanMs * 0.8);
  else if (begunMs + steps.ms[index] > moves.end()) moves.pan(begunMs - moves.end() + view.spanMs * 0.2);
  return { row: cursor.row, begunMs };
}

function StepWords({ log, rows, cursor }) {
  const row = rows[cursor.row];
  const steps = row && log.workers.get(row.instance);
  const index = steps ? steps.indexOf(cursor.begunMs) : -1;
  if (!row) return null;
  if (index < 0) return html`<b>${row.name}</b> no steps of late`;
  const kind = [steps.prompt[index] && count(steps.prompt[index], "prompt token"), steps.output[index] && count(steps.output[index], "output token")].filter(Boolean).join(", ");
  const since = new Date(cursor.begunMs).toLocaleTimeString("en-GB");
  return html`<b>${row.name}</b> ${since}.${String(Math.floor(cursor.begunMs % 1000)).padStart(3, "0")}, ${duration(steps.ms[index] / 1000)}: ${kind || "no tokens"}, ${count(steps.requests[index], "request")}`;
}

/** The last seconds in words and numbers. */
function Table({ log, rows }) {
  return html`
    <details class="link-table"><summary>The last ${duration(TABLE_MS / 1000)} as a table</summary>
      <div class="scroll" tabindex="0" role="group" aria-label="Steps by worker"><table>
        <thead><tr><th scope="col">Worker</th><th scope="col">Role</th><th scope="col" class="num">Steps</th><th scope="col" class="num">Busy</th><th scope="col" class="num">Prompt tokens</th>
          <th scope="col" class="num">Output tokens</th><th scope="col" class="num">Longest step</th></tr></thead>
        <tbody>${rows.map(({ instance, name, role }) => {
          const sum = log.summary(instance, TABLE_MS);
          return html`<tr key=${instance}><th scope="row"><a href=${`#/steps/${instance}`}>${name}</a></th><td>${role}</td><td class="num">${number(sum.num)}</td><td class="num">${share(sum.busyMs / TABLE_MS)}</td>
            <td class="num">${number(sum.prompt)}</td><td class="num">${number(sum.output)}</td><td class="num">${duration(sum.longestMs / 1000)}</td></tr>`;
        })}</tbody>
      </table></div>
    </details>`;
}
