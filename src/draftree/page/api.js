// What the page asks the server.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Api {
  constructor(key) {
    this.key = key; // a function: it may change
    this.about = null;
  }

  async _fetch(path, options = {}) {
    const headers = { "Content-Type": "application/json" };
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server does not answer: is it running?", 0);
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    throw new ServerError(explained(response.status, body?.error?.message ?? response.statusText), response.status);
  }

  /** What is served; kept until the next call, unless that fails. */
  async load() {
    try {
      this.about = await (await this._fetch("/draftree/about")).json();
    } catch (error) {
      this.about = null;
      throw error;
    }
    return this.about;
  }

  /** Streams a chat: gives {thought, content} for each token, {finish} beside what was held back, {records} and {error}, as they come. */
  async *chat(body, signal) {
    const asked = { ...body, stream: true, stream_options: { include_trace: true } };
    const response = await this._fetch("/v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal });
    for await (const event of events(response.body)) {
      if (event.error) yield { error: event.error.message };
      if (event.trace) yield { records: event.trace };
      for (const { delta, finish_reason: finish } of event.choices ?? []) {
        if (delta.role === undefined) yield { thought: delta.reasoning_content ?? "", content: delta.content ?? "", finish };
      }
    }
  }
}

function explained(status, message) {
  if (status === 401) return "The server wants a key, and this is none of its keys: type one under Settings.";
  if (status === 429) return "The server has too much to do and takes no more requests now: try again in a moment.";
  if (status === 503) return "The server has ended its work: start it again.";
  return `The server cannot do this: ${message}`;
}

/** The JSON of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ServerError("The connection to the server broke: what came is kept.", 0);
    });
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
