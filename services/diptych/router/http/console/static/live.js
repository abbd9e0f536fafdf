// The newest documents. A topic is followed only while something on the page uses it, and not in a hidden tab.

import { useEffect, useReducer } from "./vendor/htm-preact.js";
import { StepLog } from "./step_log.js";

const HIDDEN_MS = 30_000; // that a tab may be hidden before nothing is sent to it
const SETTLE_MS = 20; // in which views come and go together

/** Apply a merge patch (RFC 7396). What does not change stays the same object. */
export function mergePatch(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const isObject = target !== null && typeof target === "object" && !Array.isArray(target);
  const merged = isObject ? { ...target } : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete merged[key];
    else merged[key] = mergePatch(merged[key], value);
  }
  return merged;
}

export function createStore(api) {
  const documents = new Map();
  const listeners = new Map(); // by topic, and "connection"
  const users = new Map(); // number of users by topic
  const steps = new StepLog();
  let connection = { state: "connecting", retryAt: 0 };
  let close = null;
  let settling = 0;
  let hiding = 0;
  let early = null; // steps that came before the history did

  const tell = (name) => { for (const listener of listeners.get(name) ?? []) listener(); };

  function listen(name, listener) {
    if (!listeners.has(name)) listeners.set(name, new Set());
    listeners.get(name).add(listener);
    return () => listeners.get(name).delete(listener);
  }

  function setConnection(state, retryMs) {
    if (state === connection.state && state !== "retrying") return;
    if (state === "connecting" && connection.state === "retrying") return; // told until it is live again
    connection = { state, retryAt: retryMs ? Date.now() + retryMs : 0 };
    tell("connection");
  }

  function onEvent(name, data) {
    if (name === "snapshot") documents.set(data.topic, data.state);
    else if (name === "patch" && documents.has(data.topic)) documents.set(data.topic, mergePatch(documents.get(data.topic), data.patch));
    else if (name === "steps") return onSteps(data);
    else return;
    tell(data.topic);
  }

  function onSteps(data) {
    if (early) early.push(data);
    else {
      steps.add(data);
      tell("steps");
    }
  }

  async function readHistory() {
    early = [];
    try {
      steps.add(await api.get(`steps?since_ms=${Math.floor(steps.newestMs)}`));
    } catch { /* what the stream brings is shown */ }
    const late = early ?? [];
    early = null;
    for (const data of late) steps.add(data);
    tell("steps");
  }

  function restart() {
    close?.();
    close = null;
    const topics = [...users.keys()].filter((topic) => users.get(topic) > 0).sort();
    if (!topics.length) return;
    let wasLive = false;
    const state = (words, retryMs) => {
      if (words === "live" && !wasLive && topics.includes("steps")) readHistory();
      wasLive = words === "live";
      setConnection(words, retryMs);
    };
    close = api.stream(topics, { event: onEvent, state });
  }

  function settle() {
    clearTimeout(settling);
    settling = setTimeout(restart, SETTLE_MS);
  }

  function follow(topic) {
    users.set(topic, (users.get(topic) ?? 0) + 1);
    if (users.get(topic) === 1) settle();
    return () => {
      users.set(topic, users.get(topic) - 1);
      if (users.get(topic) === 0) settle();
    };
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(() => { close?.(); close = null; }, HIDDEN_MS);
    else if (!close) settle();
  });

  function useListener(name, followed) {
    const [, redraw] = useReducer((n) => n + 1, 0);
    useEffect(() => {
      const unlisten = listen(name, redraw);
      const unfollow = followed ? follow(name) : () => {};
      redraw(); // what came between
      return () => { unlisten(); unfollow(); };
    }, [name, followed]);
  }

  return {
    /** The newest document of a topic, null before it came. A hook: the component is drawn again when it changes. */
    use(topic) {
      useListener(topic, true);
      return documents.get(topic) ?? null;
    },
    /** The log of steps, which grows in place. A hook: the component is drawn again when steps came. */
    useSteps() {
      useListener("steps", true);
      return steps;
    },
    /** {state: "connecting" | "live" | "retrying" | "signed-out", retryAt}. A hook. */
    useConnection() {
      useListener("connection", false);
      return connection;
    },
    /** Begin anew, for example after signing in. */
    restart: settle,
    stop() {
      close?.();
      close = null;
    },
  };
}
