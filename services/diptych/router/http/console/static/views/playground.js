// A chat with the real API: each token with its probability and its time, and beside it who served it and how.

import { html, useContext, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { eventParser } from "../api.js";
import { duration, number } from "../format.js";
import { NO_SETTINGS, bodyOf, errorWords, levelOf, messagesOf, newAnswer, take } from "./chat.js";
import { Names, namesOf } from "./names.js";
import { useStory, whyWords } from "./request.js";
import { Waterfall } from "./waterfall.js";

export const title = "Playground";

const KEY = "diptych-api-key";
const SIDES = ["A", "B"];
const LEVEL_WORDS = ["above 90 %", "50 to 90 %", "20 to 50 %", "5 to 20 %", "below 5 %"];
const urlOf = (path) => new URL(`../../${path}`, import.meta.url); // the API is beside /console/

const percent = (logprob) => (logprob < -9.2 ? "below 0.01 %" : `${(Math.exp(logprob) * 100).toPrecision(3)} %`);
const shown = (text) => text.replaceAll("\n", "\u21b5").replaceAll(" ", "\u00b7") || "(part of a character)";
const headersOf = (key) => ({ "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) });

/** Send a request and note in `answer` what comes of it; `tell` is called whenever there is more. */
async function ask(body, key, answer, signal, tell) {
  const begun = performance.now();
  try {
    const response = await fetch(urlOf("v1/chat/completions"), { method: "POST", body: JSON.stringify(body), headers: headersOf(key), signal });
    answer.id = response.headers.get("x-request-id") ?? "";
    if (!response.ok) {
      answer.error = errorWords(response.status, await response.json().catch(() => null), response.headers.get("retry-after"));
      return;
    }
    const parse = eventParser((_, chunk) => {
      if (typeof chunk === "object" && chunk) take(answer, chunk, (performance.now() - begun) / 1000);
    });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      parse(part.value);
      tell();
    }
    if (!answer.finish && !answer.error) answer.error = "The answer broke off: the connection ended.";
  } catch (error) {
    if (signal.aborted) answer.finish = "stopped";
    else answer.error = `The API could not be reached: ${error.message}`;
  } finally {
    answer.isRunning = false;
    tell();
  }
}

function Tokens({ answer }) {
  const [index, setIndex] = useState(null);
  const { tokens } = answer;
  const token = tokens[index];
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setIndex(Math.min(tokens.length - 1, Math.max(0, (index ?? -1) + step)));
  };
  const onOver = (event) => event.target.dataset.nth && setIndex(Number(event.target.dataset.nth));
  return html`<div class="tokens" tabindex="0" role="group" aria-label="Tokens of the answer: the arrow keys go from one to the next" onKeyDown=${onKeyDown} onMouseOver=${onOver}>
      ${tokens.map(({ text, logprob }, nth) => html`<span key=${nth} data-nth=${nth} class=${`l${levelOf(logprob)} ${nth === index ? "is-here" : ""}`}>${text}</span>`)}</div>
    <p class="levels" aria-hidden="true">Probability: ${LEVEL_WORDS.map((words, level) => html`<span key=${level} class="tokens"><span class=${`l${level}`}>${words}</span></span>`)}</p>
    <div class="token-facts" role="status">${token
      ? html`<p><b>Token ${index + 1}</b> <code>${shown(token.text || token.token)}</code> probability ${percent(token.logprob)}, ${duration(token.at_s)} after sending${
          index > 0 && `, ${duration(token.at_s - tokens[index - 1].at_s)} after the one before`}</p>
        <ol>${token.top.map((other, nth) => html`<li key=${nth} class=${other.token === token.token ? "is-taken" : ""}><code>${shown(other.token)}</code> ${percent(other.logprob)}${other.token === token.token && " taken"}</li>`)}</ol>`
      : html`<p class="quiet">Point at a token, or walk with the arrow keys, to see its time and what else was likely.</p>`}</div>`;
}

function Call({ call }) {
  return html`<div class="tool-call"><p>Calls <code>${call.name}</code> with</p><pre>${call.arguments}</pre>
    <label>Its result, for the next turn<input value=${call.result} placeholder="null" onInput=${(event) => { call.result = event.target.value; }} /></label></div>`;
}

function Served({ api, answer }) {
  const names = useContext(Names);
  const [story, words] = useStory(api, answer.id);
  if (!answer.id) return answer.error ? null : html`<p class="quiet">The first token tells which pair serves it.</p>`;
  if (!story) return html`<p class="quiet">${words || "Asking which pair serves it."}</p>`;
  return html`<p class="served">Served by <b>${names.pair(story.row)}</b>. ${whyWords(story, names)} <a href=${`#/requests/${encodeURIComponent(answer.id)}`}>Why there</a></p>
    <${Waterfall} story=${story} />`;
}

function endWords({ finish, usage, tokens }) {
  const words = { stop: "ended by itself", length: "cut at the most tokens", tool_calls: "wants its calls answered", stopped: "stopped by you" }[finish] ?? finish;
  const first = tokens[0] ? `, the first token after ${duration(tokens[0].at_s)}` : "";
  return usage ? `${words}: ${number(usage.prompt_tokens)} tokens in, ${number(usage.completion_tokens)} out${first}` : `${words}${first}`;
}

function Turn({ api, turn, name }) {
  const { prompt, answer } = turn;
  const isPlain = !answer.calls.length && !answer.reasoning && answer.tokens.length > 0;
  return html`<article class="turn" aria-label=${name}>
    <p class="prompt">${prompt}</p>
    <div class="answer"><div class="said">
      ${answer.reasoning && html`<blockquote class="reasoning">${answer.reasoning}</blockquote>`}
      ${!isPlain && answer.content && html`<p class="content">${answer.content}</p>`}
      ${answer.calls.map((call, index) => html`<${Call} key=${index} call=${call} />`)}
      ${answer.tokens.length > 0 && html`${!isPlain && html`<p class="quiet">As the model wrote it:</p>`}<${Tokens} answer=${answer} />`}
      ${answer.error && html`<p class="bad" role="alert">${answer.error}</p>`}
      <p class="quiet" role="status">${answer.isRunning ? "writing" : answer.error ? "" : endWords(answer)}</p></div>
      <div class="beside"><${Served} api=${api} answer=${answer} /></div></div>
  </article>`;
}

function Settings({ name, settings, set, models, isAlone }) {
  const field = (key) => ({ name: key, value: settings[key], onInput: (event) => set({ ...settings, [key]: event.target.value }) });
  return html`<fieldset class="settings"><legend>${isAlone ? "Settings" : `Settings ${name}`}</legend>
    <label class="wide">System prompt<textarea rows="2" ...${field("system")}></textarea></label>
    <label>Model or adapter<input list="models" placeholder="the model" autocomplete="off" ...${field("model")} /></label>
    <label>Temperature<input type="number" min="0" max="2" step="0.1" ...${field("temperature")} /></label>
    <label>Most tokens<input type="number" min="1" step="1" ...${field("max_tokens")} /></label>
    <details class="wide"><summary>Tools and JSON schema</summary>
      <label>Tools, a JSON list as the API takes it<textarea rows="4" spellcheck="false" class="mono" ...${field("tools")}></textarea></label>
      <label>JSON schema that the answer must match<textarea rows="4" spellcheck="false" class="mono" ...${field("schema")}></textarea></label></details>
    <datalist id="models">${models.map((model) => html`<option key=${model} value=${model} />`)}</datalist>
  </fieldset>`;
}

export default function Playground({ store, api }) {
  const names = namesOf(store.use("fleet")?.workers);
  const [settings, setSettings] = useState({ A: NO_SETTINGS, B: { ...NO_SETTINGS, temperature: "0" } });
  const [isTwo, setTwo] = useState(false);
  const [key, setKey] = useState(sessionStorage.getItem(KEY) ?? "");
  const [models, setModels] = useState([]);
  const [prompt, setPrompt] = useState("");
  const [turns, setTurns] = useState({ A: [], B: [] });
  const [words, setWords] = useState("");
  const [, redraw] = useState(0);
  const stopping = useRef(null);
  const frame = useRef(0);
  const sides = isTwo ? SIDES : ["A"];
  const isRunning = sides.some((side) => turns[side].at(-1)?.answer.isRunning);
  const tell = () => {
    frame.current ||= requestAnimationFrame(() => {
      frame.current = 0;
      redraw((n) => n + 1);
    });
  };
  const stop = () => stopping.current?.abort();

  useEffect(() => {
    fetch(urlOf("v1/models"), { headers: headersOf(key) }).then((answer) => answer.json())
      .then(({ data }) => setModels(data.map(({ id }) => id)), () => {});
    return stop;
  }, []);

  const send = async (event) => {
    event.preventDefault();
    if (!prompt.trim() || isRunning) return;
    const pasts = Object.fromEntries(sides.map((side) => [side, turns[side].filter(({ answer }) => !answer.error).flatMap(({ prompt: said, answer }) => [{ role: "user", content: said }, ...messagesOf(answer)])]));
    let bodies;
    try {
      bodies = sides.map((side) => bodyOf(settings[side], [...pasts[side], { role: "user", content: prompt }]));
    } catch (error) {
      return setWords(error.message);
    }
    setWords("");
    setPrompt("");
    await api.get("requests?limit=1").catch(() => {}); // calls are followed while somebody looks
    stopping.current = new AbortController();
    const answers = sides.map(newAnswer);
    setTurns((old) => ({ ...old, ...Object.fromEntries(sides.map((side, index) => [side, [...old[side], { prompt, answer: answers[index] }]])) }));
    bodies.forEach((body, index) => ask(body, key, answers[index], stopping.current.signal, tell));
  };
  const onKeyDown = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event);
  const onKey = (event) => {
    setKey(event.target.value);
    sessionStorage.setItem(KEY, event.target.value);
  };

  return html`<${Names.Provider} value=${names}><section class="view-playground"><h1>Playground</h1>
    <div class="options"><label>API key, if the API wants one<input type="password" name="key" autocomplete="off" value=${key} onInput=${onKey} /></label>
      <label class="check"><input type="checkbox" name="two" checked=${isTwo} disabled=${isRunning} onChange=${(event) => setTwo(event.target.checked)} /> Two settings side by side</label></div>
    <div class=${`sides ${isTwo ? "two" : ""}`}>${sides.map((side) => html`<div key=${side} class="side">
      <${Settings} name=${side} isAlone=${!isTwo} settings=${settings[side]} models=${models} set=${(value) => setSettings({ ...settings, [side]: value })} />
      <div class="turns">${turns[side].map((turn, index) => html`<${Turn} key=${index} api=${api} turn=${turn} name=${`Turn ${index + 1}${isTwo ? ` of ${side}` : ""}`} />`)}</div></div>`)}</div>
    <form class="composer" onSubmit=${send}>
      <label for="prompt" class="unheard">Prompt</label>
      <textarea id="prompt" rows="2" placeholder="Ask something. Enter sends, Shift+Enter begins a line." value=${prompt} onInput=${(event) => setPrompt(event.target.value)} onKeyDown=${onKeyDown}></textarea>
      ${isRunning ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button type="submit" class="main" disabled=${!prompt.trim()}>Send</button>`}
      <button type="button" disabled=${isRunning || !turns.A.length} onClick=${() => setTurns({ A: [], B: [] })}>New chat</button>
      ${words && html`<p class="bad" role="alert">${words}</p>`}
    </form>
  </section><//>`;
}
