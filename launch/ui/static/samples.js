// The answers of a run: a step, its groups, the answers of one group side by side, one answer token by token.
//
// All of it is in the address: step, group, sample, colour, order and filters. Without a step the page shows the
// newest one and follows the run; without a group or a sample it shows the first that the filters let through.

import { ask, of } from "./api.js";
import { address, go, parse } from "./address.js";
import { drawGroup } from "./answers.js";
import { drawFilters, drawList, matches, sorted, SORTS } from "./groups.js";
import { COLOURS, drawTokens } from "./tokens.js";
import { choice, h, pill, put, short } from "./dom.js";

// Of a live run, whose page asks every 1.5 s: the newest answers are drawn every other time.
const ANSWERS_MS = 2500;

export async function show(root, route) {
  const page = new Samples(root, route.run);
  await page.poll();
  return page;
}

class Samples {
  constructor(root, run) {
    this.run = run;
    this.stamp = "";
    this.news = false;
    this.drawnAt = -Infinity;
    this.turn = 0;
    this.searches = 0;
    this.known = { steps: [] };
    this.loaded = {};
    this.shown = [];
    this.filters = h("section", { class: "filters", "aria-label": "Filters" });
    this.list = h("ol", { class: "groups" });
    this.group = h("section", { class: "group", "aria-label": "Answers of the group" });
    this.tokens = h("section", { class: "tokens", "aria-label": "One answer, token by token" });
    this.found = h("section", { class: "found", "aria-label": "Found", hidden: true });
    this.search = h("input", {
      type: "search",
      placeholder: "search all answers",
      "aria-label": "Search prompts and answers of all steps",
      on: { keydown: (event) => event.key === "Enter" && this.find(event.target.value) },
    });
    // From the beginning: a key may come before the first answers.
    this.bar = h("div", { class: "bar" }, this.search);
    root.append(
      this.bar,
      this.found,
      h(
        "div",
        { class: "split" },
        h("div", { class: "left" }, this.filters, this.list),
        h("div", { class: "right" }, this.group, this.tokens),
      ),
    );
    this.help = [
      ["j k", "next and previous step"],
      ["J K", "next and previous group"],
      ["h l", "previous and next answer"],
      ["c", "another colour"],
      ["s", "another order"],
      ["/", "search"],
      ["Esc", "no filters"],
    ];
    this.keys = {
      j: () => this.step(1),
      k: () => this.step(-1),
      J: () => this.next(1),
      K: () => this.next(-1),
      h: () => this.answer(-1),
      l: () => this.answer(1),
      "/": () => this.search.focus(),
      c: () => this.set({ colour: after(Object.keys(COLOURS), this.colour()) }),
      s: () => this.set({ sort: after(Object.keys(SORTS), this.sort()), group: "", sample: "" }),
      Escape: () => this.set({ outcome: "", fate: "", reward: "", group: "", sample: "" }),
    };
  }

  async poll() {
    const found = await ask(of(this.run, "steps"), { stamp: this.stamp });
    if (found.stamp !== this.stamp) {
      // More groups may belong to the step that was the newest.
      const newest = this.loaded.step === this.known.steps.at(-1);
      if (found.groups < this.known.groups || (newest && found.groups > this.known.groups)) this.loaded = {};
      this.stamp = found.stamp;
      this.known = found;
      this.news = true;
    }
    if (this.news && this.query && performance.now() >= this.drawnAt + ANSWERS_MS) await this.update({ query: this.query });
    return this.known.status === "running" ? `live, ${this.known.groups} groups` : "";
  }

  set(changes) {
    go("samples", this.run, { ...asked(), ...changes }, { replace: !("step" in changes || "group" in changes) });
  }

  sort() {
    return SORTS[this.query.sort] ? this.query.sort : "variance";
  }

  colour() {
    return COLOURS[this.query.colour] ? this.query.colour : "entropy";
  }

  // Keys may be quicker than answers: what was asked for last is shown.
  async update({ query }) {
    const turn = ++this.turn;
    this.query = query;
    this.news = false;
    this.drawnAt = performance.now();
    const { steps } = this.known;
    if (!steps.length) {
      put(this.bar, h("h1", {}, this.run), this.search);
      put(this.list, h("li", { class: "quiet" }, "No answers are in rollouts.jsonl yet."));
      return;
    }
    const step = query.step ? Number(query.step) : steps.at(-1);
    if (this.loaded.step !== step) {
      const { groups } = await ask(of(this.run, "steps", query.step || step));
      if (turn !== this.turn) return;
      this.loaded = { step, groups };
    }
    // What somebody is typing is left alone.
    const isTyping = this.bar.contains(document.activeElement) && document.activeElement.matches("input");
    if (!isTyping || !this.bar.querySelector("label")) this.drawBar(step);
    const shown = sorted(this.loaded.groups, this.sort(), this.query);
    this.shown = shown;
    drawFilters(this.filters, this.loaded.groups, this.query, (changes) =>
      this.set({ ...changes, group: "", sample: "" }),
    );
    const group = query.group === undefined ? shown[0]?.group : Number(query.group);
    drawList(this.list, shown, group, (place) =>
      address("samples", this.run, { ...this.query, step, group: place, sample: "" }),
    );
    if (group === undefined) {
      put(this.group, h("p", { class: "quiet" }, "No group has such an answer. Esc takes the filters away."));
      put(this.tokens);
      return;
    }
    await this.showGroup(step, query.group ?? group, turn);
  }

