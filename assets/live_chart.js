// The live view: tiles, legend, three panels, status line and log, drawn from the stream.
//
// gradio runs this text once as the body of a function of (element, trigger, props, server, watch);
// ui/live.py puts `const setup = {...}` (figure, palette, dashes, symbols, texts, stream) and
// plot.js in front of it.
// The stream's messages are JSON (ui/live.py describes them). Nothing that came from the server is
// ever read as HTML: it goes into text nodes, and escaped into plotly's labels.

const KEEP = 500; // points of a curve after re-binning
const REBIN = 750; // points that make a curve be re-binned
const LOG_LINES = 200;
const LOSS_CEILING = 30; // nats; an untrained model has ln(50257) = 10.8
const DIVERGED = { n: "NaN", "+": "inf", "-": "-inf" };
const ACTIVE = ["waiting", "lending", "loading", "compiling", "running", "stopping"];

// ---------------------------------------------------------------- the page's nodes

function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function makeTile(name) {
  const value = node("span", "live-value", "–");
  const unit = node("span", "live-unit");
  const note = node("dd", "live-note");
  const box = node("div", "live-tile", node("dt", "", name), node("dd", "", value, " ", unit), note);
  return { box, value, unit, note };
}

const tile = {
  ms: makeTile("Step time"),
  tps: makeTile("Throughput"),
  loss: makeTile("Loss"),
  mem: makeTile("Peak memory"),
  mfu: makeTile("MFU"),
};
const legend = node("div", "live-legend");
const plot = node("div", "live-plot");
const empty = node("p", "live-empty", setup.texts.empty);
const chart = node("div", "live-chart", legend, node("div", "live-canvas", plot, empty));
const sentence = node("span", "live-sentence");
sentence.setAttribute("role", "status");
sentence.setAttribute("aria-live", "polite");
const place = node("span", "live-place");
const count = node("span", "live-count");
const bar = node("progress", "live-bar");
bar.setAttribute("aria-label", "Steps done");
const status = node("div", "live-status", sentence, place, count, bar);
const logLast = node("code", "live-log-last");
const logCopy = node("button", "live-copy", "Copy");
logCopy.type = "button";
const log = node("pre", "live-lines");
log.tabIndex = 0;
log.setAttribute("aria-label", "Log lines");
const logBox = node("details", "live-log", node("summary", "", "Log", logLast), logCopy, log);
const tilesBox = node("dl", "live-tiles", ...Object.values(tile).map((t) => t.box));
element.querySelector(".live").replaceChildren(tilesBox, chart, status, logBox);

// ---------------------------------------------------------------- numbers as text

const grouped = (x, digits) =>
  x.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const ms = (x) => grouped(x, x >= 100 ? 0 : x >= 10 ? 1 : 2);
const rate = (x) => grouped(x, x >= 100 ? 0 : 1);
const plural = (n, word) => `${grouped(n, 0)} ${word}${n === 1 ? "" : "s"}`;

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

const flagOf = (row) => row[3] || "";
const tokensPerSecond = (run, row) => (run.tokens / row[2]) * 1000;
const lossText = (row, digits) =>
  row[1] === null ? DIVERGED[flagOf(row)[0]] || "unknown" : row[1].toFixed(digits);

// ---------------------------------------------------------------- the runs

const runs = new Map(); // id -> run, in the order of drawing
const hidden = new Set(); // ids that the legend switched off
let dirty = false; // false, "rows" (only new rows) or "all"

function spoil(how) {
  if (dirty !== "all") dirty = how;
  if (!frame) frame = requestAnimationFrame(draw);
}

function addRun(given) {
  if (runs.has(given.id)) return;
  // the lowest free place among the runs of one precision decides dash and symbol
  const taken = [...runs.values()].filter((r) => r.precision === given.precision);
  let place = 0;
  while (taken.some((r) => r.place === place)) place += 1;
  const nth = Math.max(0, Object.keys(setup.palette).indexOf(given.precision));
  runs.set(given.id, {
    ...given,
    rows: [...given.rows],
    drawn: 0, // rows that are in the chart already
    place,
    dash: setup.dashes[place % setup.dashes.length],
    symbol: setup.symbols[(nth + place) % setup.symbols.length],
  });
  spoil("all");
}

