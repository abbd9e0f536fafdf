// The hinge: links as lines between the workers' places on the page.

import { html, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { bytes, speed, workerName } from "../format.js";
import { BELOW } from "./fleet_model.js";

const FULL = 3; // links that have all words
const BRIEF = 30; // links that have words where they leave; of more, only those that are not up or are looked at

/** Where workers are in the picture: {width, height, places: Map(instance -> {left, right, top, bottom})}. */
export function usePlaces(picture, key) {
  const [found, setFound] = useState({ width: 0, height: 0, places: new Map() });
  const last = useRef("");
  function measure() {
    const root = picture.current;
    if (!root) return;
    const base = root.getBoundingClientRect();
    const places = new Map();
    for (const element of root.querySelectorAll("[data-instance], [data-hinge]")) {
      const box = element.getBoundingClientRect();
      const sides = (element.closest(".panel") ?? element).getBoundingClientRect(); // lines begin and end at the edge of a panel
      places.set(element.dataset.instance ?? BELOW, {
        left: sides.left - base.left, right: sides.right - base.left, top: box.top - base.top, bottom: box.bottom - base.top,
      });
    }
    const print = JSON.stringify([base.width, base.height, [...places]]);
    if (print === last.current) return;
    last.current = print;
    setFound({ width: base.width, height: base.height, places });
  }
  useLayoutEffect(() => {
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(picture.current);
    return () => observer.disconnect();
  }, [key]);
  return found;
}

/** The width of a line: by the logarithm of what the link was tested with. */
export function strokeOf(link) {
  return Math.min(6, 1 + Math.log2(1 + link.tested_bytes_per_s / 1e9) / 1.7);
}

export function linkWords(link) {
  if (link.state !== "up") return link.reason ? `${link.state}: ${link.reason}` : link.state;
  const now = link.bytes_per_s > 0 ? `${speed(link.bytes_per_s)} now` : "quiet";
  const fast = link.tested_bytes_per_s ? `, ${speed(link.tested_bytes_per_s)} tested` : "";
  const flying = link.in_flight_bytes ? `, ${bytes(link.in_flight_bytes)} in flight` : "";
  return `${link.path}: ${now}${fast}${flying}`;
}

export function Lines({ links, geometry, workers, selected, isMatrix }) {
  const [looked, setLooked] = useState("");
  const { width, height, places } = geometry;
  const ports = portsOf(links);
  const drawn = links.map((entry, index) => ({ ...entry, id: `${entry.from}-${entry.to}`, index, path: curveOf(entry, places, ports) }))
    .filter((entry) => entry.path);
  const touches = (entry) => entry.from === selected || entry.to === selected;
  const styleOf = (entry) => {
    if (entry.id === looked) return "full";
    if (isMatrix) return isBroken(entry.link) ? "mark" : "";
    if (drawn.length <= FULL) return "full";
    if (drawn.length <= BRIEF || (selected && touches(entry))) return "start";
    return isBroken(entry.link) ? "mark" : "";
  };
  return html`
    <svg class="hinge-lines" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} aria-hidden="true">
      <defs><linearGradient id="flow" gradientUnits="userSpaceOnUse" x1=${width * 0.36} x2=${width * 0.64} y1="0" y2="0">
        <stop class="from" offset="0" /><stop class="to" offset="1" /></linearGradient></defs>
      ${drawn.map((entry) => html`<${Line} key=${entry.id} entry=${entry} workers=${workers} isDim=${selected && !touches(entry)}
        isLooked=${entry.id === looked} onLook=${setLooked} />`)}
      ${drawn.filter(styleOf).map((entry) => html`
        <${Label} key=${entry.id} entry=${entry} style=${styleOf(entry)} isDim=${selected && !touches(entry)} count=${drawn.length} />`)}
    </svg>`;
}

const isBroken = (link) => link.state !== "up";

/** Lines leave and reach a card one below the other. */
function portsOf(links) {
  const out = new Map();
  const into = new Map();
  for (const { from, to } of links) {
    if (!out.has(from)) out.set(from, []);
    if (!into.has(to)) into.set(to, []);
    out.get(from).push(to);
    into.get(to).push(from);
  }
  const at = (map, one, other) => (map.get(one).indexOf(other) + 1) / (map.get(one).length + 1);
  return { out: (from, to) => at(out, from, to), into: (to, from) => at(into, to, from) };
}

/** {d, at(t)}: the curve of a link. Prefill workers are left, decode workers right, and those of both roles below. */
function curveOf({ from, to }, places, ports) {
  const a = places.get(from);
  const b = places.get(to);
  if (!a || !b) return null;
  const points = pointsOf(a, b, from === BELOW, to === BELOW, ports.out(from, to), ports.into(to, from));
  const [p, q, r, s] = points.map(([x, y]) => `${Math.round(x * 10) / 10} ${Math.round(y * 10) / 10}`);
  return { d: `M${p}C${q} ${r} ${s}`, at: (t) => ({ x: cubic(t, points.map(([x]) => x)), y: cubic(t, points.map(([, y]) => y)) }) };
}

const cubic = (t, [p, q, r, s]) => (1 - t) ** 3 * p + 3 * (1 - t) ** 2 * t * q + 3 * (1 - t) * t * t * r + t ** 3 * s;

function pointsOf(a, b, isFromBelow, isToBelow, out, into) {
  const leave = [a.right, a.top + (a.bottom - a.top) * out];
  const reach = [b.left, b.top + (b.bottom - b.top) * into];
  const foot = (box, part) => [box.left + (box.right - box.left) * part, box.bottom];
  if (isFromBelow) {
    const start = foot(a, 0.52 + 0.42 * out);
    return [start, [start[0], (start[1] + reach[1]) / 2], [start[0], reach[1]], reach];
  }
  if (isToBelow) {
    const end = foot(b, 0.48 - 0.42 * into);
    return [leave, [end[0], leave[1]], [end[0], (end[1] + leave[1]) / 2], end];
  }
  const middle = (leave[0] + reach[0]) / 2;
  return [leave, [middle, leave[1]], [middle, reach[1]], reach];
}

function Line({ entry, workers, isDim, isLooked, onLook }) {
  const { id, link, path, from, to } = entry;
  const flows = link.state === "up" && link.bytes_per_s > 0;
  const ratio = link.tested_bytes_per_s ? link.bytes_per_s / link.tested_bytes_per_s : 0.3;
  const seconds = Math.round(Math.max(0.5, Math.min(3, 1.1 - 0.35 * Math.log2(0.05 + ratio))) * 4) / 4;
  return html`
    <g class="line" data-state=${link.state} data-dim=${isDim ? "" : undefined} data-looked=${isLooked ? "" : undefined}>
      <path class="rail" d=${path.d} style=${{ strokeWidth: `${strokeOf(link)}px` }} />
      ${flows && html`<path class="pages" d=${path.d} style=${{ animationDuration: `${seconds}s`, strokeWidth: `${2 + strokeOf(link) / 2}px` }} />`}
      <path class="reach" d=${path.d} onMouseEnter=${() => onLook(id)} onMouseLeave=${() => onLook("")}>
        <title>${`${nameOf(from, workers)} to ${nameOf(to, workers)}\n${linkWords(link)}`}</title></path>
    </g>`;
}

const nameOf = (instance, workers) => (instance === BELOW ? "unified workers" : workerName(instance, workers));

function Label({ entry, style, isDim, count }) {
  const { link, path, index } = entry;
  const now = link.bytes_per_s > 0 ? speed(link.bytes_per_s) : "quiet";
  if (style === "start" && !isBroken(link)) {
    const isEnd = entry.from === BELOW;
    const { x, y } = path.at(isEnd ? 1 : 0);
    return html`<g class="label brief" data-dim=${isDim ? "" : undefined} data-end=${isEnd ? "" : undefined} transform=${place(x + (isEnd ? -7 : 7), y - 5)}>
      <text>${link.path}${link.bytes_per_s > 0 ? ` ${now}` : ""}</text></g>`;
  }
  const { x, y } = path.at(count <= 2 ? 0.5 : 0.32 + 0.36 * ((index * 0.381966) % 1));
  return html`
    <g class="label" data-state=${link.state} data-dim=${isDim ? "" : undefined} transform=${place(x, y)}>
      ${isBroken(link)
        ? html`<${Mark} state=${link.state} /><text y="-13">${link.state}</text>`
        : html`<text y="-10">${link.path} \u00b7 ${now}</text>
          ${link.in_flight_bytes > 0 && html`<text class="second" y="18">${bytes(link.in_flight_bytes)} in flight</text>`}`}
    </g>`;
}

const place = (x, y) => `translate(${Math.round(x)} ${Math.round(y)})`;

/** A cross: down. A bar across: refused. A ring: being connected or tested. */
function Mark({ state }) {
  if (state === "down") return html`<circle r="8" /><path d="M-4 -4L4 4M4 -4L-4 4" />`;
  if (state === "refused") return html`<circle r="8" /><path d="M-4.5 0H4.5" />`;
  return html`<circle r="8" /><circle class="ring" r="3.5" />`;
}
