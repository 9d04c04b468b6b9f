// The fit map: peak memory over B and T as a heat map, with frontiers, runs and the setting of now.
//
// gradio runs this text once as the body of a function of (element, trigger, props, server, watch);
// ui/live.py puts `const setup = {...}` (figure, palette, codes, texts) and plot.js in front of it.
// The value is one JSON message (ui/fit_map.py describes it). Nothing that came from the server is
// ever read as HTML: it goes into text nodes, and escaped into plotly's labels.

const MARK_SIZE = 10; // px
const MARK_REACH = MARK_SIZE / 2 + setup.figure.layout.hoverdistance; // px, as in plotly's hover

// ---------------------------------------------------------------- the page's nodes

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
}

const root = element.querySelector(".fit-map");
const empty = node("p", "fit-map-empty", setup.texts.empty);
const legend = node("ul", "fit-map-legend");
legend.setAttribute("aria-label", "Legend of the fit map");
const plot = node("div", "fit-map-plot");
plot.tabIndex = 0;
plot.setAttribute("role", "application"); // its arrow keys are its own
plot.setAttribute("aria-label", setup.texts.keys);
const note = node("p", "fit-map-note");
const spoken = node("p", "fit-map-note fit-map-cell");
spoken.setAttribute("aria-live", "polite");
const chart = node("div", "fit-map-chart", legend, plot, note, spoken);
chart.hidden = true;
root.replaceChildren(empty, chart);

// ---------------------------------------------------------------- texts

const grouped = (x, digits) =>
  x.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const digitsOf = (gib) => (gib < 1 ? 2 : 1);
const gibText = (gib, digits = digitsOf(gib)) => grouped(gib, digits);

// "5.3 of 16.0 GiB"; one digit more where both would read the same
function ofCapacity(gib) {
  const limit = map.capacity;
  if (limit === null) return `${gibText(gib)} GiB`;
  const isClose = gibText(gib) === gibText(limit) && gib !== limit;
  const digits = isClose ? digitsOf(limit) + 1 : undefined;
  return `${gibText(gib, digits)} of ${gibText(limit, digits)} GiB`;
}

function cellText(row, column) {
  const [B, T] = [map.B[row], map.T[column]];
  const verdict = setup.codes[map.verdict[row][column]];
  const what = verdict === "unknown" ? "" : `, ${verdict}`;
  const lines = [`B=${B}, T=${T}:`, `${ofCapacity(map.gib[row][column])}${what}`];
  const first = lines.join(narrow() ? "<br>" : " ");
  const line = map.lines.find((one) => one.chosen);
  if (!line) return first;
  const most = line.largest[column];
  return `${first}<br>${most ? `at T=${T}, B=${most} still fits` : `at T=${T} no B fits`}`;
}

// ---------------------------------------------------------------- the theme

let map = null; // the last message
let theme = null;

const narrow = () => plot.clientWidth < 520;
const lineColour = (line) => (setup.palette[line.precision] || {})[theme.name] || theme.muted;

function mixed(from, to, share) {
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const end = parts(to);
  return `rgb(${parts(from).map((c, i) => Math.round(c + (end[i] - c) * share))})`;
}

// ---------------------------------------------------------------- traces

// From 0 to the capacity evenly. Without one the greys run over the map's own peaks, evenly in
// log2, which plotly's scale takes as stops.
function scaleOf(verdict) {
  const [from, to] = setup.figure.cells[verdict][theme.name];
  if (map.capacity !== null) return { zmin: 0, zmax: map.capacity, stops: [[0, from], [1, to]] };
  const [zmin, zmax] = peaks();
  const stops = Array.from({ length: 17 }, (_, i) => {
    const at = zmin * (zmax / zmin) ** (i / 16);
    return [i === 16 ? 1 : (at - zmin) / (zmax - zmin), mixed(from, to, i / 16)];
  });
  return { zmin, zmax, stops };
}

function peaks() {
  const all = map.gib.flat();
  return [Math.min(...all), Math.max(...all)];
}

