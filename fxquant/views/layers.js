// The table of all weights: sorted, searched, filtered; the state is kept in the URL's fragment.

const ROWS = 300; // rendered at once
const MIB = 1024 * 1024;

const COLUMNS = [
  { key: "fqn", title: "Weight" },
  { key: "shape", title: "Shape", number: true, value: (row) => row.shape.reduce((product, side) => product * side, 1) },
  { key: "dtype", title: "Dtype" },
  { key: "form", title: "Form" },
  { key: "float", title: "Float MiB", number: true },
  { key: "resident", title: "Resident MiB", number: true },
  { key: "transient", title: "Transient MiB", number: true },
  { key: "sqnr", title: "SQNR dB", number: true, value: (row) => decibels(row.sqnr) },
  { key: "clipped", title: "Clipped %", number: true, value: (row) => row.clipped ?? -1 },
  { key: "reason", title: "Reason" },
  { key: "uses", title: "Uses", value: (row) => row.uses.join(", ") },
  { key: "files", title: "File", value: (row) => row.files.join(", ") },
];

const KINDS = [["all", "All"], ["quantized", "Quantized"], ["float", "Float"]];

function rowsOf(data) {
  return data.weights.map((values) => {
    const row = Object.fromEntries(data.columns.map((name, index) => [name, values[index]]));
    row.text = [row.fqn, ...row.aliases, row.form, row.reason, ...row.files].join("\n").toLowerCase();
    return row;
  });
}

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  const known = COLUMNS.some((column) => column.key === given.get("sort"));
  return {
    q: given.get("q") || "",
    sort: known ? given.get("sort") : "",
    dir: given.get("dir") === "desc" ? "desc" : "asc",
    only: KINDS.some(([kind]) => kind === given.get("only")) ? given.get("only") : "all",
    theme: ["light", "dark"].includes(given.get("theme")) ? given.get("theme") : "",
  };
}

function writeState(state) {
  const kept = new URLSearchParams();
  if (state.q) kept.set("q", state.q);
  if (state.sort) { kept.set("sort", state.sort); kept.set("dir", state.dir); }
  if (state.only !== "all") kept.set("only", state.only);
  if (state.theme) kept.set("theme", state.theme);
  const fragment = kept.toString();
  try {
    history.replaceState(null, "", `${location.pathname}${location.search}${fragment ? `#${fragment}` : ""}`);
  } catch {
    // A page inside of another one may not; it works without.
  }
}

function select(rows, state) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const found = rows.filter((row) => {
    if (state.only !== "all" && row.quantized !== (state.only === "quantized")) return false;
    return words.every((word) => row.text.includes(word));
  });
  const column = COLUMNS.find((candidate) => candidate.key === state.sort);
  if (!column) return found;
  const value = column.value || ((row) => row[column.key]);
  const collator = new Intl.Collator("en", { numeric: true });
  const compare = column.number ? (one, two) => one - two : collator.compare;
  const sign = state.dir === "desc" ? -1 : 1;
  return found
    .map((row, index) => ({ row, index, key: value(row) }))
    .sort((one, two) => sign * compare(one.key, two.key) || one.index - two.index)
    .map((entry) => entry.row);
}

function mebibytes(size) {
  if (size === 0) return "0";
  return size < 0.005 * MIB ? "<0.01" : (size / MIB).toFixed(2);
}

// Of a float weight nothing was measured; "inf" and "nan" come as text.
function decibels(value) {
  return value === null ? -Infinity : value === "nan" ? -1e9 : Number(value === "inf" ? Infinity : value);
}

function errorCells(row) {
  const sqnr = row.sqnr === null ? "" : Number.isFinite(row.sqnr) ? row.sqnr.toFixed(1) : String(row.sqnr);
  const clipped = row.clipped === null ? "" : row.clipped === 0 ? "0" : (100 * row.clipped).toFixed(2);
  return [h("td", { class: "number" }, sqnr), h("td", { class: "number" }, clipped)];
}

function sizeCell(size) {
  return h("td", { class: "number", title: exact(size) }, mebibytes(size));
}

