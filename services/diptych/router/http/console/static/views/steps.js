// The steps of all workers, a row each.

import { html } from "../vendor/htm-preact.js";

export const title = "Steps";

export default function StepsView({ store }) {
  const log = store.useSteps();
  return html`<h1>Steps</h1><p>${log.workers.size} workers</p>`;
}
