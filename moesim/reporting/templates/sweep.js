// Lets a reader explore a sweep: a map of winners over two axes, the front of memory
// against time, and one run with its lanes and the places of its experts.
"use strict";

const sweep = JSON.parse(document.getElementById("data").textContent);
const { axes, policies, runs } = sweep;

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// The same colours as in the figures of the command line.
function colourOf(policy) {
  return sweep.colours[policy];
}

// Steps of 1, 2 or 5 times a power of a base, about four of them up to the most.
function roundTicks(most, base = 10) {
  const rough = most / 4;
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const factors = base === 2 ? [1] : [1, 2, 5];
  const step = factors.map((factor) => factor * power).find((each) => each >= rough) ?? base * power;
  const ticks = [];
  for (let place = 0; place * step <= most * 1.0001; place += 1) ticks.push(place * step);
  return ticks;
}

// What is chosen stands in the address, so that a copied address shows the same.
const stated = new URLSearchParams(location.hash.slice(1));
const chosen = new Map(stated);

function remember(name, value) {
  if (value === "" || value === null) chosen.delete(name);
  else chosen.set(name, value);
  history.replaceState(null, "", `#${new URLSearchParams([...chosen])}`);
}

function milliseconds(seconds) {
  if (!seconds) return "0";
  return seconds >= 1 ? `${seconds.toPrecision(3)} s` : `${(1e3 * seconds).toPrecision(3)} ms`;
}

function tickTime(seconds) {
  return seconds >= 1 ? `${+seconds.toPrecision(6)} s` : `${+(1e3 * seconds).toPrecision(6)} ms`;
}

function sizeWords(bytes) {
  const [unit, size] = bytes >= 2 ** 29 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
  return bytes ? `${+(bytes / size).toPrecision(3)} ${unit}` : "0";
}

function choice(place, label, options, preset, changed) {
  const select = element("select");
  for (const [value, text] of options) select.append(element("option", { value }, text));
  const name = `${place.id.split("-")[0]}-${label.replaceAll(" ", "-")}`;
  const known = options.map(([value]) => String(value));
  select.value = known.includes(stated.get(name)) ? stated.get(name) : preset;
  select.addEventListener("change", () => {
    remember(name, select.value);
    changed();
  });
  place.append(element("label", {}, `${label} `, select));
  return select;
}

// The values of an axis, in the order in which runs have them.
function valuesOf(axis) {
  return [...new Set(runs.map((run) => run.at[axis] ?? ""))];
}

function group(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    groups.set(key, [...(groups.get(key) ?? []), item]);
  }
  return groups;
}

// Winners, a map of two axes.
const mapChoices = document.getElementById("map-choices");
const sides = [["", "nothing"], ...axes];
const across = choice(mapChoices, "across", sides, axes[0]?.[0] ?? "", drawMap);
const down = choice(mapChoices, "down", sides, axes[1]?.[0] ?? "", drawMap);

function winnersOf(cells) {
  const counts = new Map();
  for (const run of cells) counts.set(run.policy, (counts.get(run.policy) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

function drawMap() {
  const columns = across.value ? valuesOf(across.value) : [""];
  const rows = down.value ? valuesOf(down.value) : [""];
  const heads = columns.map((value) => element("th", { scope: "col" }, value));
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("td"), ...heads)));
  const body = element("tbody");
  const winners = runs.filter((run) => run.wins);
  for (const row of rows) {
    const line = element("tr", {}, element("th", { scope: "row" }, row));
    for (const column of columns) {
      const here = winners.filter(
        (run) =>
          (!across.value || (run.at[across.value] ?? "") === column) &&
          (!down.value || (run.at[down.value] ?? "") === row),
      );
      line.append(mapPlace(here));
    }
    body.append(line);
  }
  table.append(body);
  document.getElementById("map").replaceChildren(table);
}

