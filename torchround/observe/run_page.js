"use strict";

// Draws the figures of the page: a table of the runs, and one picture per panel. A point of a curve is
// [step, value] or, for several steps, [last step, mean, first step, lowest, highest].

const SVG = "http://www.w3.org/2000/svg";
const { panels, runs, settings: differing } = JSON.parse(document.getElementById("figures").textContent);
const HEIGHT = 230;
const MARGIN = { left: 58, right: 14, top: 12, bottom: 24 };
const MOST_NAMED = 8; // runs that a panel's legend names; the table names all of them
const hidden = new Set(); // runs that the table has switched off
const settings = { smoothing: 0, log: false, zoom: null }; // zoom: [first step, last step] of all panels

// Text of runs gets into the page as text alone, never as markup.
function html(name, className, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}

function svg(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function colour(index) {
  return index < 8 ? `var(--c${index})` : `hsl(${(index * 137.5) % 360} 65% 50%)`;
}

function swatch(curve) {
  const made = html("i", curve.dashed ? "swatch dashed" : "swatch");
  made.style.borderColor = curve.colour;
  return made;
}

// Numbers as text.

function written(value, form) {
  if (value === null || value === undefined) return "–";
  if (form === "percent") return `${(100 * value).toFixed(1)} %`;
  if (form === "count") return Math.round(value).toLocaleString("en");
  if (form === "power") return value === 0 ? "0" : value.toExponential(2);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

function short(value, form) {
  const tidy = Number(value.toPrecision(6));
  if (form === "percent") return `${Number((100 * tidy).toPrecision(4))} %`;
  if (form === "power") return tidy === 0 ? "0" : tidy.toExponential();
  const size = Math.abs(tidy);
  if (size >= 1e6) return `${Number((tidy / 1e6).toPrecision(4))}M`;
  if (size >= 1e4 || (form === "count" && size >= 1e3)) return `${Number((tidy / 1e3).toPrecision(4))}k`;
  return size !== 0 && size < 1e-3 ? tidy.toExponential() : String(tidy);
}

// Scales: a value's place on an axis, and round values for its marks.

function ticks(low, high, most) {
  const rough = (high - low) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step);
  return found;
}

function logTicks(low, high, most) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  }
  const inside = found.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside.filter((_, index) => index % Math.ceil(inside.length / most) === 0) : ticks(low, high, most);
}

function scale(low, high, from, to, log) {
  const place = log ? Math.log : (value) => value;
  return (value) => from + ((place(value) - place(low)) / (place(high) - place(low))) * (to - from);
}

function range(values, panel, log) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (panel.zero) low = Math.min(low, 0);
  const space = high > low ? 0.05 * (high - low) : Math.abs(high) * 0.1 || 1;
  if (log) return [low / (high / low || 1) ** 0.05 / 1.01, high * (high / low || 1) ** 0.05 * 1.01];
  return [panel.zero && low === 0 ? 0 : low - space, high + space];
}

// Curves of a panel: of one run each has a colour of its own; of several runs all curves of a run share its colour.

function curvesOf(panel) {
  const found = [];
  runs.forEach((run, index) => {
    if (hidden.has(index)) return;
    (run.curves[panel.key] || []).forEach((curve, number) => found.push({
      run,
      points: curve.points,
      label: curve.label,
      dashed: curve.label === "validation" || curve.label === "host pool",
      smooth: panel.smooth && curve.label !== "validation",
      colour: colour(runs.length === 1 ? number : index),
    }));
  });
  return found;
}

function nameOf(curve, panel) {
  if (runs.length === 1) return curve.label || panel.title.split(":")[0];
  return curve.label ? `${curve.run.name}: ${curve.label}` : curve.run.name;
}

// A mean of the values so far with weights that fall by `smoothing` from value to value, and that add up to 1.
function smoothed(points) {
  let sum = 0, mass = 0;
  return points.map(([, value]) => {
    sum = settings.smoothing * sum + (1 - settings.smoothing) * value;
    mass = settings.smoothing * mass + (1 - settings.smoothing);
    return sum / mass;
  });
}

