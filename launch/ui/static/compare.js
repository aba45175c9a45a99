// Two to four runs: curves over each other, how sure a difference is, which keys differ, which answers changed.

import { ask, of } from "./api.js";
import { go } from "./address.js";
import { Board } from "./chart.js";
import { choice, h, number, percent, pill, put, table } from "./dom.js";

const KEYS = [
  ["reward/mean", "Reward"],
  ["entropy/mean", "Entropy"],
  ["length/mean", "Length"],
  ["groups/idle", "Idle groups"],
  ["grad_norm", "Gradient norm"],
  ["mismatch/p99", "Mismatch p99"],
  ["tokens_per_s", "Tokens per second"],
  ["time/step_s", "Step time, s"],
  ["loss", "Loss"],
];
const MOST = 4;

export async function show(root) {
  const page = new Compare(root);
  page.all = (await ask("runs")).runs;
  return page;
}

class Compare {
  constructor(root) {
    this.picker = h("fieldset", { class: "picker" });
    this.tables = h("div", { class: "tables" });
    this.board = new Board((first, last) => go("compare", "", { ...this.query, first, last }, { replace: true }));
    this.changed = h("section", { class: "changed", "aria-label": "Changed answers" });
    root.append(
      h("div", { class: "bar" }, h("h1", {}, "Compare")),
      this.picker,
      this.tables,
      this.board.element,
      this.changed,
    );
    this.help = [["Esc", "all steps"]];
    this.keys = { Escape: () => go("compare", "", { ...this.query, first: "", last: "" }, { replace: true }) };
  }

  async update({ query }) {
    this.query = query;
    const names = (query.runs || "").split("/").filter(Boolean);
    this.pick(names);
    if (names.length < 2) {
      put(this.tables, h("p", { class: "quiet" }, "Choose two to four runs."));
      put(this.changed);
      put(this.board.element);
      this.board.charts = [];
      return;
    }
    const found = await ask("compare", { runs: query.runs, label: query.label });
    if (query !== this.query) return; // Other runs were chosen meanwhile.
    put(this.tables, this.intervals(found), this.differences(found));
    await this.draw(names, query);
    if (query !== this.query) return;
    put(
      this.changed,
      found.pairs.map((pair) => changed(pair)),
    );
  }

  pick(names) {
    const act = (name, on) => {
      const runs = on ? [...names, name] : names.filter((other) => other !== name);
      go("compare", "", { ...this.query, runs: runs.join("/") }, { replace: true });
    };
    const focus = document.activeElement?.value;
    put(
      this.picker,
      h("legend", {}, "Runs"),
      this.all.map(({ name }) =>
        h(
          "label",
          { class: names.includes(name) ? `key c${names.indexOf(name)}` : "" },
          h("input", {
            type: "checkbox",
            value: name,
            checked: names.includes(name),
            disabled: !names.includes(name) && names.length >= MOST,
            on: { change: (event) => act(name, event.target.checked) },
          }),
          " ",
          name,
        ),
      ),
    );
    this.picker.querySelector(`input[value="${CSS.escape(focus || "")}"]`)?.focus();
  }

  async draw(names, query) {
    const { first, last } = query,
      keys = KEYS.map(([key]) => key).join();
    const all = await Promise.all(names.map((name) => ask(of(name, "curves"), { first, last, keys })));
    if (query !== this.query) return;
    const merged = {
      first: Math.min(...all.map((one) => one.first)),
      last: Math.max(...all.map((one) => one.last)),
      steps: [],
      keys: {},
    };
    all.forEach((one, place) => {
      if (one.steps.length > merged.steps.length) merged.steps = one.steps;
      for (const [key, values] of Object.entries(one.keys))
        merged.keys[`${key} ${place}`] = { ...values, steps: one.steps };
    });
    const specs = KEYS.map(([key, title]) => ({
      title,
      one: key === "reward/mean",
      lines: names.map((name, place) => ({ key: `${key} ${place}`, name })),
    }));
    this.board.draw(specs, merged, []);
  }

  intervals({ pairs, labels, label }) {
    const choose = (chosen) => go("compare", "", { ...this.query, label: chosen }, { replace: true });
    const choices = labels.map((one) => [one, one]);
    const level = pairs.flatMap(({ ways }) => ways)[0]?.level;
    const heads = ["A - B", "Decoding", "A", "B", `Points, ${number(100 * level)} % interval`, "Verdict"];
    const rows = pairs.flatMap(({ a, b, ways, n }) => ways.map((way) => interval(a, b, n, way)));
    return h(
      "section",
      {},
      h(
        "div",
        { class: "bar" },
        h("h2", {}, "Held-out accuracy"),
        labels.length ? choice("Evaluation", choices, label, choose) : null,
      ),
      rows.length ? table(heads, rows) : null,
      pairs.filter(({ problem }) => problem).map(({ a, b, problem }) => h("p", {}, `${a} - ${b}: ${problem}`)),
    );
  }

  differences({ differences, runs }) {
    const names = runs.map(({ name }, place) => h("span", { class: `key c${place}` }, name));
    const rows = differences.map(({ key, values }) => [h("code", {}, key), ...values.map(shown)]);
    return h(
      "section",
      {},
      h("h2", {}, rows.length ? "What was set differently" : "All have the same configuration"),
      rows.length ? table(["Key", ...names], rows) : null,
    );
  }
}

function interval(a, b, n, way) {
  const p = way.p === null ? "" : `, p ${number(way.p)}`;
  return [
    `${a} - ${b}`,
    `${way.name}, n = ${n}`,
    percent(way.a),
    percent(way.b),
    `${points(way.mean)} [${points(way.low)}, ${points(way.high)}]${p}`,
    way.certain ? pill(`${way.mean > 0 ? a : b} is better`, "correct") : pill("no significant difference"),
  ];
}

function shown(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function points(value) {
  return `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`;
}

function changed({ a, b, changed, lost, won }) {
  if (!changed.length) return null;
  return h(
    "details",
    { open: true },
    h("summary", {}, `Changed answers: right in ${a} alone ${lost}, in ${b} alone ${won}`),
    changed.map((task) =>
      h(
        "article",
        { class: "task-pair" },
        h("p", {}, task.question, " ", h("span", { class: "gold" }, "Right answer: ", h("code", {}, task.answer))),
        h(
          "div",
          { class: "two" },
          ["a", "b"].map((side, place) =>
            h(
              "div",
              {},
              h("p", {}, h("b", {}, place ? b : a), " ", pill(task.outcomes[place])),
              h("pre", {}, task[side]),
            ),
          ),
        ),
      ),
    ),
  );
}
