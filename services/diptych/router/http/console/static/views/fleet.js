// The picture: prefill workers to the left, decode workers to the right, and the links between them.

import { html } from "../vendor/htm-preact.js";

export const title = "Fleet";

export default function Fleet({ store }) {
  const state = store.use("fleet");
  if (!state) return html`<p class="lone" role="status">Waiting for the fleet\u2026</p>`;
  return html`<h1>Fleet</h1><p>${Object.keys(state.workers).length} workers</p>`;
}
