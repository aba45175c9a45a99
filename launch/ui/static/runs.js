// The runs of the folder: what each is, how far it is, what it is doing. Two to four of them can be compared.

import { ask, of, Problem } from "./api.js";
import { address, go } from "./address.js";
import { sparkline } from "./chart.js";
import { ago, h, number, pill, put } from "./dom.js";

const ASKED = 5;

export async function show(root) {
  const page = new Runs(root);
  await page.look();
  return page;
}

class Runs {
  constructor(root) {
    this.stamp = "";
    this.chosen = new Set();
    this.runs = [];
    this.verdicts = new Map();
    this.filter = "";
    this.place = -1;
    this.title = h("h1", {}, "Runs");
    this.where = h("p", { class: "quiet" });
    this.search = h("input", {
      type: "search",
      "aria-label": "Show runs whose name, model or verdict has",
      placeholder: "filter",
      on: {
        input: (event) => {
          this.filter = event.target.value.toLowerCase();
          this.draw();
        },
      },
    });
    this.compare = h("button", { type: "button", disabled: true, on: { click: () => this.open() } }, "Compare");
    this.body = h("tbody");
    const heads = ["", "Run", "Status", "", "Reward", "Step", "Verdict", "Model", "Tasks", "Changed"];
    const table = h(
      "table",
      { class: "runs-table" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((head, place) =>
            head
              ? h("th", { scope: "col" }, head)
              : h("th", { scope: "col" }, h("span", { class: "hidden" }, place ? "Curve" : "Compare")),
          ),
        ),
      ),
      this.body,
    );
    this.empty = h("p", { class: "quiet", hidden: true });
    root.append(h("div", { class: "bar" }, this.title, this.where, this.search, this.compare), table, this.empty);
    this.help = [
      ["j k", "next and previous run"],
      ["Enter", "its page"],
      ["l", "its answers"],
      ["x", "choose it for Compare"],
      ["/", "filter"],
    ];
    this.keys = {
      j: () => this.move(1),
      k: () => this.move(-1),
      "/": () => this.search.focus(),
      x: () => this.body.rows[this.place]?.querySelector("input").click(),
      l: () => this.shown()[this.place] && go("samples", this.shown()[this.place].name),
    };
  }

  async look() {
    const found = await ask("runs", { stamp: this.stamp });
    if (found.stamp !== this.stamp) {
      Object.assign(this, { stamp: found.stamp, runs: found.runs });
      this.where.textContent = found.folder;
      this.draw();
    }
  }

  async poll() {
    await this.look();
    await this.judge();
    const going = this.runs.filter((run) => run.status === "running").length;
    return going ? `${going} running` : "";
  }

  // A run that goes on, or that was killed, has no verdict in its summary. A few are asked for at a time.
  async judge() {
    const unknown = (run) => !run.verdict && run.steps && this.verdicts.get(run.name)?.steps !== run.steps;
    for (const run of this.runs.filter(unknown).slice(0, ASKED)) {
      const verdict = await ask(of(run.name, "why")).then(({ verdicts }) => verdicts[0], missing);
      this.verdicts.set(run.name, { steps: run.steps, verdict });
      this.draw();
    }
  }

  known(run) {
    return run.verdict || this.verdicts.get(run.name)?.verdict;
  }

  shown() {
    const text = (run) =>
      `${run.name} ${run.model} ${run.tasks} ${run.status} ${this.known(run)?.name || ""}`.toLowerCase();
    return this.runs.filter((run) => text(run).includes(this.filter));
  }

  move(by) {
    const rows = this.body.rows;
    this.place = Math.max(0, Math.min(rows.length - 1, this.place + by));
    rows[this.place]?.querySelector("a").focus();
  }

  open() {
    go("compare", "", { runs: [...this.chosen].join("/") });
  }

  draw() {
    const runs = this.shown(),
      focus = document.activeElement?.closest?.("tr")?.dataset.run;
    put(
      this.body,
      runs.map((run) => this.row(run)),
    );
    if (focus) this.body.querySelector(`tr[data-run="${CSS.escape(focus)}"] a`)?.focus();
    this.empty.hidden = runs.length > 0;
    this.empty.textContent = this.runs.length
      ? "No run has that text."
      : "No run is in this folder yet: `python -m launch run`.";
    this.button();
  }

  button() {
    this.compare.disabled = this.chosen.size < 2 || this.chosen.size > 4;
    this.compare.textContent = this.chosen.size ? `Compare ${this.chosen.size}` : "Compare";
    this.compare.title = "Choose two to four runs";
  }

  row(run) {
    const choose = h("input", {
      type: "checkbox",
      checked: this.chosen.has(run.name),
      "aria-label": `Compare ${run.name}`,
      on: {
        change: (event) => {
          this.chosen[event.target.checked ? "add" : "delete"](run.name);
          this.button();
        },
      },
    });
    const steps = run.planned ? `${run.steps} / ${run.planned}` : run.steps;
    const known = this.known(run);
    const verdict = known
      ? h(
          "a",
          { class: known.fault ? "fault" : "fine", href: address("monitor", run.name), title: why(known) },
          known.name,
        )
      : h("span", { class: "quiet" }, run.problem || "");
    const cells = [
      choose,
      h("a", { class: "name", href: address("monitor", run.name) }, run.name),
      pill(run.status),
      sparkline(run.curve),
      h("span", { class: "figure", title: run.goal }, number(run.reward)),
      h("span", { class: "figure" }, steps),
      verdict,
      run.model,
      run.tasks,
      h("time", {}, ago(Date.now() / 1000 - run.changed)),
    ];
    const names = ["choose", "run", "status", "curve", "reward", "steps", "verdict", "model", "tasks", "age"];
    return h(
      "tr",
      { data: { run: run.name } },
      cells.map((cell, place) => h("td", { class: names[place] }, cell)),
    );
  }
}

function why({ evidence, remedy }) {
  return `${evidence}. ${remedy}.`;
}

// Of a damaged run; its own page says what is wrong.
function missing(error) {
  if (!(error instanceof Problem)) throw error;
  return null;
}
