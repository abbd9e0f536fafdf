// What an operator may do to a worker, each thing only after a question.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { count } from "../format.js";
import { ROLES } from "./fleet_model.js";

const LEVELS = ["debug", "info", "warning", "error"];

/** Each act: its name, what is asked, its fields {name: {label, ...}}, what is sent, and how the answer is told. */
const ACTS = {
  drain: {
    name: "Drain", isGrave: true,
    ask: (name) => `Drain ${name}? It takes no more requests, and leaves when those that it has are done, or when the time is over.`,
    fields: { deadline_s: { label: "Time for it, in seconds; empty: as long as it was started with", type: "number", value: "", min: "0", isOptional: true } },
    body: (instance, { deadline_s }) => ({ instance, deadline_s: deadline_s === "" ? null : Number(deadline_s) }),
    done: () => "It drains.",
  },
  role: {
    name: "Change role", isGrave: true,
    ask: (name) => `Change the role of ${name}? It finishes what it has, and then serves in the other role.`,
    fields: { role: { label: "Role", options: ROLES } },
    body: (instance, fields) => ({ instance, role: fields.role }),
    done: (answer) => `Its role is changed; it was ${answer.previous_role}.${answer.not_ready ? ` Not ready yet: ${answer.not_ready}` : ""}`,
  },
  "load-adapter": {
    name: "Load adapter",
    ask: () => "Load an adapter on all workers? The path is one on the workers' machines.",
    fields: { name: { label: "Name", value: "" }, path: { label: "Path", value: "" } },
    body: (instance, fields) => ({ name: fields.name, path: fields.path }),
    done: (answer) => `${answer.name} is loaded on ${count(answer.num_workers, "worker")}.`,
  },
  "unload-adapter": {
    name: "Unload adapter",
    ask: () => "Unload an adapter from all workers? Requests that name it are refused from then on.",
    fields: { name: { label: "Name", value: "" } },
    body: (instance, fields) => ({ name: fields.name }),
    done: (answer) => `${answer.name} is unloaded; ${count(answer.num_workers, "worker")} had it.`,
  },
  "log-level": {
    name: "Log level",
    ask: (name) => `Change how much ${name} logs, until it is started anew?`,
    fields: { level: { label: "Least severe level that is logged", options: LEVELS, value: "info" } },
    body: (instance, fields) => ({ instance, level: fields.level }),
    done: (answer) => `The log level is changed; it was ${answer.previous_level}.`,
  },
};

export function Acts({ api, instance, card, name }) {
  const [asked, setAsked] = useState("");
  const [answer, setAnswer] = useState(null); // {isError, words}
  async function act(body) {
    setAnswer(null);
    try {
      const done = await api.post(`acts/${asked}`, body);
      setAnswer({ isError: false, words: ACTS[asked].done(done) });
    } catch (error) {
      setAnswer({ isError: true, words: `${ACTS[asked].name}: ${error.message}` });
    }
    setAsked("");
  }
  return html`
    <section class="worker-acts" aria-label="Acts">
      <h3>Acts</h3>
      <div class="act-row">${Object.entries(ACTS).map(([key, { name: words }]) => html`
        <button key=${key} type="button" onClick=${() => setAsked(key)}>${words}\u2026</button>`)}</div>
      <p role="status" class=${answer?.isError ? "bad" : "good"}>${answer?.words ?? ""}</p>
      ${asked && html`<${Ask} act=${ACTS[asked]} name=${name} card=${card} onNo=${() => setAsked("")}
        onYes=${(fields) => act(ACTS[asked].body(instance, fields))} />`}
    </section>`;
}

function Ask({ act, name, card, onYes, onNo }) {
  const dialog = useRef(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => {
    const back = document.activeElement;
    dialog.current.showModal();
    return () => back?.focus();
  }, []);
  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    await onYes(Object.fromEntries(new FormData(event.target)));
  }
  return html`
    <dialog ref=${dialog} aria-labelledby="ask-name" onCancel=${(event) => { event.preventDefault(); onNo(); }}>
      <form onSubmit=${submit}>
        <h2 id="ask-name">${act.name}</h2>
        <p>${act.ask(name)}</p>
        ${Object.entries(act.fields).map(([key, field]) => html`<${Field} key=${key} name=${key} field=${field} card=${card} />`)}
        <div class="row">
          <button type="button" onClick=${onNo}>Cancel</button>
          <button type="submit" class=${act.isGrave ? "danger" : "main"} disabled=${isBusy}>${act.name}</button>
        </div>
      </form>
    </dialog>`;
}

function Field({ name, field, card }) {
  if (!field.options) {
    return html`<label>${field.label}<input name=${name} type=${field.type ?? "text"} min=${field.min} defaultValue=${field.value} required=${!field.isOptional} autocomplete="off" /></label>`;
  }
  const options = field.options.filter((option) => name !== "role" || option !== card.role);
  return html`<label>${field.label}<select name=${name}>${options.map((option) => html`
    <option key=${option} value=${option} selected=${option === field.value}>${option}</option>`)}</select></label>`;
}
