// Evaluations of a run: accuracy with intervals, mean rewards where they say more, pass@k, maj@k, by level and subject;
// with --control also a new one.

import { ask, of, tell } from "./api.js";
import * as jobs from "./jobs.js";
import { choice, clock, h, number, percent, put, table } from "./dom.js";

const COUNTS = { problems: "Problems", samples: "Samples each", long_cap: "Long cap" };
const WAYS = {
  greedy: "greedy",
  sampled: "sampled",
  long_greedy: "greedy, long cap",
  long_sampled: "sampled, long cap",
};

export async function show(root, route) {
  const page = new Evaluate(root, route.run, await jobs.allowed());
  await page.poll();
  return page;
}

class Evaluate {
  constructor(root, run, allowed) {
    this.run = run;
    this.allowed = allowed;
    this.stamp = "";
    this.wanted = { checkpoint: "latest" };
    this.form = h("form", { class: "bar", on: { submit: (event) => this.start(event) } });
    this.job = h("section", { "aria-label": "Running" });
    this.found = h("section", { class: "tables", "aria-label": "Evaluations" });
    const head = h("div", { class: "bar" }, h("h1", {}, run), allowed ? null : jobs.forbidden());
    root.append(head, allowed ? this.form : "", this.job, this.found);
  }

  // Once, when the page is shown: an evaluation may be running.
  async update() {
    if (!this.allowed || this.job.hasChildNodes()) return;
    const job = await jobs.newest("eval", this.run);
    if (job?.running) this.follow(job);
  }

  async poll() {
    const found = await ask(of(this.run, "evaluations"), { stamp: this.stamp });
    if (found.stamp === this.stamp) return "";
    this.stamp = found.stamp;
    this.fillForm(found.checkpoints);
    put(this.found, found.evaluations.length ? found.evaluations.toReversed().map(article) : nothing());
    return "";
  }

  // Only if there are other checkpoints: what somebody has filled in is left alone.
  fillForm(checkpoints) {
    const choices = JSON.stringify(checkpoints);
    if (!this.allowed || this.choices === choices) return;
    this.choices = choices;
    const which = checkpoints.map(({ step, best }) => [String(step), `step ${step}${best ? ", the best" : ""}`]);
    const all = [["latest", "the newest"], ...which, ["base", "what it began with"]];
    put(
      this.form,
      choice("Checkpoint", all, this.wanted.checkpoint, (checkpoint) => (this.wanted.checkpoint = checkpoint)),
      Object.entries(COUNTS).map(([name, caption]) => this.count(name, caption)),
      h("label", {}, h("input", { type: "checkbox", checked: this.wanted.test, on: this.change("test") }), " test set"),
      h("button", {}, "Evaluate"),
    );
  }

  count(name, caption) {
    const usual = { type: "number", min: 1, placeholder: "as in the run", value: this.wanted[name] };
    return h("label", {}, `${caption} `, h("input", { ...usual, on: this.change(name) }));
  }

  change(name) {
    return {
      change: ({ target }) => {
        this.wanted[name] = target.type === "checkbox" ? target.checked : Number(target.value) || null;
      },
    };
  }

  async start(event) {
    event.preventDefault();
    const { checkpoint, ...rest } = this.wanted;
    const which = checkpoint === "base" ? { base: true } : { checkpoint };
    const started = await jobs.trying(this.job, () => tell(of(this.run, "evaluate"), { ...which, ...rest }));
    if (started) this.follow(started);
  }

  follow(job) {
    jobs.trying(this.job, () => jobs.show(this.job, job));
  }
}

function nothing() {
  return h("p", { class: "quiet" }, "It has not been evaluated yet.");
}

function article(found) {
  const ways = Object.entries(WAYS).filter(([key]) => found[key]);
  const { label, version, n, source, wall_s } = found;
  const rewards = rewardNames(ways.map(([key]) => found[key]));
  const about = `after ${version} steps, ${n} tasks of ${source || "the run"}, ${clock(wall_s)}`;
  return h(
    "article",
    { class: "evaluation" },
    h("h2", {}, label, " ", h("span", { class: "quiet" }, about)),
    table(
      ["Decoding", "Right", "95 %", "Parsed", "Cut off", "Length", ...rewards.map(rewardTitle)],
      ways.map(([key, name]) => [name, ...figures(found[key], rewards)]),
    ),
    ways.map(([key, name]) => parts(name, found[key])),
  );
}

// Of the mean rewards: "mean" for all rewards together, and the name of each reward, whose mean is without its weight.
function rewardNames(ways) {
  return [...new Set(ways.flatMap((way) => Object.keys(way.rewards || {})))];
}

function rewardTitle(name) {
  return name === "mean" ? "Reward" : `Reward ${name}`;
}

function figures(way, rewards) {
  return [
    percent(way.accuracy),
    between(way),
    percent(way.format_rate),
    percent(way.truncation_rate),
    number(way.length_mean),
    ...rewards.map((name) => number(way.rewards?.[name])),
  ];
}

function between({ low, high }) {
  return `${percent(low)} to ${percent(high)}`;
}

// By k, level and subject.
function parts(name, way) {
  const groups = { "pass@": way.pass_at, "maj@": way.maj_at, "level ": way.by_level, "": way.by_subject };
  const row = (name, part) => [name, percent(part.accuracy), between(part), part.n];
  const rows = Object.entries(groups).flatMap(([before, found]) =>
    Object.entries(found || {}).map(([key, part]) => row(`${before}${key}`, part)),
  );
  if (!rows.length) return null;
  const title = h("summary", {}, `${name}: ${rows.map(([key]) => key).join(", ")}`);
  return h("details", { open: name === "sampled" }, title, table(["", "Right", "95 %", "Tasks"], rows));
}
