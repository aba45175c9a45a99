// One group: its prompt, its answers side by side with the parts of their rewards, and the same task in all other
// steps.

import { address } from "./address.js";
import { matches } from "./groups.js";
import { h, number, pill, put } from "./dom.js";

const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));

export function drawGroup(place, { shown, history, sample, query, run }, choose) {
  const scroll = place.querySelector(".answers")?.scrollLeft ?? 0;
  const state = {
    trained: "trained on",
    idle: "all scores are equal, so nothing is learned from it",
    quarantined: "its update was refused",
  };
  put(
    place,
    h(
      "div",
      { class: "about" },
      h("h2", {}, `Group ${shown.group}`),
      pill(shown.fate),
      h(
        "span",
        { class: "quiet" },
        `${shown.id}; ${state[shown.fate]}`,
        shown.stale ? `; stale: sampled ${shown.stale} steps earlier` : "",
      ),
    ),
    h("pre", { class: "prompt", tabindex: 0, role: "group", "aria-label": "Prompt" }, shown.prompt),
    shown.answer ? h("p", { class: "gold" }, "Right answer: ", h("code", {}, shown.answer)) : null,
    h(
      "div",
      { class: "answers", tabindex: 0, role: "group", "aria-label": "Answers" },
      shown.answers.map((answer, at) => card(answer, at, at === sample, matches(shown, at, query), choose)),
    ),
    over(history, shown, run),
  );
  place.querySelector(".answers").scrollLeft = scroll;
  const chosen = place.querySelector(".answers .chosen");
  if (chosen && place.dataset.chosen !== `${shown.step}/${shown.group}/${sample}`) {
    const box = place.querySelector(".answers");
    box.scrollLeft = Math.max(0, chosen.offsetLeft - box.offsetLeft - 40);
  }
  place.dataset.chosen = `${shown.step}/${shown.group}/${sample}`;
}

function card(answer, place, chosen, fits, choose) {
  const parts = Object.entries(answer.rewards),
    extras = Object.entries(answer.extras);
  return h(
    "article",
    {
      class: `answer ${chosen ? "chosen" : ""} ${fits ? "" : "dim"}`,
      data: { answer: place },
      on: { click: () => choose(place) },
    },
    h(
      "header",
      {},
      h("button", { type: "button", "aria-pressed": String(chosen) }, `Answer ${place}`),
      pill(answer.outcome),
      answer.kept ? null : pill("left out", "idle"),
    ),
    h(
      "dl",
      {},
      pair("reward", number(answer.reward)),
      pair(
        "advantage",
        answer.advantage === null ? "none" : signed(answer.advantage),
        answer.advantage > 0 ? "up" : answer.advantage < 0 ? "down" : "",
      ),
      parts.map(([name, value]) => pair(name, number(value))),
      pair("tokens", `${answer.tokens}${answer.finish === "length" ? ", cut off" : ""}`),
      answer.turns ? pair("turns", answer.turns) : null,
    ),
    h("pre", { tabindex: 0, role: "group", "aria-label": `Text of answer ${place}` }, answer.text),
    extras.length
      ? h(
          "dl",
          { class: "extras" },
          extras.map(([name, text]) => pair(name, text)),
        )
      : null,
  );
}

function pair(name, value, kind = "") {
  return h("div", {}, h("dt", {}, name), h("dd", { class: kind }, value));
}

function over(history, shown, run) {
  if (history.length < 2) return h("p", { class: "quiet" }, "This task is in the log once.");
  return h(
    "div",
    { class: "over" },
    h("h3", {}, `This task in ${history.length} steps`),
    h(
      "ol",
      {},
      history.map((group) =>
        h(
          "li",
          {},
          h(
            "a",
            {
              href: address("samples", run, { step: group.step, group: group.group }),
              "aria-current": group.step === shown.step && group.group === shown.group ? "true" : null,
            },
            h("span", {}, `step ${group.step}`),
            h(
              "span",
              { class: "marks" },
              group.outcomes.map((outcome) => h("span", { class: `mark ${outcome}`, title: outcome })),
            ),
          ),
        ),
      ),
    ),
  );
}
