// Is more cache worth it? The hit rate beside that of an infinite cache, the tiers, and the hottest prefixes.

import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { duration, number, share, shortId } from "../format.js";
import { namesOf } from "./names.js";

export const title = "Cache";

const TIERS = { pool: "KV pools", host: "host memory", files: "files", shared: "shared store" };

const points = (value) => (value * 100).toFixed(1);

/** What more cache would bring, in words. */
export function gainWords({ hit_rate, ceiling }) {
  if (hit_rate === null) return "Nothing is known yet: prompts must come first.";
  if (ceiling === null) return "What more cache would gain is not known: the policy of this router does not read prompts.";
  const gain = Math.max(0, ceiling - hit_rate);
  if (gain < 0.005) return "More cache would gain nothing: an infinite one would hit no more.";
  return `More cache would gain at most ${points(gain)} points.`;
}

const sameSet = (a, b) => a.length === b.length && a.every((value) => b.includes(value));

/**
 * The prefixes as trees, the hottest first. Pages in a row that the same requests read from the same workers are one
 * node: {name, first, from, to, num_pages, num_requests, workers, text, below, heat}; `heat` counts tokens read again.
 */
export function treesOf(prefixes) {
  const children = new Map();
  const push = (parent, name) => children.set(parent, [...(children.get(parent) ?? []), name]);
  for (const [name, { parent }] of Object.entries(prefixes)) push(parent in prefixes ? parent : "", name);
  const node = (first, from) => {
    let name = first;
    let num_pages = 1;
    for (let next = children.get(name); next?.length === 1; next = children.get(name)) {
      const [here, below] = [prefixes[name], prefixes[next[0]]];
      if (here.num_requests !== below.num_requests || !sameSet(here.workers, below.workers)) break;
      [name] = next;
      num_pages += 1;
    }
    const { num_tokens, num_requests, workers, text } = prefixes[name];
    const below = nodes(name, num_tokens);
    const own = (num_tokens - from) * Math.max(0, num_requests - 1);
    return { name, first, from, to: num_tokens, num_pages, num_requests, workers, text, below, heat: below.reduce((sum, { heat }) => sum + heat, own) };
  };
  const nodes = (parent, from) => (children.get(parent) ?? []).map((name) => node(name, from)).sort((a, b) => b.heat - a.heat);
  return nodes("", 0);
}

function Rate({ state }) {
  const { hit_rate, ceiling, prompt_tokens, cached_tokens, window_s } = state;
  const percent = (value) => ({ width: `${(value ?? 0) * 100}%` });
  return html`<div class="rate">
    <div class="rate-bar" role="img" aria-label=${`Hit rate ${share(hit_rate)}, ceiling ${share(ceiling)}`}>
      <i class="most" style=${percent(ceiling)}></i><i class="hit" style=${percent(hit_rate)}></i></div>
    <dl><div><dt><i class="colour-key hit"></i> Hit rate</dt><dd class="hit-rate">${share(hit_rate)}</dd></div>
      <div><dt><i class="colour-key most"></i> Ceiling of an infinite cache</dt><dd class="ceiling">${share(ceiling)}</dd></div></dl>
    <p class="quiet">In the last ${duration(window_s)} prompts had ${number(prompt_tokens)} tokens; ${number(cached_tokens)} of them were found in a cache.</p>
  </div>`;
}

function Tiers({ tiers }) {
  const rows = Object.entries(tiers);
  if (!rows.length) return html`<p class="quiet">No worker has told of its cache yet.</p>`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Tiers"><table class="tiers">
    <thead><tr><th scope="col">Tier</th><th scope="col" class="num">Pages</th><th scope="col" class="num">Capacity</th><th scope="col">Full</th><th scope="col" class="num">Saved</th><th scope="col" class="num">Restored</th></tr></thead>
    <tbody>${rows.map(([name, tier]) => {
      const full = tier.capacity_pages ? tier.pages / tier.capacity_pages : null;
      return html`<tr key=${name}><th scope="row">${TIERS[name] ?? name}</th><td class="num">${number(tier.pages)}</td><td class="num">${number(tier.capacity_pages)}</td>
        <td>${full !== null && html`<span class="meter" aria-hidden="true"><i style=${{ width: `${full * 100}%` }}></i></span> `}${share(full)}</td>
        <td class="num">${number(tier.saved_pages)}</td><td class="num">${number(tier.restored_pages)}</td></tr>`;
    })}</tbody></table></div>`;
}

const rowsOf = (nodes, flipped, depth = 0) => nodes.flatMap((node) => {
  const isOpen = (depth < 1) !== flipped.has(node.first);
  return [{ node, depth, isOpen }, ...(isOpen ? rowsOf(node.below, flipped, depth + 1) : [])];
});

function Prefixes({ prefixes, names }) {
  const [flipped, setFlipped] = useState(new Set());
  const trees = useMemo(() => treesOf(prefixes), [prefixes]);
  const flip = (name) => setFlipped((old) => {
    const next = new Set(old);
    return next.delete(name) ? next : next.add(name);
  });
  if (!trees.length) return html`<p class="quiet">No two requests have had a page in common yet.</p>`;
  const most = Math.max(1, ...trees.map(({ heat }) => heat));
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Hottest prefixes"><table class="prefixes">
    <thead><tr><th scope="col">Prefix</th><th scope="col" class="num">Tokens</th><th scope="col" class="num">Requests</th><th scope="col">Read again</th><th scope="col">Held by</th></tr></thead>
    <tbody>${rowsOf(trees, flipped).map(({ node, depth, isOpen }) => html`<tr key=${node.first}>
      <th scope="row" style=${{ "--depth": depth }}>${node.below.length
        ? html`<button type="button" class="fold" aria-expanded=${isOpen} onClick=${() => flip(node.first)}><code>${shortId(node.name)}</code></button>`
        : html`<code class="leaf">${shortId(node.name)}</code>`}${node.num_pages > 1 && html` <small>${node.num_pages} pages</small>`}
        ${node.text && html`<q>${node.text}</q>`}</th>
      <td class="num">${number(node.from)}–${number(node.to)}</td><td class="num">${number(node.num_requests)}</td>
      <td><span class="meter" aria-hidden="true"><i style=${{ width: `${(node.heat / most) * 100}%` }}></i></span> ${number(node.heat)}</td>
      <td>${node.workers.length ? node.workers.map(names.of).join(", ") : "nobody"}</td></tr>`)}</tbody></table></div>`;
}

export default function Cache({ store }) {
  const state = store.use("cache");
  const names = namesOf(store.use("fleet")?.workers);
  return html`<section class="view-cache"><h1>Cache</h1>
    ${state === null ? html`<p class="quiet">Waiting for the first answer of the router.</p>` : html`
      <p class="lead gain">${gainWords(state)}</p>
      <${Rate} state=${state} />
      <h2>Tiers</h2><${Tiers} tiers=${state.tiers} />
      <h2>Hottest prefixes</h2>
      <p class="quiet">A name is the hash of a page; pages in a row with the same readers are one line. Read again: tokens that no worker had to compute twice, if nothing was evicted.</p>
      <${Prefixes} prefixes=${state.prefixes} names=${names} />`}
  </section>`;
}
