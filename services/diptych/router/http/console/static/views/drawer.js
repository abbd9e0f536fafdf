// All that is told of one worker, beside the picture.

import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import { DASH, bytes, clock, count, duration, number, share, speed, workerName } from "../format.js";
import { Acts } from "./acts.js";
import { KV_STATES, condition, kvOf } from "./fleet_model.js";
import { KvBar, Remarks, State, hrefOf } from "./worker_card.js";

export function Drawer({ instance, state, me, api, seen, onClose }) {
  const card = state.workers[instance];
  const heading = useRef(null);
  useEffect(() => {
    heading.current?.focus();
    const listener = (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) onClose();
    };
    addEventListener("keydown", listener);
    return () => removeEventListener("keydown", listener);
  }, [instance]);
  return html`
    <aside class="drawer" data-role=${card?.role} aria-labelledby="drawer-name">
      <div class="drawer-head">
        <h2 id="drawer-name" ref=${heading} tabindex="-1">${workerName(instance, state.workers)}</h2>
        <button type="button" class="close" aria-label="Close" onClick=${onClose}><i aria-hidden="true"></i></button>
      </div>
      ${card
        ? html`<${Details} instance=${instance} card=${card} state=${state} seen=${seen} />
          ${me.is_operator && html`<${Acts} key=${instance} api=${api} instance=${instance} card=${card} name=${workerName(instance, state.workers)} />`}`
        : html`<p class="remark" data-kind="bad">This worker is gone.</p>`}
    </aside>`;
}