// At most KEEP rows: first, last, warm-up, and each bin's extremes (as charts.py does). Bins are
// equal in steps, not in rows: what was thinned before is not thinned more than the rest.
function rebinned(rows, warmup) {
  const first = rows[0];
  const last = rows[rows.length - 1];
  const isFixed = (row) => row === first || row === last || row[0] < warmup;
  const kept = new Set(rows.filter(isFixed));
  const count = Math.floor((KEEP - kept.size) / 5);
  const bins = Array.from({ length: count }, () => []);
  for (const row of rows) {
    const share = (row[0] - first[0]) / (last[0] - first[0] + 1);
    if (!isFixed(row)) bins[Math.floor(share * count)].push(row);
  }
  const extreme = (list, key, sign) =>
    list.reduce((best, row) => (sign * row[key] > sign * best[key] ? row : best));
  for (const bin of bins) {
    const finite = bin.filter((row) => row[1] !== null);
    if (bin.length) kept.add(extreme(bin, 2, -1)).add(extreme(bin, 2, 1));
    if (finite.length) kept.add(extreme(finite, 1, -1)).add(extreme(finite, 1, 1));
    if (finite.length < bin.length) kept.add(bin.find((row) => row[1] === null));
  }
  return rows.filter((row) => kept.has(row));
}

const lastStep = (run) => (run.rows.length ? run.rows[run.rows.length - 1][0] : -1);

function addRows(run, rows) {
  const last = lastStep(run);
  run.rows.push(...rows);
  writeLog(run, rows, last);
  if (run.rows.length > REBIN) {
    run.rows = rebinned(run.rows, run.warmup);
    spoil("all");
  } else spoil("rows");
}

// ---------------------------------------------------------------- messages

const SILENT_MS = 30000; // an idle stream beats every ten seconds
let following = null; // the stream that is listened to

// Listen to the stream of this browser's token, again and again: what it starts with is everything.
async function follow(token) {
  const mine = (following = {});
  for (let tries = 0; following === mine && element.isConnected; tries += 1) {
    if (tries) await new Promise((resolve) => setTimeout(resolve, Math.min(15, 2 ** tries) * 500));
    let text = setup.texts.lost;
    try {
      await listen(token, () => (tries = 0));
    } catch (error) {
      if (error.status === 503) text = setup.texts.full;
      console.warn("live view: no stream", error);
    }
    if (following === mine) showLost(text);
  }
}

// One connection until it ends; throws when it breaks, or when nothing comes for too long.
async function listen(token, heard) {
  const abort = new AbortController();
  let alarm;
  const alive = () => {
    clearTimeout(alarm);
    alarm = setTimeout(() => abort.abort(), SILENT_MS);
  };
  try {
    alive();
    const address = appRoot() + setup.stream;
    const headers = { "X-Owner": token };
    const answer = await fetch(address, { headers, signal: abort.signal, cache: "no-store" });
    if (!answer.ok) throw Object.assign(new Error("refused"), { status: answer.status });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      alive();
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) receive(event.slice(6));
      heard();
    }
  } finally {
    clearTimeout(alarm);
    abort.abort();
  }
}

function receive(text) {
  const message = JSON.parse(text);
  if (message.reset) reset(message);
  else apply(message);
}

function reset(message) {
  runs.clear();
  log.replaceChildren();
  logLast.textContent = "";
  for (const given of message.runs || []) addRun(given);
  const newest = [...runs.values()].pop();
  if (newest) {
    logHeading(newest);
    writeLog(newest, newest.rows, -1);
  }
  for (const id of hidden) if (!runs.has(id)) hidden.delete(id);
  showParts(message);
  spoil("all");
}

