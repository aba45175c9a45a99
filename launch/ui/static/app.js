// The frame around the pages: which page the address names, now and then the question what is new, and the keys.
//
// A page is a module with `show(root, route)`. It returns `{ update(route), poll(), keys }`: `update` if the
// address changed and the page is still right, `poll` for what is new, `keys` from a key to what it does.

import { messageOf } from "./api.js";
import { address, parse } from "./address.js";
import { h, put } from "./dom.js";
import { bundle } from "./files.js";
import * as chat from "./chat.js";
import * as compare from "./compare.js";
import * as evaluate from "./evaluate.js";
import * as monitor from "./monitor.js";
import * as runs from "./runs.js";
import * as samples from "./samples.js";
import * as train from "./train.js";

// A page that was written as files has some of them.
const PAGES = { runs, monitor, samples, compare, evaluate, chat, train };
const HOME = bundle ? address("samples", bundle.run) : "#/runs";
const EVERY_MS = 1500;
const main = document.getElementById("page");
const wrong = h("p", { class: "problem", role: "alert", hidden: true });
let route = null;
let shown = null;
let turn = 0;

async function follow() {
  const before = route;
  route = parse(location.hash);
  if (!PAGES[route.page]) route = parse(HOME);
  document.title = route.run ? `${route.run} - ${route.page} - Tandem` : `${route.page} - Tandem`;
  tabs();
  const mine = ++turn;
  if (shown && before.page === route.page && before.run === route.run) {
    await guarded(mine, () => shown.update?.(route));
    return;
  }
  shown = null;
  const root = h("div", { class: `page ${route.page}` });
  await guarded(mine, async () => {
    const made = await PAGES[route.page].show(root, route);
    if (mine !== turn) return;
    shown = made;
    put(main, wrong, root);
    if (shown.update) await shown.update(route);
  });
}

// An answer that says what is wrong is shown as it is; a page that could not even begin has a way out. What became of
// an address that has been left is of no interest: it may end after what the newest one shows.
async function guarded(mine, act) {
  try {
    await act();
    if (mine === turn) wrong.hidden = true;
  } catch (error) {
    if (mine !== turn) return;
    wrong.textContent = messageOf(error);
    wrong.hidden = false;
    if (shown) return;
    const out = h("p", {}, h("a", { href: "#/runs" }, "All runs"));
    put(main, wrong, h("div", { class: "page" }, h("h1", {}, "This cannot be shown"), out));
  }
}

async function tick() {
  let pause = EVERY_MS;
  if (!document.hidden && shown?.poll) {
    const current = shown;
    try {
      const text = await current.poll();
      if (current === shown) say(text || "", "live");
    } catch (error) {
      say(messageOf(error), "fault");
      pause = 3 * EVERY_MS;
    }
  }
  setTimeout(tick, pause);
}

function say(text, kind) {
  const live = document.getElementById("live");
  if (live.textContent !== text) live.textContent = text;
  live.className = kind;
}

function tabs() {
  const run = route.run,
    of = run ? ["monitor", "samples", "evaluate", "chat"] : [];
  const tab = (page, to, caption) =>
    PAGES[page] && h("a", { href: to, "aria-current": page === route.page ? "page" : null }, caption);
  put(
    document.getElementById("tabs"),
    tab("runs", "#/runs", "Runs"),
    of.map((page) => tab(page, address(page, run), page[0].toUpperCase() + page.slice(1))),
    tab("compare", address("compare", "", run ? { runs: run } : {}), "Compare"),
    tab("train", "#/train", "Train"),
  );
}

const EVERYWHERE = [
  ["?", "these keys"],
  ["g r", "all runs"],
  ["Esc", "close, or clear the choice"],
];

function help() {
  const dialog = document.getElementById("help");
  const rows = [...(shown?.help || []), ...EVERYWHERE].map(([key, what]) =>
    h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, what)),
  );
  put(
    dialog,
    h("h2", { id: "help-title" }, "Keys"),
    h("table", { class: "plain" }, h("tbody", {}, rows)),
    h("button", { type: "button", on: { click: () => dialog.close() } }, "Close"),
  );
  dialog.showModal();
}

let last = "";
function key(event) {
  const typing = event.target.matches("input, textarea, select") || document.getElementById("help").open;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && event.target.matches("input, textarea")) event.target.blur();
  if (typing) return;
  if (event.key === "?") help();
  else if (last === "g" && event.key === "r") location.hash = "#/runs";
  else if (shown?.keys?.[event.key]) shown.keys[event.key](event);
  else {
    last = event.key;
    return;
  }
  last = "";
  event.preventDefault();
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.getElementById("keys").addEventListener("click", help);
document.addEventListener("keydown", key);
window.addEventListener("hashchange", follow);
follow().then(tick);
