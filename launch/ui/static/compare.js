// Two to four runs: curves over each other, how sure a difference is, which keys differ, which answers changed.

import { ask, of } from "./api.js";
import { go } from "./address.js";
import { Board } from "./chart.js";
import { choice, h, number, percent, pill, put } from "./dom.js";

const KEYS = [
  ["reward/mean", "Reward"],
  ["entropy/mean", "Entropy"],
  ["length/mean", "Length"],
  ["groups/idle", "Dropped groups"],
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
    put(this.tables, this.intervals(found), this.differences(found));
    await this.draw(names);
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

  async draw(names) {
    const { first, last } = this.query,
      keys = KEYS.map(([key]) => key).join();
    const all = await Promise.all(names.map((name) => ask(of(name, "curves"), { first, last, keys })));
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
    const rows = pairs.flatMap(({ a, b, ways, problem, n }) =>
      problem
        ? [h("tr", {}, h("th", { scope: "row" }, `${a} - ${b}`), h("td", { colspan: 5 }, problem))]
        : ways.map((way) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, `${a} - ${b}`),
              h("td", {}, `${way.name}, n = ${n}`),
              h("td", {}, percent(way.a)),
              h("td", {}, percent(way.b)),
              h(
                "td",
                {},
                `${points(way.mean)} [${points(way.low)}, ${points(way.high)}]`,
                way.p === null ? "" : `, p ${number(way.p)}`,
              ),
              h(
                "td",
                {},
                way.certain
                  ? pill(`${way.mean > 0 ? a : b} is better`, "correct")
                  : pill("no significant difference"),
              ),
            ),
          ),
    );
    return h(
      "section",
      {},
      h(
        "div",
        { class: "bar" },
        h("h2", {}, "Held-out accuracy"),
        labels.length
          ? choice(
              "Evaluation",
              labels.map((one) => [one, one]),
              label,
              (chosen) => go("compare", "", { ...this.query, label: chosen }, { replace: true }),
            )
          : null,
      ),
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" },
        h(
          "table",
          { class: "plain" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["A - B", "Decoding", "A", "B", "Points, 97.5 % interval", "Verdict"].map((head) =>
                h("th", { scope: "col" }, head),
              ),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
    );
  }

  differences({ differences, runs }) {
    const text = (value) =>
      value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
    return h(
      "section",
      {},
      h("h2", {}, differences.length ? "What was set differently" : "Both have the same configuration"),
      differences.length
        ? h(
            "div",
            { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" },
            h(
              "table",
              { class: "plain" },
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  h("th", { scope: "col" }, "Key"),
                  runs.map(({ name }, place) => h("th", { scope: "col", class: `key c${place}` }, name)),
                ),
              ),
              h(
                "tbody",
                {},
                differences.map(({ key, values }) =>
                  h(
                    "tr",
                    {},
                    h("th", { scope: "row" }, h("code", {}, key)),
                    values.map((value) => h("td", {}, text(value))),
                  ),
                ),
              ),
            ),
          )
        : null,
    );
  }
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
