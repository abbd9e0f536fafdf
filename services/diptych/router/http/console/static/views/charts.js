// The last hour, as lines: drawn by uPlot, told in words, and as a table for who cannot see them.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import uPlot from "../vendor/uplot.js";
import { clock, duration, number, share } from "../format.js";
import { colour, onTheme } from "../theme.js";

export const title = "Charts";

const HEIGHT_PX = 168;
const TABLE_ROWS = 60; // of means: an hour by the minute
const UNITS = { s: duration, share: (value) => share(value) };
const CHARTS = [
  ["Time to the first token", /^ttft/],
  ["Between tokens", /^itl/],
  ["Goodput", /^goodput/],
  ["Tokens a second", /_tokens$/],
  ["Requests a second", /^(requests|errors)$/],
  ["Requests in the router", /^(queued|running)$/],
  ["Wait for prefill, by pool", /^queue_/],
  ["KV held, by pool", /^kv_/],
];
const WORDS = { p50: "median", requests: "ended", goodput: "within the objectives", prompt_tokens: "prompts", output_tokens: "outputs" };
const COLOURS = [["prefill", "--prefill"], ["prompt", "--prefill"], ["decode", "--decode"], ["output", "--decode"], ["unified", "--unified"], ["errors", "--bad"], ["p9", "--ink-3"]];
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]]; // so that colour is never alone

const sheet = document.createElement("link");
sheet.rel = "stylesheet";
sheet.href = new URL("../vendor/uplot.css", import.meta.url);
document.head.append(sheet);

/** What a line is called within its chart. */
export const wordsOf = (name) => WORDS[name] ?? WORDS[name.split("_").at(-1)] ?? name.split("_").at(-1);

/** The charts that a document has lines for: [{name, unit, lines: [[name, values]]}]; what nobody knows comes last. */
export function chartsOf(series) {
  const left = new Map(Object.entries(series));
  const found = CHARTS.map(([name, pattern]) => {
    const lines = [...left].filter(([key]) => pattern.test(key));
    lines.forEach(([key]) => left.delete(key));
    return { name, lines };
  });
  const others = [...left].map((line) => ({ name: line[0].replaceAll("_", " "), lines: [line] }));
  return [...found, ...others].filter(({ lines }) => lines.length)
    .map(({ name, lines }) => ({ name, unit: lines[0][1].unit, lines: lines.map(([key, { values }]) => [key, values]) }));
}

/** Means of the values that were measured, in at most `TABLE_ROWS` rows: [[seconds since 1970, mean or null, ...]]. */
export function tableOf({ begun_unix_s, interval_s }, lines) {
  const length = Math.max(...lines.map(([, values]) => values.length));
  const step = Math.max(1, Math.ceil(length / TABLE_ROWS));
  const mean = (values) => {
    const known = values.filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  return Array.from({ length: Math.ceil(length / step) }, (_, row) => [
    begun_unix_s + row * step * interval_s,
    ...lines.map(([, values]) => mean(values.slice(row * step, (row + 1) * step))),
  ]);
}

const newest = (values) => values.findLast((value) => value !== null) ?? null;
const format = (unit) => UNITS[unit] ?? ((value) => number(value >= 100 ? Math.round(value) : value));

/** Where a value stands between two that are not known: no line goes there. */
const alone = (plot, index) => plot.data[index].flatMap((value, at, all) => (value !== null && (all[at - 1] ?? null) === null && (all[at + 1] ?? null) === null ? [at] : []));

function optionsOf(chart, width) {
  const show = format(chart.unit);
  const ink = colour("--ink-2");
  const axis = { stroke: ink, grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return {
    width, height: HEIGHT_PX, padding: [8, 8, 0, 0],
    cursor: { sync: { key: "console" }, y: false, points: { size: 6 } },
    legend: { show: false },
    scales: { y: { range: (_, low, high) => [0, chart.unit === "share" ? 1 : (high || 1) * 1.1] } },
    axes: [{ ...axis, size: 24, space: 60, values: (_, ticks) => ticks.map((tick) => clock(tick).slice(0, ticks[1] - ticks[0] < 60 ? 8 : 5)) }, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === 0 ? "0" : show(tick))) }],
    series: [{}, ...chart.lines.map(([name], index) => ({ label: wordsOf(name), stroke: colour(lineColour(name)), width: 1.5, dash: DASHES[index % DASHES.length], points: { show: true, size: 3, filter: alone } }))],
  };
}

