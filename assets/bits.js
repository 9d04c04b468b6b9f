// A number bit by bit. gradio runs this text once as the body of a function of (element, ...);
// ui/bits.py puts `const setup = {...}` (formats, patterns, refusals, examples) and plot.js in front.
//
// Everything is computed here, so that a drag answers at once and thirty visitors cost the server
// nothing. It is the arithmetic of literals.py and formats.py on whole numbers (BigInt): a test
// holds the two against each other. What is typed goes into text nodes only.

const view = element.querySelector(".bits");

// ---------------------------------------------------------------- reading a number

const matchers = Object.fromEntries(
  Object.entries(setup.patterns).map(([kind, p]) => [kind, new RegExp(`^(?:${p})$`)]),
);

class Refusal extends Error {}

// as config.shown quotes it: at most 60 characters
function quoted(text) {
  const shown = `'${text.slice(0, 60)}'`;
  return shown.length <= 60 ? shown : `${shown.slice(0, 57)}...`;
}
const refuse = (why, text = "") =>
  new Refusal(setup.refusals[why].replace("{shown}", () => quoted(text)));

// {negative, nan, n, d}: the size is n / d; without n it is infinite.
function parse(text) {
  if (text.length > setup.mostChars) throw refuse("long");
  const typed = text.trim().toLowerCase();
  if (!typed) throw refuse("empty");
  const found = (kind) => typed.match(matchers[kind]);
  let why = "other";
  let match = found("word");
  if (match) return { negative: match[1] === "-", nan: match[2] === undefined };
  match = found("ratio");
  if (match) {
    const [n, d] = [BigInt(match[2]), BigInt(match[3])];
    if (d) return { negative: match[1] === "-", nan: false, n, d };
    why = "zero";
  }
  for (const [kind, base, radix, prefix] of [["hex", 16n, 2n, "0x"], ["decimal", 10n, 10n, ""]]) {
    match = found(kind);
    if (!match || !(match[2] || match[3])) continue;
    const exponent = Number(match[4] || 0);
    if (Math.abs(exponent) <= setup.mostExponent) {
      let n = BigInt(prefix + match[2] + match[3]);
      let d = base ** BigInt(match[3].length);
      if (exponent >= 0) n *= radix ** BigInt(exponent);
      else d *= radix ** BigInt(-exponent);
      return { negative: match[1] === "-", nan: false, n, d };
    }
    why = "exponent";
  }
  throw refuse(why, text);
}

// ---------------------------------------------------------------- rounding it

const bitLength = (x) => (x ? x.toString(2).length : 0);
const shift = (x, by) => (by >= 0 ? x << BigInt(by) : x);

// n / d as a whole number, to the even one of two that are as near
function roundHalfEven(n, d) {
  const [whole, rest] = [n / d, 2n * (n % d)];
  return whole + (rest > d || (rest === d && whole & 1n) ? 1n : 0n);
}

function log2(n, d) {
  const guess = bitLength(n) - bitLength(d);
  return shift(d, guess) <= shift(n, -guess) ? guess : guess - 1;
}

// log2 with its decimals, for the places of marks
function powerOf({ n, d }) {
  const whole = log2(n, d);
  return whole + Math.log2(Number(inUnits(n, d, whole - 40)) / 2 ** 40);
}

// n / d in units of 2^power
const inUnits = (n, d, power) => roundHalfEven(shift(n, -power), shift(d, power));
const power2 = (power) => ({ n: shift(1n, power), d: shift(1n, -power) });

function signed(number, exact) {
  if (!exact) return { exact: null, error: null };
  const sign = number.negative ? -1n : 1n;
  const error = number.n === undefined
    ? null
    : { n: sign * (exact.n * number.d - number.n * exact.d), d: exact.d * number.d };
  return { exact: { n: sign * exact.n, d: exact.d }, error };
}