// What is new.
function apply(message) {
  if (message.start && !runs.has(message.start.id)) {
    addRun(message.start);
    logHeading(message.start);
    writeLog(runs.get(message.start.id), message.start.rows, -1);
  }
  if (message.run !== undefined) {
    addRows(runs.get(message.run), message.rows);
  }
  if (message.end) {
    runs.get(message.end.id).live = false;
    spoil("all");
  }
  for (const id of message.drop || []) {
    if (runs.delete(id)) spoil("all");
    hidden.delete(id);
  }
  showParts(message);
}

// ---------------------------------------------------------------- tiles, status, log

let tiles = null; // null = nothing to show yet
let said = {}; // the status

function showParts(message) {
  const known = message.partial ? tiles : {}; // partial: only the fields that changed
  if (message.tiles !== undefined) tiles = message.tiles && { ...known, ...message.tiles };
  if (message.status) {
    const { page, stop } = said;
    said = { ...(message.partial ? said : {}), ...message.status };
    showStatus();
    if (page === undefined || said.stop !== stop) askAround(0);
    else if (said.page !== page) askAround(said.mine ? 0 : Math.random() * TURN_MS * said.room);
  }
  showTiles();
}

// Stop, the tables, the device panel: gradio fetches them at a tick. A room of pages would ask all at
// once, so those that watch somebody else's run wait, the longer the more of them there are; and those
// that nobody sees, until they are seen.
const TURN_MS = 60; // what the server needs for one page, and as much for everything else
let asking = 0; // the timer
let unseen = false; // a tick waits for the page to be seen

function askAround(milliseconds) {
  if (asking && milliseconds) return; // it comes, and will fetch what is there then
  clearTimeout(asking);
  asking = setTimeout(() => {
    asking = 0;
    unseen = document.hidden;
    if (!unseen) trigger("tick");
  }, milliseconds);
}

function beSeen() {
  if (!element.isConnected) document.removeEventListener("visibilitychange", beSeen);
  else if (unseen && !document.hidden) askAround(0);
}

document.addEventListener("visibilitychange", beSeen);

function fill(target, value, unit, note) {
  setText(target.value, value);
  setText(target.unit, unit);
  setText(target.note, note || "");
  target.box.classList.toggle("live-words", !unit && value !== "–");
}

function showTiles() {
  const t = tiles || {};
  const pending = t.warmup ? "warming up" : "–";
  const figure = (target, x, format, unit, note) =>
    x == null ? fill(target, pending, "", "") : fill(target, format(x), unit, note);
  const spread = t.p25 == null ? "" : `middle half ${ms(t.p25)}–${ms(t.p75)}`;
  figure(tile.ms, t.ms, ms, "ms/step", spread);
  figure(tile.tps, t.tps, rate, "tok/sec", "");
  const newest = [...runs.values()].pop();
  const row = newest && newest.rows[newest.rows.length - 1];
  if (t.loss != null) fill(tile.loss, t.loss.toFixed(4), "nats", "per token");
  else fill(tile.loss, tiles && row && row[1] === null ? lossText(row, 4) : "–", "", "");
  const unknown = (target, x, format, unit, note) => {
    if (x != null) fill(target, format(x), unit, note);
    else if (t.warmup && !note) fill(target, "warming up", "", "");
    else fill(target, note ? "unknown" : "–", "", note);
  };
  unknown(tile.mem, t.mem_gib, (x) => grouped(x, x >= 100 ? 1 : 2), "GiB", t.mem_note);
  unknown(tile.mfu, t.mfu, (x) => grouped(x * 100, 1), "%", t.mfu_note);
}

function showStatus() {
  const active = ACTIVE.includes(said.state);
  status.dataset.state = said.state;
  setText(sentence, (said.mine && active ? "Your run: " : "") + (said.text || ""));
  setText(place, said.line || "");
  const steps = said.steps || 0;
  const done = Math.min(said.done || 0, steps);
  let counted = steps ? `step ${grouped(done, 0)} of ${grouped(steps, 0)}` : "";
  if (active && said.left_s != null) counted += `, about ${duration(said.left_s)} left`;
  setText(count, counted);
  bar.style.visibility = steps ? "visible" : "hidden";
  bar.max = steps || 1;
  bar.value = done;
}

