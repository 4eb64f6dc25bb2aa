// Makes a page answer: choices that stand in its address, charts and timelines that
// follow them, tables that sort and filter. Charts are drawn by Vega.
"use strict";

const COLLATOR = new Intl.Collator("en", { numeric: true });
const ROWS_WORTH_A_FILTER = 8;
const ROWS_AT_ONCE = 200;
const FINEST_PX = 2;

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// What is chosen. It stands in the address, so that a copied address shows the same.
const state = new Map(new URLSearchParams(location.hash.slice(1)));
const followers = [];

function choose(name, value, source) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  if (state.get(name) === text) return;
  state.set(name, text);
  history.replaceState(null, "", `#${new URLSearchParams([...state])}`);
  for (const follow of followers) if (!source || follow.source !== source) follow(name, value);
}

function follow(act, source) {
  followers.push(Object.assign(act, { source }));
}

for (const select of document.querySelectorAll("select[data-choice]")) {
  const name = select.dataset.choice;
  const options = [...select.options].map((option) => option.value);
  if (options.includes(state.get(name))) select.value = state.get(name);
  select.addEventListener("change", () => choose(name, select.value, select));
  follow((changed, value) => {
    if (changed === name) select.value = value;
  }, select);
}

function chosen(name) {
  const select = document.querySelector(`select[data-choice="${name}"]`);
  return select ? select.value : state.get(name);
}

// Copying.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  } catch {
    // A page that was opened as a file may not write there: select it instead.
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = "selected";
  }
  setTimeout(() => (button.textContent = "copy"), 1500);
});

// Tables.
const UNITS = { s: 1, ms: 1e-3, "µs": 1e-6, ns: 1e-9, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, k: 1e3, M: 1e6, G: 1e9 };

// A number with a unit as a number; null where the cell begins with none.
function amount(text) {
  const match = /^([+-]?[\d,.]+(?:e[+-]?\d+)?)\s*([A-Za-zµ]*)/.exec(text);
  if (!match || !/\d/.test(match[1])) return null;
  const value = Number(match[1].replaceAll(",", ""));
  return Number.isFinite(value) ? value * (UNITS[match[2]] ?? 1) : null;
}

function compareCells(a, b) {
  const [x, y] = [amount(a), amount(b)];
  if (x !== null && y !== null) return x - y;
  return COLLATOR.compare(a, b);
}

const NO_VALUE = ["", "-", "–"];

class Table {
  constructor(place, rows) {
    this.place = place;
    this.body = place.querySelector("tbody");
    this.heads = place.querySelectorAll("thead th");
    this.made = !rows;
    this.rows = rows
      ? rows.map((cells, number) => ({ cells, number }))
      : [...this.body.rows].map((row, number) => ({ row, cells: [...row.cells].map((cell) => cell.textContent), number }));
    this.words = [];
    this.most = ROWS_AT_ONCE;
    if (this.rows.length > 1) this.makeHeads();
    if (this.rows.length >= ROWS_WORTH_A_FILTER) this.makeFilter();
    if (!this.made) this.makeMore();
    this.show();
  }

