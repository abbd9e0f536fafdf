// The page around the views: who is looking, what is looked at, and whether it is live.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { createApi } from "./api.js";
import { createStore } from "./live.js";
import { THEMES, setTheme, theme } from "./theme.js";
import * as fleet from "./views/fleet.js";

const VIEWS = {
  fleet: { name: "Fleet", load: async () => fleet },
  steps: { name: "Steps", load: () => import("./views/steps.js") },
  requests: { name: "Requests", load: () => import("./views/requests.js") },
  request: { load: () => import("./views/request.js") },
  cache: { name: "Cache", load: () => import("./views/cache.js") },
  charts: { name: "Charts", load: () => import("./views/charts.js") },
  playground: { name: "Playground", load: () => import("./views/playground.js") },
};

/** `#/requests/ID?slow_s=2` -> {view: "request", tab: "requests", id: "ID", params}. */
export function routeOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [tab = "", ...rest] = path.split("/");
  const known = VIEWS[tab]?.name ? tab : "fleet";
  let id = rest.join("/");
  try {
    id = decodeURIComponent(id);
  } catch { /* as it stands */ }
  return { view: known === "requests" && id ? "request" : known, tab: known, id, params: new URLSearchParams(query) };
}

function useRoute() {
  const [route, setRoute] = useState(() => routeOf(location.hash));
  useEffect(() => {
    const listener = () => setRoute(routeOf(location.hash));
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, []);
  return route;
}

/** Return the one-time code of the address, which is taken out of it at once. */
function takeCode() {
  const found = /^#code=([^&]+)/.exec(location.hash);
  if (found) history.replaceState(null, "", `${location.pathname}#/fleet`);
  return found ? decodeURIComponent(found[1]) : "";
}

addEventListener("hashchange", () => { if (location.hash.startsWith("#code=")) location.reload(); }); // an address that was pasted
const api = createApi();
const store = createStore(api);
const firstCode = takeCode();

function App() {
  const route = useRoute();
  const [me, setMe] = useState(null); // null: asking; false: signed out
  const [trouble, setTrouble] = useState("");

  async function ask(attempt = 0) {
    try {
      setMe(await api.get("me"));
      setTrouble("");
      store.restart();
    } catch (error) {
      if (error.status === 401 || error.status === 403) setMe(false);
      else {
        setTrouble("The router does not answer. Trying again.");
        setTimeout(() => ask(attempt + 1), Math.min(10_000, 500 * 2 ** attempt));
      }
    }
  }

  async function begin() {
    if (firstCode) {
      try {
        await api.signIn(firstCode);
      } catch (error) {
        if (!api.hasToken()) setTrouble(`${error.message} Ask for a new address, or sign in with a token.`);
      }
    }
    await ask();
  }

  useEffect(() => {
    begin();
    return api.onSignedOut(() => { store.stop(); setMe(false); });
  }, []);

  function signOut() {
    api.setToken("");
    store.stop();
    setMe(false);
  }

  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
    ${me
      ? html`<${Page} me=${me} route=${route} onSignOut=${signOut} />`
      : html`
        <header class="bar"><${Mark} /><span class="grow"></span><${ThemeSwitch} /></header>
        <main id="main" tabindex="-1">
          ${me === false
            ? html`<${SignIn} trouble=${trouble} onToken=${async (token) => { api.setToken(token); await ask(); }} />`
            : html`<p class="lone" role="status">${trouble || "Asking the router\u2026"}</p>`}
        </main>`}`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function Page({ me, route, onSignOut }) {
  const state = store.use("fleet");
  useEffect(() => { document.title = `${VIEWS[route.tab].name} \u00b7 Diptych`; }, [route.tab]);
  return html`
    <header class="bar">
      <${Mark} />
      <nav aria-label="Views">
        ${Object.entries(VIEWS).filter(([, view]) => view.name).map(([tab, view]) => html`
          <a key=${tab} href=${`#/${tab}`} aria-current=${route.tab === tab ? "page" : undefined}>${view.name}</a>`)}
      </nav>
      <span class="grow"></span>
      ${state?.model && html`<span class="model" title="The model that is served">${state.model}</span>`}
      <${Connection} />
      <${Who} me=${me} onSignOut=${onSignOut} />
      <${ThemeSwitch} />
    </header>
    ${state?.problem && html`<p class="problem" role="alert"><b>Nothing can be served.</b> ${state.problem}</p>`}
    <main id="main" tabindex="-1"><${View} me=${me} route=${route} /></main>`;
}

const Mark = () => html`<a class="mark" href="#/fleet"><i aria-hidden="true"></i>Diptych</a>`;

/** The module of the view, as soon as it is there. */
function View({ me, route }) {
  const [loaded, setLoaded] = useState(route.view === "fleet" ? { view: "fleet", module: fleet } : null);
  useEffect(() => {
    let wanted = true;
    VIEWS[route.view].load().then(
      (module) => wanted && setLoaded({ view: route.view, module }),
      () => wanted && setLoaded({ view: route.view, module: null }),
    );
    return () => { wanted = false; };
  }, [route.view]);
  if (loaded?.view !== route.view) return html`<p class="lone" role="status">Loading\u2026</p>`;
  if (!loaded.module) return html`<p class="lone" role="alert">This view could not be loaded. Reload the page to try again.</p>`;
  return html`<${loaded.module.default} key=${route.view} store=${store} api=${api} route=${route} me=${me} />`;
}

const WORDS = { connecting: "connecting", live: "live", "signed-out": "signed out" };

function Connection() {
  const { state, retryAt } = store.useConnection();
  const [, tick] = useState(0);
  useEffect(() => {
    if (state !== "retrying") return undefined;
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [state]);
  const left = Math.ceil((retryAt - Date.now()) / 1000);
  const words = state === "retrying" ? `reconnecting${left > 0 ? ` in ${left} s` : ""}` : WORDS[state];
  return html`<span class="connection" data-state=${state}><i aria-hidden="true"></i><span role="status">${
    state === "retrying" ? html`<span class="unheard">reconnecting</span><span aria-hidden="true">${words}</span>` : words}</span></span>`;
}

function Who({ me, onSignOut }) {
  if (me.is_open) return html`<span class="who" title="The server runs without signing in">open</span>`;
  return html`<span class="who">${me.is_operator ? "operator" : "viewer"}
    <button type="button" class="link" onClick=${onSignOut}>Sign out</button></span>`;
}

const THEME_WORDS = { auto: "as the system", light: "light", dark: "dark" };

function ThemeSwitch() {
  const [now, setNow] = useState(theme());
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  const choose = () => { setTheme(next); setNow(next); };
  return html`<button type="button" class="theme" onClick=${choose} aria-label=${`Colours: ${THEME_WORDS[now]}. Change to ${THEME_WORDS[next]}`}
    title=${`Colours: ${THEME_WORDS[now]}`}><i data-theme-now=${now} aria-hidden="true"></i></button>`;
}

function SignIn({ trouble, onToken }) {
  const field = useRef(null);
  const [isBusy, setBusy] = useState(false);
  const [words, setWords] = useState("");
  useEffect(() => field.current?.focus(), []);
  async function submit(event) {
    event.preventDefault();
    const token = field.current.value.trim();
    if (!token) return;
    setBusy(true);
    setWords("");
    await onToken(token);
    setBusy(false);
    setWords("The router does not know this token.");
  }
  return html`
    <form class="sign-in" onSubmit=${submit}>
      <h1>Sign in</h1>
      <p>The router shows what it serves to those with a token. The token is kept for this tab, until it is closed.</p>
      <label for="token">Token</label>
      <input id="token" ref=${field} type="password" autocomplete="off" spellcheck="false" required aria-describedby="sign-in-words" />
      <p id="sign-in-words" class="bad" role="alert">${words || trouble}</p>
      <button type="submit" class="main" disabled=${isBusy}>Sign in</button>
      <p class="quiet">On your own machine, <code>diptych up</code> prints an address that signs you in once.</p>
    </form>`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
