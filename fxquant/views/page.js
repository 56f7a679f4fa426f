// The head of the page, its facts and contributors; the last lines put everything together.

const TOP = 12;
const LISTED = 200; // names of a long list; the plan itself has them all

// Names come from whoever made the checkpoint: what would hide or turn round the text beside it is
// shown as its code.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff]" +
  "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", "g"); // the last two: halves of pairs

function visible(text) {
  return text.replace(HIDDEN, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function revive(key, value) {
  if (typeof value === "string") return visible(value);
  if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, part]) => [visible(name), part]));
}

function short(text) {
  return /^[0-9a-f]{24,}$/.test(text) ? `${text.slice(0, 12)}\u2026` : text;
}

function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "0 %";
}

function pageHead(data, toggle) {
  const line = h("p", { class: "sub" }, h("b", {}, data.scheme), " on ", h("b", {}, data.target));
  if (data.checkpoint) line.append(" \u00b7 checkpoint ", h("code", { title: data.checkpoint }, short(data.checkpoint)));
  line.append(" \u00b7 plan ", h("code", { title: data.hash }, short(data.hash)));
  return h("header", { class: "top" }, h("div", {}, h("h1", {}, data.report ? "fxquant report" : "fxquant plan"), line), toggle);
}

function tile(title, value, note, hint) {
  const shown = h("p", { class: "value" }, value);
  if (hint) shown.title = hint;
  return h("div", { class: "tile" }, h("p", { class: "title" }, title), shown, h("p", { class: "note" }, note));
}

function duration(seconds) {
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

// The unit once, where it is the same.
function fromTo(before, after) {
  const [first, second] = [bytes(before), bytes(after)];
  const same = first.split(" ")[1] === second.split(" ")[1];
  return `${same ? first.split(" ")[0] : first} \u2192 ${second}`;
}

function savedText(data) {
  const change = data.float > 0 ? Math.round(100 * (1 - data.resident / data.float)) : 0;
  if (change === 0) return "float \u2192 resident";
  return `float \u2192 resident: ${Math.abs(change)} % ${change > 0 ? "less" : "more"}`;
}

function difference(value, predicted) {
  const change = predicted > 0 ? (100 * (value - predicted)) / predicted : 0;
  const size = Math.abs(change).toFixed(1);
  return size === "0.0" ? "" : ` (${change > 0 ? "+" : "\u2212"}${size} %)`;
}

function peakTiles(data) {
  const measured = data.report ? data.report.peak : {};
  const devices = [...new Set([...Object.keys(data.peak), ...Object.keys(measured)])].sort();
  return devices.map((device) => {
    const predicted = data.peak[device];
    const value = measured[device];
    if (value === undefined) return tile(`Predicted peak on ${device}`, bytes(predicted), "weights, constants and load buffers", exact(predicted));
    if (predicted === undefined) return tile(`Measured peak on ${device}`, bytes(value), "not predicted", exact(value));
    return tile(`Measured peak on ${device}`, bytes(value), `predicted ${bytes(predicted)}${difference(value, predicted)}`, exact(value));
  });
}

function tiles(data) {
  const quantizedAt = data.columns.indexOf("quantized");
  const quantized = data.weights.filter((row) => row[quantizedAt]).length;
  const list = h("div", { class: "tiles" },
    tile("Weights", fromTo(data.float, data.resident), savedText(data), `${exact(data.float)} \u2192 ${exact(data.resident)}`),
    tile("Quantized", `${count(quantized)} of ${count(data.weights.length)}`, "weights held as codes"),
    ...peakTiles(data));
  const { report } = data;
  if (report) {
    const rate = report.seconds > 0 ? `, ${bytes(report.read / report.seconds)}/s` : "";
    if (report.anonymous !== null) {
      list.append(tile("Peak anonymous memory", bytes(report.anonymous), "of the process, over its start", exact(report.anonymous)));
    }
    list.append(tile("Load", duration(report.seconds), `${bytes(report.read)} read${rate}`, exact(report.read)));
  }
  return list;
}

function longList(title, names) {
  const list = h("ul", {}, ...names.slice(0, LISTED).map((name) => h("li", {}, name)));
  if (names.length > LISTED) list.append(h("li", { class: "none" }, `and ${names.length - LISTED} more`));
  const box = h("details", {}, h("summary", {}, title), list);
  box.open = names.length <= 5;
  return box;
}

function warnings(data) {
  const { report } = data;
  const groups = [
    [(n) => (n === 1 ? "1 note" : `${n} notes`), data.notes],
    [(n) => `${n} ${n === 1 ? "pattern matches" : "patterns match"} nothing`, data.unmatched],
    [(n) => `${n} checkpoint ${n === 1 ? "tensor is" : "tensors are"} not used`, data.extra],
    [(n) => `${n} ${n === 1 ? "place computes" : "places compute"} with float values`,
      report ? Object.entries(report.sites).map(([site, times]) => `${site} (${times} times)`) : []],
    [(n) => `${n} ${n === 1 ? "graph runs" : "graphs run"} without rewriting`, report ? report.unnormalized : []],
  ].filter(([, names]) => names.length > 0);
  if (groups.length === 0) return null;
  const lists = groups.map(([title, names]) => longList(title(names.length), names));
  return h("section", { class: "card notes", "aria-label": "Notes" }, ...lists);
}

function simple(key, value) {
  if (value === null) return "none";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") {
    const size = /byte|budget|buffer|memory/.test(key) && Number.isInteger(value) && value >= 1024;
    return size ? `${bytes(value)} (${exact(value)})` : count(value);
  }
  if (Array.isArray(value)) return value.map((part) => simple(key, part)).join(", ") || "none";
  if (typeof value === "object") {
    return Object.entries(value).map(([name, part]) => `${name}: ${simple(name, part)}`).join(", ") || "none";
  }
  return value;
}