  makeHeads() {
    this.heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => this.sort(head, column));
      head.replaceChildren(button);
    });
  }

  sort(head, column) {
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const missing = (row) => NO_VALUE.includes(row.cells[column]);
    this.rows.sort((a, b) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      const order = compareCells(a.cells[column], b.cells[column]);
      return ascending ? order : -order;
    });
    this.show();
  }

  makeFilter() {
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "Filter rows";
    field.setAttribute("aria-label", `Filter rows: ${this.place.getAttribute("aria-label")}`);
    const name = `filter${document.querySelectorAll("input[type=search]").length || ""}`;
    const apply = () => {
      this.words = field.value.toLowerCase().split(/\s+/);
      this.show();
    };
    field.addEventListener("input", () => {
      choose(name, field.value, field);
      apply();
    });
    field.value = state.get(name) ?? "";
    this.words = field.value.toLowerCase().split(/\s+/);
    this.place.before(field);
  }

  makeMore() {
    this.more = document.createElement("button");
    this.more.type = "button";
    this.more.className = "more";
    this.more.addEventListener("click", () => {
      this.most += 5 * ROWS_AT_ONCE;
      this.show();
    });
    this.place.after(this.more);
  }

  show() {
    const fit = this.rows.filter((row) => {
      const text = row.cells.join(" ").toLowerCase();
      return this.words.every((word) => text.includes(word));
    });
    const shown = this.made ? fit : fit.slice(0, this.most);
    this.body.replaceChildren(...shown.map((row) => this.elementOf(row)));
    if (!this.more) return;
    this.more.hidden = shown.length === fit.length;
    this.more.textContent = `${shown.length} of ${fit.length} rows; show more`;
  }

  elementOf(row) {
    if (row.row && row.finished) return row.row;
    row.row ??= document.createElement("tr");
    row.row.replaceChildren(
      ...row.cells.map((text, column) => {
        const cell = document.createElement(column ? "td" : "th");
        cell.className = this.heads[column].className;
        if (!column) cell.scope = "row";
        cell.textContent = text;
        return cell;
      }),
    );
    const { opens } = this.place.dataset;
    if (opens) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "link";
      button.textContent = row.cells[0];
      button.addEventListener("click", () => {
        choose("run", opens.split(" ")[row.number]);
        document.querySelector('[data-follows="run"]')?.scrollIntoView({ block: "nearest" });
      });
      row.row.cells[0].replaceChildren(button);
    }
    row.finished = true;
    return row.row;
  }
}

// Facts about what is chosen.
function showFacts(place, { choice, names, values }) {
  const show = (value) => {
    const rows = (values[value] ?? []).map((text, at) => {
      const [term, words] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = names[at];
      if (text.startsWith("$ ")) {
        const [code, button] = [document.createElement("code"), document.createElement("button")];
        code.textContent = text.slice(2);
        Object.assign(button, { type: "button", className: "copy", textContent: "copy" });
        button.dataset.copy = text.slice(2);
        words.append(code, button);
      } else words.textContent = text;
      const row = document.createElement("div");
      row.append(term, words);
      return row;
    });
    place.replaceChildren(...rows);
  };
  place.dataset.follows = choice;
  show(chosen(choice) ?? Object.keys(values)[0]);
  follow((name, value) => name === choice && show(value), place);
}

// Charts.
const dark = matchMedia("(prefers-color-scheme: dark)");
let looks;

// A description that fits the width of the place.
function fitted(spec, place) {
  const width = place.clientWidth;
  const fit = structuredClone(spec);
  walk(fit, (object, key) => {
    if (key === "legend" && object.columns) object.columns = Math.max(1, Math.min(object.columns, Math.floor(width / 180)));
    if (key === "axis" && width < 500 && object.labelLimit) object.labelLimit = 110;
  });
  if (typeof fit.width === "number") return { ...fit, width: "container", autosize: { type: "fit-x", contains: "padding" } };
  if (fit.facet && fit.columns) {
    fit.spec.width = Math.min(fit.spec.width, Math.max(120, width - 90));
    fit.columns = Math.min(fit.columns, Math.max(1, Math.floor(width / (fit.spec.width + 90))));
  }
  return fit;
}

function walk(object, act) {
  for (const [key, value] of Object.entries(object)) {
    if (value && typeof value === "object") {
      act(value, key, object);
      walk(value, act);
    }
  }
}

// The same figure of another measure, or on a logarithmic axis.
function measured(part) {
  const [first] = Object.keys(part.measures ?? {});
  const chosenOne = part.measure ?? first;
  let text = JSON.stringify(part.spec);
  if (chosenOne !== first) {
    text = text.replaceAll(`"${first}"`, `"${chosenOne}"`).replaceAll(`datum['${first}']`, `datum['${chosenOne}']`);
    text = text.replaceAll(JSON.stringify(part.measures[first]), JSON.stringify(part.measures[chosenOne]));
  }
  const spec = JSON.parse(text);
  if (chosenOne !== first && spec.layer) {
    // Intervals and labels belong to the first measure.
    spec.layer = spec.layer.filter(({ encoding }) => !["x", "y"].some((side) => encoding?.[side]?.field === "low_s") && encoding?.text?.field !== "words");
  }
  if (chosenOne !== first) {
    // So do the ends of the axis.
    walk(spec, (object, key) => {
      if (["x", "y"].includes(key) && object.field === chosenOne && object.scale?.domain) object.scale = { zero: true };
    });
  }
  if (part.log) {
    walk(spec, (object, key) => {
      if (object.field !== chosenOne && !["low_s", "high_s"].includes(object.field)) return;
      if (["x", "y"].includes(key)) object.scale = { type: "log", padding: 8 };
    });
  }
  return spec;
}

