// Charts over steps, drawn as SVG, and a board of them with one brush: what is selected in one is selected in all.
//
// A chart stretches a field of 1000 x 100 units; strokes keep their width. Names and figures are HTML around it. Each
// point is the mean of a few steps, with a band from the smallest to the largest of them, so that 10,000 steps are as
// quick as 100 and no peak is lost.

import { h, number, put, svg } from "./dom.js";

const WIDE = 1000,
  HIGH = 100;

// Charts: { title, hint, lines: [{ key, name }], kind, log, zero, one, format, points, levels }.
// kind: "stack", or none for lines; points: [{ step, value, low, high }]; levels: [{ name, value }], horizontal.
export class Board {
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.element = h("div", { class: "board" });
    this.charts = [];
    this.curves = null;
  }

  draw(specs, curves, events) {
    this.curves = curves;
    const shown = specs.filter((spec) => has(spec, curves));
    if (shown.map((spec) => spec.title).join() !== this.charts.map((chart) => chart.spec.title).join()) {
      this.charts = shown.map((spec) => new Chart(spec, this));
      put(
        this.element,
        this.charts.map((chart) => chart.element),
      );
    }
    shown.forEach((spec, place) => this.charts[place].draw(spec, curves, events));
  }

  point(share) {
    for (const chart of this.charts) chart.point(share);
  }

  brush(from, to) {
    for (const chart of this.charts) chart.brush(from, to);
  }

  select(from, to) {
    const { first, last } = this.curves;
    const at = (share) => Math.round(first + share * (last - first));
    if (to - from > 0.01 && at(to) > at(from)) this.onSelect(at(from), at(to));
  }
}

function has(spec, curves) {
  return (
    (spec.points || []).length > 0 ||
    spec.lines.some((line) => (curves.keys[line.key]?.mean || []).some((value) => value !== null))
  );
}