// One heat map a verdict: its numbers stay GiB, and its colours its own.
function cells(code) {
  const verdict = setup.codes[code];
  const here = (row, column) => map.verdict[row][column] === code;
  const { zmin, zmax, stops } = scaleOf(verdict);
  return {
    type: "heatmap",
    uid: `cells-${code}`,
    name: verdict,
    x: map.T.map((_, column) => column),
    y: map.B.map((_, row) => row),
    z: map.gib.map((gibs, row) => gibs.map((gib, column) => (here(row, column) ? gib : null))),
    text: map.B.map((_, row) =>
      map.T.map((_, column) => (here(row, column) ? cellText(row, column) : "")),
    ),
    zmin,
    zmax,
    colorscale: stops,
    showscale: false,
    hoverongaps: false,
    hovertemplate: "%{text}<extra></extra>",
    xgap: 1,
    ygap: 1,
  };
}

// A frontier, and below it a wider line that keeps it apart from the cells.
function frontier(line) {
  const width = chartScale() * (line.chosen ? 3.5 : 2);
  const below = { color: theme.ground, width: width + 2.5 };
  const common = {
    type: "scatter",
    mode: "lines",
    x: line.y.map((_, column) => column),
    y: line.y,
    hoverinfo: "skip",
  };
  return [
    { ...common, uid: `below-${line.precision}`, line: below },
    {
      ...common,
      uid: `frontier-${line.precision}`,
      name: line.name,
      line: { color: lineColour(line), width, dash: line.dash },
    },
  ];
}

function spots(name, marks, marker) {
  return {
    type: "scatter",
    mode: "markers",
    uid: name.replaceAll(" ", "-"), // plotly makes it a class name
    name,
    x: marks.map((mark) => mark.x),
    y: marks.map((mark) => mark.y),
    customdata: marks.map((mark) => [mark.B, mark.T]),
    text: marks.map((mark) => (mark.labels || []).map(escaped).join("<br>")),
    hovertemplate: "%{text}<extra></extra>",
    marker,
  };
}

function traces() {
  const around = { color: theme.ground, width: 1.5 };
  const ran = map.marks.filter((mark) => mark.passed);
  const failed = map.marks.filter((mark) => !mark.passed);
  const solid = { color: theme.text, opacity: 1, line: around };
  const ring = (width, color) => ({ symbol: "circle-open", size: 17 * chartScale(), color, line: { width } });
  const now = { hoverinfo: "skip", hovertemplate: undefined };
  return [
    ...Object.keys(setup.codes).map(cells),
    ...map.lines.flatMap(frontier),
    spots("ran", ran, { ...solid, symbol: "circle", size: MARK_SIZE * chartScale() }),
    spots("out of memory", failed, { ...solid, symbol: "x", size: MARK_SIZE * chartScale() }),
    { ...spots("below now", [map.current], ring(6, theme.ground)), ...now },
    { ...spots("now", [map.current], ring(3, theme.text)), ...now },
  ];
}

function layoutNow() {
  const layout = enlarged(structuredClone(setup.figure.layout));
  layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
  layout.font.color = theme.text;
  layout.font.family = getComputedStyle(element).fontFamily;
  Object.assign(layout.hoverlabel, { bgcolor: theme.ground, bordercolor: theme.muted });
  Object.assign(layout.hoverlabel.font, { color: theme.text, family: layout.font.family });
  layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: theme.muted, activecolor: theme.text };
  const last = map.T.length - 1;
  for (const [axis, sizes] of [[layout.xaxis, map.T], [layout.yaxis, map.B]]) {
    axis.tickvals = sizes.map((_, at) => at);
    axis.tickfont = { color: theme.muted };
    // the cells' own edges, and not what the markers would add
    const edges = [-0.5, sizes.length - 0.5];
    axis.autorangeoptions = { clipmin: edges[0], clipmax: edges[1], include: edges };
  }
  layout.yaxis.ticktext = map.B.map(String);
  // counted from the last: the longest sequence keeps its text
  layout.xaxis.ticktext = map.T.map((T, at) => (narrow() && (last - at) % 2 ? "" : String(T)));
  layout.uirevision = `${map.B} ${map.T}`; // a zoom survives while the grid is the same
  layout.shapes = cursor ? [cursorBox()] : [];
  if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false; // a swipe scrolls the page
  return layout;
}

