// What the page shows of an answer: its tokens, and the panels of a step.

import { costChart, depthBars, make, milliseconds, phaseBar, seen, tableOf, timeline, treeOf } from "./charts.js";
import { classOf } from "./trace.js";

const SPELLED = 12; // tokens of a prompt that name a request of a trace

/** An answer as tokens that can be walked by arrow keys and opened by Enter or a click. */
export class AnswerView {
  constructor(title, answer, opened) {
    this.answer = answer;
    this._opened = opened; // called with this view and the number of a step
    this._shown = []; // class and text of each token that is there
    this._figures = make("p", { class: "figures" });
    this._legend = make("ul", { class: "legend", "aria-label": "Who proposed the tokens" });
    this.tokens = make("div", { class: "tokens", role: "listbox", "aria-label": `${title}, token by token`, tabindex: "0" });
    this.element = make("div", { class: "answer" }, make("h3", {}, title), this._figures, this.tokens, this._legend);
    this.tokens.addEventListener("click", (event) => this._open(event.target));
    this.tokens.addEventListener("keydown", (event) => this._walk(event));
    this.tokens.addEventListener("focus", () => this._spans[0]?.focus());
  }

  get _spans() {
    return this.tokens.children;
  }

  /** Shows what the answer has by now. */
  update() {
    const { tokens, texts, streams } = this.answer;
    const count = (streams ? texts : tokens).length;
    for (let i = 0; i < count; i++) {
      const token = tokens[i];
      const kind = token ? classOf(token.source) : "";
      const text = streams ? texts[i] : this.answer.spell(token.id);
      if (this._shown[i] === `${kind} ${text}`) continue;
      const span = this._spans[i] ?? this.tokens.appendChild(make("span", { role: "option", tabindex: "-1", "aria-selected": "false" }));
      span.className = `token ${kind}`;
      span.textContent = text;
      const by = token ? `, by ${this.answer.nameOf(token.source)}${token.step === null ? ", after the prompt" : `, step ${token.step + 1}`}` : "";
      span.setAttribute("aria-label", `${seen(text)}${by}`);
      span.title = span.getAttribute("aria-label");
      this._shown[i] = `${kind} ${text}`;
    }
    if (this._shown.length) this.tokens.removeAttribute("tabindex");
    if (this._shown.length && !this.tokens.querySelector('[tabindex="0"]')) this._spans[0].tabIndex = 0;
    const { rate, gained, counts } = this.answer;
    this._figures.textContent =
      rate === null ? "" : `${tokens.length} tokens, ${rate.toFixed(1)} a second, ${gained.toFixed(2)} a pass of the target`;
    this._legend.replaceChildren(
      ...[...counts].map(([source, times]) => make("li", {}, make("span", { class: `key ${classOf(source)}` }, this.answer.nameOf(source)), ` ${times}`)),
    );
  }

  /** Marks the tokens of a step. */
  mark(step) {
    this.answer.tokens.forEach((token, i) => {
      const here = step !== null && token.step === step;
      this._spans[i]?.classList.toggle("open", here);
      this._spans[i]?.setAttribute("aria-selected", String(here));
    });
  }

  _open(span) {
    const token = this.answer.tokens[[...this._spans].indexOf(span)];
    if (!token || !this.answer.steps.length) return;
    this._reach(span);
    this._opened(this, token.step ?? 0);
  }

  _walk(event) {
    const spans = [...this._spans];
    const at = spans.indexOf(document.activeElement);
    const moves = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: spans.length - 1 };
    if (event.key in moves) this._reach(spans[Math.max(0, Math.min(spans.length - 1, moves[event.key]))]);
    else if (event.key === "Enter" || event.key === " ") this._open(document.activeElement);
    else return;
    event.preventDefault();
  }

  /** The only token that Tab finds is the one that was reached last. */
  _reach(span) {
    for (const other of this.tokens.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    span.tabIndex = 0;
    span.focus();
  }
}

