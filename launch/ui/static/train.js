// A new run: a preset or a file, keys with their meaning and range, what it would take, the command, and its start. And
// the runs of the folder, to stop and to resume.

import { ask, messageOf, of, tell } from "./api.js";
import { address, go } from "./address.js";
import * as jobs from "./jobs.js";
import { choice, h, pill, put } from "./dom.js";

const MOST_OFFERED = 12;
const FIRST = "embedded";
const WORDS = { ge: "at least", gt: "above", le: "at most", lt: "below" };

export async function show(root) {
  if (!(await jobs.allowed())) {
    root.append(h("div", { class: "bar" }, h("h1", {}, "Train")), jobs.forbidden());
    return {};
  }
  const page = new Train(root, await ask("form", { source: FIRST }));
  await page.poll();
  return page;
}

class Train {
  constructor(root, { keys, sources }) {
    this.source = FIRST;
    this.keys = keys;
    this.sets = new Map();
    this.goals = new Map();
    this.stamp = "";
    this.turn = 0;
    const now = new Date().toISOString().slice(0, 19).replace(/\D/g, "");
    this.name = field("Name", { value: `run-${now}` }, () => this.draft());
    this.find = field("Change a key", { type: "search", placeholder: "name or meaning" }, () => this.offer());
    this.offered = h("ul", { class: "offered", "aria-label": "Keys" });
    this.chosen = h("div", { class: "fields" });
    this.command = h("code", { class: "command" });
    this.problem = h("p", { class: "problem draft", role: "status", hidden: true });
    this.job = h("section", { "aria-label": "Plan, or start" });
    this.runs = h("tbody");
    const table = h("table", { class: "plain" }, this.runs);
    root.append(
      h("div", { class: "bar" }, h("h1", {}, "Train")),
      h("div", { class: "bar" }, this.choice(sources), this.name, this.find),
      this.offered,
      this.chosen,
      h("div", { class: "bar" }, this.command, button("Copy", () => this.copy())),
      this.problem,
      h("div", { class: "bar" }, button("Plan", () => this.plan()), button("Start", () => this.start())),
      this.job,
      h("h2", {}, "Runs"),
      h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Runs" }, table),
    );
  }

  choice(sources) {
    const choices = sources.map((name) => [name, name]);
    return choice("Configuration", choices, this.source, (source) => this.take(source));
  }

  // Values that were changed stay; all others are those of the new configuration.
  async take(source) {
    this.source = source;
    const found = await jobs.trying(this.job, () => ask("form", { source }));
    if (found) this.keys = found.keys;
    this.offer();
    this.draw();
  }

  // Once, when the page is shown: a run may be starting.
  async update() {
    await this.draft();
    if (this.job.hasChildNodes()) return;
    const job = await jobs.newest("run");
    if (job?.running) this.follow(job);
  }

  async poll() {
    const found = await ask("runs", { stamp: this.stamp });
    if (found.stamp === this.stamp) return "";
    this.stamp = found.stamp;
    put(
      this.runs,
      found.runs.map((run) => this.row(run)),
    );
    const started = found.runs.find(({ name }) => name === this.started);
    if (started?.status === "running") go("monitor", started.name);
    return "";
  }

  row({ name, status, steps, planned }) {
    const cells = [h("a", { href: address("monitor", name) }, name), pill(status), `${steps} / ${planned}`];
    const resuming = () => (status === "damaged" ? null : this.resuming(name, planned));
    const act = status === "running" ? jobs.stopButton(this.job, name) : resuming();
    return h(
      "tr",
      { data: { run: name } },
      [...cells, act].map((cell) => h("td", {}, cell)),
    );
  }

  resuming(name, planned) {
    const goal = this.goals.get(name) ?? planned;
    const on = { input: ({ target }) => this.goals.set(name, Number(target.value)) };
    const steps = h("input", { type: "number", min: 1, value: goal, "aria-label": `Last step of ${name}`, on });
    const resume = async () => {
      const wanted = this.goals.get(name) ?? planned;
      const body = wanted === planned ? {} : { steps: wanted };
      const started = await jobs.trying(this.job, () => tell(of(name, "resume"), body));
      if (started) this.follow(started);
    };
    return h("div", { class: "bar" }, button("Resume", resume, `Resume ${name}`), "up to step", steps);
  }

