// What each process did when: one lane for each, one bar for each phase, over the last steps of what is chosen. Where
// there is no bar the process waited: an actor for the learner, the learner for its actors.

import { h, number, put } from "./dom.js";

export function drawLanes(place, { phases, first, last, measured }) {
  if (!phases.length) {
    put(place);
    return;
  }
  const start = Math.min(...phases.map((phase) => phase.start_s));
  const length = Math.max(...phases.map((phase) => phase.end_s)) - start;
  const names = [...new Set(phases.map((phase) => phase.name).filter((name) => name !== "waiting"))];
  const processes = [...new Set(phases.map((phase) => phase.process))];
  const how = measured
    ? "as traced"
    : "from the times of each step: how long is measured, what overlapped is not (run --trace measures it)";
  put(
    place,
    h("h2", {}, "Processes"),
    h("p", { class: "quiet" }, `steps ${first} to ${last}, ${number(length)} s, ${how}`),
    h(
      "div",
      { class: "legend" },
      names.map((name) => h("span", { class: `key phase-${name}` }, name)),
      h("span", { class: "key phase-waiting" }, "waiting"),
    ),
    processes.map((process) => {
      const own = phases.filter((phase) => phase.process === process);
      return lane(process, own, start, length);
    }),
  );
}

function lane(process, phases, start, length) {
  const worked = phases.filter((phase) => phase.name !== "waiting");
  const said = [...shares(worked, length), waited(process, worked, length)].join(", ");
  const bars = worked.map((phase) => bar(phase, start, length));
  return h(
    "div",
    { class: "lane" },
    h("span", { class: "who" }, process),
    h("div", { class: "track", role: "img", "aria-label": `${process}: ${said}` }, bars),
    h("span", { class: "quiet shares" }, said),
  );
}

function bar({ name, step, start_s, end_s }, start, length) {
  const share = (seconds) => `${(100 * seconds) / length}%`;
  const title = `${name}${step ? `, step ${step}` : ""}: ${number(end_s - start_s)} s`;
  const width = `max(1px, ${share(end_s - start_s)})`;
  return h("span", { class: `phase phase-${name}`, title, vars: { left: share(start_s - start), width } });
}

function shares(phases, length) {
  const sums = new Map();
  for (const { name, start_s, end_s } of phases) sums.set(name, (sums.get(name) || 0) + end_s - start_s);
  const sorted = [...sums].sort((a, b) => b[1] - a[1]);
  return sorted.map(([name, seconds]) => `${name} ${Math.round((100 * seconds) / length)} %`);
}

// Phases of a trace lie in each other, so what they cover is counted once.
function waited(process, phases, length) {
  let covered = 0;
  let until = -Infinity;
  for (const { start_s, end_s } of [...phases].sort((a, b) => a.start_s - b.start_s)) {
    covered += Math.max(0, end_s - Math.max(start_s, until));
    until = Math.max(until, end_s);
  }
  const share = Math.max(0, Math.round(100 * (1 - covered / length)));
  return `waited ${share} % for ${process.startsWith("learner") ? "the actors" : "the learner"}`;
}
