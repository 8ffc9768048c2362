// Pieces that several pages are made of.
import {
  Fragment, Link, bytesOf, changed, compact, duration, hexDump, html, number, rate, session, store, stored, textOf, timeText, useCallback,
  useEffect, useLayoutEffect, useRef, useState,
  Time, plural, live, OLD_MS, TURN_MS, useChanges,
} from "./core.js";

// ---------------------------------------------------------------- figures

export function Figures({ items }) {
  return html`<dl class="figures">${items.map(({ label, before, value, unit, tone, title }) => html`
    <div class="figure" key=${label} title=${title}>
      <dt>${label}</dt>
      <dd class=${tone || ""}>${before ? html`<small>${before}</small> ` : null}${value}${unit ? html` <small>${unit}</small>` : null}</dd>
    </div>`)}</dl>`;
}

export function Bones({ rows = 5, height = 20 }) {
  return html`<div class="in" aria-hidden="true">${Array.from({ length: rows }, (_, i) =>
    html`<${Bone} key=${i} height=${height} />`)}</div>`;
}

export function Bone({ height = 20 }) {
  return html`<svg class="bone" width="100%" height=${height} role="presentation"></svg>`;
}

export function Waiting({ what }) {
  return html`<${Fragment}>
    <p class="hidden" role="status">Loading ${what} …</p>
    <div class="card"><div class="in"><${Bone} height="28" /></div><${Bones} rows=${6} /></div>
  <//>`;
}

