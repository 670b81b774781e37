// The page: a chat whose answers can be looked into, and trace files.

import { Api, ServerError } from "./api.js";
import { make } from "./charts.js";
import { Answer, readTrace } from "./trace.js";
import { AnswerView, Panels, traceView } from "./views.js";

const FORCED = { method: "opt-tree", nodes: 8 }; // drafts whatever it costs
const ENDS = { stop: "the answer is complete", length: "the answer has the most tokens it may have", deadline: "its time is over", cancelled: "it was cancelled" };
const find = (id) => document.getElementById(id);
const api = new Api(() => find("key").value);
const panels = new Panels(find("inspect"), () => api.about);
const turns = []; // of the conversation: {question, answer}
let running = null; // what stops the answer under way

// Theme: the system's, until the button is used.

const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light");
}

function applyTheme() {
  document.documentElement.dataset.theme = theme();
  find("theme").textContent = theme() === "dark" ? "Light theme" : "Dark theme";
}

find("theme").addEventListener("click", () => {
  localStorage.setItem("theme", theme() === "dark" ? "light" : "dark");
  applyTheme();
});
dark.addEventListener("change", applyTheme);
applyTheme();

// The server.

function fail(error) {
  find("error").textContent = error.message;
  if (error instanceof ServerError && error.status === 401) find("settings").open = true;
}

async function loadAbout() {
  try {
    const about = await api.load();
    const drafts = about.run.labels.drafter;
    find("about").textContent = `${about.model}, drafted for by ${about.drafter === drafts ? drafts : `${about.drafter} (${drafts})`}, method ${about.method}`;
    find("method").replaceChildren(
      make("option", { value: "" }, `the server's: ${about.method}`),
      ...about.methods.map((name) => make("option", { value: name }, name)),
    );
    find("error").textContent = "";
    panels.refresh();
  } catch (error) {
    find("about").textContent = "";
    fail(error);
  }
}

find("key").value = sessionStorage.getItem("key") ?? "";
find("key").addEventListener("change", () => {
  sessionStorage.setItem("key", find("key").value);
  loadAbout();
});
loadAbout();

// The chat.

/** What the form asks for; a seed is drawn here where none is given, so that both answers have the same. */
function asked(question) {
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  const before = turns.filter(({ answer }) => answer.text);
  const chosen = { method: find("method").value || undefined, drafter: find("drafter").value || undefined, nodes: number("nodes") };
  const choice = Object.values(chosen).some((value) => value !== undefined);
  return {
    model: api.about.model,
    messages: [
      ...before.flatMap((turn) => [
        { role: "user", content: turn.question },
        { role: "assistant", content: turn.answer.content },
      ]),
      { role: "user", content: question },
    ],
    temperature: number("temperature"),
    seed: number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0],
    max_tokens: number("limit"),
    draftree: choice ? chosen : undefined,
  };
}

/** Opens a step of an answer; where its panels are below the chat, goes there. */
function open(view, step) {
  panels.open(view, step);
  if (matchMedia("(max-width: 999px)").matches) find("inspect").scrollIntoView();
}

/** Streams one answer into its view; what came is kept, whatever ends it. */
async function stream(view, body, signal) {
  const { answer } = view;
  for await (const event of api.chat(body, signal)) {
    if (event.error) throw new ServerError(`The answer ended: ${event.error}`, 200);
    if (event.content !== undefined) answer.say(event);
    if (event.finish) find("status").textContent = ENDS[event.finish] ?? event.finish;
    for (const record of event.records ?? []) answer.add(record);
    view.update();
    panels.refresh();
  }
}

function shownTurn(...children) {
  document.querySelector("#turns > .hint")?.remove();
  const turn = make("div", { class: "turn" }, ...children);
  find("turns").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return turn;
}

async function ask(question) {
  if (api.about === null) await loadAbout();
  if (api.about === null) return;
  find("error").textContent = "";
  const body = asked(question);
  const answers = make("div", { class: "answers" });
  const turn = shownTurn(make("p", { class: "question" }, question), answers);
  find("question").value = "";
  running = new AbortController();
  find("send").disabled = find("clear").disabled = true;
  find("stop").hidden = false;
  // One after the other: together they would share passes, and no rate would be its own.
  const answered = async (title, status, draftree, follow = true) => {
    const view = new AnswerView(title, new Answer(), open);
    if (!answers.children.length) turns.push({ question, answer: view.answer });
    answers.append(view.element);
    if (follow) panels.follow(view);
    find("status").textContent = status;
    await stream(view, { ...body, draftree }, running.signal);
    return view.answer;
  };
  try {
    let trees = await answered("Draft trees", "answering …", body.draftree);
    const drafted = trees.steps.filter(({ tree }) => tree.tokens.length).length;
    if (!body.draftree && api.about.method === "auto" && api.about.drafter !== "none" && 4 * drafted < trees.steps.length) {
      const why = `Method auto drafted in ${drafted} of ${trees.steps.length} steps, since no tree would pay in the others`;
      trees = await answered(`Draft trees by ${FORCED.method}`, "answering with drafts …", FORCED);
      turn.append(make("p", { class: "hint forced" }, `${why}. So that there are trees to see, it was answered again by method ${FORCED.method} with ${FORCED.nodes} nodes.`));
    }
    if (find("beside").checked) {
      const alone = await answered("AR decoding", "answering without drafts …", { drafter: "none" }, false);
      turn.append(make("p", { class: "verdict" }, compared(trees, alone)));
    }
  } catch (error) {
    find("status").textContent = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") fail(error);
  } finally {
    running = null;
    find("send").disabled = find("clear").disabled = false;
    find("stop").hidden = true;
    api.load().then(() => panels.refresh(), fail); // where auto stands now
  }
}

function compared(trees, alone) {
  const equal = trees.text === alone.text ? "The texts are equal." : "The texts differ.";
  return trees.rate && alone.rate ? `${trees.rate.toFixed(1)} tokens a second with trees, ${alone.rate.toFixed(1)} by AR decoding: ${(trees.rate / alone.rate).toFixed(2)} times as many. ${equal}` : equal;
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null && find("question").value.trim()) ask(find("question").value);
});
find("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("ask").requestSubmit();
});
find("stop").addEventListener("click", () => {
  running?.abort();
  find("question").focus();
});
find("clear").addEventListener("click", () => {
  turns.length = 0;
  find("turns").replaceChildren();
  find("error").textContent = find("status").textContent = "";
  panels.clear();
});

// Trace files.

async function openFile(file) {
  find("error").textContent = "";
  try {
    const answers = readTrace(await file.text());
    shownTurn(make("p", { class: "question" }, `Trace ${file.name}`), ...traceView(answers, panels, open));
  } catch (error) {
    find("error").textContent = `${file.name}: ${error.message}`;
  }
}

find("file").addEventListener("change", async (event) => {
  for (const file of event.target.files) await openFile(file);
  event.target.value = "";
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
document.addEventListener("drop", async (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  for (const file of event.dataTransfer.files) await openFile(file);
});
