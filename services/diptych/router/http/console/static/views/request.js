// One call: where its time went, and why it went where it did.

import { html, useContext, useEffect, useState } from "../vendor/htm-preact.js";
import { clock, duration, number, share, shortId } from "../format.js";
import { Names, namesOf, stateWords } from "./names.js";
import { Waterfall, longest, meaning, placeOf } from "./waterfall.js";

export const title = "Request";

const REFRESH_MS = 1000;
const MAX_MISSES = 5; // then nobody knows the call
const TERMS = [
  ["queue_s", "Queue", "Prompts before it at the prefill worker."],
  ["grant_s", "Pages", "Until the decode worker has pages for it; passes while it queues."],
  ["compute_s", "Compute", "The prompt's tokens that are not cached."],
  ["ttft_s", "First token", "The larger of queue and pages, then compute."],
  ["late_s", "Others wait", "What prompts that come later lose by it."],
  ["transfer_s", "Transfer", "KV that the decode worker lacks."],
  ["decode_s", "Output", "The output, and prompts that stop it."],
  ["stall_s", "Others stall", "What outputs of others lose by it."],
  ["later", "Weight", "What a second after the first token is worth: transfer, output and others' stalls count so much."],
  ["total_s", "Total", "First token, others' wait, and the weighted rest. The lowest is the best."],
];

/** The parts of a pair's total that add up to it: [name of the kind, seconds]. */
export const partsOf = (pair) => [
  ["wait", Math.max(pair.queue_s, pair.grant_s)],
  ["compute", pair.compute_s],
  ["others", pair.late_s + pair.later * pair.stall_s],
  ["transfer", pair.later * pair.transfer_s],
  ["output", pair.later * pair.decode_s],
];

/** A story as a file for Perfetto and chrome://tracing: a process for each place, a thread for what overlaps there. */
export function chromeTrace({ row, bars, token_s, trace_id }, names) {
  const lanes = new Map(); // by place: the moment at which each of its threads is free
  const pidOf = (where) => [...lanes.keys()].indexOf(where) + 1;
  const us = (time) => Math.round(time * 1e6);
  const events = [];
  const add = (bar, depth) => {
    if (!lanes.has(bar.where)) lanes.set(bar.where, []);
    const free = lanes.get(bar.where);
    let tid = depth;
    while ((free[tid] ?? 0) > bar.begun_s + 1e-9) tid += 1;
    free[tid] = bar.begun_s + bar.duration_s;
    events.push({ name: bar.name, cat: bar.is_failure ? "failure" : "stage", ph: "X", pid: pidOf(bar.where), tid, ts: us(bar.begun_s), dur: us(bar.duration_s), args: { meaning: meaning(bar.name) } });
    for (const part of bar.parts) add(part, depth + 1);
  };
  for (const bar of bars) add(bar, 0);
  lanes.set("client", []);
  token_s.forEach((time, index) => events.push({ name: `token ${index + 1}`, ph: "i", s: "t", pid: pidOf("client"), tid: 0, ts: us(time) }));
  const places = [...lanes.keys()].map((where) => ({ name: "process_name", ph: "M", pid: pidOf(where), args: { name: /^(client|router)$/.test(where) ? where : names.of(where) } }));
  return { displayTimeUnit: "ms", otherData: { request: row.id, trace_id }, traceEvents: [...places, ...events] };
}

function download(name, value) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value)], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function Copied({ text, name }) {
  const [done, setDone] = useState(false);
  const copy = (event) => {
    getSelection().selectAllChildren(event.currentTarget.previousElementSibling); // where there is no clipboard
    navigator.clipboard?.writeText(text).then(() => setDone(true), () => {});
  };
  return html`<code>${text}</code> <button type="button" class="link" aria-label=${`Copy ${name}`} onClick=${copy}>${done ? "copied" : "copy"}</button>`;
}

