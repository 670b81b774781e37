// Records of a trace (docs/traces.md) as answers, and the figures of an answer. Knows no page and no server.

const FORMAT = "draftree-trace";
const VERSION = 4;
const COLOURS = 5;

/** One request: what decoded it and its steps; of one that streams, the texts of its tokens too. */
export class Answer {
  constructor(run = null) {
    this.run = run;
    this.streams = run === null; // else it is of a file
    this.request = null;
    this.steps = [];
    this.end = null;
    this.tokens = []; // {id, step: index into steps or null, source}
    this.texts = []; // of the tokens, those of thoughts too
    this.content = ""; // without thoughts
    this._spelled = new Map(); // token id -> its text alone
  }

  add(record) {
    for (const [id, text] of Object.entries(record.texts ?? {})) this._spelled.set(Number(id), text);
    if (record.kind === "run") this.run = record;
    else if (record.kind === "request") {
      this.request = record;
      this.tokens.push({ id: record.first, step: null, source: "target" });
    } else if (record.kind === "step") {
      const step = this.steps.push(record) - 1;
      record.tokens.slice(0, record.taken).forEach((id, i) => {
        this.tokens.push({ id, step, source: i < record.path.length ? record.tree.part : "target" });
      });
    } else if (record.kind === "end") this.end = record;
  }

  /** Takes what the next token says; at the `finish` comes what was held back of the last one. */
  say({ thought, content, finish }) {
    const at = this.texts.length - (finish ? 1 : 0);
    if (at >= 0) this.texts[at] = (this.texts[at] ?? "") + thought + content;
    this.content += content;
  }

  /** All that it says, thoughts too. */
  get text() {
    return this.texts.join("");
  }

  get drafter() {
    return this.request?.drafter ?? this.run?.labels.drafter ?? "drafter";
  }

  /** What it is of, in a line. */
  get about() {
    const nodes = this.request.nodes ?? this.run.nodes;
    return `${this.run.target.name}, drafted for by ${this.drafter}, at most ${nodes} nodes a tree`;
  }

  /** The text of a token; its number where the trace has none. */
  spell(id) {
    return this._spelled.get(id) ?? `#${id} `;
  }

  /** The name of a source: the target, or a number among the parts of an ensemble. */
  nameOf(source) {
    if (source === "target") return "the target itself";
    return this.drafter.includes(">") ? this.drafter : (this.drafter.split("+")[source] ?? `part ${source + 1}`);
  }

  /** Sources of the tokens, with how many each gave, the target first. */
  get counts() {
    const drafters = new Map([["target", 0]]);
    for (const { source } of this.tokens) drafters.set(source, (drafters.get(source) ?? 0) + 1);
    return drafters;
  }

  /** Seconds of the answer by phase. */
  get seconds() {
    const total = { prefill: this.request?.prefill ?? 0, draft: 0, verify: 0, other: 0 };
    for (const { seconds } of this.steps) {
      total.draft += seconds.draft;
      total.verify += seconds.verify;
      total.other += seconds.other;
    }
    return total;
  }

  /** Tokens a second of decoding, the prompt's reading left out; null before the first step. */
  get rate() {
    const { draft, verify, other } = this.seconds;
    const gained = this.steps.reduce((sum, step) => sum + step.taken, 0);
    return gained ? gained / (draft + verify + other) : null;
  }

  /** The number of the last step that drafted; of the last one, where none did. */
  get latest() {
    const last = this.steps.findLastIndex(({ tree }) => tree.tokens.length);
    return last < 0 ? this.steps.length - 1 : last;
  }

  /** Tokens gained a pass of the target; null before the first step. */
  get gained() {
    return this.steps.length ? (this.tokens.length - 1) / this.steps.length : null;
  }

  /** For each depth from 1: steps whose tree was so deep, nodes there, and how many were accepted. */
  get depths() {
    const depths = [];
    for (const { tree, path, taken } of this.steps) {
      const nodes = [];
      for (const depth of tree.depths) nodes[depth - 1] = (nodes[depth - 1] ?? 0) + 1;
      nodes.forEach((count, d) => {
        depths[d] ??= { steps: 0, nodes: 0, accepted: 0 };
        depths[d].steps += 1;
        depths[d].nodes += count;
        depths[d].accepted += d < Math.min(path.length, taken);
      });
    }
    return depths;
  }
}

/** The class that colours a source. */
export function classOf(source) {
  return source === "target" ? "target" : `s${source % COLOURS}`;
}

/** Probability of a node: given its parent, and of the path down to it. JSON has -Infinity as text. */
export function probabilities(tree) {
  const paths = tree.path_logprobs.map(Number);
  return paths.map((path, i) => {
    const above = tree.parents[i] < 0 ? 0 : paths[tree.parents[i]];
    return { own: Math.exp(path - above) || 0, path: Math.exp(path) };
  });
}

/** What became of each node: "accepted", "rejected", or "unjudged" where the target saw no use of its parent. */
export function fates(step) {
  const path = new Set(step.path);
  return step.tree.parents.map((parent, node) => {
    if (path.has(node)) return "accepted";
    return parent < 0 || path.has(parent) ? "rejected" : "unjudged";
  });
}

/** The requests of a trace file, by number. Throws where it is none. */
export function readTrace(text) {
  const lines = text.split("\n");
  const torn = lines.pop(); // empty where the last line is whole
  const answers = new Map();
  let run = null;
  lines.forEach((line, i) => {
    const record = parsed(line);
    if (i === 0) {
      if (record?.kind !== "run" || record.format !== FORMAT) throw new Error("this is not a draftree trace: open a file that --trace wrote");
      if (record.version !== VERSION) throw new Error(`this is a trace of version ${record.version} and this page reads ${VERSION}: record it again`);
      run = record;
    } else if (record?.kind === "request") answers.set(record.request, new Answer(run));
    else if (!answers.has(record?.request)) throw new Error(`line ${i + 1} is no line of a trace: record it again`);
    if (i) answers.get(record.request).add(record);
  });
  if (!run) throw new Error(torn ? "this is not a draftree trace: open a file that --trace wrote" : "the file is empty: open one that --trace wrote");
  if (!answers.size) throw new Error("the trace has no request yet");
  return answers;
}

function parsed(line) {
  try {
    return JSON.parse(line);
  } catch {
    return null;
  }
}
