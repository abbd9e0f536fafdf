// Calls of the console's own endpoints and of the API, with the reader's token, which is kept for this tab alone.

const KEY = "diptych-token";
const SILENCE_MS = 25_000; // the server pings each 10 s
const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 10_000;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function errorOf(response) {
  let words = "";
  try {
    const body = await response.json();
    words = typeof body?.error === "string" ? body.error : body?.error?.message ?? body?.message ?? body?.detail ?? "";
  } catch { /* not JSON */ }
  return new ApiError(response.status, typeof words === "string" && words ? words : `The server answered ${response.status}.`);
}

export function createApi() {
  const root = new URL("api/", new URL(".", import.meta.url));
  const signedOut = new Set();

  const token = () => sessionStorage.getItem(KEY) ?? "";
  const setToken = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

  /** `fetch` of any path of this server, with the token. A path without a leading slash is below `/console/api/`. */
  async function raw(path, init = {}) {
    const headers = new Headers(init.headers);
    if (token()) headers.set("Authorization", `Bearer ${token()}`);
    return fetch(new URL(path, root), { ...init, headers, cache: "no-store", credentials: "same-origin" });
  }

  async function json(path, init) {
    const response = await raw(path, init);
    if (response.status === 401) for (const listener of signedOut) listener();
    if (!response.ok) throw await errorOf(response);
    return response.status === 204 ? null : response.json();
  }

  const get = (path) => json(path, { headers: { Accept: "application/json" } });
  const post = (path, body) =>
    json(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

  /** Trade a one-time code for a token and keep it. */
  async function signIn(code) {
    const response = await fetch(new URL("sign-in", root), {
      method: "POST", body: JSON.stringify({ code }), headers: { "Content-Type": "application/json" },
    });
    if (!response.ok) throw await errorOf(response);
    setToken((await response.json()).token);
  }

  /**
   * Follow topics until the returned function is called. `on.event(name, data)` is called for each event, and
   * `on.state(words, retryMs)` with "connecting", "live", "retrying" or "signed-out".
   */
  function stream(topics, on) {
    const closing = new AbortController();
    follow(topics, on, closing.signal);
    return () => closing.abort();
  }

  async function follow(topics, on, closed) {
    let failures = 0;
    while (!closed.aborted) {
      on.state("connecting", 0);
      try {
        await readOnce(topics, on, closed, () => { failures = 0; });
      } catch (error) {
        if (closed.aborted) return;
        if (error instanceof ApiError && error.status === 401) {
          on.state("signed-out", 0);
          for (const listener of signedOut) listener();
          return;
        }
      }
      if (closed.aborted) return;
      const wait = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** failures++) * (0.75 + Math.random() / 2);
      on.state("retrying", wait);
      await pause(wait, closed);
    }
  }

  async function readOnce(topics, on, closed, heard) {
    const silence = new AbortController();
    let timer = 0;
    const listen = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
    };
    listen();
    try {
      const signal = AbortSignal.any([closed, silence.signal]);
      const response = await raw(`stream?topics=${topics.join(",")}`, { signal, headers: { Accept: "text/event-stream" } });
      if (!response.ok) throw await errorOf(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const parse = eventParser((name, data) => {
        heard();
        on.state("live", 0);
        on.event(name, data);
      });
      for (;;) {
        const { value, done } = await reader.read();
        if (done || closed.aborted) return;
        listen();
        parse(value);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  return {
    get, post, raw, stream, signIn, setToken,
    hasToken: () => token() !== "",
    onSignedOut: (listener) => {
      signedOut.add(listener);
      return () => signedOut.delete(listener);
    },
  };
}

/** Return a function that takes text of an event stream, in any pieces, and gives `emit(name, value)` its events. */
export function eventParser(emit) {
  let rest = "";
  return (text) => {
    const blocks = (rest + text).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message";
      const data = [];
      for (const line of block.split(/\r?\n/)) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (!data.length) {
        if (name !== "message") emit(name, null);
      } else emit(name, parsed(data.join("\n")));
    }
  };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function pause(ms, closed) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    closed.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
