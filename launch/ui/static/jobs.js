// A process that this page started: its command, how far it is, what it says, and the button that ends it.

import { ask, messageOf, of, tell } from "./api.js";
import { clock, h, pill, put } from "./dom.js";

const EVERY_MS = 200;
const HOW_FAR = /evaluated (\d+) of (\d+)/g;

export async function allowed() {
  return (await ask("control")).control;
}

export function forbidden() {
  const command = h("code", {}, "python -m launch ui --control");
  return h("p", { class: "quiet" }, "This page only looks. To do more with it, start it again with ", command, ".");
}

// The newest process of this kind, if there is one; a page that is loaded again finds it so.
export async function newest(kind, run = "") {
  const { jobs } = await ask("jobs");
  return jobs.findLast((job) => job.kind === kind && (!run || job.run === run));
}

// Calls `each` with what is new, until the process ends or `place` is no longer shown. Returns the last answer.
export async function follow(place, job, each) {
  for (let first = 0; ; ) {
    const told = await ask(`jobs/${job}`, { first });
    if (!place.isConnected) return told;
    each(told);
    if (!told.running) return told;
    first = told.next;
    await new Promise((wake) => setTimeout(wake, EVERY_MS));
  }
}

// Stops a run as Ctrl-C does, whoever has started it; `place` says so, or why not.
export function stopButton(place, run) {
  const stop = async () => {
    if (await trying(place, () => tell(of(run, "stop"))))
      put(place, h("p", { role: "status" }, `${run} finishes its step or gives up its evaluation, writes a checkpoint and ends.`));
  };
  return h("button", { type: "button", "aria-label": `Stop ${run}`, on: { click: stop } }, "Stop");
}

export function end(job) {
  return tell(`jobs/${job}/end`);
}

// Shows one process in `place` to its end. Another one that is shown there takes its place.
export async function show(place, { job, kind, command }) {
  const state = h("span");
  const far = h("progress", { hidden: true, "aria-label": "How far it is" });
  const said = h("pre", { class: "said", tabindex: 0, role: "group", "aria-label": "What it says", hidden: true });
  const stop = h("button", { type: "button", on: { click: () => end(job) } }, kind === "run" ? "Stop it" : "End it");
  const shown = h("div", { class: "job" }, h("div", { class: "bar" }, h("code", {}, command), state, far, stop), said);
  put(place, shown);
  const told = await follow(shown, job, ({ text, seconds }) => {
    state.textContent = `running, ${clock(seconds)}`;
    said.append(text);
    said.hidden = !said.textContent;
    const found = [...text.matchAll(HOW_FAR)].at(-1);
    if (found) Object.assign(far, { hidden: false, value: Number(found[1]), max: Number(found[2]) });
  });
  stop.remove();
  far.remove();
  put(state, pill(...ending(told.code)), ` after ${clock(told.seconds)}`);
  if (told.cause) shown.append(h("p", { class: "problem", role: "alert" }, told.cause));
  return told;
}

// In words, and the colour of its pill.
function ending(code) {
  if (code === 0) return ["done"];
  if (code < 0) return ["ended", "stopped"];
  return code === 2 ? ["refused", "failed"] : [`failed (${code})`, "failed"];
}

// Does it, or says in `place` why not.
export async function trying(place, act) {
  try {
    return await act();
  } catch (error) {
    put(place, wrong(error));
    return null;
  }
}

export function wrong(error) {
  return h("p", { class: "problem", role: "alert" }, messageOf(error));
}