function path(points, x, y, values) {
  return points.map((point, index) =>
    `${index ? "L" : "M"}${x(point[0]).toFixed(1)},${y(values[index]).toFixed(1)}`).join("");
}

function band(points, x, y) {
  const edge = (point, value) => `${x(point[0]).toFixed(1)},${y(value).toFixed(1)}`;
  const above = points.map((point) => edge(point, point.length > 2 ? point[4] : point[1]));
  const below = points.map((point) => edge(point, point.length > 2 ? point[3] : point[1]));
  return `M${above.join("L")}L${below.reverse().join("L")}Z`;
}

// One panel.

function draw(panel, figure) {
  const curves = curvesOf(panel);
  const width = Math.max(figure.clientWidth - 20, 200);
  const drawing = figure.querySelector("svg");
  drawing.replaceChildren();
  drawing.onpointerdown = drawing.onpointermove = drawing.onpointerup = null; // of curves that are gone
  drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  legend(panel, figure, curves);
  if (!curves.length) return;
  const steps = curves.flatMap((curve) => [curve.points[0][0], curve.points[curve.points.length - 1][0]]);
  let [first, last] = settings.zoom || [Math.min(...steps), Math.max(...steps)];
  if (first === last) { first -= 1; last += 1; }
  const inside = curves.flatMap((curve) => curve.points.filter(([step]) => step >= first && step <= last));
  const values = inside.map((point) => point[1]);
  if (!values.length) return;
  // Lines begin and end outside a zoom, so every value of a curve has a place on the axis or none has.
  const log = settings.log && panel.log && curves.every((curve) => curve.points.every((point) => point[1] > 0));
  const [low, high] = range(values, panel, log);
  const x = scale(first, last, MARGIN.left, width - MARGIN.right, false);
  const y = scale(low, high, HEIGHT - MARGIN.bottom, MARGIN.top, log);
  axes(drawing, panel, width, x, y, ticks(first, last, width / 90),
    log ? logTicks(low, high, 6) : ticks(low, high, 5));
  const clip = `clip-${panel.key}`;
  const frame = svg("clipPath", { id: clip });
  frame.append(svg("rect", { x: MARGIN.left - 3, y: MARGIN.top - 3, width: width - MARGIN.left - MARGIN.right + 6,
    height: HEIGHT - MARGIN.top - MARGIN.bottom + 6 }));
  const lines = svg("g", { "clip-path": `url(#${clip})` });
  drawing.append(frame, lines);
  for (const curve of curves) drawCurve(lines, curve, panel, x, y, log, curves.length);
  const cursor = svg("g", { class: "hover" });
  drawing.append(cursor);
  const leave = () => { cursor.replaceChildren(); figure.querySelector(".tip").hidden = true; };
  const show = (across) => hover(across, panel, figure, curves, [first, last], x, y, cursor, width);
  follow(drawing, width, [first, last], cursor, show, leave);
}

function drawCurve(lines, curve, panel, x, y, log, count) {
  const raw = curve.points.map((point) => point[1]);
  const isSmooth = curve.smooth && settings.smoothing > 0;
  const add = (name, attributes, fills) => {
    const made = svg(name, attributes);
    made.style[fills ? "fill" : "stroke"] = curve.colour;
    lines.append(made);
  };
  if (curve.points.some((point) => point.length > 2) && !(log && curve.points.some((point) => point[3] <= 0))) {
    add("path", { class: "band", d: band(curve.points, x, y) }, true);
  }
  if (isSmooth) add("path", { class: "raw", d: path(curve.points, x, y, raw) }, false);
  curve.shown = isSmooth ? smoothed(curve.points) : raw;
  const style = ["curve", curve.dashed ? "dashed" : "", count > 4 ? "many" : ""].filter(Boolean).join(" ");
  const made = { class: style, d: path(curve.points, x, y, curve.shown), "data-name": nameOf(curve, panel) };
  add("path", made, false);
  if (curve.points.length === 1 || (curve.label === "validation" && curve.points.length <= 60)) {
    curve.points.forEach((point, index) =>
      add("circle", { class: "dot", cx: x(point[0]), cy: y(curve.shown[index]), r: 2.6 }, true));
  }
}

