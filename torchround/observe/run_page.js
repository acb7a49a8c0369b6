"use strict";

// Draws the figures of the page: a table of the runs, and one picture per panel. A point of a curve is [step, value] or,
// for several steps, [last step, mean, lowest, highest].

const SVG = "http://www.w3.org/2000/svg";
const { panels, runs, settings } = JSON.parse(document.getElementById("figures").textContent);
const HEIGHT = 230, LEFT = 58, RIGHT = 14, TOP = 12, BOTTOM = 24;
const NUMBER = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 5 });
const hidden = new Set(); // runs that the table has switched off
const smoothing = document.getElementById("smoothing");
const log = document.getElementById("log");

// Text of runs gets into the page as text alone, never as markup.
function html(name, className, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}

function svg(parent, name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
  return made;
}

function colour(index) {
  return index < 6 ? `var(--c${index})` : `hsl(${(index * 137.5) % 360} 65% 50%)`;
}

function swatch(curve) {
  const made = html("i", curve.dashed ? "swatch dashed" : "swatch");
  made.style.borderColor = curve.colour;
  return made;
}

function written(value, percent) {
  if (value === null || value === undefined) return "–";
  if (percent) return `${NUMBER.format(100 * value)} %`;
  return value !== 0 && Math.abs(value) < 1e-3 ? Number(value.toPrecision(4)).toExponential() : NUMBER.format(value);
}

// Round values for the marks of an axis.
function ticks(low, high, most, logarithmic) {
  if (logarithmic) {
    const powers = Array.from({ length: 640 }, (_, index) => index - 320);
    const inside = powers.flatMap((power) => [1, 2, 5].map((factor) => Number(`${factor}e${power}`)))
      .filter((value) => value >= low && value <= high);
    if (inside.length > 1) return inside.filter((_, index) => index % Math.ceil(inside.length / most) === 0);
  }
  const rough = (high - low) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step + 0); // never -0
  return found;
}

function scale([low, high], from, to, logarithmic) {
  const place = logarithmic ? Math.log : (value) => value;
  return (value) => from + ((place(value) - place(low)) / (place(high) - place(low))) * (to - from);
}

