// A chat with base and trained policy side by side. The models are in a process of their own, which can be ended. What
// it has said is the whole conversation, so a page that is loaded again shows it from there.

import { ask, of, tell } from "./api.js";
import * as jobs from "./jobs.js";
import { choice, h, put } from "./dom.js";

export async function show(root, route) {
  const allowed = await jobs.allowed();
  const { checkpoints } = await ask(of(route.run, "evaluations"));
  return new Chat(root, route.run, allowed, checkpoints);
}

class Chat {
  constructor(root, run, allowed, checkpoints) {
    this.run = run;
    this.allowed = allowed;
    this.wanted = {};
    this.state = h("span", { class: "quiet", role: "status" });
    this.form = h("form", { class: "bar", on: { submit: (event) => this.start(event) } }, this.fields(checkpoints));
    this.again = button("Start over", () => this.say(""));
    this.stop = button("End it", () => jobs.end(this.job));
    this.going = h("div", { class: "bar", hidden: true }, this.again, this.stop);
    this.talk = h("section", { class: "talk", "aria-label": "Conversation", "aria-live": "polite" });
    const keydown = (event) => this.typed(event);
    this.text = h("textarea", { rows: 3, "aria-label": "Your question", on: { keydown } });
    this.send = button("Send", () => this.question());
    this.box = h("fieldset", { class: "ask", "aria-label": "Question", disabled: true }, this.text, this.send);
    root.append(h("div", { class: "bar" }, h("h1", {}, run), this.state, allowed ? null : jobs.forbidden()));
    if (allowed) root.append(this.form, this.going, this.talk, this.box);
  }

  fields(checkpoints) {
    const steps = checkpoints.map(({ step, best }) => [String(step), `step ${step}${best ? ", the best" : ""}`]);
    const number = (name, caption, usual) => {
      const change = ({ target: { value } }) => (this.wanted[name] = value === "" ? undefined : Number(value));
      const on = { change };
      return h("label", {}, `${caption} `, h("input", { type: "number", step: "any", min: 0, placeholder: usual, on }));
    };
    return [
      choice("Checkpoint", [["latest", "the newest"], ...steps], "latest", (which) => (this.wanted.checkpoint = which)),
      number("max_new_tokens", "Most tokens", "as trained"),
      number("temperature", "Temperature", "0: likeliest"),
      h("button", {}, "Load the models"),
    ];
  }

  // Once, when the page is shown: the models may be loaded.
  async update() {
    if (!this.allowed || this.job) return;
    const job = await jobs.newest("chat", this.run);
    if (job?.running) this.follow(job);
  }

  async start(event) {
    event.preventDefault();
    const started = await jobs.trying(this.talk, () => tell(of(this.run, "chat"), this.wanted));
    if (started) this.follow(started);
  }

  async follow({ job }) {
    this.job = job;
    this.rest = "";
    this.other = "";
    put(this.talk);
    this.form.hidden = true;
    this.going.hidden = false;
    this.state.textContent = "loading";
    const told = await jobs.trying(this.talk, () => jobs.follow(this.talk, job, ({ text }) => this.hear(text)));
    this.ended(told);
  }

  // The last line may not be whole yet.
  hear(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    lines.forEach((line) => this.heard(line));
  }

  heard(line) {
    const row = parsed(line);
    if (!row) this.other = line || this.other;
    else if (row.names) this.loaded(row.names);
    else if (row.question === "") put(this.talk);
    else if (row.question) this.asked(row.question);
    else if (row.name) this.replies[row.name].textContent = row.text;
    else if (row.problem) this.wrong(row.problem);
    else if (row.done) this.ready();
  }

  loaded(names) {
    this.names = names;
    this.ready();
  }

  ready() {
    this.state.textContent = this.names.join(" and ");
    this.box.disabled = false;
    this.text.focus();
  }

  wrong(sentence) {
    this.talk.append(h("p", { class: "problem", role: "alert" }, sentence));
  }

  asked(question) {
    this.replies = Object.fromEntries(this.names.map((name) => [name, h("pre")]));
    const columns = this.names.map((name) => h("div", {}, h("h2", {}, name), this.replies[name]));
    this.talk.append(h("p", { class: "question" }, question), h("div", { class: "two" }, columns));
    this.talk.lastChild.scrollIntoView({ block: "nearest" });
  }

  typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.question();
  }

  question() {
    const text = this.text.value.trim();
    if (!text || this.box.disabled) return;
    this.text.value = "";
    this.say(text);
  }

  async say(text) {
    this.box.disabled = true;
    this.state.textContent = "answering";
    try {
      await tell(`jobs/${this.job}/say`, { text });
    } catch (error) {
      this.talk.append(jobs.wrong(error));
      this.text.value = text || this.text.value;
      if (this.names) this.ready();
    }
  }

  ended(told) {
    const saidWhy = this.talk.lastChild?.matches(".problem");
    if (told?.cause) this.wrong(told.cause);
    else if (told?.code > 0 && !saidWhy) this.wrong(this.other || "It has failed and said nothing.");
    this.box.disabled = true;
    this.form.hidden = false;
    this.going.hidden = true;
    this.state.textContent = "ended";
  }
}

function button(caption, act) {
  return h("button", { type: "button", on: { click: act } }, caption);
}

// What is no JSON comes from a library.
function parsed(line) {
  try {
    return JSON.parse(line);
  } catch {
    return null;
  }
}