// ---------------------------------------------------------------- the legend

function key(sample, text, className = "") {
  return node("li", `fit-map-key ${className}`, sample, text);
}

function swatch(verdict) {
  const [from, to] = setup.figure.cells[verdict][theme.name];
  const sample = node("span", from === to ? "fit-map-swatch" : "fit-map-swatch fit-map-scale");
  sample.style.background = `linear-gradient(90deg, ${from}, ${to})`;
  return sample;
}

function drawn(width, ...shapes) {
  const size = { viewBox: `0 0 ${width} 16`, width, height: 16, "aria-hidden": true };
  const sample = svg("svg", size);
  sample.append(...shapes);
  return sample;
}

function lineKey(line) {
  const look = { d: "M0 8H30", fill: "none", stroke: lineColour(line) };
  look["stroke-width"] = line.chosen ? 3.5 : 2;
  if (line.dash !== "solid") look["stroke-dasharray"] = line.dash.replaceAll("px", "");
  const none = line.largest.some((B) => B) ? "" : " (none)";
  const name = line.chosen ? `largest B that fits: ${line.name}` : line.name;
  return key(drawn(30, svg("path", look)), name + none, line.chosen ? "fit-map-chosen" : "");
}

function drawLegend() {
  const { capacity, current, lines, marks } = map;
  const keys = [];
  if (capacity === null) {
    const [low, high] = peaks().map((gib) => gibText(gib));
    keys.push(key(swatch("unknown"), `peak of ${low} to ${high} GiB`));
  } else {
    keys.push(key(swatch("fits"), `fits (0 to ${gibText(capacity)} GiB)`));
    for (const verdict of ["may fail", "will not fit"]) keys.push(key(swatch(verdict), verdict));
  }
  keys.push(...[...lines].reverse().map(lineKey));
  const ring = { cx: 8, cy: 8, r: 6, fill: "none", stroke: "currentColor", "stroke-width": 2.5 };
  keys.push(key(drawn(16, svg("circle", ring)), `now: B=${current.B}, T=${current.T}`));
  const ink = { fill: "currentColor" };
  if (marks.some((mark) => mark.passed)) {
    keys.push(key(drawn(12, svg("circle", { ...ink, cx: 6, cy: 8, r: 5 })), "ran"));
  }
  if (marks.some((mark) => !mark.passed)) {
    const cross = "M1 5L3 3L6 6L9 3L11 5L8 8L11 11L9 13L6 10L3 13L1 11L4 8z";
    keys.push(key(drawn(12, svg("path", { ...ink, d: cross })), "out of memory"));
  }
  legend.replaceChildren(...keys);
  note.textContent = (capacity === null ? `${setup.texts.unknown} ` : "") + setup.texts.hint;
}

// ---------------------------------------------------------------- drawing

let Plotly = null;
let frame = 0;
let isDrawn = false;

function spoil() {
  if (!frame) frame = requestAnimationFrame(draw);
}

function receive(text) {
  map = text ? JSON.parse(text) : null;
  if (cursor && !(map && map.B[cursor.row] && map.T[cursor.column])) cursor = null;
  if (cursor) moveCursor(cursor); // its words may be others now
  empty.hidden = map !== null;
  chart.hidden = map === null;
  spoil();
}

function draw() {
  frame = 0;
  if (!map) return;
  theme ??= themeOf(chart, note);
  drawLegend();
  if (!Plotly || !plot.clientWidth) return; // drawn when it is there and visible
  const how = isDrawn ? Plotly.react : Plotly.newPlot;
  how(plot, traces(), layoutNow(), setup.figure.config);
  if (!isDrawn) {
    isDrawn = true;
    listen();
  }
}

// ---------------------------------------------------------------- choosing

