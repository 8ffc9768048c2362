"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // ---------------------------------------------------------------- theme

  const button = document.getElementById("theme");
  const stored = () => { try { return localStorage.getItem("marq-theme"); } catch { return null; } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  function setTheme(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    for (const figure of document.querySelectorAll(".chart[data-drawn]")) draw(figure);
  }
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("marq-theme", theme); } catch { /* a page opened from a file may have no storage */ }
    setTheme(theme);
  });
  system.addEventListener("change", () => { if (!stored()) setTheme(system.matches ? "dark" : "light"); });

  // ---------------------------------------------------------------- units

  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [0.001, "ms"]];
  function duration(s) {
    if (s === 0) return "0";
    if (s < 0.9995) return +(s * 1000).toPrecision(3) + " ms";
    if (s < 59.95) return +s.toPrecision(3) + " s";
    const whole = Math.round(s);
    for (let i = 0; i < 3; i++) {
      const [large, name] = UNITS[i];
      if (whole >= large) {
        const [small, minor] = UNITS[i + 1];
        const rest = Math.floor((whole % large) / small);
        return Math.floor(whole / large) + " " + name + (rest ? " " + rest + " " + minor : "");
      }
    }
    return whole + " s";
  }
  const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  function linearTicks(most) {
    let step = STEPS.find((s) => most / s <= 4.5);
    if (most < 4) { const ten = 10 ** Math.floor(Math.log10(most / 2)); step = [1, 2, 5, 10].map((n) => n * ten).find((s) => most / s <= 4.5); }
    if (!step) step = 86400 * [1, 2, 5, 7, 14, 28, 56, 140, 365, 1460, 3650].find((n) => most / (86400 * n) <= 4.5 || n === 3650);
    const ticks = [];
    for (let at = 0; at <= most * 1.02; at += step) ticks.push(+at.toPrecision(12));
    return ticks;
  }
  const DECADES = [0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 36000, 86400, 864000, 8640000, 86400000];

  // ---------------------------------------------------------------- charts

  const at = (part) => Array.from({ length: data.count }, (_, i) =>
    new Date(Math.min(data.start + (i + part) * data.width, part === 1 ? data.stop : Infinity)).toISOString().slice(0, -1));
  const MIDDLE = at(0.5), END = at(1);
  const RANGE = [data.start, data.start + data.count * data.width].map((ms) => new Date(ms).toISOString().slice(0, -1));
  const any = (values) => values.some((value) => value);
  const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 2 : 0 });

  // A value without neighbours would not be seen as a line: it gets a point.
  const isLonely = (y, i) => y[i] !== null && (y[i - 1] ?? null) === null && (y[i + 1] ?? null) === null;
  function trace(name, shade, x, y, text, more = {}) {
    const sizes = y.map((_, i) => (isLonely(y, i) ? 6 : 0));
    return {
      name, x, y, text, meta: shade, type: "scatter", hovertemplate: "%{text}",
      mode: any(sizes) ? "lines+markers" : "lines", marker: { size: sizes, color: color(shade), line: { width: 0 } }, cliponaxis: !any(sizes),
      line: { color: color(shade), width: 1.8, shape: "linear" }, ...more,
    };
  }
  const fill = (shade, part) => ({ fill: "tozeroy", fillcolor: color(shade) + part });

  const KINDS = {
    rates: (s) => any(s.sent) || any(s.delivered) || any(s.acked) ? {
      traces: ["sent", "delivered", "acked"].map((key) => trace(key, key, MIDDLE, s[key], s[key].map((v) => v === null ? "" : whole(v) + " per " + s.unit))),
      y: amounts([...s.sent, ...s.delivered, ...s.acked]),
    } : "Nothing was sent or delivered.",
    backlog: (s) => any(s.backlog) ? {
      traces: [
        trace("unfinished", "backlog", END, s.backlog, s.backlog.map(whole), fill("backlog", "26")),
        any(s.in_flight) && trace("in flight", "in-flight", END, s.in_flight, s.in_flight.map(whole), fill("in-flight", "40")),
      ].filter(Boolean),
      y: amounts(s.backlog),
    } : "Nothing stayed unfinished.",
    oldest: (s) => any(s.oldest) ? {
      traces: [trace("age", "oldest", END, s.oldest, s.oldest.map(duration), fill("oldest", "26"))],
      y: ticks(linearTicks(Math.max(...s.oldest)), { rangemode: "tozero" }),
    } : "Nothing stayed unfinished.",
    waiting: (s) => percentiles(s.waiting, "Nothing was delivered."),
    working: (s) => percentiles(s.working, "Nothing that was delivered has ended."),
    trouble: (s) => any(s.redelivered) || any(s.dead) || any(s.expired) ? {
      traces: [["delivered again", "redelivered"], ["dead letters", "dead"], ["expired", "expired"]]
        .filter(([, key]) => any(s[key]))
        .map(([name, key]) => ({
          name, meta: key, type: "bar", x: MIDDLE, y: s[key], width: data.width * 0.9, text: s[key].map(whole), textposition: "none",
          hovertemplate: "%{text}", marker: { color: color(key), line: { width: 0 } },
        })),
      y: amounts(s.redelivered.map((value, i) => value + s.dead[i] + s.expired[i])),
    } : "No redeliveries, no dead letters.",
  };

  // From 0, in whole numbers where they are small, as 10k and 1M where they are large.
  function amounts(values) {
    const most = Math.max(...values);
    return { rangemode: "tozero", tickformat: most >= 10000 ? "~s" : ",~g", ...(most < 4 ? { dtick: 1 } : {}) };
  }

  const ticks = (values, more) => ({ tickmode: "array", tickvals: values, ticktext: values.map(duration), ...more });

  function percentiles([p50, p95, p99], nothing) {
    const values = [...p50, ...p99].filter((v) => v !== null);
    if (!values.length) return nothing;
    // a logarithm has no place for 0: what took less than a millisecond is drawn at one
    const low = Math.max(0.001, Math.min(...values)), high = Math.max(0.002, ...values);
    const from = DECADES.findLast((d) => d <= low), to = DECADES.find((d) => d >= high) ?? high;
    const lines = [["99 %", "p99", p99, 1.6], ["95 %", "p95", p95, 1.6], ["50 %", "p50", p50, 2.2]];
    return {
      traces: lines.map(([name, shade, line, width]) =>
        trace(name, shade, MIDDLE, line.map((v) => (v === null ? null : Math.max(v, 0.001))),
          line.map((v) => (v === null ? "" : v === 0 ? "under 1 ms" : duration(v))), { line: { color: color(shade), width } })),
      y: ticks(DECADES.filter((d) => d >= from && d <= to), {
        type: "log", range: [Math.log10(from) - 0.08, Math.log10(to) + 0.08],
      }),
    };
  }

  const narrow = matchMedia("(max-width: 760px)"), touch = matchMedia("(pointer: coarse)");

  // The library lies packed in the page. The page's policy lets this script run, by its hash, and no other.
  async function library() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  function instead(figure, text) {
    const nothing = document.createElement("div");
    nothing.className = "nothing";
    nothing.textContent = text;
    figure.querySelector(".keys").remove();
    figure.querySelector(".plot").replaceWith(nothing);
    figure.removeAttribute("data-drawn");
  }

  function draw(figure) {
    const made = KINDS[figure.dataset.kind](data.series[figure.dataset.series]);
    const place = figure.querySelector(".plot");
    figure.dataset.drawn = "";
    if (typeof made === "string") {
      instead(figure, made);
      return;
    }
    const shown = new Set(made.traces.map((one) => one.meta));
    for (const key of figure.querySelectorAll(".keys li")) key.classList.toggle("hidden", !shown.has(key.dataset.key));
    const axis = { linecolor: color("rule"), gridcolor: color("grid"), zeroline: false, tickfont: { size: 12 }, fixedrange: touch.matches };
    Plotly.react(place, made.traces, {
      margin: { l: 8, r: 10, t: 10, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("soft") },
      showlegend: false, hovermode: "x unified", barmode: "stack", dragmode: touch.matches ? false : "zoom",
      hoverlabel: { bgcolor: color("card"), bordercolor: color("rule"), font: { color: color("ink"), size: 12.5 } },
      xaxis: { ...axis, type: "date", range: RANGE, showgrid: false, automargin: true, nticks: narrow.matches ? 4 : 6, showline: true, hoverformat: data.width < 1000 ? "%b %-d, %H:%M:%S.%L" : data.width < 60000 ? "%b %-d, %H:%M:%S" : data.width < 86400000 ? "%b %-d, %H:%M" : "%b %-d, %Y" },
      yaxis: { ...axis, automargin: true, fixedrange: true, nticks: 5, ticks: "", ...made.y },
    }, { displayModeBar: false, responsive: true, showTips: false });
    place.onkeydown ??= (event) => read(event, place);
  }

  // ---------------------------------------------------------------- keyboard

  // Arrow keys go from point to point, and what is there is said.
  const said = document.getElementById("said");
  function read(event, place) {
    const last = data.count - 1, now = place.dataset.at === undefined ? -1 : +place.dataset.at;
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, PageUp: now - 10, PageDown: now + 10, Home: 0, End: last }[event.key];
    if (event.key === "Escape") Plotly.Fx.unhover(place);
    if (next === undefined) return;
    event.preventDefault();
    const point = Math.min(Math.max(next, 0), last);
    place.dataset.at = point;
    const there = place.data.map((one, curveNumber) => ({ one, curveNumber })).filter(({ one }) => one.text[point]);
    Plotly.Fx.hover(place, there.map(({ curveNumber }) => ({ curveNumber, pointNumber: point })));
    const when = place.data[0].x[point].replace("T", " ").slice(0, 19);
    said.textContent = when + ": " + (there.map(({ one }) => one.name + " " + one.text[point]).join(", ") || "nothing");
  }

  // Drawn when it comes into view: a page of many queues is there at once.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "300px" });

  // ---------------------------------------------------------------- table of queues

  const table = document.getElementById("table"), body = table.tBodies[0];
  const FIRST = 25;
  const filter = document.getElementById("filter"), found = document.getElementById("found"), all = document.getElementById("all");
  let everything = false;
  function show() {
    const wanted = filter ? filter.value.trim().toLowerCase() : "";
    let matching = 0, shown = 0;
    for (const row of body.rows) {
      const matches = !wanted || row.cells[0].dataset.v.toLowerCase().includes(wanted);
      matching += matches;
      const visible = matches && (everything || shown < FIRST);
      shown += visible;
      row.classList.toggle("hidden", !visible);
    }
    if (!filter) return;
    found.textContent = matching === shown ? (wanted ? matching + " found" : "") : "first " + shown + " of " + matching;
    all.classList.toggle("hidden", matching === shown);
  }
  if (filter) {
    filter.addEventListener("input", show);
    all.addEventListener("click", () => { everything = true; show(); });
  }
  const heads = [...table.tHead.rows[1].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : column > 0;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.v;
    const compare = column ? (a, b) => key(a) - key(b) : (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
    body.append(...[...body.rows].sort((a, b) => (down ? -compare(a, b) : compare(a, b))));
    show();
  }));

  // ---------------------------------------------------------------- sections

  function open() {
    const target = /^#queue-\d+$/.test(location.hash) && document.querySelector(location.hash);
    if (target) { target.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", open);

  setTheme(stored() ?? (system.matches ? "dark" : "light"));
  show();
  open();
  const figures = document.querySelectorAll(".chart");
  library().then(
    () => { for (const figure of figures) seen.observe(figure); },
    () => { for (const figure of figures) instead(figure, "This browser is too old to draw the charts."); },
  );
})();
