// All queues: searched, sorted and paged by the server.
import { Link, ask, compact, duration, go, here, html, may, number, pathOf, plural, queueUrl, rate, useCallback, useEffect, usePoll, useRef, useState, withQuery } from "./core.js";
import { Dialog, Failed, Missing, Spark, Stale, Waiting, say, useTyped } from "./parts.js";
import { FirstMessage } from "./overview.js";

const COLUMNS = [
  ["name", "Queue", ""], ["unfinished", "Backlog", "num"], ["in_flight", "In flight", "num wide"], ["delayed", "Delayed", "num wide"],
  ["dead", "Dead", "num"], ["oldest", "Oldest", "num wide"], ["sent", "In /s", "num"], ["done", "Out /s", "num wide"],
];

export function Queues() {
  const { query } = here();
  const wanted = new URLSearchParams();
  for (const name of ["search", "sort", "desc", "page"]) if (query.get(name)) wanted.set(name, query.get(name));
  const { data, error, refresh } = usePoll(`/ui/api/queues?${wanted}`, 3000);
  const [shown, keep] = useState(null);
  useEffect(() => { if (data) keep(data); }, [data]);
  const search = useCallback((text) => go(withQuery({ search: text, page: null, focus: null }), { replace: true, scroll: false }), []);
  const [typed, onInput] = useTyped(query.get("search") || "", search);
  const [making, make] = useState(false);
  const box = useRef(null);
  const told = data || shown;
  useEffect(() => { if (query.get("focus")) box.current?.focus(); }, [!!told]);
  if (!told) return error ? html`<${Failed} error=${error} retry=${refresh} />` : html`<${Waiting} what="queues" />`;
  const sort = query.get("sort") || "name", desc = query.get("desc") === "true";
  const order = (column) => {
    const down = column === sort ? !desc : column !== "name";
    go(withQuery({ sort: column === "name" ? null : column, desc: down ? "true" : null, page: null }), { replace: true, scroll: false });
  };
  return html`
    <div class="head"><div><h1>Queues</h1><p class="lead">${plural(told.total, "queue")}${query.get("search") ? ` with “${query.get("search")}”` : ""}</p></div>
      <div class="actions">${may("manage") ? html`<button class="btn primary" onClick=${() => make(true)}>New queue</button>` : null}</div></div>
    <${Stale} error=${error} data=${told} /><${Missing} count=${told.missing} unknown=${told.unknown} />
    <div class="filters"><div class="grow"><label class="hidden" for="search">Search queues</label>
      <input id="search" ref=${box} type="search" placeholder="Search by name   /" value=${typed} onInput=${onInput} autocomplete="off" spellcheck=${false} /></div></div>
    ${told.total === 0 ? (query.get("search")
      ? html`<div class="card empty"><h2>No queue has “${query.get("search")}” in its name</h2>
          <button class="btn" onClick=${() => search("")}>Show all queues</button></div>`
      : html`<${FirstMessage} />`) : html`
    <div class="card">
      <div class="scroll" tabindex="0" role="region" aria-label="Queues"><table>
        <thead><tr>${COLUMNS.map(([key, text, kind]) => html`<th key=${key} scope="col" class=${kind}
            aria-sort=${key === sort ? (desc ? "descending" : "ascending") : undefined}>
          <button onClick=${() => order(key)}>${text}<span aria-hidden="true">${key === sort ? (desc ? "↓" : "↑") : ""}</span></button></th>`)}
          <th scope="col" class="wide">15 minutes</th></tr></thead>
        <tbody>${told.queues.map((q) => html`<tr key=${q.name}>
          <th scope="row"><${Link} to=${queueUrl(q.name)} class="name" title=${q.name}>${q.name}<//>
            ${q.fifo ? html` <span class="badge">FIFO</span>` : null}${q.purging ? html` <span class="badge warn">Purging</span>` : null}</th>
          <${Count} value=${q.unfinished} least=${told.unknown} /><${Count} value=${q.in_flight} wide=${true} least=${told.unknown} /><${Count} value=${q.delayed} wide=${true} least=${told.unknown} />
          <${Count} value=${q.dead} tone="bad" least=${told.unknown} />
          <td class="num wide">${q.oldest_ms === null ? html`<span class="zero">${told.unknown ? "?" : "–"}</span>` : duration(q.oldest_ms)}</td>
          <${Rate} value=${q.sent_rate} /><${Rate} value=${q.done_rate} wide=${true} />
          <td class="wide"><${Spark} values=${q.spark} label=${`Backlog of the last 15 minutes: now ${q.unfinished}`} /></td>
        </tr>`)}</tbody></table></div>
      ${told.pages > 1 ? html`<nav class="pager" aria-label="Pages of queues">
        <span class="muted">Page ${number(told.page)} of ${number(told.pages)}</span>
        <span class="actions">
          <button class="btn" disabled=${told.page <= 1} onClick=${() => go(withQuery({ page: told.page > 2 ? told.page - 1 : null }))}>Previous</button>
          <button class="btn" disabled=${told.page >= told.pages} onClick=${() => go(withQuery({ page: told.page + 1 }))}>Next</button>
        </span></nav>` : null}
    </div>`}
    ${making ? html`<${NewQueue} close=${() => make(false)} />` : null}`;
}

const Count = ({ value, tone = "", wide = false, least = null }) => html`<td class=${`num${wide ? " wide" : ""}`} title=${least ? (value ? `at least ${number(value)}` : "not known") : number(value)}>
  ${value ? html`<span class=${tone ? "badge " + tone : ""}>${least ? "≥ " : ""}${compact(value)}</span>` : html`<span class="zero">${least ? "?" : "0"}</span>`}</td>`;

const Rate = ({ value, wide = false }) => html`<td class=${`num${wide ? " wide" : ""}`}><span class=${value ? "" : "zero"}>${rate(value)}</span></td>`;

function NewQueue({ close }) {
  const [name, set] = useState(""), [fifo, setFifo] = useState(false);
  const submit = async () => {
    await ask(`/v1/queues/${pathOf(name)}`, { method: "PUT", body: fifo ? { fifo: true } : {} });
    say(`${name} is there.`);
    close();
    go(queueUrl(name, "settings"));
  };
  return html`<${Dialog} title="New queue" close=${close} submit=${submit} action="Make it" disabled=${!name}>
    <label class="field"><span>Name</span><input type="text" value=${name} maxlength="255" onInput=${(e) => set(e.target.value)} autocomplete="off" spellcheck=${false} /></label>
    <label class="check"><input type="checkbox" checked=${fifo} onChange=${(e) => setFifo(e.target.checked)} /> FIFO: messages of a group in order</label>
    <p class="note">It can't be changed later whether a queue is FIFO; everything else can.</p>
  <//>`;
}
