// The picture: prefill workers to the left, decode workers to the right, and between them the hinge, their links.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { bytes, count, duration, number, share, speed, workerName } from "../format.js";
import { FEW, FEW_LINKS, byCondition, byRole, linesOf, linksBetween, totals } from "./fleet_model.js";
import { Lines, linkWords, usePlaces } from "./hinge.js";
import { LinkMatrix } from "./link_matrix.js";
import { Legend, Tile, WorkerCard, hrefOf } from "./worker_card.js";

export const title = "Fleet";

const BRIEF = 4; // of a side: cards of more say less
const MOST_BROKEN = 6; // links that a narrow window tells of
const TURNED_MS = 60_000; // that a change of role is told
const NAMES = { prefill: "Prefill", decode: "Decode", unified: "Unified" };
const TASKS = { prefill: "computes prompts", decode: "makes outputs", unified: "does both" };

export default function Fleet({ store, api, route, me }) {
  const state = store.use("fleet");
  const memory = useRef(new Map());
  useEffect(() => {
    const timer = setTimeout(() => loadDrawer().catch(() => {}), 1000);
    return () => clearTimeout(timer);
  }, []);
  if (!state) return html`<p class="lone" role="status">Waiting for the fleet\u2026</p>`;
  remember(memory.current, state.workers);
  const selected = route.id;
  return html`
    <div class="fleet" data-drawer=${selected ? "" : undefined}>
      <h1 class="unheard">Fleet</h1>
      <${Picture} state=${state} selected=${selected} memory=${memory.current} />
      <${LinkTable} workers=${state.workers} />
      <${Terms} state=${state} />
      ${selected && html`<${LateDrawer} instance=${selected} state=${state} me=${me} api=${api} seen=${memory.current.get(selected)} onClose=${() => close(selected)} />`}
    </div>`;
}

const loadDrawer = () => import("./drawer.js");

/** The drawer is no part of what is seen first. */
function LateDrawer(props) {
  const [drawer, setDrawer] = useState(null);
  useEffect(() => { loadDrawer().then((module) => setDrawer(() => module.Drawer), () => setDrawer(() => Missing)); }, []);
  return drawer && html`<${drawer} ...${props} />`;
}

const Missing = () => html`<p class="drawer" role="alert">What is told of a worker could not be loaded. Reload the page to try again.</p>`;

function close(instance) {
  location.hash = "#/fleet";
  document.querySelector(`[data-instance="${CSS.escape(instance)}"] a, a[data-instance="${CSS.escape(instance)}"]`)?.focus();
}

/** Keep what a card does not tell: which role a worker had before, and how many requests it had to drain. */
function remember(memory, workers, now = Date.now()) {
  for (const [instance, card] of Object.entries(workers)) {
    const seen = memory.get(instance) ?? { role: card.role, wasRole: "", turned: 0, drainMost: 0 };
    if (seen.role !== card.role) Object.assign(seen, { wasRole: seen.role, role: card.role, turned: now });
    if (now - seen.turned > TURNED_MS) seen.wasRole = "";
    seen.drainMost = card.drain ? Math.max(seen.drainMost, card.drain.requests_left) : 0;
    memory.set(instance, seen);
  }
}

function Picture({ state, selected, memory }) {
  const { workers } = state;
  const picture = useRef(null);
  const roles = byRole(workers);
  const isMany = Math.max(roles.prefill.length, roles.decode.length, roles.unified.length) > FEW;
  const key = `${Object.keys(workers).join()} ${selected}`;
  const geometry = usePlaces(picture, key);
  const hasSides = roles.prefill.length > 0 || roles.decode.length > 0;
  const isMatrix = isMany || roles.prefill.length * roles.decode.length > FEW_LINKS;
  const all = linksBetween(workers, [...roles.prefill, ...roles.unified], [...roles.decode, ...roles.unified]);
  const ofSides = all.filter(({ from, to }) => workers[from].role !== "unified" && workers[to].role !== "unified");
  const peers = new Map(ofSides.filter(({ from, to }) => from === selected || to === selected)
    .map(({ from, to, link }) => [from === selected ? to : from, link.state]));
  const drawn = isMatrix ? ofSides.filter(({ from, to }) => from === selected || to === selected) : linesOf(all, workers);
  return html`
    <div class="picture" ref=${picture} data-matrix=${isMatrix ? "" : undefined} data-both=${roles.unified.length ? "" : undefined}>
      ${hasSides && html`
        <${Panel} role="prefill" state=${state} entries=${roles.prefill} isMany=${isMany} selected=${selected} peers=${peers} memory=${memory} />
        <${Hinge} roles=${roles} workers=${workers} isMatrix=${isMatrix} selected=${selected} links=${ofSides} width=${geometry.width} />
        <${Panel} role="decode" state=${state} entries=${roles.decode} isMany=${isMany} selected=${selected} peers=${peers} memory=${memory} />`}
      ${roles.unified.length > 0 && html`
        <${Panel} role="unified" state=${state} entries=${roles.unified} isMany=${isMany} selected=${selected} peers=${peers} memory=${memory} />`}
      ${Object.keys(workers).length === 0 && html`<p class="lone">No worker has joined yet.</p>`}
      <${Lines} links=${drawn} geometry=${geometry} workers=${workers} selected=${isMatrix ? "" : selected} isMatrix=${isMatrix} />
    </div>
    <${Legend} isMatrix=${isMatrix} isMany=${isMany} />`;
}

