// Is it healthy, how fast, how much waits.
import { Link, Time, compact, duration, html, number, plural, queueUrl, rate, session, tile, usePoll } from "./core.js";
import { Bar, Chart, Code, Failed, Figures, Missing, Stale, Waiting, ages, curl, perSecond, rates } from "./parts.js";

export function Overview() {
  const { data, error, refresh } = usePoll("/ui/api/overview", 3000);
  if (!data) return error ? html`<${Failed} error=${error} retry=${refresh} />` : html`<${Waiting} what="the overview" />`;
  const { totals, history, unknown } = data;
  const lately = (name) => {
    if (!history || !history[name].length) return null;
    const last = history[name].slice(-2);
    if (last.includes(null)) return null;
    return last.reduce((sum, n) => sum + n, 0) / (last.length * history.step_ms / 1000);
  };
  const flowing = (label, name) => {
    const value = lately(name);
    return value === null ? { label, value: "unknown", tone: "none" } : { label, value: rate(value), unit: "/s" };
  };
  const flow = (name, label, colour) => ({ label, colour, values: perSecond(history[name], history.step_ms) });
  return html`
    <h1 class="hidden">Overview</h1>
    <${Stale} error=${error} data=${data} />
    <${Health} data=${data} />
    <${Figures} items=${[
      ...(history ? [flowing("Sent", "sent"), flowing("Delivered", "delivered"), flowing("Acknowledged", "acked"), flowing("Redelivered", "redelivered")]
        : [tile("Sent", totals.sent_rate, rate, unknown, { unit: "/s" }), tile("Finished", totals.done_rate, rate, unknown, { unit: "/s" })]),
      tile("Backlog", totals.unfinished, compact, unknown, { title: number(totals.unfinished) }),
      tile("In flight", totals.in_flight, compact, unknown, { title: number(totals.in_flight) }),
      tile("Oldest", totals.oldest_ms, duration, unknown),
      tile("Dead letters", totals.dead, compact, unknown, { tone: totals.dead ? "bad" : "" }),
    ]} />
    ${data.queues === 0 && !totals.unfinished && !unknown ? html`<${FirstMessage} />` : null}
    ${history && history.sent.length > 1 ? html`<div class="grid even">
      <${Chart} title="Messages a second" first=${history.first_ms} step=${history.step_ms} format=${rates}
        series=${[flow("sent", "Sent", 1), flow("acked", "Acknowledged", 2), flow("redelivered", "Redelivered", 3)]} />
      <${Chart} title="Backlog" first=${history.first_ms} step=${history.step_ms}
        series=${[{ label: "Messages", colour: 1, values: history.unfinished }]} />
      <${Chart} title="Oldest message" first=${history.first_ms} step=${history.step_ms} format=${ages}
        series=${[{ label: "Age", colour: 3, values: history.oldest_ms }]} />
      <${Busiest} queues=${data.busiest} />
    </div>` : html`<${Busiest} queues=${data.busiest} />`}`;
}

const WORDS = {
  address: ["bad", (t) => html`${t.what[0].toUpperCase()}${t.what.slice(1)}: ${t.mend}.`],
  missing: ["bad", (t) => html`Worker <b>${t.worker}</b> does not answer.`],
  unserved: ["bad", (t) => html`<b>Partition ${t.partition}</b> is not served${t.reason ? `: ${t.reason}` : "."}`],
  stalled: ["bad", (t) => html`Kafka confirms nothing in <b>partition ${t.partition}</b> of ${t.topic}, for ${duration(t.seconds * 1000)}.`],
  waiting: ["bad", (t) => html`<b>Partition ${t.partition}</b> ${t.reason}.`],
  lost: ["bad", (t) => html`<b>Partition ${t.partition}</b>: Kafka deleted ${plural(t.count, "unfinished message")} before a worker had read them, last <${Time} ms=${t.at_ms} />. Raise the topic's retention.`],
  topics: ["bad", (t) => t.what],
  unreadable: ["bad", (t) => html`No replica of <b>partition ${t.partition}</b> has ${plural(t.count, "offset")} of the queue topic whole: messages there are neither delivered nor counted.`],
  uncounted: ["warn", (t) => html`Messages of ${t.partitions.length === 1 ? "partition" : "partitions"} <b>${t.partitions.slice(0, 20).join(", ")}</b> are not counted, since <${Time} ms=${t.since_ms} />: figures are too low.`],
  poison: ["warn", (t) => html`${plural(t.count, "record")} can't be delivered: no queue, or malformed.`],
  breaker: ["warn", (t) => html`<${Q} name=${t.queue} />: its circuit breaker is open.`],
  without_receiver: ["warn", (t) => html`<${Q} name=${t.queue} />: ${plural(t.count, "message waits", "messages wait")}, and ${t.words}.`],
  more_without_receiver: ["warn", (t) => html`${plural(t.count, "more queue", "more queues")} that nobody receives from.`],
  dead: ["warn", (t) => html`<${Q} name=${t.queue} />: ${plural(t.count, "dead letter")}${t.since_ms ? html` since <${Time} ms=${t.since_ms} />` : null}.`],
  more_dead: ["warn", (t) => html`<${Link} to="/ui/queues?sort=dead&desc=true">${plural(t.count, "more queue has", "more queues have")} dead letters<//>.`],
  moving: ["accent", (t) => html`<${Q} name=${t.queue} />: ${number(t.moved)} of about ${number(t.total)} moved${t.to ? ` to ${t.to}` : " back"} …`],
};