  offer() {
    const text = input(this.find).value.trim().toLowerCase();
    const fits = ({ key, meaning }) => !this.sets.has(key) && `${key} ${meaning}`.toLowerCase().includes(text);
    // Those whose name has it come first.
    const found = text ? this.keys.filter(fits).sort((a, b) => b.key.includes(text) - a.key.includes(text)) : [];
    put(
      this.offered,
      found.slice(0, MOST_OFFERED).map((key) => h("li", {}, button(key.key, () => this.add(key)), " ", about(key))),
    );
  }

  add({ key, value }) {
    this.sets.set(key, written(value));
    input(this.find).value = "";
    this.offer();
    this.draw();
    this.chosen.lastElementChild.querySelector("input, select").focus();
  }

  draw() {
    put(
      this.chosen,
      [...this.sets].map(([name, value]) => this.field(name, value)),
    );
    this.draft();
  }

  field(name, value) {
    const key = this.keys.find((one) => one.key === name);
    const on = {
      input: ({ target }) => {
        this.sets.set(name, target.value);
        this.draft();
      },
    };
    const same = { "aria-label": name, on };
    const choices = key.choices?.map((one) => h("option", { selected: one === value }, one));
    const control = choices ? h("select", same, choices) : h("input", { ...same, value });
    const leave = () => {
      this.sets.delete(name);
      this.draw();
    };
    const label = h("label", {}, h("code", {}, name), control);
    return h("div", { class: "field" }, label, about(key), button("\u00d7", leave, `Leave ${name} as it is`));
  }

  wanted() {
    return { source: this.source, name: input(this.name).value, sets: Object.fromEntries(this.sets) };
  }

  // The command, and what is wrong with it. The answer to what was typed last is shown.
  async draft() {
    const turn = ++this.turn;
    const found = await tell("draft", this.wanted()).catch((error) => ({ command: "", problem: messageOf(error) }));
    if (turn !== this.turn) return;
    this.command.textContent = found.command;
    this.problem.textContent = found.problem;
    this.problem.hidden = !found.problem;
  }

  async copy() {
    await jobs.trying(this.job, () => navigator.clipboard.writeText(this.command.textContent));
  }

  async plan() {
    const started = await jobs.trying(this.job, () => tell("plan", this.wanted()));
    if (started) this.follow(started);
  }

  async start() {
    const started = await jobs.trying(this.job, () => tell("train", this.wanted()));
    if (!started) return;
    this.started = started.run;
    this.follow(started);
  }

  follow(job) {
    jobs.trying(this.job, () => jobs.show(this.job, job));
  }
}

function button(caption, act, label = null) {
  return h("button", { type: "button", "aria-label": label, on: { click: act } }, caption);
}

function field(caption, attributes, act) {
  return h("label", {}, `${caption} `, h("input", { ...attributes, on: { input: act } }));
}

function input(label) {
  return label.querySelector("input");
}

function about({ form, range = {}, meaning, value }) {
  const limits = Object.entries(range).map(([kind, limit]) => `${WORDS[kind]} ${limit}`);
  const kind = form === "text" || form === "choice" ? [] : [[form, ...limits].join(", ")];
  return h("span", { class: "quiet" }, [...kind, `here ${written(value) || "empty"}`].join("; "), `. ${meaning}`);
}

// As it would be typed: a text without quotes, anything else as TOML.
function written(value) {
  if (typeof value === "string") return value;
  return value === null ? "" : toml(value);
}

function toml(value) {
  if (Array.isArray(value)) return `[${value.map(toml).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const pairs = Object.entries(value).map(([key, one]) => `${JSON.stringify(key)} = ${toml(one)}`);
  return `{${pairs.join(", ")}}`;
}