function facts(title, pairs) {
  if (pairs.length === 0) return null;
  const list = h("dl", {}, ...pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  return h("div", { class: "facts" }, h("h3", {}, title), list);
}

function planFacts(data) {
  const rules = Object.entries(data.config).filter(([name, value]) => name !== "scheme" && simple(name, value) !== "none");
  return [
    ["scheme", data.scheme],
    ["target", data.target],
    ...(data.backend === data.target ? [] : [["backend", data.backend]]),
    ...rules.map(([name, value]) => [name, simple(name, value)]),
    ["captured", data.capture],
    ...Object.entries(data.rewrites).map(([name, times]) => [`${name} rewrites`, simple("", times)]),
  ];
}

function factsSection(data) {
  const { report } = data;
  const kernels = Object.entries(data.kernels).map(([op, row]) => {
    const { op: runs, reason, ...rest } = row;
    const more = Object.keys(rest).length > 0 ? `; ${simple("", rest)}` : "";
    return [op, h("span", {}, runs || "", h("small", {}, `${reason || ""}${more}`))];
  });
  const run = report ? [
    ["graphs", `${Object.values(report.graphs).reduce((sum, compiled) => sum + compiled, 0)} over ${Object.keys(report.graphs).length} frames`],
    ["recompiles", simple("", report.recompiles)],
    ["uses rewritten", simple("", report.rewritten)],
    ["quantized calls outside of graphs", simple("", report.eager)],
    ["fallbacks", simple("", report.fallbacks)],
  ] : [];
  const loading = Object.entries(data.loading).map(([name, value]) => [name.replaceAll("_", " "), simple(name, value)]);
  return h("section", { class: "card", "aria-labelledby": "facts" }, h("h2", { id: "facts" }, "Details"),
    facts("Plan", planFacts(data)), facts("Loading", loading), facts("Kernels", kernels), facts("Since loading", run));
}

function contributors(rows) {
  if (rows.length === 0) return h("section", { class: "card" }, h("p", { class: "none" }, "The plan has no weights."));
  const top = [...rows].sort((one, two) => two.resident - one.resident).slice(0, TOP);
  const widest = Math.max(1, ...top.map((row) => Math.max(row.resident, row.float)));
  const list = h("ol", { class: "bars" });
  for (const row of top) {
    const kind = row.quantized ? "quantized" : "float";
    const bar = h("span", { class: `bar ${kind}` });
    const ghost = h("span", { class: "ghost" });
    bar.style.width = `${(100 * row.resident) / widest}%`;
    ghost.style.width = `${(100 * row.float) / widest}%`;
    const hint = `${row.form}: ${exact(row.float)} as float, ${exact(row.resident)} resident`;
    list.append(h("li", { title: hint }, h("span", { class: "name" }, ...breakable(row.fqn)),
      h("span", { class: "track" }, row.quantized ? ghost : null, bar), h("span", { class: "size" }, bytes(row.resident))));
  }
  const total = rows.reduce((sum, row) => sum + row.resident, 0);
  const rest = total - top.reduce((sum, row) => sum + row.resident, 0);
  const key = h("ul", { class: "legend" },
    h("li", {}, h("span", { class: "key quantized" }), "quantized"), h("li", {}, h("span", { class: "key float" }), "float"),
    h("li", {}, h("span", { class: "key ghost" }), "its size as float"));
  const left = rows.length - top.length;
  const note = left > 0 ? `The other ${count(left)} weights hold ${bytes(rest)}, ${percent(rest, total)} of the resident bytes.` : "";
  return h("section", { class: "card", "aria-labelledby": "largest" }, h("h2", { id: "largest" }, "Largest weights"),
    key, list, h("p", { class: "none" }, note));
}

function formsSection(rows) {
  const forms = new Map();
  for (const row of rows) {
    const sum = forms.get(row.form) || { form: row.form, quantized: row.quantized, count: 0, float: 0, resident: 0 };
    sum.count += 1;
    sum.float += row.float;
    sum.resident += row.resident;
    forms.set(row.form, sum);
  }
  const sums = [...forms.values()].sort((one, two) => two.resident - one.resident);
  const total = { count: rows.length, float: 0, resident: 0 };
  for (const sum of sums) { total.float += sum.float; total.resident += sum.resident; }
  const size = (value) => h("td", { class: "number", title: exact(value) }, bytes(value));
  const cells = (sum) => [h("td", { class: "number" }, count(sum.count)), size(sum.float), size(sum.resident),
    h("td", { class: "number" }, percent(sum.resident, total.resident))];
  const lines = sums.map((sum) => h("tr", {},
    h("th", { scope: "row" }, h("span", { class: `form ${sum.quantized ? "quantized" : "float"}` }, sum.form)), ...cells(sum)));
  const head = ["Form", "Weights", "Float", "Resident", "Share"].map((title, index) =>
    h("th", { scope: "col", class: index === 0 ? "" : "number" }, title));
  const table = h("table", { class: "forms" }, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...lines),
    h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "all"), ...cells(total))));
  return h("section", { class: "card", "aria-labelledby": "forms" }, h("h2", { id: "forms" }, "By form"), h("div", { class: "scroll-x" }, table));
}

