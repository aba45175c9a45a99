// Elements and small pieces of text. Text of a run (prompts, answers, logs) becomes a text node, never markup:
// nothing here, or in any other file of this page, sets innerHTML.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "vars") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...shown(children));
  return element;
}

const FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex]";

// Replaces the content. The focus stays where it was, or on what stands in its place.
export function put(element, ...children) {
  const focused = document.activeElement;
  const inside = focused !== element && element.contains(focused);
  const place = inside ? [...element.querySelectorAll(FOCUSABLE)].indexOf(focused) : -1;
  element.replaceChildren(...shown(children));
  if (!inside) return;
  const next = focused.isConnected ? focused : element.querySelectorAll(FOCUSABLE)[place];
  next?.focus({ preventScroll: true });
}

function shown(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 1000 ? 4 : digits)));
}

export function percent(value) {
  return value === null || value === undefined ? "-" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function clock(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const whole = Math.round(seconds),
    minutes = Math.floor(whole / 60),
    hours = Math.floor(minutes / 60);
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes % 60)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function ago(seconds) {
  const units = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ];
  for (const [size, name] of units) if (seconds >= size) return `${Math.floor(seconds / size)} ${name} ago`;
  return "now";
}

export function pill(text, kind = text) {
  return h("span", { class: `pill ${kind}` }, text);
}

// The first words of a text, on one line.
export function short(text, length = 90) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length <= length ? line : `${line.slice(0, length - 1)}\u2026`;
}

// A table of texts or elements; the first of each row is its name. It scrolls by itself where the page is narrow.
export function table(heads, rows) {
  const head = heads.map((one) => (one === "" ? h("td") : h("th", { scope: "col" }, one)));
  const body = rows.map(([name, ...cells]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      cells.map((one) => h("td", {}, one)),
    ),
  );
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" },
    h("table", { class: "plain" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

// A list to choose one value from: `choices` is [value, caption] pairs.
export function choice(label, choices, chosen, act) {
  const id = `choice-${label.replace(/\W/g, "-")}`;
  const options = choices.map(([value, caption]) => h("option", { value, selected: value === chosen }, caption));
  return h(
    "label",
    { class: "choice", for: id },
    label,
    " ",
    h("select", { id, on: { change: (event) => act(event.target.value) } }, options),
  );
}
