// Asks the server for an answer and reads its stream.
"use strict";

const CHAT = "v1/chat/completions";
const ANSWERING = { stream: true, stream_options: { include_usage: true, include_drafted: true } };

/** Why there is no (whole) answer. `kind`: key, busy, loading, offline, context, refused or server. */
class Problem extends Error {
  constructor(kind, detail = "", waitS = 1) {
    super(detail);
    this.kind = kind;
    this.waitS = waitS;
  }
}

/** Server-sent events out of bytes, however these are cut. */
class EventReader {
  #decoder = new TextDecoder();
  #rest = "";
  #name = "";
  #data = [];

  /** The events that are complete with these bytes, as {name, data}. */
  feed(bytes) {
    const events = [];
    this.#rest += this.#decoder.decode(bytes, { stream: true });
    const line = /([^\r\n]*)(\r\n|\n|\r(?=[^]))/y; // a final \r may be half of a line end
    let used = 0;
    for (let found; (found = line.exec(this.#rest)); used = line.lastIndex) this.#take(found[1], events);
    this.#rest = this.#rest.slice(used);
    return events;
  }

  #take(line, events) {
    if (!line) {
      if (this.#data.length) events.push({ name: this.#name, data: this.#data.join("\n") });
      this.#name = "";
      this.#data = [];
      return;
    }
    const [, field, value] = /^([^:]*)(?:: ?)?(.*)$/s.exec(line);
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#name = value;
  }
}

/** The chunks of an answer as they come. Throws `Problem`; ends quietly when `signal` says so. */
async function* chunksOf(request, { signal, key }) {
  const response = await fetched(request, { signal, key });
  if (!response.ok) throw await problemOf(response);
  const events = new EventReader();
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read().catch(() => offline(signal));
    if (done) break;
    for (const event of events.feed(value)) {
      if (event.data === "[DONE]") return;
      const document = JSON.parse(event.data);
      if (event.name === "error" || document.error) throw new Problem("server", document.error?.message);
      yield document;
    }
  }
  throw new Problem("offline");
}

async function fetched(request, { signal, key }) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const body = JSON.stringify({ ...request, ...ANSWERING });
  return fetch(CHAT, { method: "POST", headers, body, signal }).catch(() => offline(signal));
}

function offline(signal) {
  signal.throwIfAborted();
  throw new Problem("offline");
}

async function problemOf(response) {
  const error = (await response.json().catch(() => ({}))).error ?? {};
  const detail = error.message ?? `${response.status} ${response.statusText}`;
  const waitS = Math.max(1, Number(response.headers.get("Retry-After")) || 1);
  if (response.status === 401) return new Problem("key", detail);
  if (response.status === 429) return new Problem("busy", detail, waitS);
  if (response.status === 503) return new Problem("loading", detail, waitS);
  if (error.code === "context_length_exceeded") return new Problem("context", detail);
  return new Problem(response.status < 500 ? "refused" : "server", detail);
}

/** Whether the server takes requests. */
async function isReady() {
  const response = await fetch("health/ready").catch(() => null);
  return response?.ok ?? false;
}
