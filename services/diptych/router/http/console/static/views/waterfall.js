// The time of one call, stage by stage: a table whose last column is a picture of it.

import { html, useContext, useRef, useState } from "../vendor/htm-preact.js";
import { duration } from "../format.js";
import { Names } from "./names.js";

const MIN_GAP_S = 5e-5; // shorter ones are rounding
const MIN_SPAN_S = 1e-4; // that can be zoomed to
const MANY_PARTS = 12; // of one stage: those of a name are one line
const NICE = [1, 2, 5];

const HOLDERS = new Set(["prepare", "generate", "attempt", "retry", "replay", "move"]); // their parts come one after the other
const STAGES = {
  read: "reading the request",
  parse: "reading its JSON",
  check: "its key and its limits",
  admit: "waiting for a place",
  prepare: "making tokens of it",
  render: "the chat as a prompt",
  grammar: "what the output must match",
  gate: "can it still be in time",
  select: "choosing a pair",
  attempt: "with one pair",
  retry: "with another pair",
  replay: "with another pair, from the tokens so far",
  hedge: "a second attempt beside it",
  pause: "until a pair is asked again",
  prefill: "not told in parts",
  prefill_tokenize: "its text as tokens, at the worker",
  prefill_queue: "waiting for a step",
  prefill_compute: "computing the prompt",
  chunk: "a part of the prompt",
  messages: "the first token on its way",
  decode_queue: "waiting for pages",
  decode_transfer: "receiving the KV",
  decode_verify: "verifying the KV",
  decode_join: "joining the batch",
  output: "writing tokens",
  write: "waiting for the client",
  answer: "ending the answer",
};

/** What a stage does, in words, where its name alone would not say. */
export const meaning = (name) => STAGES[name] ?? "";

const isHolder = (bar) => HOLDERS.has(bar.name) || bar.parts.some((part) => HOLDERS.has(part.name));

/** The parts of `[0, total]` that no bar covers, as pairs of seconds. */
export function gaps(bars, total) {
  const found = [];
  let at = 0;
  for (const bar of [...bars].sort((a, b) => a.begun_s - b.begun_s)) {
    if (bar.begun_s - at > MIN_GAP_S) found.push([at, bar.begun_s]);
    at = Math.max(at, bar.begun_s + bar.duration_s);
  }
  if (total - at > MIN_GAP_S) found.push([at, total]);
  return found;
}

/** What the call did or waited for, one after the other; what ran beside that is left out, and what failed is one. */
export const leaves = (bars) => bars.flatMap((bar) => (isHolder(bar) && bar.parts.length && !bar.is_failure ? leaves(bar.parts) : [bar]));

/** Where most of the time up to `until` went: [{name, where, is_failure, seconds}], the longest first. */
export function longest(bars, until) {
  const sums = new Map();
  for (const { name, where, is_failure, begun_s, duration_s } of leaves(bars)) {
    const took = Math.min(begun_s + duration_s, until) - Math.max(0, begun_s);
    if (took <= 0) continue;
    const key = `${name} ${where}`;
    sums.set(key, { name, where, is_failure, seconds: (sums.get(key)?.seconds ?? 0) + took });
  }
  return [...sums.values()].sort((a, b) => b.seconds - a.seconds);
}

/** Who works in a stage: the router, or a worker as prefill, as decode, or alone. */
export function roleOf({ name, where }, row) {
  if (where === "router" || !where) return "router";
  if (where === row.prefill && where === row.decode) return "alone";
  return /^(prefill|messages)/.test(name) || where === row.prefill ? "prefill" : "decode";
}

/** Where a stage ran, in words. */
export function placeOf(bar, row, names) {
  const role = roleOf(bar, row);
  if (role === "router") return role;
  const name = names.of(bar.where);
  return name.includes(role) ? name : `${role} ${name}`;
}

/** Stages that come again and again among many, as one: its `times` are [begun, duration]. */
function gathered(bars) {
  const alone = bars.map((bar) => ({ ...bar, times: [[bar.begun_s, bar.duration_s]] }));
  if (bars.length <= MANY_PARTS) return alone;
  const found = new Map();
  for (const bar of alone) {
    const key = `${bar.name} ${bar.where} ${bar.is_failure} ${isHolder(bar) ? found.size : ""}`;
    const same = found.get(key);
    found.set(key, same ? { ...same, duration_s: same.duration_s + bar.duration_s, times: [...same.times, ...bar.times], parts: [...same.parts, ...bar.parts] } : bar);
  }
  return [...found.values()];
}

