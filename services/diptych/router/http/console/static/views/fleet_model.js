// What the picture shows, found from the document `fleet`. Pure.

import { count, duration, number, workerName } from "../format.js";

export const ROLES = ["prefill", "decode", "unified"];
export const FEW = 12; // workers of a side: more are tiles
export const FEW_LINKS = 36; // more are a matrix
export const KV_STATES = [ // in the order of the bar
  ["owned", "owned by requests"],
  ["exporting", "granted out, read by a peer"],
  ["importing", "granted out, written by a peer"],
  ["quarantined", "quarantined"],
  ["cached", "cached"],
  ["free", "free"],
];

const collator = new Intl.Collator("en", { numeric: true });

/** {prefill: [[instance, card], ...], decode: ..., unified: ...}, each by name. */
export function byRole(workers) {
  const found = Object.fromEntries(ROLES.map((role) => [role, []]));
  for (const entry of Object.entries(workers)) found[entry[1].role]?.push(entry);
  for (const list of Object.values(found)) {
    list.sort(([a], [b]) => collator.compare(workerName(a, workers), workerName(b, workers)) || (a < b ? -1 : 1));
  }
  return found;
}

/** How a worker is, in one word, and why: {kind, word, why}. The worst comes first. */
export function condition(card) {
  if (card.silent_s) return { kind: "bad", word: "silent", why: `its scheduler has been silent for ${card.silent_s} s` };
  if (card.breaker) return { kind: "bad", word: "left alone", why: card.breaker };
  if (card.state === "gone") return { kind: "bad", word: "gone", why: "" };
  if (!card.is_connected) return { kind: "bad", word: "not connected", why: "the router has no connection to it" };
  if (card.drain) return { kind: "leaving", word: card.drain.phase === "empty" ? "drained" : "draining", why: drainWords(card.drain) };
  if (card.not_ready) return { kind: "waiting", word: card.state === "ready" ? "not ready" : card.state, why: card.not_ready };
  if (card.state !== "ready") return { kind: "waiting", word: card.state, why: "" };
  if (card.is_paused) return { kind: "waiting", word: "paused", why: "" };
  return { kind: "ready", word: "ready", why: "" };
}

export function drainWords(drain) {
  if (drain.phase === "empty") return "no request is left";
  return `${count(drain.requests_left, "request")} left, the oldest ${duration(drain.oldest_s)}; ends in ${duration(drain.deadline_s)} at the latest`;
}

export const kvOf = (card, state) => card.kv_pages?.[state] ?? 0;

/** Pages that cannot be given to a request now, 0 to 1; null: the worker has not told. */
export function heldShare(card) {
  if (!Object.keys(card.kv_pages ?? {}).length) return null;
  const total = card.total_pages || 0;
  return total ? Math.min(1, Math.max(0, 1 - (kvOf(card, "free") + kvOf(card, "cached")) / total)) : 0;
}

export function kvWords(card) {
  return KV_STATES.filter(([state]) => kvOf(card, state)).map(([state]) => `${number(kvOf(card, state))} ${state}`).join(", ");
}

const RANK = { up: 0, testing: 1, connecting: 2, down: 3, refused: 4 };

/** The link that moves KV from one worker to another, as both tell of it; null: neither does. */
export function linkBetween(workers, from, to) {
  const sent = workers[from]?.links?.[to];
  const got = workers[to]?.links?.[from];
  const link = sent ?? got;
  if (!link) return null;
  if (sent && got && RANK[got.state] > RANK[sent.state]) return { ...sent, state: got.state, reason: got.reason };
  return link;
}

/** [{from, to, link}] of all pairs whose link is told of. */
export function linksBetween(workers, senders, receivers) {
  const found = [];
  for (const [from] of senders) {
    for (const [to] of receivers) {
      const link = from === to ? null : linkBetween(workers, from, to);
      if (link) found.push({ from, to, link });
    }
  }
  return found;
}

/** One link for several: as fast as the fastest, and as bad as the worst if none is up. */
export function bundle(links) {
  if (links.length === 1) return links[0].link;
  const sum = totals(links);
  const worst = links.reduce((a, b) => (RANK[b.link.state] > RANK[a.link.state] ? b : a)).link;
  return {
    state: sum.up ? "up" : worst.state, reason: worst.reason, path: `${sum.up} of ${sum.num} up`,
    tested_bytes_per_s: Math.max(...links.map(({ link }) => link.tested_bytes_per_s)), bytes_per_s: sum.bytesPerS,
    in_flight_bytes: sum.inFlight,
  };
}

/** What the hinge draws: a line for each link between the panels, and one for each worker's links with the unified ones. */
export function linesOf(links, workers) {
  const lines = [];
  const bundles = new Map();
  for (const entry of links) {
    const [a, b] = [workers[entry.from].role, workers[entry.to].role];
    if (a === "unified" && b === "unified") continue;
    if (a !== "unified" && b !== "unified") lines.push(entry);
    else {
      const ends = a === "unified" ? { from: BELOW, to: entry.to } : { from: entry.from, to: BELOW };
      const key = `${ends.from} ${ends.to}`;
      if (!bundles.has(key)) bundles.set(key, { ...ends, all: [] });
      bundles.get(key).all.push(entry);
    }
  }
  return [...lines, ...[...bundles.values()].map(({ from, to, all }) => ({ from, to, link: bundle(all) }))];
}

export const BELOW = "hinge"; // where lines to unified workers end: at the foot of the hinge

/** {num, up, bytesPerS, inFlight} of links. */
export function totals(links) {
  const sum = { num: links.length, up: 0, bytesPerS: 0, inFlight: 0 };
  for (const { link } of links) {
    sum.up += link.state === "up" ? 1 : 0;
    sum.bytesPerS += link.bytes_per_s;
    sum.inFlight += link.in_flight_bytes;
  }
  return sum;
}

/** Groups of workers by condition, those first that need a look: [[word, entries], ...]. */
export function byCondition(entries) {
  const groups = new Map();
  for (const entry of entries) {
    const { word } = condition(entry[1]);
    if (!groups.has(word)) groups.set(word, []);
    groups.get(word).push(entry);
  }
  return [...groups].sort(([a], [b]) => (a === "ready") - (b === "ready") || (a < b ? -1 : 1));
}
