// Questions to the process behind this page, or to the files beside it. Names and texts are encoded; every answer of a
// process is JSON.

import { answer as fromFiles, bundle } from "./files.js";

export class Problem extends Error {}

// What went wrong, for a person.
export function messageOf(error) {
  if (error instanceof Problem) return error.message;
  if (error instanceof TypeError && !error.message.includes("fetch")) console.error(error);
  if (bundle) return `This page lacks a file: ${error.message}.`;
  return "The process behind this page does not answer.";
}

export async function ask(path, query = {}, signal = undefined) {
  if (bundle) return told(await fromFiles(path, query));
  const pairs = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return read(await fetch(`/api/${path}?${new URLSearchParams(pairs)}`, { signal, credentials: "same-origin" }));
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
    return answer.ok ? content : told(content);
  }
  throw new Problem((await answer.text()).slice(0, 300));
}

function told(content) {
  if (content.problem) throw new Problem(content.problem);
  return content;
}
