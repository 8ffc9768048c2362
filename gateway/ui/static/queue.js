// One queue: how it goes, what is in it, its settings, and what can be done with it.
import { Link, Time, ask, bytes, compact, duration, go, here, html, messageUrl, number, pathOf, plural, preview, queueUrl, rate, useEffect, useMemo, usePoll, useState, withQuery, tile } from "./core.js";
import { Bar, Chart, Code, Confirm, Copy, Dialog, Failed, Figures, Missing, Payload, Segments, Stale, Waiting, curl, perSecond, rates, say } from "./parts.js";

export function Queue() {
  const { query } = here();
  const name = query.get("name") || "";
  const { data, error, refresh } = usePoll(`/ui/api/queues/${pathOf(name)}`, 3000);
  const [dialog, open] = useState(null);
  useEffect(() => { document.title = `${name} · marq`; }, [name]);
  // somebody deleted it, or took the permission away: what was seen last is no page to work with
  if (error && (error.status === 404 || error.status === 403)) return html`<${Failed} error=${error} retry=${refresh} />`;
  if (!data) return error ? html`<${Failed} error=${error} retry=${refresh} />` : html`<${Waiting} what=${name} />`;
  const can = (permission) => data.can.includes(permission);
  const tabs = [
    ...(can("inspect") ? [["", "Overview"], ["messages", data.is_dead_letter_queue ? "Dead letters" : "Messages"]] : []),
    ["settings", "Settings"],
  ];
  const wanted = query.get("tab") || "";
  const tab = tabs.some(([key]) => key === wanted) ? wanted : tabs[0][0];
  const close = () => open(null);
  const after = (text) => { say(text); close(); refresh(); };
  const { info, now } = data;
  return html`
    <div class="head">
      <div><p class="small"><${Link} to="/ui/queues">Queues<//></p>
        <h1>${name}</h1>
        <p>${info.settings.fifo ? html`<span class="badge accent">FIFO</span> ` : null}
          ${data.is_dead_letter_queue ? html`<span class="badge">Dead letters</span> ` : null}
          ${info.purging ? html`<span class="badge warn">Purging</span> ` : null}
          ${data.breaker_open ? html`<span class="badge bad">Circuit breaker open</span> ` : null}</p></div>
      <div class="actions">
        ${can("send") ? html`<button class="btn primary" onClick=${() => open("send")}>Send a message</button>` : null}
        ${can("manage") ? html`<button class="btn" onClick=${() => open("purge")}>Purge</button>
          <button class="btn danger" onClick=${() => open("delete")}>Delete</button>` : null}
      </div>
    </div>
    <${Stale} error=${error} data=${data} /><${Missing} count=${data.missing} unknown=${data.unknown} />
    ${now ? html`<${Figures} items=${[
      tile("Ready", now.ready, compact, data.unknown, { title: number(now.ready) }),
      tile("In flight", now.in_flight, compact, data.unknown, { title: number(now.in_flight) }),
      tile("Delayed", now.delayed, compact, data.unknown, { title: number(now.delayed) }),
      tile("Oldest", now.oldest_ms, duration, data.unknown),
      tile("In", now.sent_rate, rate, data.unknown, { unit: "/s" }),
      tile("Out", now.done_rate, rate, data.unknown, { unit: "/s" }),
      ...(data.is_dead_letter_queue ? [] : [tile("Dead letters", now.dead, compact, data.unknown, { tone: now.dead ? "bad" : "" })]),
    ]} />` : null}
    <nav class="tabs" aria-label="Of this queue">${tabs.map(([key, text]) => html`
      <${Link} key=${key} to=${queueUrl(name, key)} aria-current=${key === tab ? "page" : undefined}>${text}<//>`)}</nav>
    ${tab === "" && now ? html`<${Charts} data=${data} name=${name} />` : null}
    ${tab === "messages" ? html`<${Messages} name=${name} data=${data} can=${can} refresh=${refresh} />` : null}
    ${tab === "settings" ? html`<${Settings} key=${name} name=${name} info=${info} editable=${can("manage")} saved=${refresh} target=${data.dead_letter_queue} />` : null}
    ${dialog === "send" ? html`<${Send} name=${name} fifo=${info.settings.fifo} close=${close} done=${after} />` : null}
    ${dialog === "purge" ? html`<${Confirm} title=${`Purge ${name}?`} queue=${name} action="Purge it" close=${close} submit=${async () => {
      await ask(`/v1/queues/${pathOf(name)}/purge`, { method: "POST", body: {} });
      after("The queue is being purged.");
    }}><p>Everything that is in the queue now${now ? html` (<b>${plural(now.unfinished, "message")}</b>)` : ""} will be gone, and can't be got back.</p><//>` : null}
    ${dialog === "delete" ? html`<${Confirm} title=${`Delete ${name}?`} queue=${name} action="Delete it" close=${close} submit=${async () => {
      await ask(`/v1/queues/${pathOf(name)}`, { method: "DELETE" });
      say(`${name} is being deleted.`);
      go("/ui/queues");
    }}><p>The queue, its settings and everything in it${now ? html` (<b>${plural(now.unfinished, "message")}</b>)` : ""} will be gone.</p><//>` : null}`;
}

// ---------------------------------------------------------------- overview

function Charts({ data, name }) {
  const { history, now, takers } = data;
  const { first_ms: first, step_ms: step } = history;
  const flow = useMemo(() => [
    { label: "In", colour: 1, values: perSecond(history.sent, step) },
    { label: "Out", colour: 2, values: perSecond(history.done, step) },
  ], [history]);
  const depth = useMemo(() => [
    { label: "Backlog", colour: 1, values: history.unfinished },
    { label: "In flight", colour: 3, values: history.in_flight },
  ], [history]);
  return html`
    ${now.dead && !data.is_dead_letter_queue ? html`<p class="banner">${plural(now.dead, "dead letter")} in
      ${" "}<${Link} to=${queueUrl(data.dead_letter_queue, "messages")}><b>${data.dead_letter_queue}</b><//>.</p>` : null}
    <div class="grid">
      <${Chart} title="Messages a second" first=${first} step=${step} format=${rates} series=${flow} />
      <${Chart} title="Backlog" first=${first} step=${step} series=${depth} />
    </div>
    <${Receivers} takers=${takers} name=${name} now=${now} />`;
}

function Receivers({ takers, name, now }) {
  const waiting = takers.reduce((sum, t) => sum + t.waiting, 0);
  const handlers = [...new Set(takers.flatMap((t) => t.handlers))];
  const recent = takers.some((t) => t.recent);
  const by = {};
  for (const taker of takers) for (const [who, count] of Object.entries(taker.in_flight)) by[who] = (by[who] || 0) + count;
  const names = Object.entries(by).sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, ...names.map(([, count]) => count));
  const nobody = !waiting && !handlers.length && !recent && !names.length;
  return html`<section class="card" aria-label="Who receives">
    <header><h2>Who receives</h2><span class="muted small">${waiting ? plural(waiting, "receive waits", "receives wait") : "no receive waits"}${handlers.length ? `; ${plural(handlers.length, "handler")}` : ""}</span></header>
    <div class="in">
      ${nobody ? html`<div class="empty"><h2>Nobody receives from this queue</h2><p>Take a message${now.ready ? "" : " when there is one"}:</p>
        <${Code} label="With curl" text=${curl(`/v1/queues/${pathOf(name)}/receive`, '{"wait_ms":5000,"as":"text"}')} /></div>` : null}
      ${handlers.length ? html`<p>Handlers: ${handlers.map((h) => html`<code key=${h}>${h}</code> `)}</p>` : null}
      ${names.length ? html`<div class="scroll" tabindex="0" role="region" aria-label="In flight by receiver"><table>
        <thead><tr><th scope="col">Receiver</th><th scope="col" class="num">In flight</th><th scope="col"><span class="hidden">Share</span></th></tr></thead>
        <tbody>${names.slice(0, 50).map(([who, count]) => html`<tr key=${who}><th scope="row">${who ? html`<span class="name" title=${who}>${who}</span>` : html`<span class="muted">without a name</span>`}</th>
          <td class="num">${number(count)}</td><td><${Bar} part=${count / most} label=${`In flight at ${who || "receivers without a name"}`} /></td></tr>`)}</tbody></table></div>`
        : nobody ? null : html`<p class="muted">Nothing is in flight.</p>`}
    </div>
  </section>`;
}

// ---------------------------------------------------------------- messages

const STATES = [["", "All"], ["ready", "Ready"], ["in_flight", "In flight"], ["delayed", "Delayed"]];
const STATE_TEXT = { ready: "Ready", in_flight: "In flight", delayed: "Delayed", done: "Done" };
export const StateBadge = ({ state }) => html`<span class=${`badge ${{ in_flight: "accent", delayed: "warn" }[state] || ""}`}>${STATE_TEXT[state] || state}</span>`;

function Messages({ name, data, can, refresh }) {
  const { query } = here();
  const state = query.get("state") || "", after = query.get("after") || "";
  const [before, setBefore] = useState([]);
  const list = usePoll(`/v1/queues/${pathOf(name)}/messages?limit=50&payload_bytes=400${state ? `&state=${state}` : ""}${after ? `&after=${after}` : ""}`, 5000);
  const [chosen, choose] = useState(() => new Set());
  const [moving, move] = useState(null);
  const dead = data.is_dead_letter_queue;
  const listed = list.data?.messages || [];
  const places = listed.filter((m) => m.state === "ready").map((m) => `${m.partition}:${m.offset}`);
  const marked = places.filter((place) => chosen.has(place));
  const mark = (place, on) => choose((old) => {
    const next = new Set(old);
    if (on) next.add(place);
    else next.delete(place);
    return next;
  });
  const filter = (key) => { setBefore([]); choose(new Set()); go(withQuery({ state: key, after: null }), { replace: true, scroll: false }); };
  const turn = (to) => { choose(new Set()); go(withQuery({ after: to }), { replace: true, scroll: false }); };
  const movable = can("receive");
  return html`
    <${Tasks} name=${name} moves=${data.moves} can=${movable} refresh=${refresh} />
    <div class="filters">
      <${Segments} label="State" value=${state} options=${STATES} choose=${filter} />
      ${movable && listed.length ? html`<div class="actions">
        <button class="btn" disabled=${!marked.length} onClick=${() => move("some")}>${dead ? "Send back" : "Move"} ${marked.length ? number(marked.length) : "chosen"}</button>
        <button class="btn" onClick=${() => move("all")}>${dead ? "Send back" : "Move"} all …</button></div>` : null}
    </div>
    ${list.error && !list.data ? html`<${Failed} within=${true} error=${list.error} retry=${list.refresh} />` : !list.data ? html`<${Waiting} what="messages" />`
      : !listed.length ? html`<div class="card empty"><h2>${dead ? "No dead letters" : state ? `Nothing is ${STATE_TEXT[state].toLowerCase()}` : "The queue is empty"}</h2>
          ${dead ? html`<p>Messages come here that were delivered too often, or were rejected.</p>` : !state ? html`<${Code} label="With curl" text=${curl(`/v1/queues/${pathOf(name)}/messages`, '{"messages":[{"text":"hello"}]}')} />` : null}</div>`
      : html`<div class="card"><div class="scroll" tabindex="0" role="region" aria-label="Messages"><table>
        <thead><tr>${movable ? html`<th scope="col"><input type="checkbox" aria-label="Choose all that are shown and ready" disabled=${!places.length}
            checked=${places.length > 0 && marked.length === places.length} onChange=${(e) => choose(new Set(e.target.checked ? places : []))} /></th>` : null}
          <th scope="col">Message</th><th scope="col">State</th><th scope="col">${dead ? "Why" : "Payload"}</th>
          ${dead ? html`<th scope="col" class="wide">From</th>` : null}
          <th scope="col" class="num">Attempts</th><th scope="col" class="num wide">Size</th><th scope="col" class="num">${dead ? "Died" : "Sent"}</th></tr></thead>
        <tbody>${listed.map((m) => html`<${Row} key=${`${m.partition}:${m.offset}`} m=${m} dead=${dead} movable=${movable}
          marked=${chosen.has(`${m.partition}:${m.offset}`)} mark=${mark} />`)}</tbody></table></div>
        ${before.length || list.data.after ? html`<nav class="pager" aria-label="Pages of messages"><span class="muted">In the order of partitions</span><span class="actions">
          <button class="btn" disabled=${!before.length} onClick=${() => { const last = before[before.length - 1]; setBefore(before.slice(0, -1)); turn(last); }}>Previous</button>
          <button class="btn" disabled=${!list.data.after} onClick=${() => { setBefore([...before, after]); turn(list.data.after); }}>Next</button></span></nav>` : null}
      </div>`}
    ${moving ? html`<${Move} name=${name} dead=${dead} places=${moving === "some" ? marked : null} everywhere=${data.may_send_everywhere} close=${() => move(null)}
      done=${(text) => { say(text); move(null); choose(new Set()); list.refresh(); refresh(); }} />` : null}`;
}

export const headerOf = (m, wanted) => (m.headers || []).find(([key]) => key === wanted)?.[1];

function Row({ m, dead, movable, marked, mark }) {
  const place = `${m.partition}:${m.offset}`;
  const text = m.payload !== undefined ? preview(m.payload) : "";
  const back = m.left_ms !== undefined ? (m.state === "in_flight" ? `, back in ${duration(m.left_ms)}` : `, for ${duration(m.left_ms)}`) : "";
  const from = headerOf(m, "marq-dead-queue"), at = Number(headerOf(m, "marq-dead-at-ms")) || m.sent_ms;
  return html`<tr>
    ${movable ? html`<td><input type="checkbox" aria-label=${`Choose message ${place}`} disabled=${m.state !== "ready"} checked=${marked} onChange=${(e) => mark(place, e.target.checked)} /></td>` : null}
    <th scope="row" class="nowrap"><${Link} to=${messageUrl(m.partition, m.offset)} class="mono">${m.partition}:${m.offset}<//></th>
    <td class="nowrap"><${StateBadge} state=${m.state} /><span class="muted small wide">${m.receiver ? ` ${m.receiver}` : ""}${back}</span></td>
    <td><div class="clip" title=${dead ? headerOf(m, "marq-dead-reason") : text}>${dead ? html`${headerOf(m, "marq-dead-reason")}<div class="clip muted mono small">${text}</div>`
      : html`<span class="mono">${text || html`<span class="zero">(empty)</span>`}</span>`}</div></td>
    ${dead ? html`<td class="wide">${from ? html`<${Link} to=${queueUrl(from)} class="name">${from}<//>` : "–"}</td>` : null}
    <td class="num">${dead ? headerOf(m, "marq-dead-receives") ?? m.receives : m.receives}</td>
    <td class="num wide">${bytes(m.size_bytes)}</td>
    <td class="num"><${Time} ms=${dead ? at : m.sent_ms} /></td>
  </tr>`;
}

function Move({ name, dead, places, everywhere, close, done }) {
  const [to, set] = useState(""), [back, setBack] = useState(dead && everywhere), [pace, setPace] = useState("");
  const target = back ? "" : to;
  const submit = async () => {
    if (!places) {
      await ask(`/ui/api/queues/${pathOf(name)}/moves`, { method: "POST", body: { to: target, per_second: Number(pace) || 0 } });
      done("Under way.");
      return;
    }
    const messages = places.map((place) => ({ partition: Number(place.split(":")[0]), offset: Number(place.split(":")[1]) }));
    const { results } = await ask(`/v1/queues/${pathOf(name)}/move`, { method: "POST", body: target ? { to: target, messages } : { messages } });
    const failed = results.filter((result) => result.error);
    if (failed.length === results.length) throw new Error(failed[0].error.detail);
    done(failed.length ? `${plural(results.length - failed.length, "message")} moved, ${failed.length} not: ${failed[0].error.detail}` : `${plural(results.length, "message")} moved.`);
  };
  return html`<${Dialog} title=${`${dead ? "Send back" : "Move"} ${places ? plural(places.length, "message") : "all that is ready"}`} close=${close} submit=${submit}
      action=${back ? "Send back" : "Move"} disabled=${!back && !to}>
    ${dead && everywhere ? html`<${Segments} label="Where to" value=${back ? "back" : "to"} options=${[["back", "Where each came from"], ["to", "Another queue"]]} choose=${(key) => setBack(key === "back")} />` : null}
    ${back ? null : html`<label class="field"><span>To the queue</span><input type="text" value=${to} onInput=${(e) => set(e.target.value)} autocomplete="off" spellcheck=${false} /></label>`}
    ${places ? null : html`<label class="field"><span>Messages a second at most</span><input type="number" min="0" max="100000" placeholder="as fast as it goes" value=${pace} onInput=${(e) => setPace(e.target.value)} /></label>
      <p class="note">It goes on in the workers when this page is closed, and can be stopped. Messages that come meanwhile stay.</p>`}
  <//>`;
}

const MOVE_STATES = { running: ["accent", "Running"], cancelling: ["warn", "Stopping"], cancelled: ["", "Stopped"], completed: ["good", "Done"], failed: ["bad", "Failed"] };

function Tasks({ name, moves, can, refresh }) {
  const shown = moves.filter((task, i) => task.state === "running" || task.state === "cancelling" || i < 2);
  if (!shown.length) return null;
  const stop = async (task) => {
    try {
      await ask(`/ui/api/queues/${pathOf(name)}/moves/${task.id}`, { method: "DELETE" });
      say("It is being stopped.");
      refresh();
    } catch (problem) {
      say(problem.message);
    }
  };
  return html`<section class="card" aria-label="Moves"><header><h2>Moves</h2></header><div class="in">${shown.map((task) => {
    const [tone, text] = MOVE_STATES[task.state];
    const on = task.state === "running" || task.state === "cancelling";
    return html`<div class="task" key=${task.id}>
      <div class="row"><span><span class=${`badge ${tone}`}>${text}</span> ${number(task.moved)}${on ? ` of about ${number(Math.max(task.total, task.moved))}` : ""}
        ${" "}moved ${task.to ? html`to <${Link} to=${queueUrl(task.to)}>${task.to}<//>` : "back to where they came from"}
        <span class="muted"> · began <${Time} ms=${task.started_ms} />${task.per_second ? `, ${number(task.per_second)} a second` : ""}</span></span>
        ${on && can ? html`<button class="btn tiny" disabled=${task.state !== "running"} onClick=${() => stop(task)}>Stop</button>` : null}</div>
      ${on ? html`<${Bar} part=${task.moved / Math.max(1, task.total, task.moved)} label=${`Moved of ${name}`} />` : null}
      ${task.reason ? html`<p class="error">${task.reason}</p>` : null}
    </div>`;
  })}</div></section>`;
}

// ---------------------------------------------------------------- sending

function Send({ name, fifo, close, done }) {
  const [kind, setKind] = useState("text"), [text, set] = useState(""), [delay, setDelay] = useState(""), [group, setGroup] = useState(""), [headers, setHeaders] = useState("");
  const submit = async () => {
    const message = {};
    if (kind === "json") {
      try {
        message.json = JSON.parse(text);
      } catch (error) {
        throw new Error(`This is no JSON: ${error.message}`);
      }
    } else message.text = text;
    if (delay) message.delay_ms = Math.round(Number(delay) * 1000);
    if (group) message.group = group;
    const pairs = headers.split("\n").filter((line) => line.trim()).map((line) => [line.slice(0, line.indexOf(":")).trim(), line.slice(line.indexOf(":") + 1).trim()]);
    if (pairs.some(([key]) => !key)) throw new Error("A header is a line of the form name: value.");
    if (pairs.length) message.headers = Object.fromEntries(pairs.map(([key, value]) => [key, btoa(String.fromCharCode(...new TextEncoder().encode(value)))]));
    const { results } = await ask(`/v1/queues/${pathOf(name)}/messages`, { method: "POST", body: { messages: [message] } });
    if (results[0].error) throw new Error(results[0].error.detail);
    done(`Sent: ${results[0].partition}:${results[0].offset}`);
  };
  return html`<${Dialog} title=${`Send a message to ${name}`} close=${close} submit=${submit} action="Send">
    <${Segments} label="Kind" value=${kind} options=${[["text", "Text"], ["json", "JSON"]]} choose=${setKind} />
    <label class="field"><span>Payload</span><textarea rows="6" value=${text} onInput=${(e) => set(e.target.value)} spellcheck=${false}></textarea></label>
    <details><summary>More</summary><div class="form">
      <label class="field"><span>Delay, in seconds</span><input type="number" min="0" step="0.1" value=${delay} onInput=${(e) => setDelay(e.target.value)} /></label>
      <label class="field"><span>Group${fifo ? "" : " (a fair share)"}</span><input type="text" value=${group} maxlength="128" onInput=${(e) => setGroup(e.target.value)} /></label>
      <label class="field"><span>Headers, one a line: name: value</span><textarea rows="2" value=${headers} onInput=${(e) => setHeaders(e.target.value)} spellcheck=${false}></textarea></label>
    </div></details>
  <//>`;
}

// ---------------------------------------------------------------- settings

// What was typed and not saved, by queue: a look at another page does not lose it.
const drafts = new Map();
addEventListener("beforeunload", (event) => { if (drafts.size) event.preventDefault(); });

function Settings({ name, info, editable, saved, target }) {
  const { data, error } = usePoll("/ui/api/settings", 0);
  // only what was typed: somebody else may change other settings meanwhile
  const [typed, setTyped] = useState(drafts.get(name) ?? {});
  const set = (values) => {
    const changed = Object.fromEntries(Object.entries(values).filter(([field, value]) => value !== asText(info.settings[field])));
    if (Object.keys(changed).length) drafts.set(name, changed);
    else drafts.delete(name);
    setTyped(changed);
  };
  const [busy, setBusy] = useState(false), [problem, setProblem] = useState("");
  if (!data) return error ? html`<${Failed} within=${true} error=${error} />` : html`<${Waiting} what="settings" />`;
  const groups = [...new Set(data.fields.map((field) => field.group))];
  const shown = (f) => typed[f.name] ?? asText(info.settings[f.name]);
  const changes = Object.fromEntries(data.fields.filter((f) => shown(f) !== asText(info.settings[f.name])).map((f) => [f.name, asValue(f, typed[f.name])]));
  const count = Object.keys(changes).length;
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    try {
      await ask(`/v1/queues/${pathOf(name)}`, { method: "PATCH", body: changes });
      say("Saved.");
      await saved();
      set({});
    } catch (error) {
      setProblem(error.message);
    }
    setBusy(false);
  };
  return html`<form class="card" onSubmit=${submit} novalidate><div class="in form">
    ${editable ? null : html`<p class="muted">This key may look at the settings, and not change them.</p>`}
    ${groups.map((group) => html`<fieldset key=${group} disabled=${!editable}><legend>${group}</legend><div class="rows">
      ${data.fields.filter((f) => f.group === group).map((f) => html`<${Field} key=${f.name} field=${f} value=${shown(f)} target=${target}
        fixed=${f.name === "fifo"} set=${(value) => set({ ...typed, [f.name]: value })} />`)}</div></fieldset>`)}
    ${problem ? html`<p class="error" role="alert">${problem}</p>` : null}
    ${editable ? html`<div class="stick"><button class="btn primary" disabled=${!count || busy}>${busy ? "Saving …" : count ? `Save ${plural(count, "change")}` : "Save"}</button>
      ${count ? html`<button type="button" class="btn" onClick=${() => set({})}>Undo</button>` : null}
      <span class="note">Version ${info.version}${info.created_ms ? html`, made <${Time} ms=${info.created_ms} />` : ", made by a message"}</span></div>` : null}
  </div></form>`;
}

