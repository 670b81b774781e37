// Drawings: the draft tree of a step, bars, and the cost of passes.

import { classOf, fates, probabilities } from "./trace.js";

const SVG = "http://www.w3.org/2000/svg";
const MOST_NODES = 300; // drawn of one tree
const BOX = { width: 92, height: 36, column: 124, row: 46, margin: 8 };
const SIGNS = { accepted: "✓", rejected: "✕", unjudged: "○" };
const SAYS = { accepted: "accepted", rejected: "rejected", unjudged: "not judged" };

/** An element with attributes and children; texts are texts, never markup. */
export function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A token's text as one line: spaces at its ends and breaks can be seen. */
export function seen(text, most = Infinity) {
  const line = text.replace(/^ +| +$/g, (s) => "␣".repeat(s.length)).replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅";
  const letters = [...line];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : line;
}

export function percent(share) {
  return share >= 0.0995 ? `${(100 * share).toFixed(0)}%` : share >= 0.001 ? `${(100 * share).toFixed(1)}%` : "<0.1%";
}

export function milliseconds(seconds) {
  return seconds >= 1 ? `${seconds.toFixed(1)} s` : `${Number((1e3 * seconds).toPrecision(3))} ms`;
}

/** The tree of a step: root at the left, a column for each depth, and what the target said itself. */
export function treeOf(step, answer) {
  const { tree, path, tokens } = step;
  const textOf = (id) => answer.spell(id);
  const source = answer.nameOf(tree.part);
  const onPath = new Set(path);
  const drawn = tree.tokens.map((_, i) => i).filter((i) => i < MOST_NODES || onPath.has(i));
  const children = new Map(drawn.map((i) => [i, []]));
  children.set(-1, []);
  for (const i of drawn) children.get(tree.parents[i]).push(i);
  const own = tree.tokens.length; // number of the target's own token
  children.set(own, []);
  children.get(path.at(-1) ?? -1).push(own);

  const places = new Map();
  let rows = 0;
  const place = (node, depth) => {
    const below = children.get(node).map((child) => place(child, depth + 1));
    const row = below.length ? (below[0] + below.at(-1)) / 2 : rows++;
    places.set(node, { x: BOX.margin + depth * BOX.column, y: BOX.margin + row * BOX.row });
    return row;
  };
  place(-1, 0);

  const chances = probabilities(tree);
  const fate = fates(step);
  const entropy = (node) => {
    const child = tree.parents.indexOf(node);
    return child < 0 ? "" : ` H ${Number(tree.entropies[child]).toFixed(1)}`;
  };
  const edges = draw("g");
  const boxes = draw("g");
  for (const [node, { x, y }] of places) {
    const parent = node === own ? (path.at(-1) ?? -1) : tree.parents[node];
    const accepted = onPath.has(node);
    if (node !== -1) {
      const from = places.get(parent);
      const [x0, y0, y1] = [from.x + BOX.width, from.y + BOX.height / 2, y + BOX.height / 2];
      const middle = (x0 + x) / 2;
      edges.append(draw("path", { class: accepted ? "edge accepted" : "edge", d: `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x} ${y1}` }));
    }
    const [kind, text, note, title] =
      node === -1
        ? ["root", textOf(step.root), `root${entropy(node)}`, "the last token before the step"]
        : node === own
          ? ["own", textOf(tokens.at(-1)), "◆ target", "what the target said itself"]
          : [
              `${fate[node]} ${classOf(tree.part)}`,
              textOf(tree.tokens[node]),
              `${SIGNS[fate[node]]} ${percent(chances[node].own)}${entropy(node)}`,
              `node ${node}, ${SAYS[fate[node]]}, by ${source}: ` +
                `${percent(chances[node].own)} after its parent, ${percent(chances[node].path)} with its path`,
            ];
    boxes.append(
      draw(
        "g",
        { class: kind, transform: `translate(${x} ${y})` },
        draw("title", {}, `${seen(text)}: ${title}`),
        draw("rect", { width: BOX.width, height: BOX.height, rx: 6 }),
        draw("text", { x: BOX.width / 2, y: 15, "text-anchor": "middle" }, seen(text, 11)),
        draw("text", { x: BOX.width / 2, y: 30, "text-anchor": "middle", class: "small" }, note),
      ),
    );
  }
  const width = Math.max(...[...places.values()].map(({ x }) => x)) + BOX.width + BOX.margin;
  const height = rows * BOX.row + BOX.margin;
  const said = path.length ? `accepted: ${path.map((i) => seen(textOf(tree.tokens[i]))).join(" ")}` : "nothing was accepted";
  const label = `Draft tree of ${tree.tokens.length} nodes; ${said}; the target's own token: ${seen(textOf(tokens.at(-1)))}`;
  const picture = draw("svg", { class: "tree", role: "img", "aria-label": label, width, height, viewBox: `0 0 ${width} ${height}` }, edges, boxes);
  return { picture, left: tree.tokens.length - drawn.length };
}