/** The requests of a trace file as elements: a choice of them, and the chosen one's answer; the panels follow it. */
export function traceView(answers, panels, opened = (view, step) => panels.open(view, step)) {
  const select = make("select", { "aria-label": "Request of the trace" });
  const place = make("div", { class: "answers" });
  for (const [number, answer] of answers) {
    const end = seen(answer.request.prompt.slice(-SPELLED).map((id) => answer.spell(id)).join(""), 40);
    select.append(make("option", { value: number }, `request ${number}: ${answer.tokens.length} tokens, ${answer.steps.length} steps, behind “${end}”`));
  }
  const show = () => {
    const view = new AnswerView(`Request ${select.value}`, answers.get(Number(select.value)), opened);
    place.replaceChildren(view.element);
    view.update();
    panels.follow(view);
  };
  select.addEventListener("change", show);
  show();
  return [select, place];
}

/** The panels beside the answers, of one view and one of its steps. */
export class Panels {
  /** `section` gets them; `about` returns what is known of the server, or null. */
  constructor(section, about) {
    this._about = about;
    this._view = null;
    this._step = null;
    this._pinned = false; // a step was opened, and new ones do not take its place
    this._due = false;
    this._title = make("h2", {}, "Step");
    this._title.id = "step-title";
    this._previous = make("button", { type: "button", id: "previous", "aria-label": "Previous step" }, "◀");
    this._next = make("button", { type: "button", id: "next", "aria-label": "Next step" }, "▶");
    this._places = {};
    const place = (id) => (this._places[id] = make("div", { id }));
    const head = make("div", { class: "row" }, this._title, make("span", { class: "push" }), this._previous, this._next);
    section.append(make("article", { "aria-labelledby": "step-title" }, head, place("step")));
    for (const [id, title] of Object.entries({ steps: "Steps in time", depth: "Acceptance by depth", phases: "Seconds by phase", cost: "Cost of a pass" })) {
      section.append(make("article", { "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), place(id)));
    }
    addEventListener("resize", () => this.refresh());
    this._previous.addEventListener("click", () => this._go(-1));
    this._next.addEventListener("click", () => this._go(1));
    this.clear();
  }

  /** Follows an answer that comes: its last step is shown until one is opened. */
  follow(view) {
    this._view?.mark(null);
    [this._view, this._step, this._pinned] = [view, null, false];
    this.refresh();
  }

  open(view, step) {
    if (this._view !== view) this._view?.mark(null);
    [this._view, this._step, this._pinned] = [view, step, true];
    this.refresh();
  }

  /** Opens the step so many behind the open one, if there is one: a button may be clicked before its step is drawn. */
  _go(by) {
    if (this._step !== null && this._step + by in this._view.answer.steps) this.open(this._view, this._step + by);
  }

  clear() {
    [this._view, this._step] = [null, null];
    this._places.phases.replaceChildren();
    this._places.depth.replaceChildren();
    this._drawNoStep();
  }

  /** Draws before the next frame, however often it is called. */
  refresh() {
    if (this._due) return;
    this._due = true;
    requestAnimationFrame(() => {
      this._due = false;
      if (this._view) this._draw();
    });
  }

  _draw() {
    const { answer } = this._view;
    if (!this._pinned && answer.steps.length) this._step = answer.latest;
    this._places.phases.replaceChildren(...phaseBar(answer.seconds));
    const depths = answer.depths;
    this._places.depth.replaceChildren(depths.length ? depthBars(depths) : make("p", { class: "hint" }, "Nothing was drafted."));
    if (this._step === null) {
      this._drawNoStep();
      return;
    }
    this._view.mark(this._step);
    this._drawStep(answer, answer.steps[this._step]);
    this._drawSteps(answer);
    this._drawCost(answer);
  }

  /** Leaves nothing of the step that was drawn before. */
  _drawNoStep() {
    const why = this._view?.answer.end ? "No step: the answer ended with its first token." : "No step yet.";
    this._places.step.replaceChildren(make("p", { class: "hint" }, why));
    this._places.steps.replaceChildren();
    this._places.cost.replaceChildren();
    this._title.textContent = "Step";
    this._previous.disabled = this._next.disabled = true;
  }

  _drawSteps(answer) {
    const hint = "A block is a step: its width the seconds it took (light: drafting; dark: the target's pass and the rest), its height the tokens it gained. Click one to open it.";
    const chart = timeline(answer.steps, this._step, Math.max(200, this._places.steps.clientWidth), (step) => this.open(this._view, step));
    this._places.steps.replaceChildren(chart, make("p", { class: "hint" }, hint));
  }

  _drawStep(answer, step) {
    const { seconds, tree, path } = step;
    const wasOpen = this._places.step.querySelector("details")?.open ?? false;
    const { picture, left } = treeOf(step, answer);
    const facts = {
      "tokens gained": `${step.taken} of at most ${Math.max(0, ...tree.depths) + 1}`,
      "expected": Number(step.expected).toFixed(2),
      "nodes": `${tree.tokens.length}, of them ${path.length} accepted`,
      "draft": `${milliseconds(seconds.draft)}, ${step.draft_passes} passes`,
      "verify": milliseconds(seconds.verify),
      "other": milliseconds(seconds.other),
      "requests in the step": step.batch,
      "position": step.length,
    };
    const list = make("dl");
    for (const [name, value] of Object.entries(facts)) list.append(make("div", {}, make("dt", {}, name), make("dd", {}, String(value))));
    const rows = make("div", { class: "scroll" });
    const table = make("details", {}, make("summary", {}, "The nodes as a table"), rows);
    table.addEventListener("toggle", () => table.open && rows.replaceChildren(tableOf(step, answer)));
    table.open = wasOpen;
    const hint = `Each node: its probability after its parent, and H, the entropy in nats of the draft distribution behind it. ✓ accepted, ✕ rejected, ○ not judged, ◆ what the target said itself.${left ? ` ${left} more nodes are in the table.` : ""}`;
    const drawn = make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Draft tree, may be scrolled" }, picture);
    this._title.setAttribute("aria-live", this._pinned ? "polite" : "off"); // steps that come by are not read out
    this._title.textContent = `Step ${this._step + 1} of ${answer.steps.length}`;
    this._previous.disabled = this._step === 0;
    this._next.disabled = this._step === answer.steps.length - 1;
    this._places.step.replaceChildren(drawn, make("p", { class: "hint" }, hint), list, ...(tree.tokens.length ? [table] : []));
  }

  /** The profile is the server's: it belongs to answers of the same target on as many threads. */
  _drawCost(answer) {
    const about = this._about();
    const same = ["name", "dtype", "weight_format", "device", "threads"].every((key) => about?.run.target[key] === answer.run?.target[key]);
    const length = answer.steps[this._step].length;
    const fits = (point) => point.batch === 1;
    const near = (a, b) => Math.abs(a.context - length) - Math.abs(b.context - length);
    const curve = same ? ((about.cost ?? []).filter(fits).sort(near)[0] ?? null) : null;
    const hint = curve
      ? `Line: the cost profile, one request behind ${curve.context} tokens, by which auto chooses. Dots: the passes of this answer as measured, the open step's filled; hollow ones were shared with other requests.`
      : "Dots: the passes of this answer as measured, the open step's filled. There is no cost profile of this target here: a server whose method is auto has one.";
    const place = this._places.cost;
    const stands = same && about.auto ? about.auto.split("\n").map((line) => make("p", { class: "hint" }, line)) : [];
    place.replaceChildren(costChart(curve, answer.steps, this._step, Math.max(200, Math.min(560, place.clientWidth))), make("p", { class: "hint" }, hint), ...stands);
  }
}