function stateOf(number, exact, subnormal) {
  if (number.nan) return "NaN";
  if (number.n === undefined) return "infinite";
  if (!exact) return "overflow: infinite";
  if (number.n && !exact.n) return "underflow: zero";
  const how = exact.n * number.d === number.n * exact.d ? "exact" : "rounded";
  return how + (subnormal ? ", subnormal" : "");
}

function hold(number, form) {
  const { exponent_bits: e, mantissa_bits: m } = form;
  const least = 2 - 2 ** (e - 1);
  const width = BigInt(m);
  const infinity = ((1n << BigInt(e)) - 1n) << width;
  let code = 0n;
  if (number.nan) code = infinity + (1n << (width - 1n));
  else if (number.n === undefined) code = infinity;
  else if (number.n) {
    const exponent = Math.max(log2(number.n, number.d), least);
    code = (BigInt(exponent - least) << width) + inUnits(number.n, number.d, exponent - m);
    if (code > infinity) code = infinity;
  }
  const bits = code.toString(2).padStart(e + m, "0");
  let exact = null;
  let gap = null;
  const field = Number(code >> width);
  if (code < infinity) {
    gap = power2(Math.max(field - 1, 0) + least - m);
    const steps = (code & ((1n << width) - 1n)) | (field ? 1n << width : 0n);
    exact = { n: steps * gap.n, d: gap.d };
  }
  return {
    bits: [number.negative ? "1" : "0", bits.slice(0, e), bits.slice(e)],
    negative: number.negative,
    gap,
    state: stateOf(number, exact, !field && code > 0n),
    ...signed(number, exact),
  };
}

function holdInt8(number, largest) {
  if (number.nan) {
    return { bits: ["", "", ""], exact: null, error: null, gap: null, state: "int8 has no NaN" };
  }
  const most = BigInt(setup.int8Most);
  const gap = { n: largest.n, d: largest.d * most };
  let code = most;
  if (number.n !== undefined) code = roundHalfEven(number.n * gap.d, number.d * gap.n);
  if (code > most) code = most;
  const negative = number.negative && code > 0n;
  const bits = BigInt.asUintN(8, negative ? -code : code).toString(2).padStart(8, "0");
  const exact = { n: code * gap.n, d: gap.d };
  const beyond = number.n === undefined || number.n * largest.d > largest.n * number.d;
  return {
    bits: [bits[0], "", bits.slice(1)],
    negative,
    gap,
    state: beyond ? "saturated" : stateOf(number, exact, false),
    ...signed(number, exact),
  };
}

// ---------------------------------------------------------------- numbers as text

// n / d with three digits, however large or small
function scientific({ n, d }) {
  if (!n) return "0";
  const sign = n < 0n ? "-" : "";
  const size = n < 0n ? -n : n;
  let exponent = String(size).length - String(d).length;
  const digitsAt = (e) =>
    roundHalfEven(size * 10n ** BigInt(Math.max(2 - e, 0)), d * 10n ** BigInt(Math.max(e - 2, 0)));
  if (digitsAt(exponent) < 100n) exponent -= 1;
  let digits = digitsAt(exponent);
  if (digits > 999n) {
    exponent += 1;
    digits = digitsAt(exponent);
  }
  const text = String(digits);
  if (exponent < -3 || exponent > 5) return `${sign}${text[0]}.${text.slice(1)}e${exponent}`;
  return sign + String(Number(`${text}e${exponent - 2}`));
}

// What a float format holds is a float64 too, n and d being whole with d or n a power of two.
function asFloat({ n, d }) {
  const scale = bitLength(d) - 1;
  let [size, power] = [n < 0n ? -n : n, -scale];
  while (size && !(size & 0xffffffffn)) [size, power] = [size >> 32n, power + 32];
  while (size && !(size & 1n)) [size, power] = [size >> 1n, power + 1];
  // in two steps: 2 ** -1074 alone is still right, but 2 ** 1023 * 2 may not be
  const half = Math.trunc(power / 2);
  const value = Number(size) * 2 ** half * 2 ** (power - half);
  return n < 0n ? -value : value;
}