// Until the next snapshot; the chart stays.
function showLost(text) {
  status.dataset.state = "lost";
  setText(sentence, text);
  setText(place, "");
}

function logHeading(run) {
  const shown = log.childElementCount ? "\n" : "";
  log.append(node("span", "live-heading", `${shown}${run.label}\n`));
}

function writeLog(run, rows, before) {
  if (!rows.length) return;
  const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 24;
  let previous = before;
  let line = "";
  for (const row of rows.slice(-LOG_LINES)) {
    const skipped = row[0] - previous - 1;
    if (skipped > 0 && previous >= 0) log.append(`… ${plural(skipped, "step")} not listed\n`);
    previous = row[0];
    const perSecond = tokensPerSecond(run, row).toFixed(2);
    const loss = row[1] === null ? lossText(row).toLowerCase() : row[1].toFixed(6);
    line = `step ${row[0]}, loss: ${loss}, dt: ${row[2].toFixed(2)}ms, tok/sec: ${perSecond}`;
    log.append(line + (flagOf(row).includes("s") ? "  (skipped by the scaler)" : "") + "\n");
  }
  while (log.childNodes.length > LOG_LINES) log.firstChild.remove();
  setText(logLast, line);
  if (follow) log.scrollTop = log.scrollHeight;
}

logBox.addEventListener("toggle", () => {
  log.scrollTop = log.scrollHeight;
});
logCopy.addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(log.textContent);
    logCopy.textContent = "Copied";
    setTimeout(() => (logCopy.textContent = "Copy"), 1500);
  } catch {
    getSelection().selectAllChildren(log); // plain http: marked, ready for Ctrl+C
  }
});

// ---------------------------------------------------------------- the chart

const axes = ["xaxis", ...setup.figure.panels.map((panel) => panel.layout)];
let Plotly = null;
let frame = 0;
let isDrawn = false;
let restUntil = 0;
let theme = null;

const narrow = () => plot.clientWidth < 520;
const colour = (run) => (setup.palette[run.precision] || {})[theme.name] || theme.muted;
const shown = () => [...runs.values()].filter((run) => !hidden.has(run.id));

const panelValue = {
  loss: (run, row) => row[1],
  ms: (run, row) => row[2],
  tps: tokensPerSecond,
};

function columns(run, panel, rows) {
  const value = panelValue[panel.key];
  return {
    x: rows.map((row) => row[0]),
    y: rows.map((row) => value(run, row)),
    "marker.color": rows.map((row) => (row[0] < run.warmup ? theme.ground : colour(run))),
    customdata: rows.map((row) => [
      lossText(row, 4),
      ms(row[2]),
      rate(tokensPerSecond(run, row)),
      (row[0] < run.warmup ? ", warm-up" : "") + (flagOf(row).includes("s") ? ", skipped" : ""),
    ]),
  };
}

function hoverText(run) {
  const name = escaped(run.label) + (narrow() ? "<br>" : ": ");
  const figures = "loss %{customdata[0]}, %{customdata[1]} ms, %{customdata[2]} tok/s";
  return `${name}${figures}%{customdata[3]}<extra></extra>`;
}

