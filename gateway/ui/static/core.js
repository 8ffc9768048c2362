// What all pages share: components of Preact, requests, addresses, and how values look.
const { h, render, Fragment } = window.preact;
const { useState, useEffect, useLayoutEffect, useRef, useCallback, useMemo } = window.preactHooks;
const html = window.htm.bind(h);
export { Fragment, html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };

// ---------------------------------------------------------------- state that pages share

// The token is told once, at sign-in. The browser keeps it for this origin, port included; the cookie goes to all ports.
export const session = { told: null };
const listeners = new Set();

export function changed() {
  for (const listener of listeners) listener();
}

export function useChanges() {
  const [, set] = useState(0);
  useEffect(() => {
    const listener = () => set((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
}

export const may = (permission) => !!session.told?.somewhere?.includes(permission);
export const mayEverywhere = (permission) => !!session.told?.everywhere?.includes(permission);

// ---------------------------------------------------------------- requests

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = { Accept: "application/json", "X-Marq-Token": stored("marq-token") || "" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    // payloads are nothing for the browser's cache on disk
    response = await fetch(path, {
      method, headers, signal, credentials: "same-origin", cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "this worker does not answer");
  }
  let value = null;
  try {
    value = await response.json();
  } catch { /* an answer without a body */ }
  if (!response.ok) {
    if (response.status === 401 && session.told?.keys && session.told.signed_in) {
      session.told = { ...session.told, signed_in: false, over: true };
      changed();
    }
    throw new Problem(response.status, value?.detail || value?.title || `the worker answered ${response.status}`);
  }
  return value;
}

export const pathOf = (queue) => encodeURIComponent(queue);

/** Asks again and again while the page is seen: what came last, what went wrong since, and asking at once. */
export function usePoll(path, intervalMs = 3000) {
  const [state, set] = useState({ path: null, data: null, error: null, at: 0 });
  const again = useRef(() => {});
  useEffect(() => {
    if (path === null) return undefined;
    const abort = new AbortController();
    let timer = 0, over = false, failures = 0;
    const look = async () => {
      clearTimeout(timer);
      if (document.hidden) return;
      try {
        const data = await within(ANSWER_MS, abort.signal, (signal) => ask(path, { signal }));
        if (over) return;
        failures = 0;
        set({ path, data, error: null, at: Date.now() });
        live.heard(data);
      } catch (error) {
        if (over || error.name === "AbortError") return;
        failures += 1;
        set((old) => ({ ...old, path, data: old.path === path ? old.data : null, error }));
        if (error.status === 0) live.failed();
      }
      if (intervalMs) timer = setTimeout(look, Math.min(intervalMs * 2 ** Math.min(failures, 3), 20000));
    };
    again.current = look;
    const seen = () => { if (!document.hidden) look(); };
    document.addEventListener("visibilitychange", seen);
    look();
    return () => {
      over = true;
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [path, intervalMs]);
  const current = state.path === path;
  return {
    data: current ? state.data : null, error: current ? state.error : null, at: state.at,
    refresh: useCallback(() => again.current(), []),
  };
}

// A worker that stands still takes requests and answers none.
const ANSWER_MS = 8000;

async function within(ms, outer, act) {
  const abort = new AbortController(), stop = () => abort.abort();
  let late = false;
  const timer = setTimeout(() => { late = true; stop(); }, ms);
  outer.addEventListener("abort", stop);
  try {
    return await act(abort.signal);
  } catch (error) {
    throw late && !outer.aborted ? new Problem(0, "this worker does not answer") : error;
  } finally {
    clearTimeout(timer);
    outer.removeEventListener("abort", stop);
  }
}

// From when the figures are, and where to go on if this worker does not answer.
export const OLD_MS = 10000, TURN_MS = 16000;
export const live = {
  on: true, at: Date.now(), others: [],
  heard(data) {
    const before = live.on;
    live.at = Date.now();
    live.on = true;
    if (Array.isArray(data?.others)) live.others = data.others;
    if (!before) changed();
  },
  failed() {
    live.on = false;
    changed();
  },
  /** Milliseconds since the last answer. */
  age: () => Date.now() - live.at,
};

// ---------------------------------------------------------------- addresses

export function go(to, { replace = false, scroll = true } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", to);
  changed();
  if (scroll) window.scrollTo(0, 0);
}

export function here() {
  const query = new URLSearchParams(location.search);
  let path = location.pathname.replace(/\/+$/, "");
  if (path === "" || path === "/ui") path = "/ui/overview";
  return { path, query };
}

export function withQuery(values) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === "" || value === false) query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  return location.pathname + (text ? `?${text}` : "");
}

export const queueUrl = (name, tab = "") =>
  `/ui/queue?name=${encodeURIComponent(name)}${tab ? `&tab=${tab}` : ""}`;
export const messageUrl = (partition, offset) => `/ui/message?partition=${partition}&offset=${offset}`;

export function Link({ to, children, ...rest }) {
  const click = (event) => {
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(to);
  };
  return html`<a href=${to} onClick=${click} ...${rest}>${children}</a>`;
}

// ---------------------------------------------------------------- how values look

const whole = new Intl.NumberFormat("en-US");
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

/** A tile with a count or an age. `unknown`: since when something is not in it; then it is "at least", or not known. */
export function tile(label, value, format, unknown, more = {}) {
  if (!unknown) return { label, value: format(value), ...more };
  const title = `${plural(unknown.partitions.length, "partition is", "partitions are")} not counted since ${timeText(unknown.since_ms)}: ${unknown.partitions.slice(0, 20).join(", ")}`;
  if (!value) return { label, value: `unknown since ${timeText(unknown.since_ms).slice(0, -3)}`, tone: "none", title };
  return { label, before: "at least", value: format(value), ...more, title };
}

export const number = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const compact = (value) => (value < 10000 ? whole.format(value) : short.format(value));

export function rate(value) {
  if (!value) return "0";
  if (value < 10) return value.toFixed(1);
  return compact(Math.round(value));
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.min(59, Math.round(seconds))} s`;
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = parts.findIndex(([size]) => seconds >= size);
  const [size, unit] = parts[at];
  const first = Math.floor(seconds / size);
  const rest = Math.floor((seconds - first * size) / parts[at + 1][0]);
  return rest && first < 10 ? `${first} ${unit} ${rest} ${parts[at + 1][1]}` : `${first} ${unit}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1024) return `${value} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let size = value / 1024, unit = 0;
  while (size >= 1024 && unit < 3) {
    size /= 1024;
    unit += 1;
  }
  return `${size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// Times are told in the viewer's zone, or in UTC if that was chosen; the other one is always in the title.
export const times = {
  utc: stored("marq-utc") === "1",
  toggle() {
    times.utc = !times.utc;
    store("marq-utc", times.utc ? "1" : "0");
    changed();
  },
};

// Where the browser keeps nothing, this page does until it is closed.
const kept = new Map();

export function stored(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return kept.get(name) ?? null;
  }
}

export function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch {
    kept.set(name, value);
  }
}

const formats = {};
export function timeText(ms, { utc = times.utc, precise = false } = {}) {
  const date = new Date(ms), now = new Date();
  const zone = utc ? "UTC" : undefined;
  const day = (d) => d.toLocaleDateString("en-CA", { timeZone: zone });
  const key = `${utc}${precise}`;
  formats[key] ??= new Intl.DateTimeFormat("en-GB", {
    timeZone: zone, hour: "2-digit", minute: "2-digit", second: "2-digit",
    ...(precise ? { fractionalSecondDigits: 3 } : {}), hourCycle: "h23",
  });
  const clock = formats[key].format(date);
  return day(date) === day(now) ? clock : `${day(date)} ${clock}`;
}

export function Time({ ms, precise = false }) {
  if (ms === null || ms === undefined) return "–";
  const iso = new Date(ms).toISOString();
  const title = times.utc ? `${new Date(ms).toLocaleString()} here` : `${iso.replace("T", " ").replace("Z", "")} UTC`;
  return html`<time datetime=${iso} title=${title}>${timeText(ms, { precise })}${times.utc ? " UTC" : ""}</time>`;
}

// ---------------------------------------------------------------- payloads

export function bytesOf(base64) {
  const text = atob(base64 || "");
  return Uint8Array.from(text, (c) => c.charCodeAt(0));
}

export function textOf(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    return null;
  }
}

export function preview(base64) {
  const data = bytesOf(base64);
  const text = textOf(data) ?? textOf(data.slice(0, -1)) ?? textOf(data.slice(0, -2)) ?? textOf(data.slice(0, -3));
  if (text === null) return hex(data.slice(0, 16)).replace(/\n/g, " ");
  return text.replace(/\s+/g, " ").slice(0, 160);
}

const hex = (data) => [...data].map((b) => b.toString(16).padStart(2, "0")).join(" ");

export function hexDump(data) {
  const lines = [];
  for (let at = 0; at < data.length; at += 16) {
    const row = data.slice(at, at + 16);
    const shown = [...row].map((b) => (b >= 32 && b < 127 ? String.fromCharCode(b) : "·")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${hex(row).padEnd(47)}  ${shown}`);
  }
  return lines.join("\n");
}