export function Failed({ error, retry, within = false }) {
  const title = error.status === 404 ? "Not found" : error.status === 403 ? "Not allowed" : "This did not work";
  return html`<div class="card empty" role="alert">
    ${within ? html`<h2>${title}</h2>` : html`<h1>${title}</h1>`}
    <p>${error.message}</p>
    <p class="actions">${retry ? html`<button class="btn" onClick=${retry}>Try again</button>` : null}
      ${within ? null : html`<${Link} class="btn" to="/ui/queues">All queues<//>`}</p>
  </div>`;
}

export function Stale({ error, data }) {
  if (!error || !data) return null;
  return html`<p class="banner" role="status">Not up to date: ${error.message}. Trying again …</p>`;
}

/** Says how old the figures are once they are, and goes on at another worker. */
export function Age() {
  const [, tick] = useState(0);
  useChanges();
  useEffect(() => {
    const timer = setInterval(() => {
      tick((n) => n + 1);
      const [next] = live.others;
      // who types into a dialog is not interrupted, and with keys one would have to sign in there
      if (next && live.age() > TURN_MS && !document.hidden && !session.told?.keys && !document.querySelector("dialog[open]")) location.replace(next + location.pathname + location.search);
    }, 1000);
    return () => clearInterval(timer);
  }, []);
  const age = live.age();
  if (age < OLD_MS || document.hidden) return null;
  return html`<p class="banner" role="status">This worker does not answer: all figures are ${duration(age)} old, of <${Time} ms=${live.at} />.
    ${live.others.length ? html` Go on at ${live.others.slice(0, 3).map((url, i) => html`${i ? ", " : ""}<a href=${url + location.pathname + location.search}>${url}</a>`)}.` : null}</p>`;
}

export function Missing({ count, unknown }) {
  if (unknown && !count) return html`<p class="banner" role="status">Messages of ${plural(unknown.partitions.length, "partition")} are not counted,
    since <${Time} ms=${unknown.since_ms} />: these numbers are too low.</p>`;
  if (!count) return null;
  return html`<p class="banner" role="status">${count === 1 ? "A worker does" : `${count} workers do`} not answer:
    what its partitions hold is not in these numbers.</p>`;
}

// ---------------------------------------------------------------- small charts

export function Spark({ values, label }) {
  const highest = Math.max(1, ...values.filter((v) => v !== null)), width = 96, height = 24;
  const step = width / Math.max(1, values.length - 1);
  const x = (i) => (i * step).toFixed(1), y = (v) => (height - 1.5 - (v / highest) * (height - 4)).toFixed(1);
  // what is not known is a gap
  const runs = [];
  values.forEach((v, i) => {
    if (v === null) return;
    if (i === 0 || values[i - 1] === null) runs.push([]);
    runs.at(-1).push(i);
  });
  return html`<svg class="spark" viewBox="0 0 96 24" preserveAspectRatio="none" role="img" aria-label=${label}>
    ${runs.map((run) => {
      const line = `M${run.map((i) => `${x(i)},${y(values[i])}`).join("L")}`;
      return html`<path class="area" d=${`${line}L${x(run.at(-1))},${height}L${x(run[0])},${height}Z`} /><path d=${line} />`;
    })}
  </svg>`;
}

// ---------------------------------------------------------------- charts

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// of an axis that tells ages, in milliseconds: as people count time
const AGE_STEPS = [100, 200, 500, ...[1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800, 2419200].map((s) => s * 1000)];

/** Lines over time. `series`: [{ label, values, colour: 1…4, format }]. */
export function Chart({ title, first, step, series, format = compact, height = 190 }) {
  const box = useRef(null), plot = useRef(null), [at, setAt] = useState(null);
  const [theme, setTheme] = useState(0);
  const count = series[0].values.length;

  useEffect(() => {
    const seen = () => setTheme((n) => n + 1);
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", seen);
    addEventListener("marq-theme", seen);
    return () => {
      media.removeEventListener("change", seen);
      removeEventListener("marq-theme", seen);
    };
  }, []);

  const data = () => {
    const x = Array.from({ length: count }, (_, i) => (first + i * step) / 1000);
    return [x, ...series.map((s) => s.values)];
  };

  useEffect(() => {
    const font = "11px " + getComputedStyle(document.body).fontFamily;
    const axis = { stroke: colour("--muted"), font, grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    const made = new window.uPlot({
      width: box.current.clientWidth, height,
      padding: [8, 30, 0, 0],
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      legend: { show: false },
      scales: { y: { range: (u, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, gap: 6, space: 80, values: (u, marks) => marks.map((s) => timeText(s * 1000).slice(-8, step * count > 300000 ? -3 : undefined)) },
        { ...axis, incrs: format === ages ? AGE_STEPS : undefined, size: format === ages ? 68 : 52, space: 34, values: (u, marks) => marks.map((v) => format(v)) },
      ],
      series: [{}, ...series.map((s) => ({
        label: s.label, stroke: colour(`--c${s.colour}`), width: 1.75, points: { show: false },
        fill: series.length === 1 ? colour(`--c${s.colour}`) + "1a" : undefined,
      }))],
      hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] },
    }, data(), box.current);
    plot.current = made;
    const resize = new ResizeObserver(() => {
      if (box.current) made.setSize({ width: box.current.clientWidth, height });
    });
    resize.observe(box.current);
    return () => {
      resize.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [theme, series.length, height, step * count > 300000]);

  useEffect(() => {
    plot.current?.setData(data());
  }, [first, count, series]);

  const shown = at === null || at >= count ? count - 1 : at;
  const shownOf = (s) => (s.values[shown] === null ? "unknown" : format(s.values[shown] ?? 0));
  const told = series.map((s) => `${s.label} ${shownOf(s)}`).join(", ");
  return html`<section class="card" aria-label=${title}>
    <header><h2>${title}</h2><div class="keys">
      ${at !== null && at < count ? html`<span>${timeText(first + at * step)}</span>` : null}
      ${series.map((s) => html`<span class="key" key=${s.label}><span class=${`swatch c${s.colour}`}></span>${s.label}
        <b>${shownOf(s)}</b></span>`)}
    </div></header>
    <div class="in"><div class="chart" ref=${box} role="img" aria-label=${`${title}, last 15 minutes; now ${told}`}></div></div>
  </section>`;
}

export const perSecond = (values, stepMs) => values.map((v) => (v === null ? null : v / (stepMs / 1000)));
export const rates = (value) => rate(value);
export const ages = (value) => (value ? duration(value) : "0");

// ---------------------------------------------------------------- payloads

export function Payload({ base64, size }) {
  const data = bytesOf(base64);
  const text = textOf(data);
  let json = null;
  if (text !== null) {
    try {
      json = JSON.stringify(JSON.parse(text), null, 2);
    } catch { /* it is none */ }
  }
  const kinds = [...(json !== null ? ["JSON"] : []), ...(text !== null ? ["Text"] : []), "Hex"];
  const [chosen, choose] = useState(null);
  const kind = kinds.includes(chosen) ? chosen : kinds[0];
  return html`<div class="stack">
    <div class="filters">
      <div class="segments" role="group" aria-label="Show the payload as">
        ${kinds.map((one) => html`<button key=${one} type="button" aria-pressed=${one === kind} onClick=${() => choose(one)}>${one}</button>`)}
      </div>
      <${Copy} text=${kind === "JSON" ? json : kind === "Text" ? text : hexDump(data)} />
      ${size > data.length ? html`<span class="note">The first ${number(data.length)} of ${number(size)} bytes</span>` : null}
    </div>
    <pre class=${`payload${kind === "Hex" ? " hex" : ""}`} tabindex="0" aria-label="Payload">${
      data.length === 0 ? "(empty)" : kind === "JSON" ? coloured(json) : kind === "Text" ? text : hexDump(data)}</pre>
  </div>`;
}

const TOKENS = /("(?:[^"\\]|\\.)*")(\s*:)?|(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)/g;

function coloured(json) {
  if (json.length > 20000) return json;
  const parts = [];
  let end = 0;
  for (const match of json.matchAll(TOKENS)) {
    parts.push(json.slice(end, match.index));
    const kind = match[2] !== undefined ? "k" : match[1] !== undefined ? "s" : "n";
    parts.push(html`<span class=${kind}>${match[1] ?? match[3]}</span>`, match[2] ?? "");
    end = match.index + match[0].length;
  }
  parts.push(json.slice(end));
  return parts;
}

export function Copy({ text, label = "Copy" }) {
  const [done, set] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      set(true);
      setTimeout(() => set(false), 1500);
    } catch {
      say("The browser did not let us copy that.");
    }
  };
  if (!navigator.clipboard) return null;
  return html`<button type="button" class="btn tiny" onClick=${copy}>${done ? "Copied" : label}</button>`;
}

/** A curl command for this installation, as a user types it: with the key, if one is needed. `body` has no single quote. */
export function curl(path, body) {
  const url = location.origin + path, key = session.told.keys ? ' -H "Authorization: Bearer $MARQ_KEY"' : "";
  return `curl${key} -d '${body}' ${/^[\w:/.%~-]+$/.test(url) ? url : `'${url.replace(/'/g, "%27")}'`}`;
}

export function Code({ text, label }) {
  return html`<div class="code"><pre tabindex="0" aria-label=${label}>${text}</pre><${Copy} text=${text} /></div>`;
}

// ---------------------------------------------------------------- what was done

let toasts = [];
export function say(text) {
  const toast = { text, id: Math.random() };
  toasts = [...toasts, toast].slice(-3);
  changed();
  setTimeout(() => {
    toasts = toasts.filter((one) => one !== toast);
    changed();
  }, 5000);
}

export function Toasts() {
  return html`<div class="toasts" role="status" aria-live="polite">
    ${toasts.map((toast) => html`<div class="toast" key=${toast.id}>${toast.text}</div>`)}</div>`;
}

/** A dialog with a form. `submit` does it, and may throw. */
export function Dialog({ title, close, submit, action, danger = false, disabled = false, children }) {
  const box = useRef(null), [error, setError] = useState(""), [busy, setBusy] = useState(false);
  // before the next key: one that is pressed at once would move the focus on behind the dialog
  useLayoutEffect(() => {
    const before = document.activeElement, shown = box.current;
    shown.showModal();
    shown.querySelector("input, select, textarea")?.focus();
    return () => {
      shown.close();
      before?.focus?.();
    };
  }, []);
  const onSubmit = async (event) => {
    event.preventDefault();
    if (disabled || busy) return;
    setBusy(true);
    setError("");
    try {
      await submit();
    } catch (problem) {
      setError(problem.message);
      setBusy(false);
    }
  };
  return html`<dialog ref=${box} aria-labelledby="dialog-title" onCancel=${(e) => { e.preventDefault(); close(); }}>
    <form onSubmit=${onSubmit}>
      <h2 id="dialog-title">${title}</h2>
      ${children}
      ${error ? html`<p class="error" role="alert">${error}</p>` : null}
      <div class="foot">
        <button type="button" class="btn" onClick=${close}>Cancel</button>
        <button class=${`btn ${danger ? "danger sure" : "primary"}`} disabled=${disabled || busy}>${busy ? "Working …" : action}</button>
      </div>
    </form>
  </dialog>`;
}

/** For what can't be undone: the name of the queue has to be typed. */
export function Confirm({ title, queue, action, close, submit, children }) {
  const [typed, type] = useState("");
  return html`<${Dialog} title=${title} close=${close} submit=${submit} action=${action} danger=${true} disabled=${typed !== queue}>
    ${children}
    <label class="field"><span>Type the name of the queue to go on: <code>${queue}</code></span>
      <input type="text" value=${typed} onInput=${(e) => type(e.target.value)} autocomplete="off" autocapitalize="off" spellcheck=${false} /></label>
  <//>`;
}

export function Segments({ label, value, options, choose }) {
  return html`<div class="segments" role="group" aria-label=${label}>
    ${options.map(([key, text]) => html`<button key=${key} type="button" aria-pressed=${key === value}
      onClick=${() => choose(key)}>${text}</button>`)}</div>`;
}

export function Bar({ part, label }) {
  const width = Math.max(0, Math.min(100, part * 100));
  return html`<div class="progress" role="progressbar" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(width)}>
    <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect width=${width} height="6" /></svg></div>`;
}

// ---------------------------------------------------------------- theme

export function nextTheme() {
  const order = ["auto", "light", "dark"];
  const next = order[(order.indexOf(stored("marq-theme") || "auto") + 1) % 3];
  store("marq-theme", next === "auto" ? null : next);
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  dispatchEvent(new Event("marq-theme"));
  changed();
}

export const theme = () => stored("marq-theme") || "auto";

/** Calls with what was typed once the typing has stopped. */
export function useTyped(value, act, delayMs = 250) {
  const [typed, set] = useState(value), timer = useRef(0);
  useEffect(() => set(value), [value]);
  const onInput = useCallback((event) => {
    const text = event.target.value;
    set(text);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => act(text), delayMs);
  }, [act]);
  return [typed, onInput];
}
