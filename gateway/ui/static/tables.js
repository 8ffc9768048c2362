// What is in the tables, decoded.
import { bytes, go, here, html, number, usePoll, useState, withQuery } from "./core.js";
import { Copy, Failed, Segments, Stale, Waiting } from "./parts.js";

const TABLES = [["messages", "messages"], ["markers", "markers"], ["progress", "progress"]];
const MEANINGS = {
  messages: "Payloads of messages that have been unfinished for a while, some to a row.",
  markers: "State of those messages: what is done, who has what until when; and ids that were accepted.",
  progress: "The manifest of the partition: which rows count, and how far both logs were read.",
};

export function Tables() {
  const { query } = here();
  const table = MEANINGS[query.get("table")] ? query.get("table") : "progress";
  const partitions = usePoll("/v1/partitions?scope=cluster", 0);
  const known = (partitions.data?.partitions || []).map((p) => p.partition);
  const partition = /^\d+$/.test(query.get("partition") || "") ? query.get("partition") : String(known[0] ?? 0);
  const after = query.get("after") || "";
  const rows = usePoll(partitions.data ? `/v1/tables/${table}/${partition}?limit=50${after ? `&after=${encodeURIComponent(after)}` : ""}` : null, after ? 0 : 10000);
  const [before, setBefore] = useState([]);
  const show = (values) => { setBefore([]); go(withQuery({ after: null, ...values }), { replace: true, scroll: false }); };
  return html`
    <div class="head"><div><h1>Tables</h1><p class="lead">${MEANINGS[table]}</p></div></div>
    <div class="filters">
      <${Segments} label="Table" value=${table} options=${TABLES} choose=${(key) => show({ table: key })} />
      <div><label class="hidden" for="partition">Partition</label><select id="partition" value=${partition} onChange=${(e) => show({ partition: e.target.value })}>
        ${[...new Set([...known.map(String), partition])].map((n) => html`<option key=${n} value=${n} selected=${n === partition}>Partition ${n}</option>`)}</select></div>
    </div>
    <${Stale} error=${rows.error} data=${rows.data} />
    ${!rows.data ? (rows.error || partitions.error ? html`<${Failed} within=${true} error=${rows.error || partitions.error} retry=${rows.refresh} />` : html`<${Waiting} what="rows" />`)
      : !rows.data.rows.length ? html`<div class="card empty"><h2>No rows</h2><p>${table === "progress" ? "The partition has had no checkpoint yet." : "Messages come here that have been unfinished for about ten seconds. Short work leaves nothing behind."}</p></div>`
      : html`<div class="card"><div class="scroll" tabindex="0" role="region" aria-label="Rows"><table>
        <thead><tr><th scope="col">Key</th><th scope="col" class="num">Size</th><th scope="col">Row</th></tr></thead>
        <tbody>${rows.data.rows.map((row) => html`<${Row} key=${row.key} row=${row} />`)}</tbody></table></div>
        ${before.length || rows.data.after ? html`<nav class="pager" aria-label="Pages of rows"><span class="muted">${number(rows.data.rows.length)} rows</span><span class="actions">
          <button class="btn" disabled=${!before.length} onClick=${() => { const last = before[before.length - 1]; setBefore(before.slice(0, -1)); go(withQuery({ after: last }), { replace: true }); }}>Previous</button>
          <button class="btn" disabled=${!rows.data.after} onClick=${() => { setBefore([...before, after]); go(withQuery({ after: rows.data.after }), { replace: true }); }}>Next</button></span></nav>` : null}</div>`}`;
}

const SHOWN = 20000;

function Row({ row }) {
  const [open, set] = useState(false);
  const short = JSON.stringify(row.row);
  const long = open ? JSON.stringify(row.row, null, 2) : "";
  return html`<tr><th scope="row" class="mono nowrap">${row.key}</th><td class="num">${bytes(row.size_bytes)}</td>
    <td><button class="btn tiny" aria-expanded=${open} onClick=${() => set(!open)}>${open ? "Close" : "Look"}</button>
      ${open ? html` <${Copy} text=${long} /><pre class="payload" tabindex="0" aria-label=${`Row ${row.key}`}>${long.length > SHOWN ? `${long.slice(0, SHOWN)}\n… (${number(long.length - SHOWN)} more characters)` : long}</pre>`
        : html` <span class="muted mono small">${short.slice(0, 120)}</span>`}</td></tr>`;
}