  async showGroup(step, group, turn) {
    if (this.loaded.shown?.group !== Number(group)) {
      const shown = await ask(of(this.run, "steps", step, group));
      const history = (await ask(of(this.run, "task"), { task: shown.task })).groups;
      if (turn !== this.turn) return;
      this.loaded = { ...this.loaded, shown, history, tokens: null };
    }
    const { shown, history } = this.loaded;
    const sample = this.query.sample === undefined ? first(shown, this.query) : Number(this.query.sample);
    this.sample = sample;
    drawGroup(this.group, { shown, history, sample, query: this.query, run: this.run }, (place) =>
      this.set({ step, group: String(group), sample: String(place) }),
    );
    if (this.loaded.tokens?.sample !== sample) {
      const tokens = await ask(of(this.run, "steps", step, group, this.query.sample ?? sample));
      if (turn !== this.turn) return;
      this.loaded.tokens = tokens;
    }
    drawTokens(this.tokens, this.loaded.tokens, shown.answers[sample], this.colour(), (colour) =>
      this.set({ colour }),
    );
  }

  drawBar(step) {
    const { steps, status } = this.known,
      place = nearest(steps, step);
    const turn = (by, caption, name) =>
      h(
        "button",
        {
          type: "button",
          "aria-label": name,
          disabled: steps[place + by] === undefined,
          on: { click: () => this.step(by) },
        },
        caption,
      );
    put(
      this.bar,
      h("h1", {}, h("a", { href: address("monitor", this.run) }, this.run)),
      pill(status),
      turn(-1, "\u2039", "Previous step"),
      h(
        "label",
        {},
        "Step ",
        h("input", {
          type: "number",
          min: steps[0],
          max: steps.at(-1),
          value: step,
          on: { change: (event) => this.set({ step: event.target.value, group: "", sample: "" }) },
        }),
      ),
      turn(1, "\u203a", "Next step"),
      h("span", { class: "quiet" }, this.query.step ? `of ${steps.at(-1)}` : "the newest"),
      this.query.step && status === "running"
        ? h(
            "button",
            { type: "button", on: { click: () => this.set({ step: "", group: "", sample: "" }) } },
            "Follow",
          )
        : null,
      choice(
        "Order",
        Object.entries(SORTS).map(([value, { name }]) => [value, name]),
        this.sort(),
        (sort) => this.set({ sort, group: "", sample: "" }),
      ),
      this.search,
    );
  }

  step(by) {
    const { steps } = this.known,
      place = nearest(steps, Number(asked().step) || this.loaded.step) + by;
    if (steps[place] !== undefined) this.set({ step: steps[place], group: "", sample: "" });
  }

  next(by) {
    const here = Number(asked().group ?? this.loaded.shown?.group);
    const place = this.shown.findIndex(({ group }) => group === here) + by;
    if (this.shown[place]) this.set({ step: this.loaded.step, group: this.shown[place].group, sample: "" });
  }

  answer(by) {
    const { shown } = this.loaded;
    const place = Number(asked().sample ?? this.sample) + by;
    if (shown?.answers[place]) this.set({ step: this.loaded.step, group: shown.group, sample: place });
  }

  async find(text, from = 1, before = []) {
    const turn = ++this.searches;
    this.found.hidden = !text.trim();
    if (!text.trim()) return;
    put(this.found, h("p", { class: "quiet" }, "Searching ..."));
    const { hits, next } = await ask(of(this.run, "search"), { text, first: from });
    if (turn !== this.searches) return;
    const all = [...before, ...hits];
    put(
      this.found,
      h(
        "h2",
        {},
        all.length ? `${all.length} places with "${text}"` : `"${text}" is nowhere`,
        h(
          "button",
          {
            type: "button",
            on: {
              click: () => {
                this.found.hidden = true;
              },
            },
          },
          "Close",
        ),
      ),
      h(
        "ol",
        {},
        all.map((hit) =>
          h(
            "li",
            {},
            h(
              "a",
              { href: address("samples", this.run, { step: hit.step, group: hit.group, sample: hit.sample ?? "" }) },
              `step ${hit.step}, group ${hit.group}${hit.sample === null ? ", prompt" : `, answer ${hit.sample}`}`,
            ),
            " ",
            h("q", {}, short(hit.text, 160)),
          ),
        ),
      ),
      next
        ? h("button", { type: "button", on: { click: () => this.find(text, next, all) } }, `Go on from step ${next}`)
        : null,
    );
  }
}

function first(shown, query) {
  const fit = shown.answers.map((answer, place) => place).filter((place) => matches(shown, place, query));
  const by = query.sort === "reward" ? fit.sort((a, b) => shown.rewards[b] - shown.rewards[a]) : fit;
  return by[0] ?? 0;
}

// What the address says now: a key may come before what it asked for last has been shown.
function asked() {
  return parse(location.hash).query;
}

function nearest(steps, step) {
  let place = 0;
  while (place + 1 < steps.length && steps[place + 1] <= step) place++;
  return place;
}

function after(names, name) {
  return names[(names.indexOf(name) + 1) % names.length];
}
