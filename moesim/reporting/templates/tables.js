// Sorts tables by a click on a head, and filters the rows of long ones. Without scripts a
// page shows the same tables, in the order in which they were written.
"use strict";

const ROWS_WORTH_A_FILTER = 8;
const SCALES = {
  ns: 1e-9, "\u00b5s": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600,
  B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
  "MB/s": 1e6, "GB/s": 1e9,
};

// The number that a cell begins with, in its unit's base; null for other texts.
function valueOf(text) {
  const parts = text.match(/^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*(\S*)/);
  return parts && Number(parts[1].replaceAll(",", "")) * (SCALES[parts[2]] ?? 1);
}

function textOf(row, column) {
  return row.cells[column].textContent.trim();
}

// A column of numbers sorts by value, any other by text.
function comparisonOf(rows, column) {
  const texts = rows.map((row) => textOf(row, column));
  const known = texts.filter((text) => text !== "" && text !== "-");
  if (known.every((text) => valueOf(text) !== null)) {
    return (a, b) => valueOf(textOf(a, column)) - valueOf(textOf(b, column));
  }
  return (a, b) => textOf(a, column).localeCompare(textOf(b, column), "en", { numeric: true });
}

function isEmpty(row, column) {
  return ["", "-"].includes(textOf(row, column));
}

function sortBy(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const ascending = heads[column].getAttribute("aria-sort") !== "ascending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");

  const body = table.tBodies[0];
  const rows = [...body.rows];
  const compare = comparisonOf(rows.filter((row) => !isEmpty(row, column)), column);
  rows.sort((a, b) => {
    // Cells without a value stand last in either direction.
    const empty = isEmpty(a, column) - isEmpty(b, column);
    if (empty || isEmpty(a, column)) return empty;
    return ascending ? compare(a, b) : compare(b, a);
  });
  body.append(...rows);
}

function makeSortable(table) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sortBy(table, column));
    head.replaceChildren(button);
  });
}

function makeFilter(table, place) {
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Filter rows";
  field.setAttribute("aria-label", `Filter rows: ${place.getAttribute("aria-label")}`);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  place.before(field);
}

for (const place of document.querySelectorAll("main .table")) {
  const table = place.querySelector("table");
  if (table.tBodies[0].rows.length > 1) makeSortable(table);
  if (table.tBodies[0].rows.length >= ROWS_WORTH_A_FILTER) makeFilter(table, place);
}