/** The nodes of a step's tree as a table. */
export function tableOf(step, answer) {
  const chances = probabilities(step.tree);
  const fate = fates(step);
  const cells = (name, values) => make("tr", {}, ...values.map((value) => make(name, {}, String(value))));
  const rows = step.tree.tokens.map((token, i) =>
    cells("td", [
      i,
      seen(answer.spell(token)),
      step.tree.parents[i] < 0 ? "root" : step.tree.parents[i],
      step.tree.depths[i],
      percent(chances[i].own),
      percent(chances[i].path),
      Number(step.tree.entropies[i]).toFixed(2),
      SAYS[fate[i]],
      answer.nameOf(step.tree.part),
    ]),
  );
  const head = ["node", "token", "parent", "depth", "probability", "of the path", "entropy", "fate", "proposed by"];
  return make("table", {}, make("thead", {}, cells("th", head)), make("tbody", {}, ...rows));
}

/** Acceptance by depth: of the steps whose tree was so deep, those in which the node there was accepted. */
export function depthBars(depths) {
  const bars = make("div", { class: "bars" });
  depths.forEach(({ steps, nodes, accepted }, d) => {
    const inner = make("div");
    inner.style.width = `${(100 * accepted) / steps}%`;
    bars.append(
      make("span", {}, `depth ${d + 1}`),
      make("div", { class: "bar", "aria-hidden": "true" }, inner),
      make("span", { title: `${nodes} nodes` }, `${accepted} of ${steps} steps, ${percent(accepted / steps)}`),
    );
  });
  return bars;
}

/** Seconds by phase as one bar. */
export function phaseBar(seconds) {
  const total = Object.values(seconds).reduce((a, b) => a + b, 0) || 1;
  const stack = make("div", { class: "stack", "aria-hidden": "true" });
  const legend = make("ul", { class: "legend" });
  for (const [name, value] of Object.entries(seconds)) {
    const kind = name === "other" ? "rest" : name;
    const part = make("div", { class: kind });
    part.style.width = `${(100 * value) / total}%`;
    stack.append(part);
    legend.append(make("li", {}, make("span", { class: `swatch ${kind}` }), `${name} ${milliseconds(value)}, ${percent(value / total)}`));
  }
  return [stack, legend];
}