function save(name, content) {
  const link = document.createElement("a");
  link.href = content.startsWith("data:") ? content : URL.createObjectURL(new Blob([content], { type: "text/csv" }));
  link.download = name;
  link.click();
}

function csv(rows) {
  const names = Object.keys(rows[0] ?? {});
  const cell = (value) => (/[",\n]/.test(String(value ?? "")) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  return [names.map(cell).join(","), ...rows.map((row) => names.map((name) => cell(row[name])).join(","))].join("\n");
}

// What a reader can do with any figure: another measure, a logarithmic axis, files.
function makeTools(place, part) {
  const tools = document.createElement("div");
  tools.className = "tools";
  const key = `figure${place.dataset.part}`;
  const redraw = () => draw(place, part);
  const names = Object.entries(part.measures ?? {});
  if (names.length > 1) {
    const select = document.createElement("select");
    select.setAttribute("aria-label", "shows");
    select.append(...names.map(([value, words]) => new Option(words, value)));
    if (names.some(([name]) => name === state.get(`${key}.shows`))) part.measure = select.value = state.get(`${key}.shows`);
    select.addEventListener("change", () => {
      part.measure = select.value;
      choose(`${key}.shows`, select.value, part);
      redraw();
    });
    tools.append(select);
  }
  if (part.can_log) {
    const [label, box] = [document.createElement("label"), document.createElement("input")];
    box.type = "checkbox";
    part.log = box.checked = state.get(`${key}.log`) === "true";
    box.addEventListener("change", () => {
      part.log = box.checked;
      choose(`${key}.log`, String(box.checked), part);
      redraw();
    });
    label.append(box, "logarithmic");
    tools.append(label);
  }
  const title = place.getAttribute("aria-label").toLowerCase().replace(/\W+/g, "-").slice(0, 40);
  const button = (words, act) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: words });
    made.setAttribute("aria-label", `save as ${words}`);
    made.addEventListener("click", act);
    tools.append(made);
  };
  for (const kind of ["PNG", "SVG"]) button(kind, async () => save(`${title}.${kind.toLowerCase()}`, await part.view.toImageURL(kind.toLowerCase(), 2)));
  if (part.data.rows) button("CSV", () => save(`${title}.csv`, csv(part.data.rows)));
  place.closest("figure").append(tools);
}

async function draw(place, part) {
  part.view?.finalize();
  if (!part.tools) {
    part.tools = true;
    makeTools(place, part);
  }
  const theme = dark.matches && !printing ? "dark" : undefined;
  const ink = { color: theme ? "#e4e4e4" : "#222222" };
  const spec = { ...fitted(measured(part), place), config: { ...looks, text: ink, rule: ink } };
  // Vega adds to the rows that it is given.
  spec.datasets = { ...spec.datasets, ...structuredClone(part.data) };
  const tooltip = { theme: theme ?? "light" };
  const made = await vegaEmbed(place, spec, { renderer: "canvas", actions: false, theme, tooltip });
  part.view = made.view;
  connect(place, part);
  await part.after?.();
}

function paramsOf(spec) {
  return [...(spec.params ?? []), ...(spec.layer ?? []).flatMap((each) => each.params ?? [])];
}

