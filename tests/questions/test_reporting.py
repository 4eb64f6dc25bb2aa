"""Tables as text, and pages as HTML: they fit the screen, and hold all that they are
given.
"""

from __future__ import annotations

import html
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError
from rich.cells import cell_len
from support.browser import browser, check_page, show
from support.small_trace import write_small_trace, write_trace

import moesim
from moesim.questions.compare_page import write_cells, write_comparison
from moesim.questions.trace_page import write_html
from moesim.reporting.pages import PageFigure, PageTable, render
from moesim.reporting.tables import PLAIN_WIDTH, aligned, facts_lines, screen
from moesim.traces.format.reader import open_trace
from moesim.traces.stats.trace_summary import summarise_trace

TEMPLATES = Path(moesim.__file__).parent / "reporting" / "templates"


@pytest.fixture(autouse=True)
def plain_screen(monkeypatch):
    """No terminal, and nobody who states a width."""
    monkeypatch.delenv("COLUMNS", raising=False)


def tokens(lines):
    return sorted(" ".join(lines).split())


# Tables.

HEADS = ("policy", "first token", "per token", "decode", "GPU memory", "busiest lane")
ROW = ("greedy+lru+residual", "209 ms", "20.0 ms", "49.9 tok/s", "8.0 GiB", "gpu0 65 %")


def test_a_table_that_fits_is_one_block():
    assert aligned([["lane", "busy"], ["cpu", "1.66 s"], ["gpu0", "9 ms"]]) == [
        "lane    busy",
        "cpu   1.66 s",
        "gpu0    9 ms",
    ]


def test_heads_wrap_before_the_table_is_split(monkeypatch):
    """At 79 columns the heads of 81 must give way; every cell stays in one piece."""
    monkeypatch.setenv("COLUMNS", "79")
    lines = aligned([HEADS, ROW])
    assert len(lines) == 3
    assert " ".join(lines[-1].split()) == " ".join(ROW)


def test_what_is_left_continues_below_the_first_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = aligned([HEADS, ROW])
    assert max(map(len, lines)) <= 60
    blocks = "\n".join(lines).split("\n\n")
    assert len(blocks) == 2
    assert all(block.splitlines()[-1].startswith(ROW[0]) for block in blocks)


def test_all_leading_columns_are_repeated(monkeypatch):
    """A machine alone does not say which row of a sweep is meant."""
    monkeypatch.setenv("COLUMNS", "30")
    rows = [["machine", "memory", "a" * 9, "b" * 9], ["m", "8 GiB", "1", "2"]]
    blocks = "\n".join(aligned(rows, lead=2)).split("\n\n")
    assert len(blocks) == 2
    assert all("8 GiB" in block for block in blocks)


CELLS = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.integers(1, 14).flatmap(
        lambda width: st.lists(
            st.lists(CELLS, min_size=width, max_size=width), min_size=2, max_size=5
        )
    )
)
def test_no_table_is_wider_than_the_screen_and_none_loses_a_cell(rows):
    lines = aligned(rows)
    assert max(map(cell_len, lines)) <= PLAIN_WIDTH
    text = " ".join(lines).split()
    assert {cell for row in rows for cell in row} <= set(text)


def test_brackets_are_no_markup():
    """`[bold]` in the name of a policy or file is text."""
    lines = aligned([["policy", "x"], ["a[bold]:smile:[/x]", "1"]])
    assert lines[1].startswith("a[bold]:smile:[/x]")
    assert facts_lines([("[red]", "[/]")]) == ["[red]  [/]"]


def test_a_fact_wraps_within_its_column_and_keeps_numbers_with_their_units():
    text = ", ".join(["66.6 % of active experts in 4.0 GiB"] * 5)
    lines = facts_lines([("hit rate", text), ("", ""), ("run", "2.77 s")])
    assert max(map(len, lines)) <= PLAIN_WIDTH
    assert lines[1].startswith(" " * len("hit rate  "))
    assert lines[-2:] == ["", "run       2.77 s"]
    assert all(not re.search(r"\d$|^ *(%|GiB)", line) for line in lines[:-2])
    assert tokens(lines[:-2]) == tokens(["hit rate", text])