function Panel({ role, state, entries, isMany, selected, peers, memory }) {
  const signals = Object.entries(state.pools).filter(([, signal]) => signal.role === role);
  return html`
    <section class="panel" data-role=${role} aria-labelledby=${`panel-${role}`}>
      <header>
        <h2 id=${`panel-${role}`}>${NAMES[role]} <small>${TASKS[role]}</small></h2>
        ${signals.map(([name, signal]) => html`<${Signal} key=${name} name=${signals.length > 1 ? name : ""} signal=${signal} />`)}
        ${role === "unified" && html`<${Among} entries=${entries} workers=${state.workers} />`}
        ${!signals.length && html`<p class="quiet">${count(entries.length, "worker")}</p>`}
      </header>
      ${isMany
        ? html`<${Tiles} entries=${entries} workers=${state.workers} selected=${selected} peers=${peers} />`
        : html`<ul class="workers">${entries.map(([instance, card]) => html`
          <${WorkerCard} key=${instance} instance=${instance} card=${card} workers=${state.workers} isSelected=${instance === selected}
            isBrief=${entries.length > BRIEF} seen=${memory.get(instance)} />`)}</ul>`}
    </section>`;
}

/** The links of unified workers with each other. */
function Among({ entries, workers }) {
  const links = linksBetween(workers, entries, entries);
  if (!links.length) return null;
  const sum = totals(links);
  return html`<p class="next">Links between them: ${number(sum.up)} of ${number(sum.num)} up${sum.bytesPerS > 0 ? `, ${speed(sum.bytesPerS)} now` : ", quiet"}.</p>`;
}

/** What a pool is scaled by, and what comes next. */
function Signal({ name, signal }) {
  return html`
    <div class="signal">
      <p class="numbers">${name && html`<span>${name}</span>`}
        <span><b>${number(signal.num_ready)}</b> of ${count(signal.num_workers, "worker")} ready</span>
        <span><b>${duration(signal.queue_s)}</b> queue</span>
        <span><b>${share(signal.kv_share)}</b> of KV held</span>
        ${signal.weight != null && html`<span>weight <b>${number(signal.weight)}</b></span>`}</p>
      <p class="next">${signal.words}</p>
    </div>`;
}

function Tiles({ entries, workers, selected, peers }) {
  const groups = byCondition(entries);
  const order = groups.flatMap(([, group]) => group.map(([instance]) => instance));
  const [stop, setStop] = useState("");
  const tabStop = order.includes(selected) ? selected : order.includes(stop) ? stop : order[0];
  function onKey(event) {
    const at = order.indexOf(event.target.dataset?.instance);
    if (at < 0) return;
    const tiles = [...event.currentTarget.querySelectorAll(".tile")];
    const row = tiles.filter((tile) => tile.offsetTop === tiles[0].offsetTop).length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row, Home: -at, End: order.length - 1 - at }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = tiles[Math.max(0, Math.min(tiles.length - 1, at + step))];
    setStop(next.dataset.instance);
    next.focus();
  }
  return html`
    <div class="tile-groups" onKeyDown=${onKey}>${groups.map(([word, group]) => html`
      <div key=${word} class="tile-group" data-few=${group.length <= 3 ? "" : undefined}>
      <h3>${word} <small>${number(group.length)}</small></h3>
      <div class="tiles">${group.map(([instance, card]) => html`
        <${Tile} key=${instance} instance=${instance} card=${card} workers=${workers} isSelected=${instance === selected} isStop=${instance === tabStop} peer=${peers.get(instance)} />`)}</div></div>`)}
    </div>`;
}

