// The frame: who looks, where they are, and what is around each page.
import { Link, ask, changed, go, here, html, live, may, mayEverywhere, render, session, store, times, useChanges, useEffect, useRef, useState } from "./core.js";
import { Age, Failed, Toasts, Waiting, nextTheme, theme } from "./parts.js";
import { Overview } from "./overview.js";
import { Queues } from "./queues.js";
import { Queue } from "./queue.js";
import { Message } from "./message.js";
import { Workers } from "./workers.js";
import { Tables } from "./tables.js";

const PAGES = [
  ["/ui/overview", "Overview", Overview, "inspect"],
  ["/ui/queues", "Queues", Queues, "inspect"],
  ["/ui/workers", "Workers", Workers, "inspect"],
  ["/ui/tables", "Tables", Tables, "everywhere"],
];
const OTHERS = { "/ui/queue": [Queue, "/ui/queues", "Queue"], "/ui/message": [Message, "/ui/queues", "Message"] };

export async function look() {
  try {
    session.told = await ask("/ui/api/session");
    session.error = null;
  } catch (error) {
    session.error = error;
  }
  changed();
}

function SignIn() {
  const [key, set] = useState(""), [error, setError] = useState(""), [busy, setBusy] = useState(false), field = useRef(null);
  useEffect(() => { field.current.focus(); }, []);
  useEffect(() => { document.title = "Sign in · marq"; }, []);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError("");
    try {
      session.told = await ask("/ui/api/session", { method: "POST", body: { key: key.trim() } });
      store("marq-token", session.told.token);
      changed();
    } catch (problem) {
      setError(problem.status === 401 ? "This key is not known here." : problem.message);
      setBusy(false);
    }
  };
  return html`<main class="gate"><form class="card" onSubmit=${submit}>
    <h1 class="brand"><img src="/ui/static/icon.svg" alt="" />marq <span class="muted">${session.told.name}</span></h1>
    ${session.told.over ? html`<p class="banner" role="status">The session is over. Sign in again to go on where you were.</p>` : null}
    <p class="muted">Sign in with a key of this installation. What it may do decides what you see.</p>
    <label class="field"><span>Key</span>
      <input ref=${field} type="password" name="key" autocomplete="current-password" required value=${key} onInput=${(e) => set(e.target.value)} /></label>
    ${error ? html`<p class="error" role="alert">${error}</p>` : null}
    <button class="btn primary" disabled=${busy || !key}>${busy ? "Signing in …" : "Sign in"}</button>
    <p class="note">Keys stand in <code>MARQ_KEYS</code>. A session ends after 12 hours.</p>
  </form></main>`;
}

async function signOut() {
  try {
    session.told = await ask("/ui/api/session", { method: "DELETE" });
  } finally {
    store("marq-token", null);
    look();
  }
}

function Frame() {
  useChanges();
  const { path } = here();
  useEffect(() => {
    const back = () => changed();
    addEventListener("popstate", back);
    addEventListener("keydown", onKey);
    look();
    return () => {
      removeEventListener("popstate", back);
      removeEventListener("keydown", onKey);
    };
  }, []);
  const listed = PAGES.filter(([, , , needs]) => (needs === "everywhere" ? mayEverywhere("inspect") : may(needs)));
  const page = PAGES.find(([at]) => at === path);
  const [Page, current, title] = page ? [page[2], page[0], page[1]] : OTHERS[path] || [null, "", "Not found"];
  useEffect(() => { if (session.told?.signed_in) document.title = `${title} · marq`; }, [path, session.told?.signed_in]);

  if (session.error && !session.told) return html`<main><${Failed} error=${session.error} retry=${look} /></main>`;
  if (!session.told) return html`<main><${Waiting} what="the cockpit" /></main>`;
  if (!session.told.signed_in) return html`<${SignIn} />`;
  const themes = { auto: "as the system", light: "light", dark: "dark" };
  return html`
    <a class="skip" href="#main">To the content</a>
    <header class="bar"><div class="bar-in">
      <${Link} to="/ui/overview" class="brand"><img src="/ui/static/icon.svg" alt="" />marq
        ${session.told.name !== "marq" ? html`<span class="muted">${session.told.name}</span>` : null}<//>
      <nav class="nav" aria-label="Pages">
        ${listed.map(([at, text]) => html`<${Link} key=${at} to=${at} aria-current=${at === current ? "page" : undefined}>${text}<//>`)}
      </nav>
      <div class="tools">
        <span class="live" role="status"><span class=${`dot ${live.on ? "good" : "bad"}`}></span><span class="text">${live.on ? "Live" : "No answer"}</span></span>
        <button class="btn quiet tiny" onClick=${times.toggle} title="Times in your zone, or in UTC" aria-label=${`Times are ${times.utc ? "in UTC" : "in your zone"}; change`}>${times.utc ? "UTC" : "Local"}</button>
        <button class="btn quiet tiny" onClick=${nextTheme} aria-label=${`Theme: ${themes[theme()]}; change`} title=${`Theme: ${themes[theme()]}`}>
          <${ThemeIcon} name=${theme()} /></button>
        ${session.told.keys ? html`<button class="btn quiet tiny" onClick=${signOut}>Sign out</button>` : null}
      </div>
    </div></header>
    <main id="main" tabindex="-1"><${Age} />${Page && (listed.length || path === "/ui/queue")
      ? html`<${Page} key=${path} />`
      : html`<div class="card empty"><h1>${Page ? "This key sees nothing here" : "There is no such page"}</h1>
          <p>${Page ? "The pages need the permission inspect. A queue that the key may use is at /ui/queue?name=…" : html`<${Link} to="/ui/overview">To the overview<//>`}</p></div>`}
    </main>
    <${Toasts} />`;
}

function ThemeIcon({ name }) {
  const stroke = { fill: "none", stroke: "currentColor", "stroke-width": 1.6, "stroke-linecap": "round" };
  return html`<svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true" ...${stroke}>${
    name === "dark" ? html`<path d="M13.2 9.6A5.6 5.6 0 1 1 6.4 2.8a4.6 4.6 0 0 0 6.8 6.8Z" />`
      : name === "light" ? html`<circle cx="8" cy="8" r="3" /><path d="M8 1v1.4M8 13.6V15M1 8h1.4M13.6 8H15M3 3l1 1M12 12l1 1M3 13l1-1M12 4l1-1" />`
        : html`<circle cx="8" cy="8" r="5.6" /><path d="M8 2.4v11.2A5.6 5.6 0 0 0 8 2.4Z" fill="currentColor" />`}</svg>`;
}

// "/" to search, "g" and the first letter of a page to go there.
let goes = 0;
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.("input, textarea, select")) return;
  if (event.key === "/") {
    event.preventDefault();
    const search = document.querySelector('input[type="search"]');
    if (search) search.focus();
    else go("/ui/queues?focus=1");
  } else if (event.key === "g") {
    goes = Date.now();
  } else if (Date.now() - goes < 1200) {
    const page = PAGES.find(([, text]) => text[0].toLowerCase() === event.key);
    goes = 0;
    if (page) go(page[0]);
  }
}

render(html`<${Frame} />`, document.getElementById("app"));