// A chart follows the choices whose names are those of its parameters; what is zoomed
// in it stands in the address too.
function connect(place, part) {
  const params = paramsOf(part.spec);
  const set = (name, value) => {
    const known = params.some((param) => param.name === name && !param.select);
    if (known) part.view.signal(name, value);
    return known;
  };
  for (const { name } of params) if (chosen(name) !== undefined) set(name, chosen(name));
  for (const { name, select } of params) {
    if (select?.type !== "interval") continue;
    // A zoom is kept by the column of the axis.
    const signal = `${name}_start`;
    if (state.has(signal)) part.view.signal(signal, JSON.parse(state.get(signal)));
    part.view.addSignalListener(signal, (_, value) => {
      choose(signal, value, part);
      part.changed?.(value);
    });
  }
  part.view.addEventListener("click", (_, item) => {
    if (item?.datum?.run === undefined) return;
    choose("run", String(item.datum.run));
    document.querySelector('[data-follows="run"]')?.scrollIntoView({ block: "nearest" });
  });
  if (!part.connected) {
    part.connected = true;
    follow((name, value) => {
      if (set(name, value)) part.view.runAsync();
    }, part);
  }
  return part.view.runAsync();
}

// Timelines. Only what can be seen is given to the chart: operations shorter than two
// pixels become one, and what is outside is left out.
function decoded(run) {
  const start = new Float64Array(run.start.length);
  let last = 0;
  run.start.forEach((delta, at) => (start[at] = last += delta));
  const end = start.map((from, at) => from + run.length[at]);
  const lanes = run.lanes.map(() => []);
  run.lane.forEach((lane, at) => lanes[lane].push(at));
  return { ...run, start, end, places: lanes };
}