function trace(run, panel) {
  const { "marker.color": markerColour, ...data } = columns(run, panel, run.rows);
  const scale = chartScale();
  const line = { color: colour(run), width: scale * (run.live ? 2.5 : 1.25), dash: run.dash };
  return {
    type: "scatter",
    mode: "lines+markers",
    uid: `${run.id} ${panel.key}`,
    name: escaped(run.label),
    xaxis: "x",
    yaxis: panel.axis,
    ...data,
    connectgaps: false,
    visible: !hidden.has(run.id),
    opacity: run.live ? 1 : 0.6,
    line,
    marker: {
      symbol: run.symbol,
      size: scale * (run.live ? 6 : 4.5),
      opacity: 1,
      maxdisplayed: run.live || run.rows.length <= 60 ? 60 : 20,
      color: markerColour,
      line: { color: line.color, width: 1.5 * scale },
    },
    // one entry a run, from the panel whose value is always finite and never outside its axis
    hoverinfo: panel.key === "tps" ? "all" : "none",
    hovertemplate: panel.key === "tps" ? hoverText(run) : undefined,
    showlegend: false,
  };
}

// What a panel leaves outside its axis, and where the axis ends. null = leave it to plotly.
function outside(panel) {
  const drawnRuns = shown();
  if (panel.key === "loss") {
    const rows = drawnRuns.flatMap((run) => run.rows);
    const broken = rows.filter((row) => row[1] === null).length;
    const high = rows.reduce((top, row) => Math.max(top, row[1] ?? 0), 0);
    const parts = broken ? [`NaN or infinite at ${plural(broken, "step")}`] : [];
    if (high > LOSS_CEILING) parts.push(`highest: ${high.toPrecision(3)}`);
    return { end: high > LOSS_CEILING ? LOSS_CEILING : null, text: parts.join(", ") };
  }
  if (panel.key !== "ms") return { end: null, text: "" };
  let end = 0;
  for (const run of drawnRuns)
    for (const row of run.rows) if (row[0] >= run.warmup && row[2] > end) end = row[2];
  if (!end) return { end: null, text: "" };
  end *= 1.12;
  const above = [];
  for (const run of drawnRuns)
    for (const row of run.rows) if (row[2] > end) above.push(row[2]);
  if (!above.length) return { end, text: "" };
  const head = `${plural(above.length, "warm-up")} above: `;
  if (above.length <= 2) return { end, text: head + above.map((x) => `${ms(x)} ms`).join(", ") };
  return { end, text: `${head}up to ${ms(Math.max(...above))} ms` };
}

// Sets the parts of a layout that follow from the data. Axes stay on plotly's autorange, within
// limits, so that a zoom is the viewer's own and a double click brings all of it back.
function fit(layout) {
  for (const panel of setup.figure.panels) {
    const { end, text } = outside(panel);
    layout[panel.layout].autorangeoptions = end === null ? {} : { clipmax: end };
    layout.annotations.find((a) => a.name === `note-${panel.key}`).text = text;
  }
  // a short run shows its planned length from the start, a long one grows
  const ends = shown().map((run) => Math.min(run.live ? run.steps : lastStep(run) + 1, 100) - 1);
  layout.xaxis.autorangeoptions = { include: [0, Math.max(9, ...ends)] };
  const hasRows = [...runs.values()].some((run) => run.rows.length);
  for (const name of axes) layout[name].showticklabels = hasRows;
  empty.hidden = hasRows;
}

function layoutNow() {
  const layout = enlarged(structuredClone(setup.figure.layout));
  layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
  layout.font.color = theme.text;
  layout.font.family = getComputedStyle(element).fontFamily;
  Object.assign(layout.hoverlabel, { bgcolor: theme.ground, bordercolor: theme.border });
  layout.hoverlabel.font.color = theme.text;
  layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: theme.muted, activecolor: theme.text };
  layout.xaxis.spikecolor = theme.muted;
  for (const name of axes) {
    Object.assign(layout[name], { gridcolor: theme.border, tickfont: { color: theme.muted } });
  }
  for (const a of layout.annotations) {
    a.font = { color: a.name.startsWith("note-") ? theme.muted : theme.text };
  }
  if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false; // a swipe scrolls the page
  fit(layout);
  return layout;
}

