// What workers and states are called wherever calls are shown; workers as in the picture of the fleet, but short.

import { createContext } from "../vendor/htm-preact.js";
import { workerName } from "../format.js";

const MOST = 20; // characters; the end of a long name tells it from its neighbours

/** Names by the workers of the fleet's document: {of(instance), pair({prefill, decode})}. */
export function namesOf(workers) {
  const of = (instance) => {
    const name = workerName(instance, workers);
    return name.length > MOST ? `\u2026${name.slice(1 - MOST)}` : name;
  };
  const pair = ({ prefill, decode }) => {
    if (!prefill && !decode) return "not chosen yet";
    return prefill === decode ? `${of(prefill)} alone` : `${of(prefill)} \u2192 ${of(decode)}`;
  };
  return { of, pair };
}

/** For components below a view. */
export const Names = createContext(namesOf(null));

export const PHASES = { waiting: "waiting", prompt: "computing prompt", output: "writing output", ended: "ended" };

/** How a call is, or how it ended. */
export const stateWords = (row) => (row.phase === "ended" ? row.outcome || "ended" : PHASES[row.phase] ?? row.phase);