/** The steps on the clock: a block's width is its seconds, its height the tokens gained; `opened` takes a step's number. */
export function timeline(steps, open, width, opened) {
  const [height, bottom, left] = [110, 18, 22];
  const spans = steps.map(({ seconds }) => seconds.draft + seconds.verify + seconds.other);
  const scale = (width - left - 10) / Math.max(1e-9, spans.reduce((a, b) => a + b, 0));
  const most = Math.max(2, ...steps.map(({ taken }) => taken));
  const tall = (tokens) => ((height - bottom - 8) * tokens) / most;
  const label = `${steps.length} steps on the clock, with the tokens that each gained`;
  const chart = draw("svg", { class: "chart timeline", role: "img", width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": label });
  for (const tokens of [1, most]) {
    const y = height - bottom - tall(tokens);
    chart.append(draw("path", { class: "tick", d: `M${left} ${y}H${width - 10}` }));
    chart.append(draw("text", { x: left - 5, y: y + 4, "text-anchor": "end", class: "small" }, String(tokens)));
  }
  let x = left;
  steps.forEach((step, i) => {
    const [y, tallness, drafting] = [height - bottom - tall(step.taken), tall(step.taken), scale * step.seconds.draft];
    const note = `step ${i + 1}: ${step.taken} tokens in ${milliseconds(spans[i])}, ${step.tree.tokens.length} nodes drafted`;
    const block = draw("g", { class: i === open ? "block open" : "block" }, draw("title", {}, note));
    block.append(draw("rect", { class: "drafting", x, y, width: drafting, height: tallness }));
    block.append(draw("rect", { class: "verifying", x: x + drafting, y, width: scale * spans[i] - drafting, height: tallness }));
    block.addEventListener("click", () => opened(i));
    chart.append(block);
    x += scale * spans[i];
  });
  const total = milliseconds(spans.reduce((a, b) => a + b, 0));
  chart.append(draw("text", { x: left, y: height - 4, class: "small" }, "0"), draw("text", { x: width - 10, y: height - 4, "text-anchor": "end", class: "small" }, total));
  return chart;
}

/** A round number not below a positive one: 1, 2 or 5 times a power of ten. */
function round(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((times) => times * power).find((found) => found >= number * 0.999);
}

/** Seconds of a pass by its tokens: the profile's curve, and where the steps of an answer stood; `width` in pixels. */
export function costChart(curve, steps, open, width) {
  const [height, left, bottom, top] = [240, 52, 36, 12];
  const passes = steps.map((step) => ({ x: step.tree.tokens.length + 1, y: step.seconds.verify, shared: step.batch > 1 }));
  const longest = Math.max(2, ...passes.map(({ x }) => x));
  const shown = (curve?.sizes ?? []).filter((size, i, all) => size <= 1.5 * longest || all[i - 1] < longest);
  const most = Math.max(longest, ...shown) + 1;
  const highest = 1.1 * Math.max(...passes.map(({ y }) => y), ...shown.map((_, i) => curve.seconds[i]));
  const x = (tokens) => left + ((width - left - 10) * tokens) / most;
  const y = (seconds) => height - bottom - ((height - bottom - top) * seconds) / highest;
  const chart = draw("svg", { class: "chart", role: "img", width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": "Seconds of a pass by its tokens" });
  for (let seconds = 0, i = 0, every = round(highest / 6); seconds < highest; seconds = ++i * every) {
    chart.append(
      draw("path", { class: "tick", d: `M${left} ${y(seconds)}H${width - 10}` }),
      draw("text", { x: left - 5, y: y(seconds) + 4, "text-anchor": "end", class: "small" }, milliseconds(seconds)),
    );
  }
  const stride = Math.max(1, Math.ceil(most / 8));
  for (let tokens = 1; tokens < most; tokens += stride) {
    chart.append(draw("text", { x: x(tokens), y: height - bottom + 15, "text-anchor": "middle", class: "small" }, String(tokens)));
  }
  chart.append(
    draw("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - 10}` }),
    draw("text", { x: (left + width) / 2, y: height - 5, "text-anchor": "middle", class: "small" }, "tokens of the pass: the root, and what was drafted"),
  );
  if (shown.length) {
    chart.append(draw("path", { class: "curve", d: `M${shown.map((size, i) => `${x(size)} ${y(curve.seconds[i])}`).join("L")}` }));
  }
  const point = (pass, kind, radius) => draw("circle", { class: kind, cx: x(pass.x), cy: y(pass.y), r: radius });
  passes.forEach((pass) => chart.append(point(pass, pass.shared ? "pass shared" : "pass", 3)));
  if (open !== null) chart.append(point(passes[open], "pass open", 5));
  return chart;
}
