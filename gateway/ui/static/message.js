// The history of one message.
import { Link, Time, bytes, duration, go, here, html, number, plural, queueUrl, useEffect, usePoll } from "./core.js";
import { Copy, Failed, Payload, Stale, Waiting } from "./parts.js";
import { StateBadge } from "./queue.js";

const ENDS = { acked: ["good", "Acknowledged"], dead: ["bad", "Became a dead letter"], expired: ["warn", "Expired"], purged: ["warn", "Purged"], poison: ["bad", "Poison"], moved: ["good", "Moved to another queue"] };

export function Message() {
  const { query } = here();
  const partition = query.get("partition") || "", offset = query.get("offset") || "";
  const known = /^\d+$/.test(partition) && /^\d+$/.test(offset);
  const now = usePoll(known ? `/v1/messages/${partition}/${offset}` : null, 4000);
  const found = usePoll(known ? `/ui/api/messages/${partition}/${offset}` : null, now.data && now.data.state !== "done" ? 6000 : 0);
  useEffect(() => { document.title = `${partition}:${offset} · marq`; }, [partition, offset]);
  const seen = now.data && `${now.data.state} ${now.data.receives} ${now.data.delivery?.delivery}`;
  useEffect(() => { if (seen && found.data) found.refresh(); }, [seen]);
  if (!known) return html`<${Find} />`;
  if (!found.data) return found.error ? html`<${Failed} error=${found.error} retry=${found.refresh} />` : html`<${Waiting} what="the history of the message" />`;
  const told = found.data, state = told.outcome ? "done" : now.data?.state;
  const headers = told.key === null ? told.headers : [["Key", told.key], ...told.headers.filter(([name]) => name !== "marq-key")];
  return html`
    <div class="head"><div>
      <p class="small"><${Link} to="/ui/queues">Queues<//>${told.queue ? html` / <${Link} to=${queueUrl(told.queue, "messages")}>${told.queue}<//>` : null}</p>
      <h1>Message <span class="mono">${partition}:${offset}</span></h1>
      <p>${state ? html`<${StateBadge} state=${state} />` : null} ${told.outcome ? html`<span class=${`badge ${ENDS[told.outcome]?.[0] || ""}`}>${ENDS[told.outcome]?.[1] || told.outcome}</span>` : null}</p>
    </div></div>
    <${Stale} error=${found.error} data=${found.data} />
    <div class="grid">
      <section class="card" aria-label="History"><header><h2>History</h2>${told.ended_ms ? html`<span class="muted small">${duration(told.ended_ms - told.sent_ms)} in all</span>` : null}</header>
        <div class="in"><${Timeline} told=${told} now=${now.data} /></div></section>
      <div class="stack far">
        <section class="card" aria-label="Payload"><header><h2>Payload</h2><span class="muted small">${bytes(told.size_bytes)}</span></header>
          <div class="in"><${Payload} base64=${told.payload} size=${told.size_bytes} /></div></section>
        <section class="card" aria-label="Key and headers"><header><h2>Key and headers</h2></header><div class="in">${headers.length
          ? html`<dl class="pairs">${headers.map(([key, value], i) => html`<dt key=${`k${i}`} class="mono">${key}</dt><dd key=${`v${i}`} class="mono">${value}</dd>`)}</dl>`
          : html`<p class="muted">It has none.</p>`}</div></section>
      </div>
    </div>
    <details class="card"><summary>Raw markers (${number(told.events.length)})</summary><div class="in">
      ${told.events.length ? html`<pre class="payload hex" tabindex="0" aria-label="Raw markers">${told.events.map((e) => `${String(e.offset).padStart(8)}  ${new Date(e.at_ms).toISOString()}  ${e.marker}`).join("\n")}</pre>
        <${Copy} text=${told.events.map((e) => e.marker).join("\n")} />` : html`<p class="muted">No marker is about this message.</p>`}
    </div></details>`;
}

function Find() {
  const submit = (event) => {
    event.preventDefault();
    const [, p, o] = /^\s*(\d+)\s*[:/ ]\s*(\d+)\s*$/.exec(event.target.place.value) || [];
    if (p) go(`/ui/message?partition=${p}&offset=${o}`);
  };
  return html`<div class="head"><h1>Find a message</h1></div><form class="card" onSubmit=${submit}><div class="in form">
    <label class="field"><span>Partition and offset</span><input type="text" name="place" placeholder="3:1042" /></label>
    <div><button class="btn primary">Show</button></div></div></form>`;
}

function Timeline({ told, now }) {
  const steps = [];
  steps.push({ at: told.sent_ms, tone: "accent", what: "Sent", more: told.origin ? `a copy of ${told.origin}` : "" });
  // what the log says happened, and what it does not say: a lease that ran out
  let delivery = -1;
  for (const event of told.events) {
    if (event.kind === "start") {
      const before = told.deliveries[delivery];
      if (before?.end === "expired_lease") steps.push({ at: before.deadline_ms, tone: "warn", what: "Lease ran out", more: `after ${duration(before.deadline_ms - before.start_ms)}` });
      delivery += 1;
      const own = told.deliveries[delivery];
      steps.push({ at: event.at_ms, tone: "accent", what: `Delivered${own ? `, attempt ${own.attempt}` : ""}`,
        more: html`${event.receiver ? html`to <b>${event.receiver}</b>` : "to a receiver without a name"}, for ${duration(event.span_ms)}`, by: event.worker });
    } else if (event.kind === "extended") {
      steps.push({ at: event.at_ms, tone: "", what: "Extended", more: `by ${duration(event.span_ms)}` });
    } else if (event.kind === "released" || event.kind === "uncounted") {
      steps.push({ at: event.at_ms, tone: "warn", what: event.kind === "released" ? "Given back" : "Given back, uncounted", more: event.span_ms ? `comes back after ${duration(event.span_ms)}` : "" });
    } else {
      const own = told.deliveries[delivery];
      const [tone, what] = ENDS[event.kind] || ["", event.kind];
      steps.push({ at: event.at_ms, tone, what, more: own && event.kind === "acked" ? `after ${duration(event.at_ms - own.start_ms)}` : "" });
    }
  }
  const last = told.deliveries[delivery];
  if (!told.outcome && last?.end === "expired_lease") steps.push({ at: last.deadline_ms, tone: "warn", what: "Lease ran out", more: `after ${duration(last.deadline_ms - last.start_ms)}` });
  return html`<ol class="timeline">${steps.map((step, i) => html`<li key=${i} class=${step.tone}>
      <p class="what"><b>${step.what}</b><span class="muted">${step.more}</span></p>
      <p class="muted small"><${Time} ms=${step.at} precise=${true} />${i && step.at >= told.sent_ms ? html` · ${duration(step.at - told.sent_ms)} after it was sent` : ""}${step.by ? html` · ${step.by}` : ""}</p></li>`)}
    ${!told.outcome ? html`<li><p class="what"><b>${!told.complete ? "There may be more" : now?.state === "in_flight" ? "In flight" : now?.state === "delayed" ? "Waits for its time" : now?.state === "done" ? "Done" : "Waits for a receiver"}</b>
      <span class="muted">${!told.complete ? html`the log was read up to <${Time} ms=${told.read_until_ms} />` : now?.delivery && now.state === "in_flight" ? `comes back in ${duration(now.delivery.left_ms)}` : ""}</span></p></li>` : null}
  </ol>`;
}

export { plural };
