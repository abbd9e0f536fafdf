// The calls that run and the last that ended: filtered, sorted, and still while somebody reads them.

import { html, useContext, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { clock, duration, number, share } from "../format.js";
import { Names, PHASES, namesOf, stateWords } from "./names.js";

export const title = "Requests";

const ROW_PX = 36;
const CARD_PX = 104;
const OVERSCAN = 8; // rows beyond the window
const SLOW_TIMES = 3; // the median of the list
const SLOW_S = 0.3; // quicker first tokens are never slow
const NO_HOLDS = { pause: false, pointer: false, focus: false, away: false }; // why the list stands still
const NO_FILTERS = { tenant: "", model: "", adapter: "", phase: "", outcome: "", slow_s: "" };
const COLUMNS = [
  ["arrived_unix_s", "Arrived", "num"],
  ["id", "Request", ""],
  ["phase", "State", ""],
  ["tenant", "Tenant", ""],
  ["model", "Model", ""],
  ["ttft_s", "First token", "num"],
  ["duration_s", "Duration", "num"],
  ["prompt_tokens", "Prompt", "num"],
  ["output_tokens", "Output", "num"],
  ["prefill", "Where", ""],
];

const kept = { filters: NO_FILTERS, sort: { key: "arrived_unix_s", falls: true } }; // when the reader comes back

const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1] ?? 0;
const paceOf = (row) => (row.output_tokens > 1 && row.ttft_s !== null ? (row.duration_s - row.ttft_s) / (row.output_tokens - 1) : null);

/** What is usual in a list: the median first token and the median pace of outputs, in seconds. */
export const usualOf = (rows) => ({
  ttft_s: median(rows.map((row) => row.ttft_s).filter((value) => value !== null)),
  pace_s: median(rows.map(paceOf).filter((value) => value !== null)),
});

/** Why a call counts as slow, in words; empty: it does not. */
export function slowness(row, usual) {
  const first = row.ttft_s ?? (row.phase === "ended" ? 0 : row.duration_s);
  const limit = Math.max(SLOW_S, SLOW_TIMES * usual.ttft_s);
  if (usual.ttft_s > 0 && first > limit) return row.ttft_s === null ? "slow: no token yet" : "slow first token";
  const pace = paceOf(row);
  return usual.pace_s > 0 && pace > SLOW_TIMES * usual.pace_s && row.output_tokens > 4 ? "slow output" : "";
}

const has = (text, part) => text.toLowerCase().includes(part.trim().toLowerCase());

/** Does a call pass the filters? */
export const passes = (row, filters) =>
  has(row.tenant, filters.tenant) &&
  has(row.model, filters.model) &&
  has(row.adapter, filters.adapter) &&
  (!filters.phase || (filters.phase === "running" ? row.phase !== "ended" : row.phase === filters.phase)) &&
  (!filters.outcome || (filters.outcome === "failed" ? !["", "ok"].includes(row.outcome) : row.outcome === filters.outcome)) &&
  !(row.duration_s <= Number(filters.slow_s || -1));

/** Sorted ids; what is not known comes last, and the newest first among equals. */
export function sorted(rows, { key, falls }) {
  const sign = falls ? -1 : 1;
  const compare = (a, b) => {
    if (a[key] === b[key]) return b.arrived_unix_s - a.arrived_unix_s;
    if (a[key] === null || b[key] === null) return a[key] === null ? 1 : -1;
    return a[key] < b[key] ? -sign : sign;
  };
  return [...rows].sort(compare).map((row) => row.id);
}

/** The ids to show: while the list is held, the old ones in their old places. */
function useHeld(ids, rows, isHeld, key) {
  const old = useRef({ key, ids });
  if (!isHeld || old.current.key !== key) old.current = { key, ids };
  const shown = old.current.ids.filter((id) => rows[id]);
  if (old.current.ids === ids) return [shown, 0];
  const known = new Set(old.current.ids);
  return [shown, ids.filter((id) => !known.has(id)).length];
}

/** The part of a long list that is in the window, as [first, last). */
function useWindowed(ref, length, rowPx) {
  const [range, setRange] = useState([0, 60]);
  useEffect(() => {
    const measure = () => {
      if (!ref.current) return;
      const above = -ref.current.getBoundingClientRect().top;
      const first = Math.max(0, Math.floor(above / rowPx) - OVERSCAN);
      const last = first + Math.ceil(innerHeight / rowPx) + 2 * OVERSCAN;
      setRange(([a, b]) => (a === first && b === last ? [a, b] : [first, last]));
    };
    measure();
    addEventListener("scroll", measure, { capture: true, passive: true });
    addEventListener("resize", measure);
    return () => {
      removeEventListener("scroll", measure, { capture: true });
      removeEventListener("resize", measure);
    };
  }, [rowPx, length]);
  return [Math.min(range[0], Math.max(0, length - 1)), Math.min(range[1], length)];
}

