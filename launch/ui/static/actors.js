// The figures of each of several actors in the last step, and the key that costs them the most time.

import { h, number, percent, put, table } from "./dom.js";

// `last`: a row of metrics.jsonl. A run with one actor has none of these figures.
export function drawActors(place, last) {
  const figures = byActor(last);
  if (!figures.size) {
    put(place);
    return;
  }
  const rows = [...figures].map(([name, { tokens_per_s, waiting, faults, version }]) => [
    name,
    number(tokens_per_s),
    percent(waiting),
    number(faults),
    number(version),
  ]);
  const limits = Object.entries(last).filter(([key, share]) => key.startsWith("limited/") && share !== null);
  put(
    place,
    h("h2", {}, "Actors"),
    table(["Actor", "Tokens per second", "Waiting", "Faults", "Version"], rows),
    limits.map(([key, share]) =>
      h("p", {}, `${key.slice("limited/".length)} costs the actors ${percent(share)} of their time.`),
    ),
  );
}

// From `actors/NAME/figure`. Those of an actor that has left are null.
function byActor(last) {
  const found = new Map();
  for (const [key, value] of Object.entries(last)) {
    if (!key.startsWith("actors/") || value === null) continue;
    const end = key.lastIndexOf("/"),
      name = key.slice("actors/".length, end);
    found.set(name, { ...found.get(name), [key.slice(end + 1)]: value });
  }
  return found;
}
