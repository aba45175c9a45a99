// Which charts a run has: a chart whose figures the run does not have is left out.

import { number, percent } from "./dom.js";

const line = (key, name) => ({ key, name });
const mb = (value) => (value >= 1024 ? `${number(value / 1024)} GB` : `${number(value)} MB`);
const s = (value) => `${number(value)} s`;
const nats = (value) => `${number(value)}`;

export function specs(found, curves) {
  addTrained(curves.keys);
  const keys = Object.keys(curves.keys);
  const named = (prefix, without) =>
    keys
      .filter((key) => key.startsWith(prefix) && !without.includes(key))
      .map((key) => line(key, key.slice(prefix.length)));
  const parts = named("reward/", ["reward/mean", "reward/std", "reward/min", "reward/max"]);
  return [
    { title: "Reward", hint: "Mean of all samples of a step", lines: [line("reward/mean", "mean")], one: true },
    {
      title: "Held-out accuracy",
      hint: "With 95 % intervals, by the steps that the policy was trained for",
      lines: [],
      format: percent,
      ...accuracy(found),
    },
    {
      title: "Outcomes",
      hint: "Shares of the samples of a step",
      kind: "stack",
      one: true,
      format: percent,
      lines: ["correct", "wrong", "truncated", "unparsable", "timeout", "error", "abstain"].map((name) =>
        line(`outcome/${name}`, name),
      ),
    },
    { title: "Parts of the reward", hint: "Each unweighted", lines: parts },
    { title: "Logged by reward functions", lines: named("logged/", []) },
    {
      title: "Groups",
      hint: "Groups whose scores are all equal are idle: nothing is learned from them",
      kind: "stack",
      lines: [
        line("groups/trained", "trained"),
        line("groups/alike", "idle"),
        line("groups/quarantined", "quarantined"),
      ],
    },
    {
      title: "Entropy",
      hint: "Nats a sampled token",
      lines: [line("entropy/mean", "mean")],
      zero: true,
      format: nats,
    },
    {
      title: "Mask",
      hint: "Share of sampled tokens that carried gradient",
      lines: [line("selected/fraction", "selected")],
      one: true,
      format: percent,
    },
    {
      title: "Ratio",
      hint: "Policy over the one at the step's start, and over the actor's",
      lines: [line("ratio/mean", "ratio"), line("importance/mean", "importance")],
    },
    {
      title: "Clipped",
      hint: "Share of tokens whose ratio, or whose weight, was cut off",
      lines: [line("clip/fraction", "ratio"), line("importance/capped", "weight"), line("stale/fraction", "stale")],
      zero: true,
      format: percent,
    },
    {
      title: "Mismatch",
      hint: "Difference of actor's and learner's log-probs, on a log scale",
      log: true,
      lines: [line("mismatch/p99", "p99"), line("mismatch/mean", "mean"), line("mismatch/max", "max")],
    },
    { title: "Length", hint: "Sampled tokens of a completion", lines: [line("length/mean", "mean")], zero: true },
    { title: "Gradient norm", hint: "Before it was scaled down", lines: [line("grad_norm", "norm")], zero: true },
    {
      title: "KL",
      hint: "Against reference, teacher and for penalised tokens",
      lines: [line("kl", "reference"), line("teacher/kl", "teacher"), line("constraint/kl", "constraint")],
    },
    { title: "Loss", lines: [line("loss", "loss")] },
    { title: "Learning rate", lines: [line("lr", "rate")], zero: true },
    { title: "Tokens per second", lines: [line("tokens_per_s", "tokens/s")], zero: true },
    {
      title: "Step time",
      hint: "Where the time of a step went; what several actors did at once counts once",
      kind: "stack",
      format: s,
      lines: stepTime(curves),
    },
    {
      title: "Energy of a step",
      hint: "Joules, as the hardware counted them",
      zero: true,
      lines: [line("energy/card_j", "card"), line("energy/cpu_j", "processor")],
    },
    {
      title: "Memory",
      hint: "Peaks; dashed: as predicted before the start",
      zero: true,
      format: mb,
      lines: [
        ...[line("mem/learner_mb", "learner"), line("mem/actor_mb", "actor")],
        ...keys.filter((key) => /^mem\/.*_(reserved|driver)$/.test(key)).map((key) => line(key, key.slice(4))),
      ],
      levels: predicted(found),
    },
  ];
}

// Groups that an update learned from: all but the idle and the quarantined ones. A refused step quarantines all its
// groups, the idle ones too. A point of several steps has means: there the share of idle groups is that of all its steps.
function addTrained(keys) {
  const [all, idle, quarantined] = ["total", "idle", "quarantined"].map((name) => keys[`groups/${name}`]?.mean);
  if (!all || !idle) return;
  const left = all.map((value, place) => (value === null ? null : Math.max(0, value - (quarantined?.[place] ?? 0))));
  const alike = all.map((value, place) => (value ? ((idle[place] ?? 0) * left[place]) / value : value));
  keys["groups/alike"] = { mean: alike };
  keys["groups/trained"] = { mean: left.map((value, place) => (value === null ? null : value - alike[place])) };
}

// A row has the sum over all actors, who score at once; they also decode at once, unless they take turns, and then all
// of it fits into the step. From time/idle_s the sums are taken off, so it is too small with several. As phase_seconds
// of launch/display/watch.py.
function stepTime({ keys, steps }) {
  const waiting = Object.keys(keys)
    .filter((key) => /^actors\/.*\/waiting$/.test(key))
    .map((key) => keys[key].mean);
  const phases = steps.map((_, place) => {
    const at = (name) => keys[`time/${name}_s`]?.mean[place] ?? 0;
    const count = Math.max(1, waiting.filter((mean) => mean[place] !== null && mean[place] < 1).length);
    const left = at("step") - at("update") - at("verify") / count;
    const inTurns = at("rollout") + at("swap");
    const atOnce = left > 0 ? Math.min(count, Math.max(1, inTurns / left)) : count;
    const idle = count > 1 ? Math.max(0, left - inTurns / atOnce) : at("idle");
    return { verify: at("verify") / count, rollout: at("rollout") / atOnce, swap: at("swap") / atOnce, idle };
  });
  const names = { rollout: "decoding", verify: "scoring", swap: "swap", update: "update", idle: "neither" };
  return Object.entries(names).map(([phase, name]) => {
    const sums = keys[`time/${phase}_s`]?.mean;
    const one = (value, place) => (value === null ? null : (phases[place][phase] ?? value));
    if (sums) keys[`phase/${phase}`] = { mean: sums.map(one) };
    return line(`phase/${phase}`, name);
  });
}

// Evaluation of the base, before the first update, is drawn at the first step.
function accuracy({ evaluations }) {
  const ways = [...new Set(evaluations.flatMap(({ ways }) => Object.keys(ways)))].slice(0, 2);
  const points = evaluations
    .filter(({ in_curve }) => in_curve)
    .flatMap((one) =>
      ways
        .map((way, kind) => one.ways[way] && { ...one.ways[way], kind, step: Math.max(1, one.step) })
        .filter(Boolean),
    );
  // The figures of metrics, `eval/greedy`, are in the row that came after, so they are not drawn.
  return { points, lines: ways.map((way) => line(`accuracy/${way}`, way)) };
}

function predicted({ predicted }) {
  return ["learner_mb", "actor_mb"]
    .filter((key) => predicted[key])
    .map((key) => ({ name: `${key} predicted`, value: predicted[key] }));
}
