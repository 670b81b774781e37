// What the page shows of an answer: its tokens, and the panels of a step.

import { costChart, depthBars, make, milliseconds, phaseBar, seen, tableOf, treeOf } from "./charts.js";
import { classOf } from "./trace.js";

/** An answer as tokens that can be walked by arrow keys and opened by Enter or a click. */
export class AnswerView {
  constructor(title, answer, api, opened) {
    this.answer = answer;
    this._api = api;
    this._opened = opened; // called with this view and the number of a step
    this._shown = []; // the class of each token that is there
    this._title = title;
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
      if (i < this._shown.length && (this._shown[i] !== null || !token)) continue;
      const span = this._spans[i] ?? this.tokens.appendChild(make("span", { role: "option", tabindex: "-1", "aria-selected": "false" }));
      span.className = `token ${token ? classOf(token.source) : ""}`;
      span.textContent = streams ? texts[i] : this._api.text(token.id);
      const by = token ? `, by ${this.answer.nameOf(token.source)}${token.step === null ? ", after the prompt" : `, step ${token.step + 1}`}` : "";
      span.setAttribute("aria-label", `${seen(span.textContent)}${by}`);
      span.title = span.getAttribute("aria-label");
      this._shown[i] = token ? classOf(token.source) : null;
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

  /** Spells all tokens anew. */
  respell() {
    this._shown = [];
    this.update();
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

/** The panels beside the answers, of one view and one of its steps. */
export class Panels {
  constructor(root, api) {
    this._api = api;
    this._find = (id) => root.querySelector(`#${id}`);
    this._view = null;
    this._step = null;
    this._pinned = false; // a step was opened, and new ones do not take its place
    this._due = false;
    addEventListener("resize", () => this.refresh());
    this._find("previous").addEventListener("click", () => this.open(this._view, this._step - 1));
    this._find("next").addEventListener("click", () => this.open(this._view, this._step + 1));
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

  clear() {
    [this._view, this._step] = [null, null];
    for (const id of ["depth", "phases", "cost"]) this._find(id).replaceChildren();
    this._find("step").replaceChildren(make("p", { class: "hint" }, "No step yet."));
    this._find("step-title").textContent = "Step";
    this._find("previous").disabled = this._find("next").disabled = true;
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
    if (!this._pinned && answer.steps.length) this._step = answer.steps.length - 1;
    this._find("phases").replaceChildren(...phaseBar(answer.seconds));
    const depths = answer.depths;
    this._find("depth").replaceChildren(depths.length ? depthBars(depths) : make("p", { class: "hint" }, "Nothing was drafted."));
    if (this._step === null) return;
    this._view.mark(this._step);
    this._drawStep(answer, answer.steps[this._step]);
    this._drawCost(answer);
  }

  _drawStep(answer, step) {
    const { seconds, tree, path } = step;
    const spells = this._api.spells(answer.run);
    if (spells) this._api.learn([step.root, ...tree.tokens, ...step.tokens]).then((news) => news && this.refresh(), () => {});
    const textOf = (id) => (spells ? this._api.text(id) : `#${id}`);
    const wasOpen = this._find("step").querySelector("details")?.open ?? false;
    const { picture, left } = treeOf(step, answer, textOf);
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
    table.addEventListener("toggle", () => table.open && rows.replaceChildren(tableOf(step, answer, textOf)));
    table.open = wasOpen;
    const hint = `Each node: its probability after its parent. ✓ accepted, ✕ rejected, ○ not judged, ◆ what the target said itself.${left ? ` ${left} more nodes are in the table.` : ""}`;
    const drawn = make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Draft tree, may be scrolled" }, picture);
    this._find("step-title").setAttribute("aria-live", this._pinned ? "polite" : "off"); // steps that come by are not read out
    this._find("step-title").textContent = `Step ${this._step + 1} of ${answer.steps.length}`;
    this._find("previous").disabled = this._step === 0;
    this._find("next").disabled = this._step === answer.steps.length - 1;
    this._find("step").replaceChildren(drawn, make("p", { class: "hint" }, hint), list, ...(tree.tokens.length ? [table] : []));
  }

  /** The profile is the server's: it belongs to answers of the same target on as many threads. */
  _drawCost(answer) {
    const { about } = this._api;
    const same = ["name", "dtype", "weight_format", "device", "threads"].every((key) => about?.run.target[key] === answer.run?.target[key]);
    const length = answer.steps[this._step].length;
    const fits = (point) => point.batch === 1;
    const near = (a, b) => Math.abs(a.context - length) - Math.abs(b.context - length);
    const curve = same ? ((about.cost ?? []).filter(fits).sort(near)[0] ?? null) : null;
    const hint = curve
      ? `Line: the cost profile, one request behind ${curve.context} tokens, by which auto chooses. Dots: the passes of this answer as measured, the open step's filled; hollow ones were shared with other requests.`
      : "Dots: the passes of this answer as measured, the open step's filled. There is no cost profile of this target here: a server whose method is auto has one.";
    const place = this._find("cost");
    const stands = same && about.auto ? about.auto.split("\n").map((line) => make("p", { class: "hint" }, line)) : [];
    place.replaceChildren(costChart(curve, answer.steps, this._step, Math.min(560, place.clientWidth)), make("p", { class: "hint" }, hint), ...stands);
  }
}
