// One answer, token by token, coloured by a figure. Special tokens and line ends are visible; what an environment
// wrote is folded; tokens without gradient have a dotted line. The arrow keys move from token to token, and the
// figures stand below.

import { choice, h, number, put } from "./dom.js";

const SHOWN = 20000;

// kind `amount`: the more, the darker. `sides`: above the middle one colour, below it another.
export const COLOURS = {
  entropy: { name: "entropy", kind: "amount", strength: (value) => value / 2, scale: "0 to 2 nats" },
  mask: { name: "mask", kind: "amount", strength: (value) => value / 2, scale: "coloured: carried gradient" },
  ratio: {
    name: "ratio",
    kind: "sides",
    strength: (value) => Math.log(Math.max(value, 1e-9)) / 0.2,
    scale: "0.8 to 1.2, learner over actor",
  },
  mismatch: {
    name: "mismatch",
    kind: "amount",
    strength: (value) => (Math.log10(Math.max(value, 1e-7)) + 7) / 7,
    scale: "1e-7 to 1, logarithmic",
  },
  advantage: {
    name: "advantage",
    kind: "sides",
    strength: (value) => value / 2,
    scale: "-2 to 2, 0 without gradient",
  },
  // Of the actor, or of the learner where no actor wrote the answer.
  actor: {
    name: "probability",
    otherwise: "learner",
    kind: "amount",
    strength: (value) => -value / 4,
    scale: "the less likely, the darker",
  },
};

export function drawTokens(place, tokens, answer, colour, act) {
  const values = tokens.values[colour] ?? tokens.values[COLOURS[colour].otherwise],
    figures = h("output", { class: "figures", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
  const text = h("div", { class: "text", tabindex: 0, role: "group", "aria-label": "Tokens of the answer" });
  const marks = tokens.pieces.slice(0, SHOWN).map((piece, at) => token(piece, at, tokens, COLOURS[colour], values));
  text.append(...(tokens.turns.length ? folded(marks, tokens.turns) : marks));
  const show = (mark) => {
    text.querySelector(".here")?.classList.remove("here");
    mark?.classList.add("here");
    if (mark) figures.textContent = words(tokens, Number(mark.dataset.at));
  };
  text.addEventListener("pointerover", (event) => event.target.dataset.at && show(event.target));
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const here = text.querySelector(".here"),
      at = here ? Number(here.dataset.at) + by : 0;
    show(marks[Math.max(0, Math.min(marks.length - 1, at))]);
    event.preventDefault();
  });
  put(
    place,
    h(
      "div",
      { class: "bar" },
      h("h2", {}, `Answer ${tokens.sample}`),
      choice(
        "Colour",
        Object.entries(COLOURS).map(([value, { name }]) => [value, name]),
        colour,
        act,
      ),
      h("span", { class: "quiet" }, values ? COLOURS[colour].scale : "this figure was not measured for this answer"),
      h(
        "span",
        { class: "quiet" },
        `${tokens.pieces.length} tokens${tokens.pieces.length > SHOWN ? `, the first ${SHOWN} are shown` : ""}`,
      ),
    ),
    text,
    figures,
  );
}

function token(piece, at, tokens, { kind, strength }, values) {
  const value = values?.[at],
    amount = value === null || value === undefined ? 0 : strength(value);
  const pale = tokens.values.mask && !tokens.values.mask[at];
  const special = /^<[|/]?[^\s<>]+[|]?>$/.test(piece) || piece === "";
  const side = kind === "sides" ? (amount < 0 ? "down" : "up") : "amount";
  const size = Math.min(1, Math.abs(Number.isFinite(amount) ? amount : 1));
  return h(
    "span",
    {
      class: `t ${side} ${pale ? "pale" : ""} ${special ? "special" : ""}`,
      data: { at },
      vars: size > 0.01 ? { "--a": (0.45 * size).toFixed(3) } : {},
    },
    visible(piece),
  );
}

function visible(piece) {
  if (piece === "") return "\u2205";
  return piece.replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u2192\t");
}

// The model's own turns are open, what an environment put between them is closed.
function folded(marks, turns) {
  let at = 0;
  return turns.map(({ sampled, tokens }, place) => {
    const own = marks.slice(at, at + tokens);
    at += tokens;
    return h(
      "details",
      { class: sampled ? "own" : "environment", open: sampled },
      h("summary", {}, `${sampled ? "model" : "environment"}, turn ${place + 1}, ${tokens} tokens`),
      own,
    );
  });
}

// Whether an environment put this token there.
function given(turns, at) {
  let end = 0;
  const turn = turns.find(({ tokens }) => at < (end += tokens));
  return Boolean(turn && !turn.sampled);
}

function words(tokens, at) {
  const v = (name) => tokens.values[name]?.[at];
  const known = (name, text) => (v(name) === null || v(name) === undefined ? null : text(v(name)));
  return [
    `token ${at}: ${JSON.stringify(tokens.pieces[at])} (${tokens.ids[at]})`,
    given(tokens.turns, at) ? "not sampled" : null,
    known("actor", (value) => `p ${number(Math.exp(value))} actor`),
    known("learner", (value) => `${tokens.values.actor ? "" : "p "}${number(Math.exp(value))} learner`),
    known("entropy", (value) => `entropy ${number(value)}`),
    known("mask", (value) => (value ? "carried gradient" : "masked")),
    known("ratio", (value) => `ratio ${number(value, 5)}`),
    known("mismatch", (value) => `mismatch ${number(value)}`),
    known("advantage", (value) => `advantage ${number(value)}`),
  ]
    .filter(Boolean)
    .join(" \u00b7 ");
}