const lineColour = (name) => COLOURS.find(([part]) => name.includes(part))?.[1] ?? "--ink-2";

function Plot({ chart, times, onCursor }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = [times, ...chart.lines.map(([, values]) => values)];
  const names = chart.lines.map(([name]) => name).join();
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const options = optionsOf(chart, place.current.clientWidth);
      options.hooks = { setCursor: [({ cursor }) => onCursor(cursor.idx ?? null)] };
      plot.current = new uPlot(options, latest.current, place.current);
    };
    make();
    const sizes = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT_PX }));
    sizes.observe(place.current);
    const forget = onTheme(make);
    return () => {
      forget();
      sizes.disconnect();
      plot.current.destroy();
    };
  }, [names]);
  useEffect(() => plot.current.setData(data), [chart]);
  return html`<div class="plot" ref=${place} aria-hidden="true"></div>`;
}

function Values({ state, chart }) {
  const [isOpen, setOpen] = useState(false);
  const show = format(chart.unit);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}><summary>As a table</summary>
    ${isOpen && html`<div class="scroll tall" tabindex="0" role="group" aria-label=${`${chart.name}, as a table`}><table>
      <thead><tr><th scope="col">From</th>${chart.lines.map(([name]) => html`<th key=${name} scope="col" class="num">${wordsOf(name)}</th>`)}</tr></thead>
      <tbody>${tableOf(state, chart.lines).reverse().map(([time, ...values]) => html`<tr key=${time}><th scope="row">${clock(time)}</th>${values.map((value, index) => html`<td key=${index} class="num">${show(value)}</td>`)}</tr>`)}</tbody>
    </table></div>`}</details>`;
}

function Chart({ state, times, chart }) {
  const [index, setIndex] = useState(null);
  const show = format(chart.unit);
  const at = (values) => (index === null ? newest(values) : values[index] ?? null);
  return html`<figure class="chart">
    <figcaption><h2>${chart.name}</h2><span class="quiet">${index === null ? "now" : clock(times[index])}</span></figcaption>
    <ul class="series">${chart.lines.map(([name, values], nth) => html`<li key=${name} data-series=${name}>
      <svg width="22" height="6" aria-hidden="true"><path d="M0 3H22" style=${{ stroke: `var(${lineColour(name)})`, strokeDasharray: DASHES[nth % DASHES.length].join(" ") }} /></svg>
      ${wordsOf(name)} <b>${show(at(values))}</b></li>`)}</ul>
    <${Plot} chart=${chart} times=${times} onCursor=${setIndex} />
    <${Values} state=${state} chart=${chart} />
  </figure>`;
}

export default function Charts({ store }) {
  const state = store.use("charts");
  const charts = useMemo(() => (state ? chartsOf(state.series) : []), [state]);
  const length = Math.max(0, ...charts.flatMap(({ lines }) => lines.map(([, values]) => values.length)));
  const times = useMemo(() => (state ? Array.from({ length }, (_, index) => state.begun_unix_s + index * state.interval_s) : []), [state, length]);
  return html`<section class="view-charts"><h1>Charts</h1>
    <p class="quiet">${state === null ? "Waiting for the first answer of the router." : length === 0
      ? "Nothing was measured yet."
      : `The last ${duration(length * state.interval_s)}, a value each ${number(state.interval_s)} s.`}</p>
    <div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.name} state=${state} times=${times} chart=${chart} />`)}</div>
  </section>`;
}