const asText = (value) => (value === null || value === undefined ? "" : Array.isArray(value) ? (value.length ? value.join("\n") : "-") : typeof value === "boolean" ? value : String(value));

function asValue(field, text) {
  if (field.kind === "bool") return text;
  if (field.kind === "number") return text.trim() === "" ? 0 : Number(text);
  if (field.kind === "names") return text.trim() === "" ? null : text.trim() === "-" ? [] : text.split("\n").map((line) => line.trim()).filter(Boolean);
  return text;
}

function Field({ field, value, set, fixed, target }) {
  const id = `field-${field.name}`, help = `${id}-help`;
  if (field.kind === "bool") return html`<div><label class="check"><input id=${id} type="checkbox" checked=${value} disabled=${fixed} aria-describedby=${help}
    onChange=${(e) => set(e.target.checked)} /> ${field.label}</label><p class="note" id=${help}>${field.meaning}</p></div>`;
  const shared = { id, value, "aria-describedby": help, onInput: (e) => set(e.target.value) };
  const bounds = field.kind === "number" ? `${number(field.min)} to ${number(field.max)}${field.unit ? ` ${field.unit}` : ""}.` : "";
  return html`<div><label class="field" for=${id}><span>${field.label}</span></label>
    ${field.kind === "choice" ? html`<select ...${shared}>${field.choices.map((c) => html`<option key=${c} value=${c} selected=${c === value}>${c}</option>`)}</select>`
      : field.kind === "names" ? html`<textarea rows="2" ...${shared} spellcheck=${false}></textarea>`
      : field.kind === "number" ? html`<div class="with-unit"><input type="number" min=${field.min} max=${field.max} ...${shared} />
          <span class="note">${field.unit === "ms" ? `= ${duration(Number(value))}` : field.unit === "bytes" ? `= ${bytes(Number(value))}` : ""}</span></div>`
      : html`<input type="text" ...${shared} maxlength=${field.max_length} placeholder=${field.name === "dead_letter_queue" ? target : ""} spellcheck=${false} />`}
    <p class="note" id=${help}>${field.meaning} ${bounds} ${field.kind === "names" ? "A single - means none." : ""}</p></div>`;
}

export { Copy, Payload };