function valueText(held, isFloat) {
  if (held.state === "int8 has no NaN") return "none";
  if (held.state === "NaN") return "NaN";
  const sign = held.negative ? "-" : "";
  if (!held.exact) return `${sign}infinity`;
  if (!held.exact.n) return `${sign}0`;
  if (isFloat) return String(asFloat(held.exact));
  const digits = 10n ** 40n; // int8's are ratios: more digits than a float64 can show
  return String(Number((Number((held.exact.n * digits) / held.exact.d) / 1e40).toPrecision(9)));
}

function errorText(held, number) {
  if (!held.error) return "none";
  if (!held.error.n) return "0";
  const size = held.error.n < 0n ? -held.error.n : held.error.n;
  const share = scientific({ n: size * number.d, d: held.error.d * number.n });
  return `${scientific(held.error)} (${share === "1" ? "all" : share} of the number)`;
}

// ---------------------------------------------------------------- the page's nodes

let serial = 0;
function field(label, input) {
  input.id = `bits-field-${(serial += 1)}`;
  const name = node("label", "bits-label", label);
  name.htmlFor = input.id;
  return node("div", "bits-field", name, input);
}

function input(type, className, attributes) {
  const made = node("input", className);
  Object.assign(made, { type, ...attributes });
  return made;
}

const plain = { autocomplete: "off", spellcheck: false };
const typedBox = input("text", "bits-number", { value: setup.examples[0], ...plain });
const drag = input("range", "bits-drag", {
  min: setup.axis.low,
  max: setup.axis.high,
  step: 0.125,
  value: 0,
});
const largestBox = input("text", "bits-largest", { value: "1", ...plain });
const examples = setup.examples.map((text) => {
  const button = node("button", "bits-example", text);
  button.type = "button";
  button.addEventListener("click", () => {
    typedBox.value = text;
    show();
  });
  return button;
});
const said = node("p", "bits-refused");
said.setAttribute("role", "alert");
said.hidden = true;

function cellsOf(form) {
  const parts = form.id === "int8"
    ? [["sign", 1], ["exponent", 0], ["mantissa", 7]]
    : [["sign", 1], ["exponent", form.exponent_bits], ["mantissa", form.mantissa_bits]];
  return parts.map(([part, count]) =>
    node("span", `bits-part bits-${part}`, ...Array.from({ length: count }, () => node("i", ""))),
  );
}

function figure(name) {
  const value = node("dd", "");
  return { value, box: node("div", "bits-figure", node("dt", "", name), value) };
}

const rows = setup.formats.map((form) => {
  const parts = cellsOf(form);
  const cells = node("div", "bits-cells", ...parts);
  cells.setAttribute("role", "img");
  const figures = { value: figure("value"), error: figure("error"), gap: figure("gap") };
  const state = node("b", "bits-state");
  const head = node("h3", "bits-name", form.name, node("span", "bits-shape", form.shape), state);
  const list = node("dl", "bits-figures", ...Object.values(figures).map((f) => f.box));
  const mark = node("span", "bits-mark");
  const subnormal = node("span", "bits-subnormal");
  const bar = node("span", "bits-bar");
  const range = node("div", "bits-range", subnormal, bar, mark);
  const rangeText = node("p", "bits-range-text", form.range);
  const box = node("section", "bits-format", head, cells, list, range, rangeText);
  box.dataset.format = form.id;
  return { form, parts, cells, figures, state, mark, subnormal, bar, range, rangeText, box };
});