function renderRow(row) {
  const name = h("th", { scope: "row", class: "name" }, ...breakable(row.fqn));
  for (const alias of row.aliases) name.append(h("span", { class: "alias" }, "= ", ...breakable(alias)));
  if (row.kind !== "parameter") name.append(h("span", { class: "alias" }, row.kind));
  const form = h("span", { class: `form ${row.quantized ? "quantized" : "float"}` }, row.form);
  const shape = row.shape.length === 0 ? "scalar" : row.shape.join("\u00d7");
  return h("tr", {}, name,
    h("td", { class: "number" }, shape), h("td", {}, row.dtype), h("td", {}, form),
    sizeCell(row.float), sizeCell(row.resident), sizeCell(row.transient), ...errorCells(row),
    h("td", {}, row.reason), h("td", {}, ...breakable(row.uses.join(", "))), h("td", { class: "file" }, ...breakable(row.files.join(", "))));
}

function headerRow(state, sortBy) {
  const cells = COLUMNS.map(({ key, title, number }) => {
    const active = state.sort === key;
    const sorted = !active ? "none" : state.dir === "desc" ? "descending" : "ascending";
    const arrow = h("span", { class: "arrow", "aria-hidden": "true" }, !active ? "" : state.dir === "desc" ? "\u2193" : "\u2191");
    const button = h("button", { type: "button" }, title, arrow);
    button.addEventListener("click", () => sortBy(key, Boolean(number)));
    return h("th", { scope: "col", "data-key": key, "aria-sort": sorted, class: number ? "number" : "" }, button);
  });
  return h("tr", {}, ...cells);
}

// Numbers start with the largest; a third click goes back to the order of the model.
function nextSort(state, key, number) {
  const first = number ? "desc" : "asc";
  if (state.sort !== key) return { sort: key, dir: first };
  if (state.dir === first) return { sort: key, dir: first === "asc" ? "desc" : "asc" };
  return { sort: "", dir: "asc" };
}

function layersView(rows) {
  const search = h("input", { type: "search", id: "search", placeholder: "name, form, reason or file", autocomplete: "off", spellcheck: "false" });
  const matches = h("output", { class: "count", for: "search" });
  const head = h("thead");
  const body = h("tbody");
  const more = h("button", { type: "button", class: "more" });
  const chips = KINDS.map(([kind, title]) => {
    const size = rows.filter((row) => kind === "all" || row.quantized === (kind === "quantized")).length;
    return h("button", { type: "button", class: "chip", "data-kind": kind }, `${title} `, h("small", {}, count(size)));
  });
  const measured = rows.some((row) => row.sqnr !== null);
  const table = h("table", { class: measured ? "layers" : "layers unmeasured" }, h("caption", { class: "hidden" }, "All weights of the model"),
    h("colgroup", {}, ...COLUMNS.map(({ key }) => h("col", { class: `col-${key}` }))), head, body);
  const section = h("section", { class: "card", "aria-labelledby": "layers" },
    h("h2", { id: "layers" }, "Layers"),
    h("div", { class: "tools" }, h("label", { for: "search" }, "Search"), search,
      h("div", { class: "chips", role: "group", "aria-label": "Show" }, ...chips), matches),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of layers" }, table), more);
  return { section, search, count: matches, head, body, more, chips };
}

// Returns the section and a function that shows it for the current state.
function layersSection(rows, state) {
  const view = layersView(rows);
  let found = [];
  const extend = () => {
    const start = view.body.rows.length;
    view.body.append(...found.slice(start, start + ROWS).map(renderRow));
    const left = found.length - view.body.rows.length;
    view.more.hidden = left === 0;
    view.more.textContent = `Show ${count(Math.min(left, ROWS))} more; ${count(left)} are not shown`;
  };
  const show = () => {
    found = select(rows, state);
    if (view.search.value !== state.q) view.search.value = state.q;
    view.count.textContent = `${count(found.length)} of ${count(rows.length)}`;
    for (const chip of view.chips) chip.setAttribute("aria-pressed", String(chip.dataset.kind === state.only));
    const focused = view.head.contains(document.activeElement) ? document.activeElement.parentElement.dataset.key : null;
    view.head.replaceChildren(headerRow(state, (key, number) => change(nextSort(state, key, number))));
    if (focused) view.head.querySelector(`[data-key="${focused}"] button`).focus();
    view.body.replaceChildren();
    extend();
    if (found.length === 0) {
      view.body.append(h("tr", {}, h("td", { colspan: COLUMNS.length, class: "none" }, "No weight matches.")));
    }
  };
  const change = (part) => {
    Object.assign(state, part);
    writeState(state);
    show();
  };
  view.search.addEventListener("input", () => change({ q: view.search.value }));
  view.more.addEventListener("click", extend);
  for (const chip of view.chips) chip.addEventListener("click", () => change({ only: chip.dataset.kind }));
  return { section: view.section, show };
}