function range(values, panel, logarithmic) {
  const low = values.reduce((a, b) => Math.min(a, b), panel.zero ? 0 : Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (logarithmic) return [low / 1.05, high * 1.05];
  const space = high > low ? 0.05 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [panel.zero && low === 0 ? 0 : low - space, high + space];
}

// Curves of a panel: of one run each has a colour of its own; of several runs all curves of a run share its colour.
function curvesOf(panel) {
  const shown = runs.map((run, index) => [run, index]).filter(([, index]) => !hidden.has(index));
  return shown.flatMap(([run, index]) => (run.curves[panel.key] || []).map(({ label, points }, number) => ({
    points,
    run: run.name,
    label,
    name: runs.length === 1 ? label || panel.title.split(":")[0] : [run.name, label].filter(Boolean).join(": "),
    dashed: label === "validation" || label === "host pool",
    smooth: panel.smooth && label !== "validation" && Number(smoothing.value) > 0,
    colour: colour(runs.length === 1 ? number : index),
  })));
}

// A mean of the values so far with weights that fall by the slider's factor from value to value, and that add up to 1.
function smoothed(points) {
  const factor = Number(smoothing.value);
  let sum = 0, mass = 0;
  return points.map(([, value]) => {
    sum = factor * sum + (1 - factor) * value;
    mass = factor * mass + (1 - factor);
    return sum / mass;
  });
}

function line(points, x, y, values) {
  return `M${points.map(([step], index) => `${x(step).toFixed(1)},${y(values[index]).toFixed(1)}`).join("L")}`;
}

function draw(panel) {
  const figure = document.getElementById(`panel-${panel.key}`);
  const drawing = figure.querySelector("svg");
  const curves = curvesOf(panel);
  const width = Math.max(figure.clientWidth - 20, 200);
  drawing.replaceChildren();
  drawing.onpointermove = null; // of curves that are gone
  drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  legend(figure, curves);
  if (!curves.length) return;
  const values = curves.flatMap((curve) => curve.points.map((point) => point[1]));
  const logarithmic = log.checked && panel.log && values.every((value) => value > 0);
  const steps = curves.flatMap(({ points }) => [points[0][0], points[points.length - 1][0]]);
  const ends = [Math.min(...steps), Math.max(...steps)];
  if (ends[0] === ends[1]) ends[1] += 1;
  const [low, high] = range(values, panel, logarithmic);
  const x = scale(ends, LEFT, width - RIGHT);
  const y = scale([low, high], HEIGHT - BOTTOM, TOP, logarithmic);
  for (const value of ticks(low, high, 5, logarithmic)) {
    svg(drawing, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    svg(drawing, "text", { class: "y", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, written(value, panel.percent));
  }
  svg(drawing, "text", { x: LEFT - 6, y: HEIGHT - 8, "text-anchor": "end" }, "step");
  for (const value of ticks(...ends, width / 90).filter(Number.isInteger)) {
    const anchor = x(value) > width - 40 ? "end" : "middle";
    svg(drawing, "text", { class: "x", x: x(value), y: HEIGHT - 8, "text-anchor": anchor }, written(value));
  }
  for (const curve of curves) drawCurve(drawing, curve, x, y, low, high);
  const cursor = svg(drawing, "g", {});
  drawing.onpointermove = (event) => hover(event, panel, figure, curves, x, y, cursor, width);
  drawing.onpointerleave = () => { cursor.replaceChildren(); figure.querySelector(".tip").hidden = true; };
}

function drawCurve(drawing, curve, x, y, low, high) {
  const { points } = curve;
  const raw = points.map((point) => point[1]);
  const add = (name, attributes) => { svg(drawing, name, attributes).style.color = curve.colour; };
  if (points.some((point) => point.length > 2)) {
    const inside = (value) => Math.max(low, Math.min(value, high));
    const above = line(points, x, y, points.map((point) => inside(point[3] ?? point[1])));
    const below = line([...points].reverse(), x, y, points.map((point) => inside(point[2] ?? point[1])).reverse());
    add("path", { class: "band", d: `${above}L${below.slice(1)}Z` });
  }
  if (curve.smooth) add("path", { class: "raw", d: line(points, x, y, raw) });
  curve.shown = curve.smooth ? smoothed(points) : raw;
  const name = curve.dashed ? "curve dashed" : "curve";
  add("path", { class: name, d: line(points, x, y, curve.shown), "data-name": curve.name });
  if (points.length === 1) add("circle", { cx: x(points[0][0]), cy: y(raw[0]), r: 2.6 });
}

function legend(figure, curves) {
  const names = new Map(curves.map((curve) => [runs.length === 1 ? curve.name : curve.run, { colour: curve.colour }]));
  for (const curve of curves.filter((one) => one.dashed)) {
    const ink = runs.length === 1 ? curve.colour : "var(--quiet)";
    names.set(curve.label, { colour: ink, dashed: true });
  }
  const shown = names.size > 1 && names.size <= 10 ? [...names] : [];
  figure.querySelector(".legend").replaceChildren(...shown.map(([name, curve]) => html("span", "", swatch(curve), name)));
}

// Shows what each curve had at the step below the pointer: its newest point up to there.
function hover(event, panel, figure, curves, x, y, cursor, width) {
  const box = figure.querySelector("svg").getBoundingClientRect();
  const across = ((event.clientX - box.left) / box.width) * width;
  const nearer = (a, b) => (Math.abs(x(b) - across) < Math.abs(x(a) - across) ? b : a);
  const step = curves.flatMap((curve) => curve.points.map((point) => point[0])).reduce(nearer);
  cursor.replaceChildren();
  svg(cursor, "line", { class: "cursor", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM });
  const rows = [];
  for (const curve of curves) {
    const index = curve.points.findLastIndex((point) => point[0] <= step);
    if (index < 0) continue;
    const [at, ...values] = curve.points[index];
    const [value, low, high] = values.map((one) => written(one, panel.percent));
    const spread = low === undefined ? "" : ` (${low} to ${high})`;
    rows.push(html("div", "", swatch(curve), `${curve.name} ${value}${spread}${at === step ? "" : `, step ${at}`}`));
    svg(cursor, "circle", { cx: x(at), cy: y(curve.shown[index]), r: 3.5 }).style.color = curve.colour;
  }
  const tip = figure.querySelector(".tip");
  tip.replaceChildren(html("b", "", `step ${step}`), ...rows);
  tip.hidden = false;
  // Beside the pointer's half of the picture, so that it hides no value there.
  const isLeft = across < width / 2;
  tip.style.left = isLeft ? "" : `${LEFT}px`;
  tip.style.right = isLeft ? `${RIGHT}px` : "";
}

function addRow(run, index) {
  const name = html("label", "", run.name);
  if (runs.length > 1) {
    const box = Object.assign(html("input", ""), { type: "checkbox", checked: true });
    box.onchange = () => { hidden[box.checked ? "delete" : "add"](index); drawAll(); };
    name.prepend(box, swatch({ colour: colour(index) }));
  }
  const best = run.best ? `${written(run.best[0])} (step ${run.best[1]})` : "–";
  const cells = [name, run.step.toLocaleString("en"), run.duration || "–", written(run.loss), best, written(run.tokens),
    written(run.tokens_per_s), written(run.skipped_steps), ...run.settings.map((value) => value ?? "–")];
  document.querySelector("#runs tbody").append(html("tr", "", ...cells.map((cell) => html("td", "", cell))));
  if (run.samples) {
    const [step, texts] = run.samples;
    const heading = runs.length > 1 ? `${run.name}, step ${step}` : `Continuations after step ${step}`;
    const lines = texts.map(([prompt, text]) => html("p", "", html("b", "", prompt), text));
    document.getElementById("samples").append(html("h2", "", heading), ...lines);
  }
}

function drawAll() {
  panels.forEach(draw);
}

const heads = ["run", "step", "duration", "loss", "lowest validation loss", "labels learnt", "tokens/s", "skipped steps"];
document.querySelector("h1").textContent = document.title;
document.querySelector("#runs thead").append(
  html("tr", "", ...[...heads, ...settings].map((head) => html("th", "", head))));
runs.forEach(addRow);
for (const panel of panels) {
  const caption = html("figcaption", "", html("b", "", panel.title), html("small", "", ` ${panel.unit}`));
  const figure = html("figure", "", caption, html("div", "legend"));
  figure.id = `panel-${panel.key}`;
  svg(figure, "svg", { height: HEIGHT, role: "img", "aria-label": panel.title });
  figure.append(Object.assign(html("div", "tip"), { hidden: true }));
  document.querySelector("main").append(figure);
}
const longest = Math.max(0, ...runs.flatMap((run) => (run.curves.loss || []).map((curve) => curve.points.length)));
smoothing.value = longest > 100 ? 0.8 : 0; // a short curve is shown as it is
smoothing.oninput = log.onchange = drawAll;
addEventListener("resize", drawAll);
drawAll();