view.replaceChildren(
  node(
    "div",
    "bits-controls",
    field("A number", typedBox),
    field("Drag its size", drag),
    field("int8: largest value of its tensor", largestBox),
  ),
  node("div", "bits-examples", "Try ", ...examples),
  said,
  node(
    "p",
    "bits-legend",
    node("span", "bits-sign", node("i", "bits-on", "")), "sign",
    node("span", "bits-exponent", node("i", "bits-on", "")), "exponent",
    node("span", "bits-mantissa", node("i", "bits-on", "")), "mantissa",
    node("span", "bits-hint", setup.legend),
  ),
  node("div", "bits-formats", ...rows.map((row) => row.box)),
);

// ---------------------------------------------------------------- showing a number

const { low, high } = setup.axis;
const at = (power) => (100 * (Math.min(Math.max(power, low), high) - low)) / (high - low);

function showCells(row, bits) {
  row.parts.forEach((part, p) => {
    [...part.children].forEach((cell, i) => {
      const bit = bits[p][i] ?? "";
      if (cell.textContent === bit) return;
      cell.textContent = bit;
      cell.className = bit === "1" ? "bits-on" : "";
    });
  });
  const names = row.form.id === "int8" ? ["sign", "", "value"] : ["sign", "exponent", "mantissa"];
  const spoken = names.map((name, p) => (bits[p] ? `${name} ${bits[p]}` : "")).filter(Boolean);
  row.cells.setAttribute("aria-label", `${row.form.name}: ${spoken.join(", ") || "no bits"}`);
}

function showRange(row, from, normal, to, position) {
  row.subnormal.style.left = `${at(from)}%`;
  row.subnormal.style.width = `${at(normal) - at(from)}%`;
  row.bar.style.left = `${at(normal)}%`;
  row.bar.style.width = `${at(to) - at(normal)}%`;
  row.mark.hidden = position === null;
  if (position !== null) row.mark.style.left = `${at(position)}%`;
}

function showRow(row, number, largest, position) {
  const { form } = row;
  const isInt8 = form.id === "int8";
  const held = isInt8 ? holdInt8(number, largest) : hold(number, form);
  showCells(row, held.bits);
  row.state.textContent = held.state;
  row.state.dataset.state = held.state.split(/[:,]/)[0];
  row.figures.value.value.textContent = valueText(held, !isInt8);
  row.figures.error.value.textContent = errorText(held, number);
  row.figures.gap.value.textContent = held.gap ? scientific(held.gap) : "none";
  if (isInt8) {
    const top = log2(largest.n, largest.d);
    showRange(row, top - 7, top - 7, top, position);
    row.rangeText.textContent = `range ±${scientific(largest)}, 255 evenly spaced values`;
  } else {
    const least = 2 - 2 ** (form.exponent_bits - 1);
    showRange(row, least - form.mantissa_bits, least, 2 - least, position);
  }
}

let largest = { n: 1n, d: 1n };

function readLargest() {
  const wrong = () => refuse("largest", largestBox.value);
  let number;
  try {
    number = parse(largestBox.value);
  } catch {
    throw wrong();
  }
  const [least, most] = setup.largestRange.map(parse);
  const below = (a, b) => a.n * b.d < b.n * a.d;
  if (number.negative || !number.n || below(number, least) || below(most, number)) throw wrong();
  return number;
}

function show(dragged = false) {
  let number;
  try {
    largest = readLargest();
    number = parse(typedBox.value);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    said.textContent = error.message;
    said.hidden = false;
    view.classList.add("bits-stale"); // what stands below is of the last number
    return;
  }
  said.hidden = true;
  view.classList.remove("bits-stale");
  const position = number.n ? powerOf(number) : null;
  if (position !== null && !dragged) drag.value = position;
  for (const row of rows) showRow(row, number, largest, position);
}

drag.addEventListener("input", () => {
  const sign = typedBox.value.trim().startsWith("-") ? "-" : "";
  typedBox.value = sign + String(Number((2 ** Number(drag.value)).toPrecision(4)));
  show(true);
});
for (const box of [typedBox, largestBox]) box.addEventListener("input", () => show());
show();