function Details({ instance, card, state, seen }) {
  const told = condition(card);
  return html`
    <p class="drawer-state"><span class="worker-role" data-role=${card.role}>${card.role}</span> <${State} state=${told} />
      <a href=${`#/steps/${encodeURIComponent(instance)}`}>Its steps</a></p>
    <${Remarks} card=${card} state=${told} seen=${seen} />
    <${Facts} rows=${work(card)} />
    <h3>KV pages</h3>
    <${KvBar} card=${card} role=${card.role} />
    <${Facts} rows=${pages(card)} />
    <${Links} instance=${instance} card=${card} workers=${state.workers} />
    <${Unpaired} instance=${instance} state=${state} />
    <h3>About</h3>
    <${Facts} rows=${about(instance, card)} />`;
}

const Facts = ({ rows }) => html`<dl class="fact-list">${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

function work(card) {
  const rate = card.rate;
  return [
    ["Queue", duration(card.queue_s)],
    ["Running", `${number(card.num_running)}${card.max_requests ? ` of ${number(card.max_requests)}` : ""}`],
    ["Waiting", `${number(card.num_waiting)} (${count(card.queued_tokens, "token")})`],
    ["Steps", rate ? `${number(rate.steps_per_s)}/s, busy ${share(rate.busy)}` : DASH],
    ["Prompt tokens", rate ? `${number(rate.prompt_tokens_per_s)}/s` : DASH],
    ["Output tokens", rate ? `${number(rate.output_tokens_per_s)}/s` : DASH],
    ["Learned prompt speed", card.prompt_tokens_per_s == null ? DASH : `${number(card.prompt_tokens_per_s)} tokens/s`],
    ["Tokens in a step, at most", number(card.max_step_tokens)],
    ["Retractions", number(card.retractions)],
    ["Tokens guessed, of them right", card.drafts_verified == null ? "none" : `${number(card.drafts_verified)}, ${share(card.drafts_accepted / (card.drafts_verified || 1))}`],
  ];
}

function pages(card) {
  const rows = KV_STATES.map(([name]) => [name, `${number(kvOf(card, name))} (${share(kvOf(card, name) / (card.total_pages || 1))})`]);
  return [
    ...rows,
    ["in all", `${number(card.total_pages)} of ${count(card.page_size, "token")}`],
    ["known to this router", number(card.cached_pages)],
    ["tiers below the pool", card.host_pages == null ? "none told" : `${number(card.host_pages)} pages`],
    ["saved to them, restored from them", `${number(card.host_pages_saved)}, ${number(card.host_pages_restored)}`],
    ["pulled from others, lent to others", `${number(card.pages_pulled)}, ${number(card.pages_lent)}`],
    ["integrity failures", number(card.integrity_failures)],
    ["leaks", number(card.leaks_found)],
  ];
}

function about(instance, card) {
  return [
    ["Instance", html`<code>${instance}</code>`],
    ["Address", card.address], ["Pod", card.pod || DASH], ["Pool", card.pool || DASH],
    ...card.nodes.map((node, number) => [`Node ${number}`, node]),
    ["Model", card.model], ["Version", card.version], ["Terms", html`<code>${card.compat}</code>`],
    ["Started", `${new Date(card.started_unix_s * 1000).toLocaleDateString("en-GB")} ${clock(card.started_unix_s)}`],
    ["Weights", card.weights_taken_bytes == null ? DASH : card.weights_taken_bytes > 0 ? `${bytes(card.weights_taken_bytes)} from another worker` : "from disk"],
    ["Adapters", card.adapters.length ? card.adapters.join(", ") : "none"],
  ];
}

const ORDER = { refused: 0, down: 1, connecting: 2, testing: 3, up: 4 };

function Links({ instance, card, workers }) {
  const rows = Object.entries(card.links).sort(([a, x], [b, y]) => ORDER[x.state] - ORDER[y.state] || y.bytes_per_s - x.bytes_per_s || (a < b ? -1 : 1));
  const up = card.num_links_up ?? rows.filter(([, link]) => link.state === "up").length;
  return html`
    <h3>Links <small>${number(up)} up</small></h3>
    ${rows.length === 0 ? html`<p class="quiet">This worker tells of no link.</p>` : html`
      <div class="scroll" tabindex="0" role="group" aria-label="Links of this worker"><table class="links">
        <thead><tr><th scope="col">Peer</th><th scope="col">State</th><th scope="col">Path</th><th scope="col" class="num">Now</th>
          <th scope="col" class="num">Tested</th><th scope="col" class="num">In flight</th></tr></thead>
        <tbody>${rows.map(([peer, link]) => html`
          <tr key=${peer} data-state=${link.state} data-more=${link.reason ? "" : undefined}>
            <th scope="row"><a href=${hrefOf(peer)}>${workerName(peer, workers)}</a></th>
            <td><span class="link-state" data-state=${link.state}><i aria-hidden="true"></i>${link.state}</span></td>
            <td>${link.path || DASH}${link.lanes && html`<div class="why">${link.lanes}</div>`}</td>
            <td class="num">${link.bytes_per_s > 0 ? speed(link.bytes_per_s) : "quiet"}</td>
            <td class="num">${link.tested_bytes_per_s ? speed(link.tested_bytes_per_s) : DASH}</td>
            <td class="num">${bytes(link.in_flight_bytes)}${link.queued_bytes > 0 && html`<div class="why">+ ${bytes(link.queued_bytes)} queued</div>`}</td>
          </tr>
          ${link.reason && html`<tr key=${`${peer} why`} class="reason"><td colspan="6">${link.reason}</td></tr>`}`)}</tbody>
      </table></div>
      ${up > rows.length && html`<p class="quiet">Links with traffic or trouble are listed; the others are up and quiet.</p>`}`}`;
}

function Unpaired({ instance, state }) {
  const rows = Object.values(state.unpaired).filter((pair) => pair.prefill === instance || pair.decode === instance);
  if (!rows.length) return null;
  return html`
    <h3>Cannot serve with <small>${number(rows.length)}</small></h3>
    <ul class="unpaired">${rows.map((pair) => {
      const peer = pair.prefill === instance ? pair.decode : pair.prefill;
      return html`<li key=${peer}><a href=${hrefOf(peer)}>${workerName(peer, state.workers)}</a> <span>${pair.why}</span></li>`;
    })}</ul>`;
}
