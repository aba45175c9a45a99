// Where time and energy of all steps went, and what one point of reward took of them.

import { h, number, put } from "./dom.js";

const ENERGY = { card: "energy of the card", cpu: "energy of the processor" };

export function drawSpent(place, spent) {
  const { points, seconds, seconds_per_point, joules, joules_per_point, unread } = spent;
  if (!Object.keys(seconds).length) {
    put(place);
    return;
  }
  const row = (name, whole, each) =>
    h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, whole), h("td", {}, each));
  const amount = (value, unit) => (value === undefined ? "" : `${number(value)} ${unit}`);
  const gained =
    points === null
      ? "No point of reward: the last five steps are not above the first five, or there are fewer than ten."
      : `${number(points)} points of reward: hundredths of its mean, the last five steps against the first five.`;
  put(
    place,
    h("h2", {}, "Time and energy"),
    h("p", { class: "quiet" }, gained),
    h(
      "table",
      { class: "plain" },
      h(
        "thead",
        {},
        h("tr", {}, h("td", {}), h("th", { scope: "col" }, "of all steps"), h("th", { scope: "col" }, "for a point")),
      ),
      h(
        "tbody",
        {},
        Object.entries(seconds).map(([part, whole]) =>
          row(part, amount(whole, "s"), amount(seconds_per_point[part], "s")),
        ),
        Object.entries(ENERGY).map(([source, name]) => {
          if (source in joules) return row(name, amount(joules[source], "J"), amount(joules_per_point[source], "J"));
          return source in unread ? row(name, unread[source], "") : null;
        }),
      ),
    ),
  );
}