// The system's choice until the reader makes one.
function themeButton(state) {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = h("button", { type: "button", class: "theme" });
  const show = () => {
    const theme = state.theme || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light theme" : "Dark theme";
  };
  button.addEventListener("click", () => {
    state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    writeState(state);
    show();
  });
  dark.addEventListener("change", show);
  return { button, show };
}

function main() {
  const data = JSON.parse(document.getElementById("data").textContent, revive);
  const state = readState();
  const theme = themeButton(state);
  theme.show();
  const rows = rowsOf(data);
  const memory = memorySection(data);
  const layers = layersSection(rows, state);
  document.title = `fxquant ${data.report ? "report" : "plan"}: ${data.scheme} on ${data.target}`;
  const parts = [pageHead(data, theme.button), tiles(data), warnings(data),
    h("div", { class: "split" },
      h("div", {}, memory.section, contributors(rows)), h("div", {}, factsSection(data), formsSection(rows))),
    layers.section,
    h("footer", {}, "Sizes are binary: 1 MiB is 1,048,576 bytes. Point at a size for the exact number of bytes.")];
  document.getElementById("page").append(...parts.filter((part) => part !== null));
  memory.draw();
  layers.show();
  window.addEventListener("hashchange", () => {
    Object.assign(state, readState());
    theme.show();
    layers.show();
  });
  document.documentElement.dataset.ready = "true";
}

main();