const Q = ({ name }) => html`<${Link} to=${queueUrl(name)}><b>${name}</b><//>`;

function served(workers, partitions) {
  const { count, missing } = workers, silent = missing.length ?? missing;
  const sharing = workers.rebalancing ? ", sharing out partitions right now" : "", s = count === 1 ? "s" : "";
  // those that don't answer may serve some of the partitions
  if (silent) return `${count} of ${plural(count + silent, "worker")} answer${s}${sharing}; ${plural(partitions, "partition")}`;
  return `${plural(count, "worker")}${sharing && `${sharing},`} serve${s} ${plural(partitions, "partition")}`;
}

function Health({ data }) {
  const { workers, partitions, unknown } = data;
  // partitions that nobody serves are named by themselves
  const unserved = data.trouble.filter((t) => t.kind === "unserved").map((t) => t.partition);
  const left = unknown ? unknown.partitions.filter((n) => !unserved.includes(n)) : [];
  const trouble = left.length ? [...data.trouble, { kind: "uncounted", partitions: left, since_ms: unknown.since_ms }] : data.trouble;
  const known = trouble.filter((t) => WORDS[t.kind]);
  const worst = known.some((t) => WORDS[t.kind][0] === "bad") ? "bad" : known.some((t) => WORDS[t.kind][0] === "warn") ? "warn" : "good";
  const state = { bad: "Something is wrong", warn: "Working, and something needs a look", good: "All is well" }[worst];
  return html`<section class="card health" aria-label="Health">
    <span class=${`dot ${worst}`} aria-hidden="true"></span>
    <div>
      <p class="state">${state}</p>
      <p class="muted">${served(workers, partitions)}; ${plural(data.queues, "queue")}; ${workers.waiting_receives ? plural(workers.waiting_receives, "receive waits", "receives wait") : "no receive waits"}.</p>
      ${known.length ? html`<ul class="troubles">${known.map((t, i) => html`<li key=${i}>
        <span class=${`dot ${WORDS[t.kind][0]}`} aria-hidden="true"></span><span>${WORDS[t.kind][1](t)}</span></li>`)}</ul>` : null}
    </div>
  </section>`;
}

function Busiest({ queues }) {
  if (!queues.length) return null;
  const most = Math.max(1, ...queues.map((q) => q.unfinished));
  return html`<section class="card" aria-label="Busiest queues">
    <header><h2>Busiest queues</h2><${Link} to="/ui/queues?sort=unfinished&desc=true" class="small">All queues<//></header>
    <div class="scroll" tabindex="0"><table>
      <thead><tr><th scope="col">Queue</th><th scope="col" class="num">In /s</th><th scope="col" class="num">Out /s</th><th scope="col" class="num">Backlog</th><th scope="col" class="wide"><span class="hidden">Share</span></th></tr></thead>
      <tbody>${queues.map((q) => html`<tr key=${q.name}>
        <th scope="row"><${Link} to=${queueUrl(q.name)} class="name" title=${q.name}>${q.name}<//></th>
        <td class="num">${rate(q.sent_rate)}</td><td class="num">${rate(q.done_rate)}</td><td class="num">${compact(q.unfinished)}</td>
        <td class="wide"><${Bar} part=${q.unfinished / most} label=${`Backlog of ${q.name}`} /></td>
      </tr>`)}</tbody></table></div>
  </section>`;
}

export function FirstMessage({ queue = "orders" }) {
  const python = session.told.keys
    ? `import os\nfrom marq.client import Service\n\nService(${JSON.stringify(location.origin)}, key=os.environ["MARQ_KEY"])`
    : `from marq.client import Service\n\nService(${JSON.stringify(location.origin)})`;
  return html`<section class="card empty">
    <h2>No message yet. Send the first one</h2>
    <${Code} label="With curl" text=${curl(`/v1/queues/${encodeURIComponent(queue)}/messages`, '{"messages":[{"text":"hello"}]}')} />
    <p>or, with Python:</p>
    <${Code} label="With Python" text=${`${python}.queue(${JSON.stringify(queue)}).send(b"hello")`} />
  </section>`;
}

export { Missing };