function mapPlace(here) {
  if (!here.length) return element("td");
  const winners = winnersOf(here);
  const [[policy, count]] = winners;
  const others = winners.slice(1).filter(([, times]) => times === count);
  const best = here.filter((run) => run.policy === policy).sort((a, b) => a.s - b.s)[0];
  const cells = new Set(here.map((run) => run.cell)).size;
  const button = element("button", { type: "button", class: "plain" }, policy);
  button.addEventListener("click", () => openRun(best));
  const tied = others.map(([other]) => ` = ${other}`).join("");
  const rest = cells > 1 ? `${count} of ${cells}, from ${milliseconds(best.s)}` : milliseconds(best.s);
  return element("td", { style: `--policy: ${colourOf(policy)}` }, button, tied, element("br"), rest);
}

// Time over memory.
const frontChoices = document.getElementById("front-choices");
const filters = axes
  .filter(([axis]) => !sweep.memory_axes.includes(axis))
  .map(([axis, head]) => {
    const options = [["", "all"], ...valuesOf(axis).map((value) => [value, value])];
    return [axis, choice(frontChoices, head, options, valuesOf(axis)[0] ?? "", drawFront)];
  });

function frontOf(points) {
  const front = [];
  for (const run of [...points].sort((a, b) => a.gpu_bytes - b.gpu_bytes || a.s - b.s)) {
    if (!run.oracle && run.s < (front.at(-1)?.s ?? Infinity)) front.push(run);
  }
  return front;
}

function around(here) {
  if (here.length === 1) return [[here[0], 0, 0]];
  return here.map((run, place) => {
    const angle = (2 * Math.PI * place) / here.length;
    return [run, 6 * Math.cos(angle), 6 * Math.sin(angle)];
  });
}

function drawFront() {
  const points = runs.filter((run) =>
    filters.every(([axis, select]) => !select.value || (run.at[axis] ?? "") === select.value),
  );
  const place = document.getElementById("front");
  if (!points.length) return place.replaceChildren("no runs");

  const [left, right, top, bottom] = [60, 690, 12, 300];
  const most = Math.max(...points.map((run) => run.gpu_bytes)) || 1;
  const longest = Math.max(...points.map((run) => run.s)) || 1;
  const x = (run) => left + ((right - left) * run.gpu_bytes) / most;
  const y = (run) => bottom - ((bottom - top) * run.s) / longest;
  const picture = element("svg:svg", { viewBox: "0 0 700 345", role: "group", "aria-label": "Time over memory of the GPU" });
  for (const seconds of roundTicks(longest)) {
    const at = y({ s: seconds });
    picture.append(
      element("svg:line", { x1: left, x2: right, y1: at, y2: at }),
      element("svg:text", { x: left - 6, y: at + 4, "text-anchor": "end" }, tickTime(seconds)),
    );
  }
  for (const bytes of roundTicks(most, 2)) {
    const over = x({ gpu_bytes: bytes });
    const anchor = over > right - 30 ? "end" : "middle";
    picture.append(element("svg:text", { x: over, y: bottom + 16, "text-anchor": anchor }, sizeWords(bytes)));
  }
  picture.append(element("svg:text", { x: right, y: bottom + 36, "text-anchor": "end" }, `${sweep.measure} over memory of the GPU`));
  const line = frontOf(points).map((run) => `${x(run)} ${y(run)}`);
  picture.append(element("svg:path", { d: `M${line.join("L")}` }));
  // Points at one place stand around it, so that none hides another.
  const places = group(points, (run) => `${Math.round(x(run) / 4)} ${Math.round(y(run) / 4)}`);
  for (const [run, dx, dy] of [...places.values()].flatMap(around)) {
    const words = `${run.name}: ${milliseconds(run.s)}, ${sizeWords(run.gpu_bytes)}`;
    const circle = element(
      "svg:circle",
      { cx: x(run) + dx, cy: y(run) + dy, r: 5, fill: colourOf(run.policy), class: run.oracle ? "future" : "", "data-run": run.index },
      element("svg:title", {}, words),
    );
    circle.addEventListener("click", () => openRun(run));
    picture.append(circle);
  }
  const legend = element("p", { class: "choices" });
  for (const policy of policies) {
    const mark = element("span", { class: "mark", style: `background: ${colourOf(policy)}` });
    legend.append(element("span", {}, mark, ` ${policy}`));
  }
  place.replaceChildren(picture, legend);
}