/** The newest story of a call, asked for again while it runs; `[story, words of the error]`. */
export function useStory(api, id) {
  const [answer, setAnswer] = useState([null, ""]);
  useEffect(() => {
    let timer = 0;
    let isOver = false;
    let isLast = false; // what the workers say last comes after the end
    let misses = 0;
    const ask = async () => {
      try {
        const story = await api.get(`requests/${encodeURIComponent(id)}`);
        if (isOver) return;
        setAnswer([story, ""]);
        if (isLast) return;
        isLast = story.row.phase === "ended";
      } catch (error) {
        if (isOver) return;
        const words = error.status === 404 ? "No router knows this request any more, or yet." : `The request could not be read: ${error.message}`;
        setAnswer(([story]) => [story, words]);
        if (error.status === 404 && ++misses === MAX_MISSES) return;
      }
      timer = setTimeout(ask, REFRESH_MS);
    };
    setAnswer([null, ""]);
    if (id) ask();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [api, id]);
  return answer;
}

function Facts({ story }) {
  const names = useContext(Names);
  const { row, trace_id } = story;
  const facts = [
    ["State", html`${stateWords(row)}${row.status ? `, status ${row.status}` : ""}`],
    ["First token", row.ttft_s === null ? "not yet" : duration(row.ttft_s)],
    ["Duration", duration(row.duration_s)],
    ["Prompt", `${number(row.prompt_tokens)} tokens${row.cached_tokens ? `, ${share(row.cached_tokens / row.prompt_tokens)} cached` : ""}`],
    ["Output", `${number(row.output_tokens)} tokens`],
    ["Served by", names.pair(row)],
    ["Attempts", number(row.num_attempts)],
    ["Model", row.adapter ? `${row.model} + ${row.adapter}` : row.model],
    ["Tenant", row.tenant || "common"],
    ["Path", html`<code>${row.path}</code>`],
    ["Arrived", `${clock(row.arrived_unix_s)} at router ${shortId(row.router)}`],
    ["Trace", trace_id ? html`<${Copied} text=${trace_id} name="the trace id" />` : "not exported"],
  ];
  return html`<dl class="call-facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** Where the time went, in a sentence. */
export function whyWords({ row, bars }, names) {
  const until = row.ttft_s ?? row.duration_s;
  const parts = longest(bars, until).slice(0, 3);
  if (!parts.length || !until) return "";
  const words = parts.map((part) => `${share(part.seconds / until)} ${part.is_failure ? "a failed attempt" : meaning(part.name) || part.name} (${duration(part.seconds)}, ${placeOf(part, row, names)})`);
  return `${row.ttft_s === null ? `${duration(until)} so far` : `The first token took ${duration(until)}`}: ${words.join(", ")}.`;
}

function CostBar({ pair, most }) {
  return html`<span class="cost-bar" aria-hidden="true">${partsOf(pair).map(([kind, seconds]) => html`<i key=${kind} class=${kind} style=${{ width: `${(seconds / most) * 100}%` }}></i>`)}</span>`;
}

function Pairs({ attempt }) {
  const names = useContext(Names);
  const pairs = [...attempt.pairs].sort((a, b) => a.total_s - b.total_s);
  const most = Math.max(...pairs.map((pair) => pair.total_s));
  const isChosen = (pair) => pair.prefill_instance === attempt.prefill_instance && pair.decode_instance === attempt.decode_instance;
  const cell = (pair, key) => (key === "later" ? number(pair[key]) : duration(pair[key]));
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Expected costs of the candidate pairs">
    <table class="costs"><thead><tr><th scope="col">Pair</th>${TERMS.map(([key, name, words]) => html`<th key=${key} scope="col" class="num" title=${words}>${name}</th>`)}<th scope="col">Made up of</th></tr></thead>
    <tbody>${pairs.map((pair) => html`<tr key=${`${pair.prefill_instance}-${pair.decode_instance}`} class=${isChosen(pair) ? "is-chosen" : ""}>
      <th scope="row">${names.pair({ prefill: pair.prefill_instance, decode: pair.decode_instance })}${isChosen(pair) && html` <span class="tag good">chosen</span>`}</th>
      ${TERMS.map(([key]) => html`<td key=${key} class=${`num ${key}`}>${cell(pair, key)}</td>`)}
      <td><${CostBar} pair=${pair} most=${most} /></td></tr>`)}</tbody></table></div>
    <p class="key"><i class="wait"></i> wait <i class="compute"></i> compute <i class="others"></i> others lose <i class="transfer"></i> transfer <i class="output"></i> output</p>`;
}

function placeWords(attempt) {
  const pairs = [...attempt.pairs].sort((a, b) => a.total_s - b.total_s);
  const place = pairs.findIndex((pair) => pair.prefill_instance === attempt.prefill_instance && pair.decode_instance === attempt.decode_instance);
  if (place < 0 || pairs.length < 2) return pairs.length === 1 ? "It was the only candidate." : "";
  if (place === 0) return `It was the cheapest of ${pairs.length}; the next would have cost ${duration(pairs[1].total_s - pairs[0].total_s)} more.`;
  return `It was number ${place + 1} of ${pairs.length} by cost, ${duration(pairs[place].total_s - pairs[0].total_s)} above the cheapest.`;
}

function ttftWords({ predicted_ttft_s: expected, ttft_s: real }) {
  if (expected === null) return real === null ? "" : `First token after ${duration(real)}; this policy expects nothing.`;
  if (real === null) return `First token expected after ${duration(expected)}; none came.`;
  const off = expected > 0 ? ` (${real >= expected ? "+" : "−"}${share(Math.abs(real / expected - 1))})` : "";
  return `First token expected after ${duration(expected)}, came after ${duration(real)}${off}.`;
}

function Workers({ attempt }) {
  const names = useContext(Names);
  const score = (worker) => Object.entries(attempt.scores).filter(([, scores]) => worker.instance in scores)
    .map(([leg, scores]) => `${leg} ${scores[worker.instance] === null ? "cannot" : number(scores[worker.instance])}`).join(", ");
  const hasScores = Object.keys(attempt.scores).length > 0;
  return html`<details><summary>What was known of the ${attempt.workers.length} workers</summary>
    <div class="scroll" tabindex="0" role="group" aria-label="Workers at the moment of the choice"><table>
    <thead><tr><th scope="col">Worker</th><th scope="col" class="num">Prompt cached</th><th scope="col" class="num">Tokens queued</th><th scope="col" class="num">Requests</th><th scope="col" class="num">Tokens free</th><th scope="col">Takes more</th>${hasScores && html`<th scope="col">Score, the lowest wins</th>`}</tr></thead>
    <tbody>${attempt.workers.map((worker) => html`<tr key=${worker.instance}><th scope="row">${names.of(worker.instance)}</th><td class="num">${number(worker.cached_tokens)}</td><td class="num">${number(worker.queued_tokens)}</td><td class="num">${number(worker.num_requests)}</td><td class="num">${number(worker.free_tokens)}</td><td>${worker.has_credit ? "yes" : "no"}</td>${hasScores && html`<td>${score(worker)}</td>`}</tr>`)}</tbody></table></div></details>`;
}

function Attempt({ attempt, index, total }) {
  const names = useContext(Names);
  const hasFailed = attempt.outcome.startsWith("failed");
  return html`<article class=${`attempt ${hasFailed ? "is-failure" : ""}`}>
    <h3>Attempt ${index + 1} of ${total} <span class=${`tag ${hasFailed ? "bad" : ""}`}>${attempt.outcome}</span></h3>
    <p>After ${duration(attempt.dispatched_after_s)} the policy <b>${attempt.policy}</b> chose <b>${names.pair({ prefill: attempt.prefill_instance, decode: attempt.decode_instance })}</b>: ${attempt.reason}. ${placeWords(attempt)} ${ttftWords(attempt)}${
      attempt.session && html` Session <code>${attempt.session}</code>.`}</p>
    ${attempt.pairs.length > 0 && html`<${Pairs} attempt=${attempt} />`}
    <${Workers} attempt=${attempt} />
  </article>`;
}

function Explanation({ explanation }) {
  if (!explanation) return html`<p class="quiet">Why it went where it did is not known: the router keeps the last requests only, or no pair was chosen.</p>`;
  return html`${explanation.requests.map(({ attempts }, index) => html`<div key=${index}>
    ${explanation.requests.length > 1 && html`<h3 class="nth">Output ${index + 1}</h3>`}
    ${attempts.map((attempt, nth) => html`<${Attempt} key=${attempt.room} attempt=${attempt} index=${nth} total=${attempts.length} />`)}
    ${attempts.length === 0 && html`<p class="quiet">No pair was chosen.</p>`}</div>`)}
    <details><summary>What the columns mean</summary><dl class="terms">${TERMS.map(([key, name, words]) => html`<div key=${key}><dt>${name}</dt><dd>${words}</dd></div>`)}</dl></details>`;
}

export default function Request({ store, api, route }) {
  const names = namesOf(store.use("fleet")?.workers);
  const id = route.id;
  const [story, words] = useStory(api, id);
  const head = html`<p class="back"><a href="#/requests">All requests</a></p><h1>Request <code>${id}</code></h1>`;
  if (!story) return html`<section class="view-request">${head}<p class="quiet" role="status">${words || "Waiting for the router."}</p></section>`;
  const isRunning = story.row.phase !== "ended";
  return html`<${Names.Provider} value=${names}><section class="view-request">${head}
    ${words && html`<p class="quiet" role="status">${words}</p>`}
    <p class="lead">${whyWords(story, names)}${isRunning && html` <span class="tag">still running</span>`}</p>
    <${Facts} story=${story} />
    <h2>Where the time went</h2>
    <${Waterfall} story=${story} />
    <p class="call-acts"><button type="button" onClick=${() => download(`${id}.trace.json`, chromeTrace(story, names))}>Download for Perfetto</button>
      <span class="quiet">a Chrome trace: open it at ui.perfetto.dev or in chrome://tracing</span></p>
    <h2>Why it went there</h2>
    <${Explanation} explanation=${story.explanation} />
  </section><//>`;
}
