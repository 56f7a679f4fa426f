"use strict";

// The memory curve of each device, drawn as SVG. Sizes are bytes.

window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = String(event.message);
});

const SVG = "http://www.w3.org/2000/svg";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const MARGIN = { top: 12, right: 18, bottom: 44, left: 72 };
const COLUMN = 6; // pixels
const LINES = ["predicted", "measured", "anonymous"];

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The text with places where it may break: a long name parts after a dot, not inside of a word.
function breakable(text) {
  return text.split(/(?<=[./])/).flatMap((part, index) => (index === 0 ? [part] : [h("wbr"), part]));
}

function unitOf(size) {
  let power = 0;
  while (power < UNITS.length - 1 && Math.abs(size) >= 1024 ** (power + 1)) power += 1;
  return power;
}

function bytes(size) {
  const power = unitOf(size);
  return `${(size / 1024 ** power).toFixed(power === 0 ? 0 : 1)} ${UNITS[power]}`;
}

function count(number) {
  return number.toLocaleString("en-US");
}

function exact(size) {
  return `${count(size)} bytes`;
}

// Round steps in the unit of the largest value: 1, 2 or 5 times a power of ten.
function ticks(maximum, wanted) {
  const power = unitOf(maximum);
  const top = maximum / 1024 ** power;
  const rough = top / wanted;
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 5, 10].find((candidate) => candidate * magnitude >= rough * 0.999);
  const step = power === 0 ? Math.max(1, factor * magnitude) : factor * magnitude;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const marks = [];
  for (let index = 0; index * step <= top * 1.0001; index += 1) {
    marks.push({ at: index * step * 1024 ** power, text: (index * step).toFixed(digits) });
  }
  return { marks, unit: UNITS[power] };
}

function highest(points) {
  return points.reduce((best, point) => Math.max(best, point[1]), 0);
}

// What is alive at a moment stays alive until the next one. Of each few pixels a line shows the
// highest value, so that it stays a line where weights come and go thousands of times.
function columnsOf(points, x, right) {
  const columns = [];
  let next = 0;
  let held = null;
  for (let left = x(points[0][0]); left <= right; left += COLUMN) {
    const sizes = held === null ? [] : [held];
    while (next < points.length && x(points[next][0]) < left + COLUMN) {
      sizes.push(Math.max(0, points[next][1]));
      next += 1;
    }
    held = sizes[sizes.length - 1];
    columns.push({ left, end: Math.min(left + COLUMN, right), low: Math.min(...sizes), high: Math.max(...sizes) });
    if (next === points.length) break;
  }
  return columns;
}

function stepPath(columns, y, name) {
  const steps = columns.map((column) => `V${y(column[name]).toFixed(1)}H${column.end.toFixed(1)}`);
  return `M${columns[0].left.toFixed(1)},${y(columns[0][name]).toFixed(1)}${steps.join("")}`;
}

// The value at a place: of the last moment up to it, the highest if that read count has several.
function valueAt(points, read) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= read) low = middle + 1;
    else high = middle;
  }
  if (low === 0) return null;
  let best = points[low - 1];
  for (let at = low - 1; at >= 0 && points[at][0] === points[low - 1][0]; at -= 1) {
    if (points[at][1] > best[1]) best = points[at];
  }
  return best;
}

function shownLines(chart) {
  return LINES.filter((name) => chart[name].length > 0);
}

// A budget far above everything would flatten the curve: then the legend alone tells it.
function levels(chart) {
  const data = Math.max(0, ...shownLines(chart).map((name) => highest(chart[name])));
  const found = [];
  if (chart.resident !== null) found.push({ kind: "resident", name: "resident at the end", size: chart.resident });
  for (const [name, size] of Object.entries(chart.budgets)) {
    found.push({ kind: "budget", name, size, outside: size > 2 * Math.max(data, chart.resident || 0) });
  }
  return found;
}

function swatch(kind) {
  const sample = s("line", { x1: 1, y1: 6, x2: 25, y2: 6, class: `line ${kind}` });
  return s("svg", { viewBox: "0 0 26 12", width: 26, height: 12, class: "swatch", "aria-hidden": "true" }, sample);
}

