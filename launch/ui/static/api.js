// Questions to the process behind this page. Names and texts are encoded; every answer is JSON.

export class Problem extends Error {}

// What went wrong, for a person.
export function said(error) {
  if (error instanceof Problem) return error.message;
  if (error instanceof TypeError && !error.message.includes("fetch")) console.error(error);
  return "The process behind this page does not answer.";
}

export async function ask(path, query = {}, signal = undefined) {
  const words = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const answer = await fetch(`/api/${path}?${new URLSearchParams(words)}`, { signal, credentials: "same-origin" });
  return read(answer);
}

export async function tell(path, body = {}) {
  const headers = { "content-type": "application/json" };
  return read(await fetch(`/api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

export function of(run, ...parts) {
  return ["runs", run, ...parts].map((part) => encodeURIComponent(part)).join("/");
}

async function read(answer) {
  if ((answer.headers.get("content-type") || "").startsWith("application/json")) {
    const content = await answer.json();
    if (answer.ok) return content;
    throw new Problem(content.problem);
  }
  throw new Problem((await answer.text()).slice(0, 300));
}
