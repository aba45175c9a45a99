// One run as curves: the verdict with its evidence, the main figures, what each process and each of several actors did,
// what happened; with --control also its stop. One brush for all charts; the chosen steps are in the address.

import { ask, of } from "./api.js";
import { address, go } from "./address.js";
import { Board } from "./chart.js";
import { clock, h, number, pill, put } from "./dom.js";
import { drawActors } from "./actors.js";
import * as jobs from "./jobs.js";
import { drawLanes } from "./lanes.js";
import { specs } from "./figures.js";
import { drawSpent } from "./spent.js";

const EVENTS_SHOWN = 40;
// Of a live run, whose page asks every 1.5 s: curves are drawn every other time, verdicts are made less often still.
const CURVES_MS = 2500;
const PIXELS_A_POINT = 8; // Of the page's width; a chart is a third of it.
const VERDICT_MS = 10000;

export async function show(root, route) {
  const page = new Monitor(root, route.run, await jobs.allowed());
  await page.look(route.query);
  page.judge().catch(() => {});
  return page;
}

class Monitor {
  constructor(root, run, allowed) {
    this.run = run;
    this.allowed = allowed;
    this.stamp = "";
    this.query = null;
    this.drawn = { stamp: "", at: 0 };
    this.judged = { stamp: "", at: 0 };
    this.head = h("div", { class: "bar" });
    this.stopping = h("div", {});
    this.verdicts = h("section", { class: "verdicts", "aria-label": "Verdict" });
    this.damaged = h("div", {});
    this.first = step("From step", () => this.typed());
    this.last = step("to step", () => this.typed());
    this.all = h("button", { type: "button", on: { click: () => this.choose() } }, "All steps");
    this.chosen = h(
      "div",
      { class: "bar tools" },
      this.first,
      this.last,
      this.all,
      h("span", { class: "quiet" }, "or draw over any chart"),
    );
    this.lanes = h("section", { class: "lanes", "aria-label": "What each process did when" });
    this.actors = h("section", { class: "actors", "aria-label": "Actors" });
    this.spent = h("section", { class: "spent", "aria-label": "Time and energy" });
    this.events = h("ol", { class: "events" });
    this.board = new Board((first, last) => this.choose(first, last));
    root.append(
      this.head,
      this.stopping,
      this.verdicts,
      this.damaged,
      this.chosen,
      this.board.element,
      this.lanes,
      this.actors,
      this.spent,
      h("details", { class: "happened", open: true }, h("summary", {}, "What happened"), this.events),
    );
    this.help = [
      ["Esc", "all steps"],
      ["l", "the answers of the last step"],
    ];
    this.keys = { Escape: () => this.choose(), l: () => go("samples", this.run) };
  }

  async update(route) {
    if (JSON.stringify(route.query) !== JSON.stringify(this.query)) await this.draw(route.query);
  }

  async poll() {
    await this.describeNews();
    if (this.isDue(this.drawn, CURVES_MS)) await this.draw(this.query);
    if (this.isDue(this.judged, VERDICT_MS)) await this.judge();
    return this.found.status === "running" ? `live, step ${this.found.steps}` : "";
  }

  async look(query) {
    await this.describeNews();
    await this.draw(query);
  }

  async describeNews() {
    const found = await ask(of(this.run, "overview"), { stamp: this.stamp });
    if (found.stamp === this.stamp) return;
    this.stamp = found.stamp;
    this.found = found;
    this.describe();
  }

  isDue(last, everyMs) {
    const waits = this.found.status === "running" && performance.now() < last.at + everyMs;
    return last.stamp !== this.stamp && !waits;
  }

  async judge() {
    this.judged = { stamp: this.stamp, at: performance.now() };
    const { verdicts } = await ask(of(this.run, "why"));
    put(
      this.verdicts,
      verdicts.map((verdict) => this.verdict(verdict)),
    );
  }

  choose(first, last) {
    go("monitor", this.run, { first, last }, { replace: true });
  }

  typed() {
    const [first, last] = [this.first, this.last].map((label) => label.querySelector("input").value);
    this.choose(first, last);
  }

  describe() {
    const { name, status, steps, planned, last, last_logged, damaged } = this.found;
    put(
      this.head,
      h("h1", {}, name),
      pill(status),
      h("span", {}, `step ${steps} of ${planned}`),
      h("progress", { max: Math.max(planned, 1), value: steps, "aria-label": "Steps done" }),
      h(
        "span",
        { class: "quiet" },
        `${clock(last.time_s)}, ${number(last["time/step_s"])} s a step, ${number(last.tokens_per_s)} tokens/s`,
      ),
      last_logged ? h("a", { class: "button", href: address("samples", name) }, "Answers") : null,
      this.allowed && status === "running" ? jobs.stopButton(this.stopping, name) : null,
    );
    if (status !== "running") put(this.stopping);
    const broken = Object.entries(damaged)
      .filter(([, lines]) => lines)
      .map(([file, lines]) =>
        h(
          "p",
          { class: "verdict fault" },
          `${lines} damaged ${lines === 1 ? "line" : "lines"} of ${file} ${lines === 1 ? "is" : "are"} left out.`,
        ),
      );
    put(this.damaged, broken);
    drawActors(this.actors, last);
    drawSpent(this.spent, this.found.spent);
    put(
      this.events,
      this.found.events
        .slice(-EVENTS_SHOWN)
        .reverse()
        .map((event) =>
          h(
            "li",
            { class: event.kind },
            h("span", { class: "at" }, `step ${event.step}`),
            pill(event.kind),
            " ",
            event.text,
          ),
        ),
    );
  }

  verdict({ name, fault, evidence, remedy, look }) {
    const query = look && this.found.last_logged ? { step: this.found.last_logged, ...look } : null;
    return h(
      "article",
      { class: `verdict ${fault ? "fault" : "fine"}` },
      h("h2", {}, name),
      h("p", {}, `${evidence}.`),
      h("p", { class: "remedy" }, `${remedy}.`),
      query ? h("a", { class: "button", href: address("samples", this.run, query) }, "See these answers") : null,
    );
  }

  async draw(query) {
    this.query = query;
    this.drawn = { stamp: this.stamp, at: performance.now() };
    const { first, last } = query;
    const curves = await ask(of(this.run, "curves"), {
      first,
      last,
      points: Math.min(400, Math.max(120, (innerWidth / PIXELS_A_POINT) | 0)),
    });
    if (query !== this.query) return; // Other steps were chosen meanwhile.
    for (const [label, value] of [
      [this.first, curves.first],
      [this.last, curves.last],
    ])
      label.querySelector("input").value = value;
    this.all.disabled = !first && !last;
    this.board.draw(specs(this.found, curves), curves, this.found.events);
    const lanes = await ask(of(this.run, "lanes"), { first, last });
    if (query === this.query) drawLanes(this.lanes, lanes);
  }
}

function step(caption, act) {
  return h("label", {}, `${caption} `, h("input", { type: "number", min: 1, step: 1, on: { change: act } }));
}