function legend(chart) {
  const list = h("ul", { class: "legend" });
  for (const name of shownLines(chart)) {
    const size = highest(chart[name]);
    const value = h("b", { title: exact(size) }, bytes(size));
    const hint = name === "anonymous" ? "anonymous resident memory of the process, over its start" : "weights, constants and load buffers";
    list.append(h("li", { title: hint }, swatch(name), h("span", {}, `${name}, peak `, value)));
  }
  for (const { kind, name, size, outside } of levels(chart)) {
    const value = h("b", { title: exact(size) }, bytes(size));
    list.append(h("li", {}, swatch(kind), h("span", {}, `${name} `, value, outside ? " (above the chart)" : "")));
  }
  return list;
}

function axes(frame, across, up, x, y) {
  const { width, height } = frame;
  const group = s("g", { class: "axes" });
  for (const { at, text } of up.marks) {
    group.append(
      s("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(at), y2: y(at) }),
      s("text", { x: MARGIN.left - 8, y: y(at) + 4, "text-anchor": "end" }, at === 0 ? "0" : `${text} ${up.unit}`),
    );
  }
  const floor = height - MARGIN.bottom;
  for (const { at, text } of across.marks) {
    group.append(
      s("line", { class: "tick", x1: x(at), x2: x(at), y1: floor, y2: floor + 5 }),
      s("text", { x: x(at), y: floor + 19, "text-anchor": "middle" }, text),
    );
  }
  const middle = (MARGIN.left + width - MARGIN.right) / 2;
  group.append(
    s("line", { class: "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: floor, y2: floor }),
    s("text", { class: "axis-name", x: middle, y: height - 6, "text-anchor": "middle" }, `read from the checkpoint (${across.unit})`),
  );
  return group;
}

// Below the line: what comes and goes, then what is alive all the time.
function areas(columns, y) {
  return ["high", "low"].map((name) => {
    const close = `V${y(0).toFixed(1)}H${columns[0].left.toFixed(1)}Z`;
    return s("path", { class: "area", d: stepPath(columns, y, name) + close });
  });
}

function curves(chart, frame, x, y) {
  const group = s("g", { class: "curves" });
  const right = frame.width - MARGIN.right;
  for (const { kind, size, outside } of levels(chart)) {
    if (outside) continue;
    group.append(s("line", { class: `line ${kind}`, x1: MARGIN.left, x2: right, y1: y(size), y2: y(size) }));
  }
  for (const name of shownLines(chart)) {
    const points = chart[name];
    if (points.length > 1) {
      const columns = columnsOf(points, x, right);
      if (name === "predicted") group.append(...areas(columns, y));
      group.append(s("path", { class: `line ${name}`, d: stepPath(columns, y, "high") }));
    }
    const top = highest(points);
    const peak = points.find((point) => point[1] === top) || points[0];
    group.append(s("circle", { class: `dot ${name}`, cx: x(peak[0]), cy: y(Math.max(0, peak[1])), r: 4 }));
  }
  return group;
}

function tooltip(chart, read) {
  const rows = h("dl");
  let seconds = null;
  for (const name of shownLines(chart)) {
    const point = valueAt(chart[name], read);
    if (point === null) continue;
    if (name === "measured" && point.length > 2) [, , seconds] = point;
    rows.append(h("dt", {}, swatch(name), name), h("dd", {}, bytes(point[1]), h("small", {}, exact(point[1]))));
  }
  const when = seconds === null ? "" : ` at ${seconds.toFixed(2)} s`;
  return [h("p", {}, `after ${bytes(read)}${when}`, h("small", {}, `${exact(read)} read`)), rows];
}

// The crosshair jumps from moment to moment: with the pointer, or with the arrow keys.
function follow(figure, picture, chart, frame, x) {
  const stops = [...new Set(shownLines(chart).flatMap((name) => chart[name].map((point) => point[0])))];
  stops.sort((one, two) => one - two);
  const hair = s("line", { class: "hair", y1: MARGIN.top, y2: frame.height - MARGIN.bottom, visibility: "hidden" });
  const box = h("div", { class: "tip", "aria-live": "polite", hidden: "" });
  picture.append(hair);
  figure.append(box);
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(stops.length - 1, index));
    const place = x(stops[at]);
    hair.setAttribute("visibility", "visible");
    hair.setAttribute("x1", place);
    hair.setAttribute("x2", place);
    box.replaceChildren(...tooltip(chart, stops[at]));
    box.hidden = false;
    const share = picture.clientWidth / frame.width || 1;
    const left = place * share;
    const flip = left > picture.clientWidth / 2;
    box.style.left = `${flip ? left - box.offsetWidth - 12 : left + 12}px`;
  };
  const hide = () => {
    box.hidden = true;
    hair.setAttribute("visibility", "hidden");
  };
  picture.addEventListener("pointermove", (event) => {
    const area = picture.getBoundingClientRect();
    const place = ((event.clientX - area.left) / area.width) * frame.width;
    let best = 0;
    stops.forEach((stop, index) => {
      if (Math.abs(x(stop) - place) < Math.abs(x(stops[best]) - place)) best = index;
    });
    show(best);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("focus", () => { if (picture.matches(":focus-visible")) show(Math.max(0, at)); });
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: stops.length - 1 };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

function describe(chart) {
  const parts = shownLines(chart).map((name) => `${name}: peak ${bytes(highest(chart[name]))}`);
  parts.push(...levels(chart).map(({ name, size }) => `${name}: ${bytes(size)}`));
  return `Memory on ${chart.device} over the bytes read. ${parts.join("; ")}.`;
}

function plot(figure, chart, farthest) {
  const frame = { width: Math.max(360, Math.round(figure.clientWidth)), height: farthest.height };
  const inside = levels(chart).filter((level) => !level.outside).map((level) => level.size);
  const top = Math.max(1, ...inside, ...shownLines(chart).map((name) => highest(chart[name]))) * 1.06;
  const x = (read) => MARGIN.left + (read / farthest.read) * (frame.width - MARGIN.left - MARGIN.right);
  const y = (size) => frame.height - MARGIN.bottom - (size / top) * (frame.height - MARGIN.top - MARGIN.bottom);
  const picture = s("svg", {
    viewBox: `0 0 ${frame.width} ${frame.height}`, class: "plot", role: "img", tabindex: 0, "aria-label": describe(chart),
  });
  const across = ticks(farthest.read, Math.max(3, Math.round(frame.width / 110)));
  picture.append(axes(frame, across, ticks(top, 5), x, y), curves(chart, frame, x, y));
  figure.replaceChildren(picture);
  follow(figure, picture, chart, frame, x);
}

// Small multiples: one chart per device, all over the same reads. Drawn once the section has a width.
function memorySection(data) {
  const section = h("section", { class: "card memory", "aria-labelledby": "memory" }, h("h2", { id: "memory" }, "Memory while loading"));
  const reads = data.charts.flatMap((chart) => LINES.flatMap((name) => chart[name].map((point) => point[0])));
  const drawn = data.charts.filter((chart) => shownLines(chart).length > 0);
  const farthest = { read: reads.reduce((best, read) => Math.max(best, read), 1), height: drawn.length > 1 ? 230 : 340 };
  if (drawn.length === 0) section.append(h("p", { class: "none" }, "No timeline was recorded."));
  const draws = [];
  for (const chart of drawn) {
    const figure = h("div", { class: "figure" });
    section.append(h("h3", {}, `on ${chart.device}`), legend(chart), figure);
    let width = 0;
    const draw = () => {
      if (figure.clientWidth === width || figure.clientWidth === 0) return;
      width = figure.clientWidth;
      plot(figure, chart, farthest);
    };
    draws.push(draw);
    new ResizeObserver(draw).observe(figure);
  }
  if (drawn.length > 0) {
    section.append(h("p", { class: "none" }, "Lines show the highest value of every few pixels. Exact values: point at the chart, or focus it and use the arrow keys."));
  }
  return { section, draw: () => draws.forEach((draw) => draw()) };
}