function useNarrow() {
  const query = useMemo(() => matchMedia("(max-width: 719px)"), []);
  const [isNarrow, setNarrow] = useState(query.matches);
  useEffect(() => {
    const tell = () => setNarrow(query.matches);
    query.addEventListener("change", tell);
    return () => query.removeEventListener("change", tell);
  }, []);
  return isNarrow;
}

function Filters({ rows, filters, set }) {
  const known = (key) => [...new Set(rows.map((row) => row[key]).filter(Boolean))].sort().slice(0, 200);
  const text = (key, name) => html`<label>${name}
    <input type="search" list=${`known-${key}`} name=${key} value=${filters[key]} placeholder="any" autocomplete="off"
      onInput=${(event) => set({ ...filters, [key]: event.target.value })} />
    <datalist id=${`known-${key}`}>${known(key).map((value) => html`<option key=${value} value=${value} />`)}</datalist></label>`;
  const choice = (key, name, options) => html`<label>${name}
    <select name=${key} value=${filters[key]} onChange=${(event) => set({ ...filters, [key]: event.target.value })}>
      <option value="">any</option>${options.map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}
    </select></label>`;
  return html`<form class="filters" role="search" aria-label="Filter requests" onSubmit=${(event) => event.preventDefault()}>
    ${choice("phase", "State", [["running", "running"], ...Object.entries(PHASES)])}
    ${choice("outcome", "Outcome", [["failed", "anything but ok"], ...known("outcome").map((value) => [value, value])])}
    ${text("tenant", "Tenant")}${text("model", "Model")}${text("adapter", "Adapter")}
    <label>Slower than (s)<input type="number" min="0" step="any" name="slow_s" value=${filters.slow_s} placeholder="any"
      onInput=${(event) => set({ ...filters, slow_s: event.target.value })} /></label>
    <button type="button" disabled=${Object.values(filters).every((value) => !value)} onClick=${() => set(NO_FILTERS)}>Clear</button>
  </form>`;
}

function Row({ row, index, slow }) {
  const pair = useContext(Names).pair(row);
  const isBad = row.phase === "ended" && row.outcome !== "ok" && row.outcome !== "disconnected";
  const href = `#/requests/${encodeURIComponent(row.id)}`;
  const open = () => {
    if (getSelection().isCollapsed) location.hash = href;
  };
  return html`<tr role="row" aria-rowindex=${index + 2} onClick=${open} class=${`call ${row.phase} ${isBad ? "is-failure" : ""}`}>
    <td role="cell" class="num c-when">${clock(row.arrived_unix_s)}</td>
    <td role="cell" class="c-id"><a href=${href}>${row.id}</a></td>
    <td role="cell" class="c-state"><span class=${`call-state ${row.phase} ${isBad ? "bad" : ""}`}>${stateWords(row)}</span>
      ${row.num_attempts > 1 && html` <span class="tag">${row.num_attempts} attempts</span>`}
      ${slow && html` <span class="tag slow">${slow}</span>`}</td>
    <td role="cell" class="c-tenant">${row.tenant || html`<span class="quiet">common</span>`}</td>
    <td role="cell" class="c-model" title=${row.model}>${row.adapter || row.model.split("/").at(-1)}</td>
    <td role="cell" class="num c-ttft" data-name="first token">${row.ttft_s === null ? "–" : duration(row.ttft_s)}</td>
    <td role="cell" class="num c-took" data-name="in all">${duration(row.duration_s)}</td>
    <td role="cell" class="num c-prompt" data-name="prompt">${number(row.prompt_tokens)}
      ${row.cached_tokens > 0 && html` <span class="quiet">${share(row.cached_tokens / row.prompt_tokens)} cached</span>`}</td>
    <td role="cell" class="num c-output" data-name="output">${number(row.output_tokens)}</td>
    <td role="cell" class="c-where" title=${pair}>${pair}</td>
  </tr>`;
}