function Hinge({ roles, workers, isMatrix, selected, links, width }) {
  const sum = totals(links);
  const num = isMatrix ? roles.prefill.length * roles.decode.length : sum.num;
  const broken = sum.num - sum.up;
  return html`
    <section class="hinge" data-hinge aria-labelledby="hinge">
      <header>
        <h2 id="hinge">Links</h2>
        <p class="numbers"><span><b>${number(num - broken)}</b> of ${number(num)} up</span>
          <span><b>${sum.bytesPerS > 0 ? speed(sum.bytesPerS) : "quiet"}</b></span><span><b>${bytes(sum.inFlight)}</b> in flight</span></p>
      </header>
      ${isMatrix && roles.prefill.length > 0 && roles.decode.length > 0 && html`
        <${LinkMatrix} senders=${roles.prefill} receivers=${roles.decode} workers=${workers} selected=${selected}
          room=${Math.max(240, Math.min(560, width * 0.42, innerWidth - 40))} onSelect=${(instance) => { location.hash = hrefOf(instance); }} />`}
      <ul class="narrow-links">${links.filter(({ link }) => link.state !== "up").slice(0, MOST_BROKEN).map(({ from, to, link }) => html`
        <li key=${from + to}><b>${workerName(from, workers)} \u2192 ${workerName(to, workers)}</b> ${linkWords(link)}</li>`)}</ul>
    </section>`;
}

/** What the lines tell, in words. */
function LinkTable({ workers }) {
  const [isOpen, setOpen] = useState(false);
  return html`
    <details class="link-table" onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>Links as a table</summary>
      ${isOpen && html`<${LinkRows} workers=${workers} />`}
    </details>`;
}

const MOST_ROWS = 300;

function LinkRows({ workers }) {
  const roles = byRole(workers);
  const links = linksBetween(workers, [...roles.prefill, ...roles.unified], [...roles.decode, ...roles.unified]);
  return html`
    <div class="scroll" tabindex="0" role="group" aria-label="Links"><table>
      <thead><tr><th scope="col">From</th><th scope="col">To</th><th scope="col">State</th><th scope="col">What it does</th></tr></thead>
      <tbody>${links.slice(0, MOST_ROWS).map(({ from, to, link }) => html`
        <tr key=${from + to}><td><a href=${hrefOf(from)}>${workerName(from, workers)}</a></td><td><a href=${hrefOf(to)}>${workerName(to, workers)}</a></td>
          <td>${link.state}</td><td>${linkWords(link)}</td></tr>`)}</tbody>
    </table></div>
    ${links.length > MOST_ROWS && html`<p class="quiet">The first ${MOST_ROWS} of ${number(links.length)}; a worker's own are in its drawer.</p>`}`;
}

/** Who cannot serve together, which terms there are, and who routes. */
function Terms({ state }) {
  const pairs = Object.entries(state.unpaired);
  const terms = new Map();
  for (const card of Object.values(state.workers)) {
    const key = `${card.version} ${card.compat}`;
    if (!terms.has(key)) terms.set(key, { version: card.version, compat: card.compat, num: 0 });
    terms.get(key).num += 1;
  }
  return html`
    <div class="below">
      <section aria-labelledby="unpaired-name">
        <h2 id="unpaired-name">Pairs that cannot serve <small>${number(state.num_unpaired ?? pairs.length)}</small></h2>
        ${pairs.length === 0 ? html`<p class="quiet">Every prefill worker has a link to every decode worker.</p>` : html`
          <ul class="unpaired">${pairs.slice(0, 12).map(([key, { prefill, decode, why }]) => html`
            <li key=${key}><a href=${hrefOf(prefill)}>${workerName(prefill, state.workers)}</a> \u2192 <a href=${hrefOf(decode)}>${workerName(decode, state.workers)}</a>
              <span>${why}</span></li>`)}</ul>
          ${pairs.length > 12 && html`<p class="quiet">The first 12; a worker's own are in its drawer.</p>`}`}
      </section>
      <section aria-labelledby="terms-name">
        <h2 id="terms-name">Versions and terms</h2>
        <table><thead><tr><th scope="col">Version</th><th scope="col">Terms</th><th scope="col" class="num">Workers</th></tr></thead>
          <tbody>${[...terms].map(([key, row]) => html`<tr key=${key}><td>${row.version}</td><td><code>${row.compat}</code></td><td class="num">${number(row.num)}</td></tr>`)}</tbody></table>
        <p class="quiet">Only workers of the same terms pair.</p>
      </section>
      <section aria-labelledby="routers-name">
        <h2 id="routers-name">Routers <small>${number(Object.keys(state.routers).length)}</small></h2>
        <table><thead><tr><th scope="col">Router</th><th scope="col">Address</th><th scope="col">Version</th></tr></thead>
          <tbody>${Object.entries(state.routers).map(([instance, router]) => html`
            <tr key=${instance}><td>${router.pod || instance.slice(0, 6)}${router.is_here && html` <span class="quiet">answers here</span>`}</td>
              <td>${router.address}</td><td>${router.version}</td></tr>`)}</tbody></table>
      </section>
    </div>`;
}
