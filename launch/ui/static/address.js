// What the address says: `#/samples/first?step=3&group=0` is the page `samples` of the run `first`. Whatever a page
// shows is in its address, so that it can be kept, sent and reloaded, and "back" goes back.

export function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?", 2);
  const [page, run] = path.split("/", 2).map(decoded);
  return { page: page || "runs", run: run || "", query: Object.fromEntries(new URLSearchParams(query || "")) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function address(page, run = "", query = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const tail = pairs.length ? `?${new URLSearchParams(pairs)}` : "";
  return `#/${page}${run ? `/${encodeURIComponent(run)}` : ""}${tail}`;
}

// `replace` leaves no entry behind: for a value that changes with every key.
export function go(page, run, query, { replace = false } = {}) {
  const to = address(page, run, query);
  if (to === location.hash) return;
  if (replace) {
    history.replaceState(null, "", to);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = to;
  }
}