class Chart {
  constructor(spec, board) {
    this.spec = spec;
    this.value = h("output", { class: "now" });
    this.top = h("span", { class: "top-label" });
    this.bottom = h("span", { class: "bottom-label" });
    this.first = h("span");
    this.last = h("span");
    this.cross = h("div", { class: "cross", hidden: true });
    this.chosen = h("div", { class: "brushed", hidden: true });
    this.field = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img" });
    this.plot = h("div", { class: "plot" }, this.field, this.top, this.bottom, this.chosen, this.cross);
    this.legend = h("div", { class: "legend" });
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", { title: spec.hint || "" }, h("span", { class: "title" }, spec.title), this.value),
      this.plot,
      h("div", { class: "axis" }, this.first, this.legend, this.last),
    );
    this.follow(board);
  }

  follow(board) {
    let from = null;
    const share = (event) => {
      const box = this.plot.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    };
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      from = share(event);
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointermove", (event) => {
      const here = share(event);
      board.point(here);
      if (from !== null) board.brush(Math.min(from, here), Math.max(from, here));
    });
    this.plot.addEventListener("pointerup", (event) => {
      const here = share(event),
        start = from;
      from = null;
      board.brush(null);
      if (start !== null) board.select(Math.min(start, here), Math.max(start, here));
    });
    this.plot.addEventListener("pointercancel", () => {
      from = null;
      board.brush(null);
    });
    this.plot.addEventListener("pointerleave", () => board.point(null));
  }

  draw(spec, curves, events) {
    this.spec = spec;
    this.curves = curves;
    this.x = scaleOf(curves.first, curves.last);
    const drawn = spec.kind === "stack" ? stack(spec, curves, this.x) : lines(spec, curves, this.x);
    const marks = events
      .filter(({ step }) => step >= curves.first && step <= curves.last)
      .map((event) =>
        svg("line", {
          class: `event ${event.kind}`,
          x1: this.x(event.step),
          x2: this.x(event.step),
          y1: 0,
          y2: HIGH,
        }),
      );
    this.field.replaceChildren(...marks, ...drawn.shapes);
    this.field.setAttribute("aria-label", `${spec.title}: ${this.words()}`);
    this.top.textContent = format(spec, drawn.high);
    this.bottom.textContent = format(spec, drawn.low);
    this.first.textContent = curves.first;
    this.last.textContent = curves.last;
    const named = spec.lines.filter((line) => curves.keys[line.key] || spec.points?.length);
    put(
      this.legend,
      named.length > 1
        ? named.map((line) => h("span", { class: `key c${spec.lines.indexOf(line)}` }, line.name))
        : [],
    );
    this.point(null);
  }

  point(share) {
    const { steps } = this.curves,
      some = steps.length > 0;
    this.cross.hidden = share === null || !some;
    const at = (steps) => (share === null ? steps.length - 1 : nearest(steps, this.curves, share)),
      place = at(steps);
    if (!this.cross.hidden) this.cross.style.setProperty("left", `${this.x(steps[place]) / 10}%`);
    const points = this.spec.lines.map((_, kind) => pointsOf(this.spec, this.curves, kind)).filter((of) => of.length),
      near = points.map((of) => of[at(of.map(({ step }) => step))]);
    const values = this.spec.lines
      .map((line) => this.curves.keys[line.key])
      .filter(Boolean)
      .map((one) => one.mean[one.steps ? at(one.steps) : place])
      .filter((value) => value !== undefined && value !== null);
    const shown = [...near.map(({ value }) => value), ...values]
      .slice(0, 4)
      .map((value) => format(this.spec, value))
      .join(" \u00b7 ");
    const step = near.length ? near[0].step : steps[place];
    this.value.textContent = share === null || !some ? shown : `step ${Math.round(step)}: ${shown}`;
  }

  brush(from, to) {
    this.chosen.hidden = from === null;
    if (from === null) return;
    this.chosen.style.setProperty("left", `${100 * from}%`);
    this.chosen.style.setProperty("width", `${100 * (to - from)}%`);
  }

  words() {
    const line = this.spec.lines[0],
      points = pointsOf(this.spec, this.curves, 0),
      values = (this.curves.keys[line?.key]?.mean || []).filter((value) => value !== null);
    const at = (value, step) => `${format(this.spec, value)} at step ${step}`;
    const ends = ([first, ...rest]) => [first, ...rest.slice(-1)].map(({ value, step }) => at(value, step)).join(", ");
    if (points.length) return `${line.name} ${ends(points)}`;
    if (!values.length) return "nothing in these steps";
    return `${line.name} ${at(values[0], this.curves.first)}, ${at(values.at(-1), this.curves.last)}`;
  }
}

// Those of one line, in the steps that are shown.
function pointsOf(spec, { first, last }, kind) {
  return (spec.points || []).filter((one) => (one.kind ?? 0) === kind && one.step >= first && one.step <= last);
}

function format(spec, value) {
  return (spec.format || number)(value);
}

function nearest(steps, { first, last }, share) {
  const wanted = first + share * (last - first);
  let best = 0;
  for (let place = 1; place < steps.length; place++) {
    if (Math.abs(steps[place] - wanted) < Math.abs(steps[best] - wanted)) best = place;
  }
  return best;
}

function scaleOf(first, last) {
  return (step) => (last > first ? (WIDE * (step - first)) / (last - first) : WIDE / 2);
}

function lines(spec, curves, x) {
  const found = spec.lines.map((line) => curves.keys[line.key]);
  const points = (spec.points || []).filter(({ step }) => step >= curves.first && step <= curves.last);
  const all = [
    ...found.flatMap((one) => (one ? [...(one.low ?? one.mean), ...(one.high ?? one.mean)] : [])),
    ...points.flatMap(({ low, high }) => [low, high]),
    ...(spec.levels || []).map(({ value }) => value),
  ];
  const { low, high, y } = heights(
    all.filter((value) => value !== null && value !== undefined),
    spec,
  );
  const shapes = (spec.levels || []).map(({ name, value }) =>
    svg("path", { class: "level", d: `M0 ${y(value)}H${WIDE}` }, svg("title", {}, name)),
  );
  found.forEach((one, place) => {
    if (!one) return;
    if (one.low)
      shapes.push(svg("path", { class: `band c${place}`, d: band(one.steps || curves.steps, one, x, y) }));
    shapes.push(svg("path", { class: `line c${place}`, d: path(one.steps || curves.steps, one.mean, x, y) }));
  });
  for (const one of points) {
    const kind = one.kind ?? 0;
    shapes.push(svg("path", { class: `bar c${kind}`, d: `M${x(one.step)} ${y(one.low)}V${y(one.high)}` }));
    shapes.push(svg("path", { class: `dot c${kind}`, d: `M${x(one.step)} ${y(one.value)}h0.01` }));
  }
  return { shapes, low, high };
}

