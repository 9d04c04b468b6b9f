// What the page's scripts share; ui/live.py puts it in front of each of them.

function node(tag, className, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

const escaped = (text) =>
  String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Any colour CSS knows as the rgb() that plotly knows.
function rgb(colour) {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
  return `rgba(${r},${g},${b},${a / 255})`;
}

// The page's colours as a chart takes them: `chart` is its box, `quiet` a muted text in it.
function themeOf(chart, quiet) {
  const style = getComputedStyle(chart);
  return {
    name: document.body.classList.contains("dark") ? "dark" : "light",
    text: rgb(style.color),
    muted: rgb(getComputedStyle(quiet).color),
    border: rgb(style.borderTopColor),
    ground: rgb(style.backgroundColor),
  };
}

// gradio moves the app under a prefix when it runs behind a proxy; config.root knows it
const appRoot = () => (window.gradio_config && window.gradio_config.root) || "";

function loadPlotly() {
  window.gpt2demoPlotly ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = appRoot() + setup.plotly;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error(script.src));
    document.head.append(script);
  });
  return window.gpt2demoPlotly;
}

// How much larger than usual charts are: assets/present.css sets it for a room.
const chartScale = () =>
  Number(getComputedStyle(document.documentElement).getPropertyValue("--chart-scale")) || 1;

// The layout of a chart with texts and margins as large as the room wants them.
function enlarged(layout) {
  const scale = chartScale();
  if (scale === 1) return layout;
  layout.font.size *= scale;
  if (layout.hoverlabel) layout.hoverlabel.font.size *= scale;
  for (const side of ["l", "r", "t", "b"]) layout.margin[side] *= scale;
  for (const note of layout.annotations || []) {
    for (const shift of ["xshift", "yshift"]) if (note[shift]) note[shift] *= scale;
  }
  return layout;
}
