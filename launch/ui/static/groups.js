// The groups of a step: in which order, which ones the filters let through, and the filters: the bars of a histogram
// of the rewards, outcomes, and what became of a group.

import { h, number, pill, put, short } from "./dom.js";

const most = (values) => Math.max(...values);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
const BARS = 12,
  FEW = 8;

export const SORTS = {
  variance: { name: "variance", key: (group) => -group.spread },
  untrained: { name: "not trained on first", key: (group) => (group.fate === "trained" ? 1 : 0) },
  length: { name: "longest", key: (group) => -most(group.lengths) },
  reward: { name: "highest reward", key: (group, fit) => -most(fit.map((place) => group.rewards[place])) },
  low: { name: "lowest reward", key: (group) => mean(group.rewards) },
  order: { name: "as sampled", key: (group) => group.group },
};

export function matches(group, place, { outcome, fate, reward }) {
  if (outcome && group.outcomes[place] !== outcome) return false;
  if (fate === "stale" ? !group.stale : fate && group.fate !== fate) return false;
  if (!reward) return true;
  const [low, high] = reward.split("_").map(Number);
  return group.rewards[place] >= low && group.rewards[place] <= high;
}

export function sorted(groups, sort, query) {
  const kept = groups
    .map((group) => ({
      group,
      fit: group.rewards.map((_, place) => place).filter((place) => matches(group, place, query)),
    }))
    .filter(({ fit }) => fit.length);
  const { key } = SORTS[sort];
  return kept
    .sort((a, b) => key(a.group, a.fit) - key(b.group, b.fit) || a.group.group - b.group.group)
    .map(({ group, fit }) => ({ ...group, fit }));
}

export function drawList(list, shown, chosen, to) {
  const focused = list.contains(document.activeElement);
  put(
    list,
    shown.map((group) =>
      h(
        "li",
        {},
        h(
          "a",
          {
            href: to(group.group),
            "aria-current": group.group === chosen ? "true" : null,
            class: `one ${group.fate}`,
          },
          h("span", { class: "task" }, short(group.prompt, 400)),
          h(
            "span",
            { class: "marks" },
            group.outcomes.map((outcome, place) =>
              h("span", {
                class: `mark ${outcome} ${group.fit.includes(place) ? "" : "dim"}`,
                title: `answer ${place}: ${outcome}, reward ${number(group.rewards[place])}`,
              }),
            ),
          ),
          h("span", { class: "figures" }, `reward ${number(mean(group.rewards))}`, ` \u00b1 ${number(group.spread)}`),
          group.fate === "trained" ? null : pill(group.fate),
          group.stale ? pill(`${group.stale} stale`, "stale") : null,
        ),
      ),
    ),
  );
  if (focused) list.querySelector("[aria-current]")?.focus();
}

export function drawFilters(place, groups, query, act) {
  const samples = groups.flatMap((group) =>
    group.rewards.map((reward, place) => ({ reward, outcome: group.outcomes[place] })),
  );
  put(
    place,
    histogram(
      samples.map(({ reward }) => reward),
      query,
      act,
    ),
    chips("Outcome", counted(samples.map(({ outcome }) => outcome)), query.outcome, (outcome) => act({ outcome })),
    chips(
      "Groups",
      counted([...groups.map(({ fate }) => fate), ...groups.filter(({ stale }) => stale).map(() => "stale")]),
      query.fate,
      (fate) => act({ fate }),
    ),
  );
}

function counted(names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) || 0) + 1);
  return [...counts];
}

function chips(title, counts, chosen, act) {
  return h(
    "div",
    { class: "chips", role: "group", "aria-label": title },
    counts.map(([name, count]) =>
      h(
        "button",
        {
          type: "button",
          class: `chip ${name}`,
          "aria-pressed": String(name === chosen),
          on: { click: () => act(name === chosen ? "" : name) },
        },
        `${name} ${count}`,
      ),
    ),
  );
}

// One bar for each reward if there are few, else equal parts of their range.
function histogram(rewards, query, act) {
  const values = [...new Set(rewards)].sort((a, b) => a - b);
  const low = values[0],
    width = (values.at(-1) - low) / BARS;
  const edges =
    values.length <= FEW
      ? values.map((value) => [value, value])
      : Array.from({ length: BARS }, (_, bar) => [
          low + bar * width,
          bar === BARS - 1 ? values.at(-1) : low + (bar + 1) * width,
        ]);
  const inside = ([from, to], bar) =>
    rewards.filter(
      (reward) => reward >= from && reward <= to && (from === to || bar === edges.length - 1 || reward < to),
    ).length;
  const counts = edges.map(inside),
    highest = most(counts);
  return h(
    "div",
    { class: "histogram", role: "group", "aria-label": "Rewards of the step; a bar filters" },
    edges.map(([from, to], bar) => {
      const key = `${from}_${to}`,
        name = from === to ? number(from) : `${number(from)} to ${number(to)}`;
      return h(
        "button",
        {
          type: "button",
          "aria-pressed": String(key === query.reward),
          title: `${counts[bar]} answers with reward ${name}`,
          "aria-label": `${counts[bar]} answers with reward ${name}`,
          on: { click: () => act({ reward: key === query.reward ? "" : key }) },
        },
        h("span", { class: "height", vars: { height: `${(100 * counts[bar]) / highest}%` } }),
        h("span", { class: "value" }, number(from, 2)),
      );
    }),
  );
}