function heights(values, spec) {
  const known = spec.log ? values.filter((value) => value > 0) : values;
  let low = known.length ? Math.min(...known) : 0,
    high = known.length ? Math.max(...known) : 1;
  if (spec.one && low >= 0 && high <= 1) [low, high] = [0, 1];
  else if (spec.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (high - low < 1e-12 + 1e-9 * Math.abs(high))
    [low, high] = spec.log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const unit = spec.log
    ? (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low)
    : (value) => (value - low) / (high - low);
  return { low, high, y: (value) => round(4 + (HIGH - 8) * (1 - unit(value))) };
}

function round(value) {
  return Math.round(100 * value) / 100;
}

// A gap where a figure was not measured; a figure alone between two gaps is a dot.
function path(steps, values, x, y) {
  let text = "",
    pen = false;
  values.forEach((value, place) => {
    if (value === null) {
      pen = false;
      return;
    }
    text += `${pen ? "L" : "M"}${round(x(steps[place]))} ${y(value)}`;
    if (!pen) text += "h0.01";
    pen = true;
  });
  return text;
}

function band(steps, { low, high }, x, y) {
  const known = steps.map((_, place) => place).filter((place) => low[place] !== null);
  if (!known.length) return "";
  const up = known.map((place) => `${round(x(steps[place]))} ${y(high[place])}`);
  const down = known.reverse().map((place) => `${round(x(steps[place]))} ${y(low[place])}`);
  return `M${up.join("L")}L${down.join("L")}Z`;
}

function stack(spec, curves, x) {
  const columns = spec.lines.map((line) => curves.keys[line.key]?.mean || []);
  const sums = curves.steps.map((_, place) => columns.reduce((sum, column) => sum + (column[place] ?? 0), 0));
  const high = spec.one ? 1 : Math.max(...sums, 1e-12),
    y = (value) => round(HIGH * (1 - Math.min(1, value / high)));
  const base = curves.steps.map(() => 0),
    shapes = [];
  columns.forEach((column, kind) => {
    if (!column.length) return;
    const below = [...base];
    column.forEach((value, place) => {
      base[place] += value ?? 0;
    });
    shapes.push(
      svg(
        "path",
        { class: `area c${kind}`, d: area(curves.steps, below, base, x, y) },
        svg("title", {}, spec.lines[kind].name),
      ),
    );
  });
  return { shapes, low: 0, high };
}

// Steps are bars here, so one step alone has an area too.
function area(steps, below, above, x, y) {
  const half = steps.length > 1 ? (x(steps[1]) - x(steps[0])) / 2 : WIDE / 2;
  const edges = (values) =>
    values.flatMap((value, place) => [
      `${round(x(steps[place]) - half)} ${y(value)}`,
      `${round(x(steps[place]) + half)} ${y(value)}`,
    ]);
  return `M${edges(above).join("L")}L${edges(below).reverse().join("L")}Z`;
}

export function sparkline(values) {
  const known = values.filter((value) => value !== null);
  const drawing = svg("svg", {
    class: "spark",
    viewBox: `0 0 ${WIDE} ${HIGH}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": known.length ? `from ${number(known[0])} to ${number(known.at(-1))}` : "no steps yet",
  });
  if (!known.length) return drawing;
  const { y } = heights(known, { one: true }),
    x = scaleOf(0, Math.max(1, values.length - 1));
  drawing.append(
    svg("path", {
      class: "line c0",
      d: path(
        values.map((_, place) => place),
        values,
        x,
        y,
      ),
    }),
  );
  return drawing;
}