// What lies at a place of the screen: a mark, or the cell below it. What plotly calls the clicked
// point is where the pointer was up to 50 ms before.
function at({ clientX, clientY }) {
  const box = plot.querySelector(".nsewdrag").getBoundingClientRect();
  const { xaxis, yaxis } = plot._fullLayout;
  const wide = (xaxis.range[1] - xaxis.range[0]) / box.width; // grid positions a px
  const high = (yaxis.range[1] - yaxis.range[0]) / box.height;
  const x = xaxis.range[0] + (clientX - box.left) * wide;
  const y = yaxis.range[0] + (box.bottom - clientY) * high;
  const far = (mark) => Math.hypot((mark.x - x) / wide, (mark.y - y) / high);
  const [mark] = [...map.marks].sort((one, other) => far(one) - far(other));
  if (mark && far(mark) <= MARK_REACH) return { B: mark.B, T: mark.T };
  const nearest = (sizes, spot) => sizes[Math.min(sizes.length - 1, Math.max(0, Math.round(spot)))];
  return { B: nearest(map.B, y), T: nearest(map.T, x) };
}

const isZoomed = () => !(plot.layout.xaxis.autorange && plot.layout.yaxis.autorange);

// In a zoomed map a double click brings all of it back and chooses nothing: there a click waits
// until it cannot be the first half of one.
function listen() {
  let pending = 0;
  let endsZoom = false;
  plot.on("plotly_doubleclick", () => {
    clearTimeout(pending);
    endsZoom = isZoomed(); // plotly says it before it zooms out, and the click after it
    setTimeout(() => (endsZoom = false));
  });
  plot.on("plotly_click", ({ event }) => {
    if (endsZoom) return;
    const { B, T } = at(event.changedTouches ? event.changedTouches[0] : event);
    clearTimeout(pending);
    const wait = isZoomed() ? setup.figure.config.doubleClickDelay : 0;
    pending = setTimeout(() => trigger("select", { B, T }), wait);
  });
}

// ---------------------------------------------------------------- the keyboard

let cursor = null; // {row, column} of the cell that the arrow keys have reached

const KEYS = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };

function cursorBox() {
  const { row, column } = cursor;
  return {
    type: "rect",
    x0: column - 0.5,
    x1: column + 0.5,
    y0: row - 0.5,
    y1: row + 0.5,
    line: { color: theme.text, width: 3 },
  };
}

function moveCursor(to) {
  cursor = to;
  const text = cursor ? cellText(cursor.row, cursor.column).replaceAll("<br>", "; ") : "";
  spoken.textContent = text;
  spoil();
}

plot.addEventListener("focus", () => {
  if (!map || !plot.matches(":focus-visible")) return; // a click has its own cell
  const limit = (at, sizes) => Math.min(sizes.length - 1, Math.max(0, Math.round(at)));
  moveCursor({ row: limit(map.current.y, map.B), column: limit(map.current.x, map.T) });
});
plot.addEventListener("blur", () => {
  if (cursor) moveCursor(null);
});
plot.addEventListener("keydown", (event) => {
  if (!map || event.target !== plot || event.ctrlKey || event.altKey || event.metaKey) return;
  const step = KEYS[event.key];
  if (step) {
    const from = cursor || { row: 0, column: 0 };
    const inside = (at, sizes) => Math.min(sizes.length - 1, Math.max(0, at));
    moveCursor({
      row: inside(from.row + step[0], map.B),
      column: inside(from.column + step[1], map.T),
    });
  } else if (cursor && (event.key === "Enter" || event.key === " ")) {
    trigger("select", { B: map.B[cursor.row], T: map.T[cursor.column] });
  } else return;
  event.preventDefault(); // the page does not scroll
});

// ---------------------------------------------------------------- start

// gradio moves the app under a prefix when it runs behind a proxy; config.root knows it. The live
// view waits for the same script.
const resizing = new ResizeObserver(() => {
  if (!element.isConnected) {
    resizing.disconnect();
    theming.disconnect();
    if (Plotly) Plotly.purge(plot);
  } else if (plot.clientWidth) {
    if (isDrawn) Plotly.Plots.resize(plot);
    spoil(); // its texts follow the width
  }
});
const theming = new MutationObserver(() => {
  theme = null;
  spoil();
});

watch("value", () => receive(props.value));
resizing.observe(plot);
theming.observe(document.body, { attributes: true, attributeFilter: ["class"] });
receive(props.value);
loadPlotly().then(
  (loaded) => {
    Plotly = loaded;
    spoil();
  },
  () => {
    window.gpt2demoPlotly = undefined;
    plot.textContent = setup.texts.failed;
  },
);
