// Who owns what, and how far each partition is.
import { Time, bytes, compact, duration, html, number, plural, useEffect, usePoll, useRef, useState } from "./core.js";
import { Failed, Missing, Stale, Waiting } from "./parts.js";

const KEPT = 50;

export function Workers() {
  const workers = usePoll("/v1/workers", 3000), partitions = usePoll("/v1/partitions?scope=cluster", 3000);
  const events = useTakeOvers(partitions.data);
  if (!workers.data || !partitions.data) {
    const error = workers.error || partitions.error;
    return error ? html`<${Failed} error=${error} retry=${() => { workers.refresh(); partitions.refresh(); }} />` : html`<${Waiting} what="workers" />`;
  }
  const missing = [...new Set([...workers.data.missing, ...partitions.data.missing])];
  return html`
    <div class="head"><div><h1>Workers</h1><p class="lead">${plural(workers.data.workers.length, "worker")}, ${plural(partitions.data.partitions.length, "partition")}</p></div></div>
    <${Stale} error=${workers.error || partitions.error} data=${workers.data} /><${Missing} count=${missing.length} />
    <section class="card" aria-label="Workers"><div class="scroll" tabindex="0"><table>
      <thead><tr><th scope="col">Worker</th><th scope="col">State</th><th scope="col">Partitions</th><th scope="col" class="num">Memory, highest</th>
        <th scope="col" class="num">Payload</th><th scope="col" class="num wide">To Kafka</th><th scope="col" class="num">Receives</th><th scope="col" class="num">Up for</th></tr></thead>
      <tbody>${workers.data.workers.map((w) => html`<tr key=${w.url}>
        <th scope="row"><span class="name" title=${w.worker}>${w.worker}</span><br /><span class="muted small">${w.url}</span></th>
        <td><span class=${`badge ${w.ready ? "good" : "warn"}`}>${w.ready ? "Ready" : "Not ready"}</span></td>
        <td>${w.partitions.length ? spans(w.partitions) : html`<span class="zero">none</span>`}</td>
        <td class="num">${bytes(w.peak_memory_bytes)}</td><td class="num">${bytes(w.payload_bytes)}</td><td class="num wide">${bytes(w.pending_bytes)}</td>
        <td class="num">${number(w.waiting_receives)}</td><td class="num">${duration(w.uptime_s * 1000)}</td></tr>`)}
      ${missing.map((url) => html`<tr key=${url}><th scope="row">${url}</th><td><span class="badge bad">No answer</span></td><td colspan="6"></td></tr>`)}</tbody></table></div></section>
    <section class="card" aria-label="Partitions"><header><h2>Partitions</h2></header>
      <div class="scroll" tabindex="0"><table>
      <thead><tr><th scope="col">Partition</th><th scope="col">Phase</th><th scope="col">Owner</th><th scope="col" class="num">Epoch</th><th scope="col" class="num">Unfinished</th><th scope="col" class="num wide">In memory</th>
        <th scope="col" class="num">Queue lag</th><th scope="col" class="num">Markers lag</th><th scope="col" class="num">Checkpoint</th></tr></thead>
      <tbody>${partitions.data.partitions.map((p) => html`<tr key=${`${p.partition} ${p.owner}`}>
        <th scope="row">${p.partition}</th>
        <td><span class=${`badge ${p.phase === "serving" ? "good" : "warn"}`}>${p.phase}</span>${p.paused ? html` <span class="badge">reading paused</span>` : null}</td>
        <td><span class="name" title=${p.owner}>${p.owner}</span>${p.reason ? html`<br /><span class="error">${p.reason}</span>` : null}</td>
        <td class="num">${number(p.epoch)}</td><td class="num">${p.in_memory === undefined ? "–" : compact(p.in_memory + p.parked)}</td><td class="num wide">${bytes(p.bytes)}</td>
        <td class="num">${number(p.lag)}</td><td class="num">${number(p.markers_lag)}</td>
        <td class="num">${p.checkpoint_age_ms === null || p.checkpoint_age_ms === undefined ? html`<span class="zero">–</span>` : `${duration(p.checkpoint_age_ms)} ago`}</td></tr>`)}</tbody></table></div></section>
    <section class="card" aria-label="Take-overs"><header><h2>Take-overs</h2><span class="muted small">since this page was opened</span></header>
      <div class="in" role="log" aria-live="polite">${events.length ? html`<ul>${events.map((e) => html`<li key=${e.key}><span class="muted"><${Time} ms=${e.at} /></span> ${e.text}</li>`)}</ul>`
        : html`<p class="muted">No partition has changed hands.</p>`}</div></section>`;
}

/** Partitions that changed hands between two looks. */
function useTakeOvers(data) {
  const before = useRef(null), [events, set] = useState([]);
  useEffect(() => {
    if (!data) return;
    const now = new Map(data.partitions.filter((p) => p.phase === "serving").map((p) => [p.partition, p]));
    const found = [];
    if (before.current) {
      for (const [partition, p] of now) {
        const old = before.current.get(partition);
        if (old && (old.owner !== p.owner || old.epoch !== p.epoch)) {
          found.push({ at: Date.now(), key: `${partition} ${p.epoch}`, text: old.owner === p.owner ? `Partition ${partition}: ${p.owner} took it again, epoch ${p.epoch}` : `Partition ${partition}: ${p.owner} took it over from ${old.owner}` });
        }
      }
      for (const [partition, old] of before.current) if (!now.has(partition)) now.set(partition, old);
    }
    before.current = now;
    if (found.length) set((old) => [...found, ...old].slice(0, KEPT));
  }, [data]);
  return events;
}

function spans(numbers) {
  const parts = [];
  for (const n of numbers) {
    const last = parts[parts.length - 1];
    if (last && last[1] === n - 1) last[1] = n;
    else parts.push([n, n]);
  }
  return parts.map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(", ");
}
