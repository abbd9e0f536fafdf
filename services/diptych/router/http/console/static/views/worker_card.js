// One worker: as a card, or as a tile where there are many.

import { html } from "../vendor/htm-preact.js";
import { DASH, count, duration, number, share, workerName } from "../format.js";
import { KV_STATES, condition, heldShare, kvOf, kvWords } from "./fleet_model.js";

export const hrefOf = (instance) => `#/fleet/${encodeURIComponent(instance)}`;

/** The pages of a worker, in shares of the whole; patterns as well as colours tell the states apart. */
export function KvBar({ card, role }) {
  const total = card.total_pages || 1;
  return html`
    <div class="kv" data-role=${role} role="img" aria-label=${`KV pages, ${number(card.total_pages)}: ${kvWords(card)}`}>
      ${KV_STATES.map(([state]) => html`<i key=${state} data-kv=${state} style=${{ flexGrow: kvOf(card, state) / total }}></i>`)}
    </div>`;
}

const LINES = [["up", "link, thicker is faster"], ["flow", "pages on their way"], ["down", "down"], ["refused", "refused"]];
const CELLS = [["quiet", "quiet link"], ["flow", "pages on their way, bigger is faster"], ["down", "down"], ["refused", "refused"], ["testing", "being tested"]];

export function Legend({ isMatrix, isMany }) {
  return html`
    <ul class="picture-legend" aria-label="Legend">
      ${isMany
        ? html`<li key="tile"><i class="tile-swatch" aria-hidden="true"></i>a worker: seconds of queue, and the share of its pages that is held</li>`
        : KV_STATES.map(([state, words]) => html`<li key=${state}><i class="kv-swatch" data-kv=${state} aria-hidden="true"></i>${words}</li>`)}
      ${(isMatrix ? CELLS : LINES).map(([state, words]) => html`
        <li key=${`link ${state}`}><i class=${isMatrix ? "cell" : "stroke"} data-link=${state} aria-hidden="true"></i>${words}</li>`)}
    </ul>`;
}

export function State({ state }) {
  return html`<span class="condition" data-kind=${state.kind}><i aria-hidden="true"></i>${state.word}</span>`;
}

function rateWords(card) {
  const rate = card.rate;
  if (!rate) return "no steps of late";
  const parts = [`${number(rate.steps_per_s)} steps/s`];
  if (card.role !== "decode") parts.push(`${number(rate.prompt_tokens_per_s)} prompt tokens/s`);
  if (card.role !== "prefill") parts.push(`${number(rate.output_tokens_per_s)} output tokens/s`);
  return parts.join(" \u00b7 ");
}

/** `seen`: {wasRole, drainMost}, what the page remembers of the worker. */
export function WorkerCard({ instance, card, workers, isSelected, isBrief, seen }) {
  const state = condition(card);
  const name = workerName(instance, workers);
  return html`
    <li class="worker" data-role=${card.role} data-kind=${state.kind} data-instance=${instance} data-brief=${isBrief ? "" : undefined}
      data-selected=${isSelected ? "" : undefined}>
      <div class="worker-head">
        <a href=${hrefOf(instance)} aria-current=${isSelected ? "true" : undefined} title=${instance}>${name}</a>
        <${State} state=${state} />
        <span class="queue" title="Until a prompt that came now would begin"><b>${duration(card.queue_s)}</b> queue</span>
      </div>
      <${KvBar} card=${card} role=${card.role} />
      <div class="worker-line">
        <span title="Pages held by requests and peers">${share(heldShare(card))} held</span>
        <span>${number(card.num_running)} running, ${number(card.num_waiting)} waiting</span>
        ${!isBrief && html`<span>${rateWords(card)}</span>`}
        ${!isBrief && card.host_pages > 0 && html`<span>host tier ${number(card.host_pages)} pages</span>`}
      </div>
      <${Remarks} card=${card} state=${state} seen=${seen} />
    </li>`;
}

export function Remarks({ card, state, seen }) {
  const drain = card.drain;
  const most = Math.max(seen?.drainMost ?? 0, drain?.requests_left ?? 0);
  return html`
    ${state.why && html`<p class="remark" data-kind=${state.kind}>${state.why}</p>`}
    ${drain && most > 0 && html`<progress class="drain" max=${most} value=${most - drain.requests_left} aria-label="Drained"></progress>`}
    ${seen?.wasRole && html`<p class="remark" data-kind="turned">Served as ${seen.wasRole} until a moment ago</p>`}
    ${card.integrity_failures > 0 && html`<p class="remark" data-kind="bad">${count(card.integrity_failures, "page")} came damaged</p>`}
    ${card.leaks_found > 0 && html`<p class="remark" data-kind="bad">${count(card.leaks_found, "leak")} found</p>`}`;
}

/** A tile tells the queue, and the share of its pages that is held by its height. */
export function Tile({ instance, card, workers, isSelected, isStop, peer }) {
  const state = condition(card);
  const name = workerName(instance, workers);
  const words = `${name}, ${state.word}, queue ${duration(card.queue_s)}, ${number(card.num_running)} running, ${share(heldShare(card))} of pages held`;
  return html`
    <a class="tile" href=${hrefOf(instance)} data-instance=${instance} data-role=${card.role} data-kind=${state.kind} data-peer=${peer}
      data-selected=${isSelected ? "" : undefined} aria-current=${isSelected ? "true" : undefined} tabindex=${isStop ? 0 : -1}
      aria-label=${words} title=${`${words}${state.why ? `\n${state.why}` : ""}`}>
      <i style=${{ height: `${heldShare(card) * 100}%` }}></i><span>${card.queue_s == null ? DASH : tileNumber(card.queue_s)}</span>
    </a>`;
}

const tileNumber = (seconds) => (seconds < 0.995 ? seconds.toFixed(2).slice(1) : seconds < 9.95 ? seconds.toFixed(1) : Math.min(999, Math.round(seconds)));