function duration(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${(ns / 1e9).toPrecision(4)} s`;
  return size >= 1e6 ? `${(ns / 1e6).toPrecision(4)} ms` : `${(ns / 1e3).toPrecision(4)} µs`;
}

function nameOf(run, at) {
  const expert = run.expert[at] < 0 ? "" : `, expert ${run.expert[at]}`;
  const layer = run.layer[at] < 0 ? "" : ` of layer ${run.layer[at]}`;
  return `${run.kinds[run.kind[at]]}${layer}${expert}`;
}

function wordsOf(run, at, origin) {
  const lines = [
    `${nameOf(run, at)}, on ${run.lanes[run.lane[at]]}`,
    `${duration(run.end[at] - run.start[at])}, from ${duration(run.start[at] - origin)}`,
  ];
  const bytes = run.sizes[run.bytes[at]];
  if (bytes) lines.push(`${bytes} moved`);
  if (run.reason[at]) lines.push(run.reasons[run.reason[at]]);
  if (run.cause[at]) lines.push(`waited for: ${nameOf(run, at - run.cause[at])}, on ${run.lanes[run.lane[at - run.cause[at]]]}`);
  return lines.join("\n");
}

function visible(run, origin, [from, to], width) {
  const rows = [];
  const finest = ((to - from) / width) * FINEST_PX;
  const wide = ((to - from) / width) * 9;
  for (const places of run.places) {
    let [low, high] = [0, places.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (run.end[places[middle]] < from) low = middle + 1;
      else high = middle;
    }
    let open = null;
    for (; low < places.length && run.start[places[low]] < to; low += 1) {
      const at = places[low];
      const [start, end] = [run.start[at], run.end[at]];
      if (open && end - open.from < finest) {
        open.count += 1;
        open.till = end;
        if (end - start > run.end[open.at] - run.start[open.at]) open.at = at;
        continue;
      }
      open = { at, from: start, till: end, count: 1 };
      rows.push(open);
    }
  }
  return rows.map(({ at, from: start, till, count }) => {
    const label = String(run.expert[at]);
    return {
      at: count > 1 ? -1 : at,
      lane: run.lanes[run.lane[at]],
      kind: run.kinds[run.kind[at]],
      start: (start - origin) / 1e6,
      end: (till - origin) / 1e6,
      label: count === 1 && run.expert[at] >= 0 && till - start > wide * label.length ? label : "",
      count,
    };
  });
}

function makeTimeline(place, part) {
  const known = new Map();
  const figure = place.closest("figure");
  const caption = figure.querySelector("figcaption");
  let current = -1;
  let waiting = false;
  const run = () => {
    const name = part.choice ? chosen(part.choice) : Object.keys(part.runs)[0];
    if (!known.has(name)) known.set(name, decoded(part.runs[name]));
    return known.get(name);
  };
  const step = () => run().steps.find(([number]) => String(number) === chosen("step")) ?? run().steps[0];
  // Timelines below each other begin at the same instant and have one scale.
  const whole = () => [0, Math.max(...["policy", "other"].map((name) => {
    const { steps } = part.runs[chosen(name)] ?? run();
    const here = steps.find(([number]) => String(number) === chosen("step")) ?? steps[0];
    return (here[2] - here[1]) / 1e6;
  }))];
  const domain = () => (state.has("when_start") ? JSON.parse(state.get("when_start")) : whole());
  const rows = () => {
    const origin = step()[1];
    const [from, to] = domain().map((ms) => origin + 1e6 * ms);
    return visible(run(), origin, [from, to], part.view.width());
  };
  const redraw = () => part.view.data("spans", rows()).runAsync();
  const update = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      redraw();
    });
  };
  const show = (span) => {
    choose("when_start", span);
  };
  const around = (at, share) => {
    const [here, length] = [(run().start[at] - step()[1]) / 1e6, (run().end[at] - run().start[at]) / 1e6];
    const margin = (length / share - length) / 2;
    show([here - margin, here + length + margin]);
  };
  const say = (at) => {
    current = at;
    caption.textContent = wordsOf(run(), at, step()[1]);
  };
  const acts = {
    in: ([from, to]) => show([from + (to - from) / 4, to - (to - from) / 4]),
    out: ([from, to]) => show([from - (to - from) / 2, to + (to - from) / 2]),
    left: ([from, to]) => show([from - (to - from) / 4, to - (to - from) / 4]),
    right: ([from, to]) => show([from + (to - from) / 4, to + (to - from) / 4]),
    all: () => show(whole()),
    next: ([from, to]) => {
      const begin = step()[1] + 1e6 * from;
      const after = current < 0 || run().start[current] < begin ? run().start.findIndex((start) => start >= begin) : current + 1;
      if (after < 0 || after >= run().start.length) return;
      say(after);
      const here = (run().start[after] - step()[1]) / 1e6;
      if (here > to - (to - from) / 10) show([here - (to - from) / 10, here + (9 * (to - from)) / 10]);
    },
  };
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all", 0: "all", n: "next" };

  part.words = ({ at, count }) => (count > 1 ? `${count} operations; zoom in to tell them apart` : wordsOf(run(), at, step()[1]));
  part.changed = update;
  part.show = (span) => {
    show(span);
    return redraw();
  };
  part.after = async () => {
    part.view.signal("when_start", domain());
    await redraw();
    // Words are made for what is pointed at only: thousands of rows come with a frame.
    const show = part.view.tooltip();
    part.view.tooltip((handler, event, item, value) => show.call(handler, handler, event, item, value && part.words(item.datum)));
    part.view.addEventListener("dblclick", (_, item) => {
      if (item?.datum?.at >= 0) around(item.datum.at, 0.2);
      else acts.all();
    });
    part.view.addEventListener("click", (_, item) => item?.datum?.at >= 0 && say(item.datum.at));
  };
  if (part.listening) return;
  part.listening = true;
  figure.addEventListener("click", (event) => acts[event.target.dataset.do]?.(domain()));
  place.addEventListener("keydown", (event) => {
    const act = acts[keys[event.key]];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act(domain());
  });
  follow((name) => {
    if (name === "when_start") part.view.signal("when_start", domain());
    if (name === "step") {
      current = -1;
      show(whole());
    }
    if (["when_start", "step", part.choice].includes(name)) update();
  });
}

// All of it.
let printing = false;

async function start() {
  const content = await inflate(document.getElementById("data").textContent);
  looks = content.looks;
  const charts = [];
  let runs;
  for (const place of document.querySelectorAll("[data-part], .table")) {
    const part = content.parts[place.dataset.part];
    if (place.classList.contains("table")) new Table(place, part?.rows);
    else if (place.classList.contains("facts")) showFacts(place, part);
    else {
      // Two timelines show the same runs, which stand with the first.
      if (part.runs) part.runs = runs = Object.keys(part.runs).length ? part.runs : runs;
      charts.push([place, part]);
    }
  }
  const drawAll = async () => {
    for (const [place, part] of charts) {
      if (part.runs) makeTimeline(place, part);
      await draw(place, part);
    }
  };
  await drawAll();
  dark.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => {
    printing = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    printing = false;
    drawAll();
  });
  return { charts: charts.map(([, part]) => part), choose, state };
}

window.page = start();
