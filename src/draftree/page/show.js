// A trace alone: the document that draftree.show makes.

import { readTrace } from "./trace.js";
import { Panels, traceView } from "./views.js";

try {
  const answers = readTrace(document.getElementById("trace").textContent);
  const panels = new Panels(document.getElementById("inspect"), () => null);
  document.getElementById("about").textContent = [...answers.values()][0].about;
  document.getElementById("trace-view").append(...traceView(answers, panels));
} catch (error) {
  document.getElementById("error").textContent = error.message;
}