function axes(drawing, panel, width, x, y, across, up) {
  for (const value of up) {
    const height = y(value);
    drawing.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: height, y2: height }));
    drawing.append(svg("text", { class: "y", x: MARGIN.left - 6, y: height + 4, "text-anchor": "end" }, short(value, panel.form)));
  }
  drawing.append(svg("text", { x: MARGIN.left - 6, y: HEIGHT - 8, "text-anchor": "end" }, "step"));
  for (const value of across.filter(Number.isInteger)) {
    const anchor = x(value) > width - 40 ? "end" : "middle";
    drawing.append(svg("text", { class: "x", x: x(value), y: HEIGHT - 8, "text-anchor": anchor }, short(value, "number")));
  }
}

function legend(panel, figure, curves) {
  const names = new Map();
  for (const curve of curves) {
    if (runs.length === 1) names.set(nameOf(curve, panel), curve);
    else if (runs.length <= MOST_NAMED) names.set(curve.run.name, { colour: curve.colour });
  }
  if (runs.length > 1) {
    const dashed = curves.find((curve) => curve.dashed);
    if (dashed) names.set(dashed.label, { colour: "var(--quiet)", dashed: true });
  }
  const shown = names.size > 1 ? [...names] : [];
  figure.querySelector(".legend").replaceChildren(
    ...shown.map(([name, curve]) => html("span", "", swatch(curve), name)));
}