function Rows({ ids, rows, usual, sort, setSort, onAway }) {
  const body = useRef(null);
  const rowPx = useNarrow() ? CARD_PX : ROW_PX;
  const [first, last] = useWindowed(body, ids.length, rowPx);
  useEffect(() => onAway(first > 0), [first > 0]);
  const spacer = (length) => length > 0 && html`<tr role="presentation" class="spacer" style=${{ height: `${length * rowPx}px` }}></tr>`;
  const turn = (key) => setSort({ key, falls: sort.key === key ? !sort.falls : true });
  return html`<table role="table" class="calls" aria-label="Requests" aria-rowcount=${ids.length + 1}>
    <thead role="rowgroup"><tr role="row" aria-rowindex="1">${COLUMNS.map(([key, name, kind]) => html`
      <th key=${key} role="columnheader" scope="col" class=${kind} aria-sort=${sort.key === key ? (sort.falls ? "descending" : "ascending") : "none"}>
        <button type="button" onClick=${() => turn(key)}>${name}<span aria-hidden="true" class="arrow">${sort.key === key ? (sort.falls ? "↓" : "↑") : ""}</span></button></th>`)}
    </tr></thead>
    <tbody role="rowgroup" ref=${body}>
      ${spacer(first)}
      ${ids.slice(first, last).map((id, index) => html`<${Row} key=${id} row=${rows[id]} index=${first + index} slow=${slowness(rows[id], usual)} />`)}
      ${spacer(ids.length - last)}
    </tbody>
  </table>`;
}

export default function Requests({ store, route }) {
  const state = store.use("requests");
  const names = namesOf(store.use("fleet")?.workers);
  const [filters, setFilters] = useState({ ...kept.filters, ...Object.fromEntries([...route.params].filter(([name]) => name in NO_FILTERS)) });
  const [sort, setSort] = useState(kept.sort);
  const [holds, setHolds] = useState(NO_HOLDS);
  Object.assign(kept, { filters, sort });
  const hold = (change) => setHolds((old) => ({ ...old, ...change }));
  const rows = state?.rows ?? {};
  const all = useMemo(() => Object.values(rows), [state]);
  const usual = useMemo(() => usualOf(all), [state]);
  const matching = useMemo(() => sorted(all.filter((row) => passes(row, filters)), sort), [state, filters, sort]);
  const isHeld = Object.values(holds).includes(true);
  const [ids, num_new] = useHeld(matching, rows, isHeld, JSON.stringify([filters, sort]));
  if (!state) return html`<section><h1>Requests</h1><p class="quiet">Waiting for the first answer of the router.</p></section>`;

  const num_running = all.filter((row) => row.phase !== "ended").length;
  const num_slow = ids.filter((id) => slowness(rows[id], usual)).length;
  const letGo = () => {
    setHolds(NO_HOLDS);
    scrollTo({ top: 0 });
  };
  return html`<section class="view-requests">
    <h1>Requests</h1>
    <p class="lead">${number(num_running)} running, ${number(all.length - num_running)} ended of late. ${num_slow > 0
      ? `${number(num_slow)} below ${num_slow === 1 ? "is" : "are"} slow: more than ${SLOW_TIMES} times the median first token (${duration(usual.ttft_s)}) or the median pace.`
      : "None below is slow beside the others."}</p>
    <${Filters} rows=${all} filters=${filters} set=${setFilters} />
    <div onPointerEnter=${(event) => hold({ pointer: event.pointerType === "mouse" })} onPointerLeave=${() => hold({ pointer: false })}
      onFocusCapture=${(event) => hold({ focus: event.target.matches("a") })} onBlurCapture=${() => hold({ focus: false })}>
      <div class="held">
        <button type="button" aria-pressed=${holds.pause} onClick=${() => hold({ pause: !holds.pause })}>Hold still</button>
        <span class="quiet">${ids.length === all.length ? `all ${number(all.length)}` : `${number(ids.length)} of ${number(all.length)}`}${
          isHeld ? " \u00b7 held still while you read" : ""}</span>
        ${num_new > 0 && html`<button type="button" class="link" onClick=${letGo}>show ${number(num_new)} new</button>`}
      </div>
      ${ids.length > 0
        ? html`<${Names.Provider} value=${names}><${Rows} ids=${ids} rows=${rows} usual=${usual} sort=${sort} setSort=${setSort} onAway=${(away) => hold({ away })} /><//>`
        : html`<p class="empty">${all.length ? "No request passes these filters." : "No request has come yet. Send one, or try the playground."}</p>`}
    </div>
  </section>`;
}