// One run: lanes and placement.
async function openRun(run) {
  const place = document.getElementById("run");
  remember("run", String(run.index));
  const facts = element("dl");
  for (const [name, value] of run.facts) facts.append(element("dt", {}, name), element("dd", {}, value));

  const heads = ["lane", "busy", "of the run", "stalled"].map((head) => element("th", { scope: "col" }, head));
  const lanes = element("tbody");
  for (const [lane, busy_s, stall_s] of run.lanes) {
    const share = run.makespan_s ? busy_s / run.makespan_s : 0;
    lanes.append(
      element(
        "tr",
        {},
        element("th", { scope: "row" }, lane),
        element("td", {}, milliseconds(busy_s)),
        element("td", {}, `${(100 * share).toFixed(0)} % `, element("span", { class: "bar", style: `width: ${(8 * share).toFixed(2)}em` })),
        element("td", {}, stall_s === null ? "" : milliseconds(stall_s)),
      ),
    );
  }
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), lanes);
  const wide = element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Lanes" }, table);
  place.replaceChildren(element("h3", {}, run.name), facts, wide);
  if (run.placement) await showPlacement(run, place);
  place.scrollIntoView({ block: "nearest" });
}

async function placementOf(run) {
  const packed = Uint8Array.from(atob(run.placement), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function showPlacement(run, place) {
  const shares = await placementOf(run);
  const size = shares.length / 2;
  const layers = size / run.experts;
  for (const [part, words] of [["computed on the GPU", "of its uses, on the GPU"], ["resident when used", "of its uses, resident"]].entries()) {
    const [title, label] = words;
    const canvas = element("canvas", { width: run.experts, height: layers, role: "img" });
    const used = shares.subarray(part * size, (part + 1) * size).filter((share) => share !== sweep.never_used);
    const mean = used.reduce((sum, share) => sum + share, 0) / (used.length || 1) / sweep.full_share;
    canvas.setAttribute("aria-label", `Share of each expert ${label}; mean ${(100 * mean).toFixed(0)} %`);
    draw(canvas, shares.subarray(part * size, (part + 1) * size));
    canvas.addEventListener("mousemove", (event) => {
      const box = canvas.getBoundingClientRect();
      const expert = Math.floor(((event.clientX - box.left) / box.width) * run.experts);
      const layer = Math.floor(((event.clientY - box.top) / box.height) * layers);
      const share = shares[part * size + layer * run.experts + expert];
      const used = share === sweep.never_used ? "never used" : `${(100 * share) / sweep.full_share} % ${label}`;
      canvas.title = `layer ${layer}, expert ${expert}: ${used}`;
    });
    const caption = `Share ${title}, mean ${(100 * mean).toFixed(0)} %: a cell per expert, a line per layer; orange none, blue all, empty never used.`;
    place.append(element("p", { class: "note" }, caption), canvas);
  }
}

function draw(canvas, shares) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const [cpu, gpu] = sweep.devices.map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
  shares.forEach((share, index) => {
    if (share === sweep.never_used) return;
    const part = share / sweep.full_share;
    const mix = cpu.map((from, channel) => from + (gpu[channel] - from) * part);
    image.data.set([...mix, 255], 4 * index);
  });
  context.putImageData(image, 0, 0);
}

// The table has all runs, in the order of the data.
[...document.querySelectorAll("#runs tbody tr")].forEach((row, index) => {
  const head = row.cells[0];
  const button = element("button", { type: "button", class: "plain" }, head.textContent);
  button.addEventListener("click", () => openRun(runs[index]));
  head.replaceChildren(button);
});
drawMap();
drawFront();
if (runs[Number(stated.get("run"))] && stated.has("run")) openRun(runs[Number(stated.get("run"))]);