// Follows the pointer: it shows values, and dragging it across steps zooms all panels to them.
function follow(drawing, width, [first, last], cursor, show, leave) {
  let start = null; // of a drag, in the units of the drawing
  const place = (event) => {
    const box = drawing.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * width;
    return Math.max(MARGIN.left, Math.min(across, width - MARGIN.right));
  };
  const stepAt = (across) => first + ((across - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (last - first);
  drawing.onpointerdown = (event) => { start = place(event); show(start); };
  drawing.onpointermove = (event) => {
    const across = place(event);
    show(across);
    if (start !== null) {
      cursor.append(svg("rect", { class: "drag", x: Math.min(start, across), y: MARGIN.top,
        width: Math.abs(across - start), height: HEIGHT - MARGIN.top - MARGIN.bottom }));
    }
  };
  drawing.onpointerup = (event) => {
    const ends = start === null ? [0, 0] : [start, place(event)].sort((a, b) => a - b);
    start = null;
    if (ends[1] - ends[0] < 8) return; // a click, not a drag
    const zoom = [Math.ceil(stepAt(ends[0])), Math.floor(stepAt(ends[1]))];
    if (zoom[0] < zoom[1]) zoomTo(zoom);
  };
  drawing.onpointerleave = drawing.onpointercancel = () => { start = null; leave(); };
  drawing.ondblclick = () => zoomTo(null);
}

function zoomTo(steps) {
  settings.zoom = steps;
  document.getElementById("all").hidden = steps === null;
  drawAll();
}

// Shows what each curve had at the step below the pointer: its newest point up to there.
function hover(across, panel, figure, curves, [first, last], x, y, cursor, width) {
  const box = figure.querySelector("svg").getBoundingClientRect();
  let step = null;
  for (const curve of curves) {
    for (const [at] of curve.points) {
      if (at < first || at > last) continue;
      if (step === null || Math.abs(x(at) - across) < Math.abs(x(step) - across)) step = at;
    }
  }
  const tip = figure.querySelector(".tip");
  const rows = [];
  let from = step;
  cursor.replaceChildren(svg("line", { class: "cursor", x1: x(step), x2: x(step), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
  for (const curve of curves) {
    const index = curve.points.findLastIndex((point) => point[0] <= step);
    if (index < 0 || curve.points[index][0] < first) continue;
    const [at, value, begin, low, high] = curve.points[index];
    if (at === step && begin !== undefined) from = Math.min(from, begin);
    const spread = begin === undefined ? "" : ` (${written(low, panel.form)} to ${written(high, panel.form)})`;
    const when = at === step ? "" : `, step ${at}`;
    rows.push(html("div", "", swatch(curve), `${nameOf(curve, panel)} ${written(value, panel.form)}${spread}${when}`));
    const dot = svg("circle", { cx: x(at), cy: y(curve.shown[index]), r: 3.5 });
    dot.style.fill = curve.colour;
    cursor.append(dot);
  }
  tip.replaceChildren(html("b", "", from < step ? `steps ${from} to ${step}` : `step ${step}`), ...rows);
  tip.hidden = false;
  const left = (x(step) / width) * box.width;
  tip.style.left = `${Math.max(4, Math.min(left + 18, figure.clientWidth - tip.offsetWidth - 4))}px`;
  if (left > box.width / 2) tip.style.left = `${Math.max(4, left - tip.offsetWidth)}px`;
  tip.style.top = `${box.top - figure.getBoundingClientRect().top + 8}px`;
}

// The page.

function table() {
  const heads = ["run", "step", "duration", "loss", "lowest validation loss", "labels learnt", "tokens/s", "skipped steps",
    ...differing];
  document.querySelector("#runs thead").append(html("tr", "", ...heads.map((head) => html("th", "", head))));
  runs.forEach((run, index) => {
    const name = html("label", "", swatch({ colour: colour(index) }), run.name);
    if (runs.length > 1) {
      const box = Object.assign(html("input", ""), { type: "checkbox", checked: true });
      box.onchange = () => { hidden[box.checked ? "delete" : "add"](index); drawAll(); };
      name.prepend(box);
    } else {
      name.replaceChildren(run.name);
    }
    const best = run.best ? `${written(run.best[0])} (step ${run.best[1]})` : "–";
    const cells = [written(run.step, "count"), run.duration || "–", written(run.loss), best, written(run.tokens, "count"),
      written(run.tokens_per_s, "count"), written(run.skipped_steps, "count"),
      ...run.settings.map((value) => value ?? "–")];
    document.querySelector("#runs tbody").append(
      html("tr", "", html("td", "", name), ...cells.map((cell) => html("td", "", cell))));
  });
}

function continuations() {
  for (const run of runs.filter((one) => one.samples)) {
    const [step, texts] = run.samples;
    const name = runs.length > 1 ? `${run.name}, step ${step}` : `Continuations after step ${step}`;
    const lines = texts.map(([prompt, text]) => html("p", "", html("b", "", prompt), text));
    document.getElementById("samples").append(html("section", "", html("h2", "", name), ...lines));
  }
}

function makePanels() {
  for (const panel of panels.filter((one) => runs.some((run) => run.curves[one.key]))) {
    const caption = html("figcaption", "", html("b", "", panel.title), html("small", "", panel.unit));
    const figure = html("figure", "", caption, html("div", "legend"), svg("svg", { height: HEIGHT, role: "img" }),
      Object.assign(html("div", "tip"), { hidden: true }));
    figure.id = `panel-${panel.key}`;
    figure.querySelector("svg").setAttribute("aria-label", panel.title);
    document.querySelector("main").append(figure);
  }
}

function drawAll() {
  for (const panel of panels) {
    const figure = document.getElementById(`panel-${panel.key}`);
    if (figure) draw(panel, figure);
  }
}

function controls() {
  const smoothing = document.getElementById("smoothing");
  const most = Math.max(0, ...runs.flatMap((run) => (run.curves.loss || []).map((curve) => curve.points.length)));
  smoothing.value = most > 100 ? 0.8 : 0; // a short curve is shown as it is
  smoothing.oninput = () => {
    settings.smoothing = Number(smoothing.value);
    document.getElementById("weight").value = settings.smoothing.toFixed(2);
    drawAll();
  };
  const log = document.getElementById("log");
  log.onchange = () => { settings.log = log.checked; drawAll(); };
  document.getElementById("all").onclick = () => zoomTo(null);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = document.getElementById("theme");
  const dress = () => {
    const dark = theme.value === "system" ? system.matches : theme.value === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
  };
  theme.onchange = system.onchange = dress;
  dress();
  smoothing.oninput();
}

document.querySelector("h1").textContent = document.title;
table();
makePanels();
continuations();
controls();
let drawnWidth = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawnWidth) { drawnWidth = innerWidth; drawAll(); } });