def test_the_width_is_that_of_the_environment_or_plain(monkeypatch):
    assert screen() == (PLAIN_WIDTH, False)
    monkeypatch.setenv("COLUMNS", "132")
    assert screen() == (132, False)
    monkeypatch.setenv("COLUMNS", "wide")
    assert screen().width == PLAIN_WIDTH


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize(
    ("term", "escapes"), [("xterm", True), ("dumb", False)], ids=("xterm", "dumb")
)
def test_a_terminal_gets_bold_heads_in_its_own_width(term, escapes):
    """A pseudo-terminal of 100 columns; a dumb one is spared escape sequences."""
    import fcntl
    import pty
    import struct
    import subprocess
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    code = (
        "from moesim.reporting.tables import aligned, screen; print(screen().width);"
        " print(aligned([['a', 'b'], ['c', 'd']])[0])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    subprocess.run(
        [sys.executable, "-c", code],
        stdout=theirs,
        check=True,
        timeout=120,
        env={**environment, "TERM": term},
    )
    os.close(theirs)
    printed = os.read(ours, 4096).decode()
    os.close(ours)
    assert printed.startswith("100")
    assert ("\x1b[1m" in printed) is escapes


# Pages.


class Outline(HTMLParser):
    """Tags with their attributes, in order; and which are still open at the end."""

    EMPTY = frozenset({"meta", "path", "use", "br", "rect", "image", "input"})

    def __init__(self):
        super().__init__()
        self.tags = []
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of each kind, but for the validation's, which real runs make elsewhere.

    The trace's name would break a page that does not escape it.
    """
    folder = tmp_path_factory.mktemp("pages")
    path = write_small_trace(folder / "<i>&.parquet")
    table, runs = moesim.compare(path, ["all-cpu", "greedy"])
    compared = moesim.compare_cells(path, ["all-cpu"], hw=["rtx4060ti", "rtx3080ti"])
    trace = open_trace(path)
    return {
        "comparison": write_comparison(table, runs, folder / "c.html"),
        "cells": write_cells(compared, folder / "s.html"),
        "trace": write_html(trace, summarise_trace(trace), folder / "t.html"),
    }


KINDS = pytest.mark.parametrize("kind", ["comparison", "cells", "trace"])


@KINDS
def test_a_page_can_be_read_by_everybody_on_any_screen(pages, kind):
    """Language, viewport, colours for dark screens, landmarks, heads with scope, and
    wide things that scroll by themselves.
    """
    text = pages[kind].read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert outline.named("html") == [{"lang": "en"}]
    metas = {attrs["name"]: attrs for attrs in outline.named("meta") if "name" in attrs}
    assert "width=device-width" in metas["viewport"]["content"]
    assert metas["color-scheme"]["content"] == "light dark"
    assert "prefers-color-scheme: dark" in text
    assert len(outline.named("main")) == len(outline.named("h1")) == 1
    assert outline.named("th")
    assert {attrs.get("scope") for attrs in outline.named("th")} == {"col", "row"}
    scrolling = [a for a in outline.named("div") if "wide" in a.get("class", "")]
    drawn = len(outline.named("table")) + len(outline.named("svg"))
    assert len(scrolling) == drawn
    assert all(attrs["aria-label"] for attrs in scrolling)
    assert all(attrs["role"] == "img" for attrs in outline.named("svg"))
    # One title for the page, one for each figure.
    assert len(outline.named("title")) == 1 + len(outline.named("svg"))


@KINDS
def test_the_words_of_figures_are_text(pages, kind):
    """They can be searched and copied, and follow the colour of the page."""
    figures = re.findall(r"<svg.*?</svg>", pages[kind].read_text("utf-8"), re.DOTALL)
    assert figures
    for figure in figures:
        assert "<text" in figure
        assert "#000000" not in figure


@KINDS
def test_no_two_parts_of_a_page_have_the_same_id(pages, kind):
    """matplotlib numbers the parts of each figure from one."""
    ids = re.findall(r'\bid="([^"]+)"', pages[kind].read_text(encoding="utf-8"))
    assert ids
    assert len(ids) == len(set(ids))


@KINDS
def test_the_head_says_where_the_figures_come_from(pages, kind):
    head = pages[kind].read_text(encoding="utf-8").partition("</header>")[0]
    assert "&lt;i&gt;&amp;.parquet, SHA-256 " in head
    assert "a call from Python" in head
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC by moesim ", head)


def test_the_head_of_a_page_repeats_the_command(command, tmp_path, monkeypatch):
    page = tmp_path / "a b.html"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert command("trace", "stats", "tiny", "--html", page)[0] == 0
    head = page.read_text(encoding="utf-8").partition("</header>")[0]
    # As a shell takes it: the name has a space.
    line = html.escape(f"moesim trace stats tiny --html '{page}'", quote=True)
    assert f"<dd><code>{line}</code>".replace("&#x27;", "&#39;") in head
    assert "1970-01-02 00:00 UTC" in head


@KINDS
def test_a_page_is_one_file_that_loads_nothing(pages, kind):
    outline = Outline()
    text = pages[kind].read_text(encoding="utf-8")
    outline.feed(text)
    names = {tag for tag, _ in outline.tags}
    assert names.isdisjoint({"link", "img", "iframe", "object"})
    assert outline.named("script") == [{}]
    links = [
        value
        for _, attrs in outline.tags
        for name, value in attrs.items()
        if name in {"src", "href", "xlink:href"}
    ]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


def test_text_is_escaped(pages):
    """The name of the trace is text, wherever it stands."""
    for path in pages.values():
        text = path.read_text(encoding="utf-8")
        assert "<i>" not in text
    assert "&lt;i&gt;&amp;.parquet" in pages["trace"].read_text(encoding="utf-8")


def test_a_name_that_a_template_lacks_is_an_error():
    with pytest.raises(UndefinedError, match="summary"):
        render("trace.html", title="t", origin=[])


def test_every_template_is_used():
    """Else it would be shipped for nothing, and tested by nothing."""
    used = set()
    for path in TEMPLATES.parents[1].rglob("*.py"):
        used |= set(re.findall(r'"(\w+\.html)"', path.read_text(encoding="utf-8")))
    for path in TEMPLATES.iterdir():
        used |= set(re.findall(r'"(\w+\.\w+)"', path.read_text(encoding="utf-8")))
    assert {path.name for path in TEMPLATES.iterdir()} <= used


def test_a_page_without_prompts_or_tokens_is_whole(tmp_path, tiny_shape):
    """A trace of a prompt alone has few figures, and a page nevertheless."""
    trace = open_trace(write_trace(tmp_path / "p.parquet", tiny_shape, ((9, 0),)))
    outline = Outline()
    outline.feed(
        write_html(trace, summarise_trace(trace), tmp_path / "p.html").read_text()
    )
    assert outline.open == []


# In a real browser.


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@KINDS
def test_axe_finds_nothing_on_any_screen(driver, pages, kind):
    check_page(driver, pages[kind])


def column(driver, position):
    """The cells of one column of the first table, from top to bottom."""
    return driver.execute_script(
        "return [...document.querySelector('table').tBodies[0].rows]"
        f".filter(row => !row.hidden).map(row => row.cells[{position}].textContent)"
    )


def test_a_click_on_a_head_sorts_by_value(driver, tmp_path):
    """900 ms are less than 1.2 s, and a cell without a value stands last either way."""
    rows = [["a", "1.2 s"], ["b", "-"], ["c", "900 ms"], ["d", "1,050 ms"]]
    show(driver, table_page(tmp_path, rows))
    button = driver.find_elements("css selector", "thead button")[1]
    button.click()
    assert column(driver, 0) == ["c", "d", "a", "b"]
    button.click()
    assert column(driver, 0) == ["a", "d", "c", "b"]


def test_words_sort_as_people_sort_them(driver, tmp_path):
    rows = [["layer 10", "x"], ["layer 9", "y"], ["Layer 1", "z"]]
    show(driver, table_page(tmp_path, rows))
    driver.find_element("css selector", "thead button").click()
    assert column(driver, 0) == ["Layer 1", "layer 9", "layer 10"]


def test_a_long_table_can_be_filtered(driver, tmp_path):
    rows = [[f"machine {n % 3}", f"policy {n}"] for n in range(12)]
    show(driver, table_page(tmp_path, rows))
    field = driver.find_element("css selector", "input[type=search]")
    field.send_keys("machine 2 policy 1")
    assert column(driver, 1) == ["policy 11"]
    field.clear()
    field.send_keys("POLICY")
    assert len(column(driver, 1)) == 12


def test_a_dark_screen_gets_a_dark_page_with_light_words(driver, pages):
    show(driver, pages["cells"], scheme="dark")
    colours = driver.execute_script(
        "const style = getComputedStyle; const text = document.querySelector('svg text');"
        "return [style(document.body).backgroundColor, style(text).fill];"
    )
    levels = [list(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]
    assert max(levels[0]) < 64
    assert min(levels[1]) > 192


def table_page(folder, rows):
    """A page of one table."""
    table = PageTable(["name", "value"], rows)
    text = render(
        "cells.html",
        title="t",
        origin=[],
        setting="",
        answer="",
        winners=table,
        notes=[],
        curves=PageFigure("<svg></svg>", "none"),
        meaning="",
        times=table,
        runs=table,
        warnings=[],
        settings="",
    )
    path = folder / "table.html"
    path.write_text(text, encoding="utf-8")
    return path