function extend() {
  const panels = setup.figure.panels;
  const update = { x: [], y: [], "marker.color": [], customdata: [] };
  const indices = [];
  [...runs.values()].forEach((run, at) => {
    if (run.drawn === run.rows.length) return;
    panels.forEach((panel, p) => {
      const added = columns(run, panel, run.rows.slice(run.drawn));
      for (const key in update) update[key].push(added[key]);
      indices.push(at * panels.length + p);
    });
  });
  if (!indices.length) return;
  fit(plot.layout); // extendTraces redraws with the layout as it is: one redraw for both
  Plotly.extendTraces(plot, update, indices);
}

function draw() {
  frame = 0;
  if (!Plotly || !dirty || !plot.clientWidth) return; // drawn when it is there and visible
  const started = performance.now();
  if (started < restUntil) {
    frame = requestAnimationFrame(draw);
    return;
  }
  theme ??= themeOf(chart, count);
  if (isDrawn && dirty === "rows") extend();
  else {
    const panels = setup.figure.panels;
    const data = [...runs.values()].flatMap((run) => panels.map((panel) => trace(run, panel)));
    // plotly draws no axes without a trace: these, without points, keep all three panels there
    data.push(...panels.map((p) => ({ uid: p.key, x: [null], y: [null], yaxis: p.axis })));
    const how = isDrawn ? Plotly.react : Plotly.newPlot;
    how(plot, data, layoutNow(), setup.figure.config);
    isDrawn = true;
    drawLegend();
  }
  for (const run of runs.values()) run.drawn = run.rows.length;
  dirty = false;
  const now = performance.now();
  restUntil = now + 2 * (now - started); // a slow machine keeps two thirds of its time
}

const SHAPES = {
  circle: "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
  square: "M-3-3h6v6h-6z",
  diamond: "M0-4L4 0L0 4L-4 0z",
  "triangle-up": "M0-4L4 3H-4z",
  "triangle-down": "M0 4L4-3H-4z",
};

function drawLegend() {
  const svg = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    return made;
  };
  const keys = [...runs.values()].map((run) => {
    const c = colour(run);
    const swatch = svg("svg", { viewBox: "0 0 30 10", width: 30, height: 10, "aria-hidden": true });
    const line = { d: "M0 5H30", stroke: c, "stroke-width": run.live ? 2.5 : 1.5, fill: "none" };
    if (run.dash !== "solid") line["stroke-dasharray"] = run.dash.replaceAll("px", "");
    const shape = { d: SHAPES[run.symbol], fill: c, transform: "translate(15 5)" };
    swatch.append(svg("path", line), svg("path", shape));
    const key = node("button", run.live ? "live-key live-now" : "live-key", swatch, run.label);
    key.type = "button";
    key.title = "Show or hide this run";
    key.setAttribute("aria-pressed", String(!hidden.has(run.id)));
    key.addEventListener("click", () => {
      if (!hidden.delete(run.id)) hidden.add(run.id);
      key.setAttribute("aria-pressed", String(!hidden.has(run.id)));
      spoil("all");
    });
    return key;
  });
  const focused = [...legend.children].indexOf(document.activeElement);
  legend.replaceChildren(...keys);
  if (focused >= 0 && keys[focused]) keys[focused].focus();
}

// ---------------------------------------------------------------- start

const resizing = new ResizeObserver(() => {
  if (!element.isConnected) {
    resizing.disconnect();
    theming.disconnect();
    if (Plotly) Plotly.purge(plot);
  } else if (isDrawn && plot.clientWidth) {
    spoil("all"); // its hover texts follow the width
    Plotly.Plots.resize(plot);
  } else if (dirty) spoil(dirty);
});
const theming = new MutationObserver(() => {
  theme = null;
  spoil("all");
});

watch("value", () => follow(props.value));
showTiles();
bar.style.visibility = "hidden";
spoil("all");
resizing.observe(plot);
theming.observe(document.body, { attributes: true, attributeFilter: ["class"] });
if (props.value) follow(props.value);
loadPlotly().then(
  (loaded) => {
    Plotly = loaded;
    spoil("all");
  },
  () => {
    window.gpt2demoPlotly = undefined;
    setText(empty, setup.texts.failed);
  },
);
