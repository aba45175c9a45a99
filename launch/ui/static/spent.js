// Where time and energy of all steps went, and what one point of reward took of them.

import { h, number, put, table } from "./dom.js";

const ENERGY = { card: "energy of the card", cpu: "energy of the processor" };

export function drawSpent(place, spent) {
  const { points, seconds, seconds_per_point, joules, joules_per_point, unread } = spent;
  if (!Object.keys(seconds).length) {
    put(place);
    return;
  }
  const amount = (value, unit) => (value === undefined ? "" : `${number(value)} ${unit}`);
  const gained =
    points === null
      ? "No point of reward: the last five steps are not above the first five, or there are fewer than ten."
      : `${number(points)} points of reward: hundredths of its mean, the last five steps against the first five.`;
  const times = Object.entries(seconds).map(([part, whole]) => [
    part,
    amount(whole, "s"),
    amount(seconds_per_point[part], "s"),
  ]);
  const energies = Object.entries(ENERGY)
    .filter(([source]) => source in joules || source in unread)
    .map(([source, name]) =>
      source in joules
        ? [name, amount(joules[source], "J"), amount(joules_per_point[source], "J")]
        : [name, unread[source], ""],
    );
  put(
    place,
    h("h2", {}, "Time and energy"),
    h("p", { class: "quiet" }, gained),
    table(["", "of all steps", "for a point"], [...times, ...energies]),
  );
}