const rowsOf = (bars, folded, depth = 0, path = "") => gathered(bars).flatMap((bar, index) => {
  const key = `${path}/${index}`;
  return [{ key, bar, depth, isOpen: !folded[key] }, ...(folded[key] ? [] : rowsOf(bar.parts, folded, depth + 1, key))];
});

function ticksOf(from, to) {
  const rough = (to - from) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (NICE.find((nice) => nice * power >= rough) ?? 10);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) found.push(at);
  return found;
}

function gapWords(times) {
  const between = times.slice(1).map((at, index) => at - times[index]);
  const most = Math.max(...between);
  const median = [...between].sort((a, b) => a - b)[between.length >> 1];
  return `Tokens went out ${duration(median)} apart in the median; the longest gap, ${duration(most)}, came after token ${between.indexOf(most) + 1}.`;
}

/** `bars` and `token_s` of a story; `row` tells how long the call is, and who its workers are. */
export function Waterfall({ story, label = "Where the time went" }) {
  const { row, bars, token_s, unnamed_s } = story;
  const ends = bars.map((bar) => bar.begun_s + bar.duration_s);
  const total = Math.max(row.duration_s, MIN_SPAN_S, ...ends, token_s.at(-1) ?? 0);
  const names = useContext(Names);
  const [folded, setFolded] = useState({});
  const [window_, setWindow] = useState(null); // null: the whole call
  const [drag, setDrag] = useState(null);
  const started = useRef(null);
  const [from, to] = window_ ?? [0, total];
  const at = (time) => ((time - from) / (to - from)) * 100;

  const show = (a, b) => {
    const span = Math.min(Math.max(b - a, MIN_SPAN_S), total);
    const begin = Math.min(Math.max(0, a), total - span);
    setWindow(span >= total ? null : [begin, begin + span]);
  };
  const scale = (factor) => {
    const middle = (from + to) / 2;
    const half = ((to - from) * factor) / 2;
    show(middle - half, middle + half);
  };
  const move = (share) => show(from + (to - from) * share, to + (to - from) * share);
  const keys = { "+": () => scale(0.5), "-": () => scale(2), 0: () => setWindow(null), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25) };
  const onKeyDown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  };

  const timeAt = (event, box) => from + ((event.clientX - box.left) / box.width) * (to - from);
  const onPointerDown = (event) => {
    const track = event.target.closest(".wf-track");
    if (!track || event.button || event.pointerType === "touch") return;
    const box = track.getBoundingClientRect();
    started.current = { box, at: timeAt(event, box) };
    event.currentTarget.setPointerCapture(event.pointerId);
  };
  const onPointerMove = (event) => {
    if (!started.current) return;
    const now = timeAt(event, started.current.box);
    setDrag([Math.min(now, started.current.at), Math.max(now, started.current.at)]);
  };
  const onPointerUp = () => {
    if (drag && drag[1] - drag[0] > (to - from) / 100) show(...drag);
    started.current = null;
    setDrag(null);
  };

  const segment = (begin, length, kind, name) => (
    begin + length <= from || begin >= to
      ? null
      : html`<div class=${`wf-bar ${kind}`} title=${name} style=${{ left: `${at(begin)}%`, width: `${(length / (to - from)) * 100}%` }}></div>`
  );
  const track = (content) => html`<td role="cell" class="wf-cell"><div class="wf-track">
    ${ticksOf(from, to).map((time) => html`<i key=${time} class="wf-grid" style=${{ left: `${at(time)}%` }}></i>`)}
    ${content}
    ${drag && html`<i class="wf-drag" style=${{ left: `${at(drag[0])}%`, width: `${at(drag[1]) - at(drag[0])}%` }}></i>`}
  </div></td>`;
  const holes = gaps(bars, row.duration_s);

  return html`<figure class="wf" aria-label=${label} onKeyDown=${onKeyDown}>
    <div class="wf-tools" role="toolbar" aria-label="Part of the call that is shown">
      <button type="button" aria-pressed=${!window_} onClick=${() => setWindow(null)}>Whole call</button>
      ${row.ttft_s > 0 && html`<button type="button" onClick=${() => show(0, row.ttft_s * 1.04)}>To the first token</button>`}
      <button type="button" onClick=${() => scale(0.5)}>Zoom in</button>
      <button type="button" disabled=${!window_} onClick=${() => scale(2)}>Zoom out</button>
      <button type="button" disabled=${!window_ || from <= 0} onClick=${() => move(-0.5)}>Earlier</button>
      <button type="button" disabled=${!window_ || to >= total} onClick=${() => move(0.5)}>Later</button>
      <span class="quiet wf-range">${window_ ? `${duration(from)} to ${duration(to)} of ${duration(total)}` : `all ${duration(total)}`}</span>
    </div>
    <table role="table" class="wf-table" onPointerDown=${onPointerDown} onPointerMove=${onPointerMove}
      onPointerUp=${onPointerUp} onPointerCancel=${onPointerUp}>
      <thead role="rowgroup"><tr role="row">
        <th role="columnheader" scope="col">Stage</th><th role="columnheader" scope="col">Where</th>
        <th role="columnheader" scope="col" class="num">Begins</th><th role="columnheader" scope="col" class="num">Takes</th>
        <th role="columnheader" scope="col" class="wf-cell"><span class="unheard">Picture</span>
          <div class="wf-axis" aria-hidden="true">${ticksOf(from, to).map((time) => html`<span key=${time} style=${{ left: `${at(time)}%` }}>${duration(time)}</span>`)}</div></th>
      </tr></thead>
      <tbody role="rowgroup">
        ${rowsOf(bars, folded).map(({ key, bar, depth, isOpen }) => html`<tr role="row" key=${key} class=${bar.is_failure ? "is-failure" : ""}>
          <th role="rowheader" scope="row" class="wf-name" style=${{ "--depth": depth }}>
            ${bar.parts.length
              ? html`<button type="button" class="fold" aria-expanded=${isOpen} onClick=${() => setFolded({ ...folded, [key]: isOpen })}>${bar.name}</button>`
              : html`<span class="leaf">${bar.name}</span>`}
            ${bar.is_failure && html` <span class="tag bad">failed</span>`}
            ${bar.times.length > 1 && html` <span class="tag">${bar.times.length} times</span>`}
            ${meaning(bar.name) && html` <small>${meaning(bar.name)}</small>`}
          </th>
          <td role="cell" class="wf-where">${!isHolder(bar) || bar.where === "router" ? html`<span class=${`place ${roleOf(bar, row)}`}>${placeOf(bar, row, names)}</span>` : ""}</td>
          <td role="cell" class="num wf-begin">${duration(bar.begun_s)}</td><td role="cell" class="num">${duration(bar.duration_s)}</td>
          ${track(bar.times.map((time) => segment(...time, `${roleOf(bar, row)} ${isHolder(bar) ? "whole" : ""} ${bar.is_failure ? "failure" : ""}`, `${bar.name}, ${duration(time[1])}`)))}
        </tr>`)}
        <tr role="row" class="wf-unnamed">
          <th role="rowheader" scope="row" class="wf-name"><span class="leaf">no name</span> <small>time in no stage</small></th>
          <td role="cell"></td><td role="cell" class="wf-begin"></td><td role="cell" class="num">${duration(unnamed_s)}</td>
          ${track(holes.map(([begin, end]) => segment(begin, end - begin, "unnamed", "no name")))}
        </tr>
        ${token_s.length > 0 && html`<tr role="row" class="wf-tokens">
          <th role="rowheader" scope="row" class="wf-name"><span class="leaf">tokens</span> <small>when each went out</small></th>
          <td role="cell" class="wf-where"><span class="place client">client</span></td>
          <td role="cell" class="num wf-begin">${duration(token_s[0])}</td><td role="cell" class="num">${token_s.length}</td>
          ${track(html`<svg class="wf-ticks" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true"><path
            d=${token_s.filter((time) => time >= from && time <= to).map((time) => `M${(at(time) * 10).toFixed(1)} 0V10`).join("")} /></svg>`)}
        </tr>`}
      </tbody>
    </table>
    ${token_s.length > 1 && html`<figcaption class="quiet">${gapWords(token_s)}</figcaption>`}
  </figure>`;
}
