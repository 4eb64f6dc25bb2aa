"""Tables as text: they fit the screen, and hold all that they are given."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from moesim.reporting.tables import PLAIN_WIDTH, aligned, facts_lines, screen


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


@pytest.mark.parametrize(("term", "escapes"), [("xterm", True), ("dumb", False)])
def test_a_terminal_gets_bold_heads(monkeypatch, term, escapes):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", term)
    assert screen().styled is escapes
    assert ("\x1b[1m" in aligned([["a", "b"], ["c", "d"]])[0]) is escapes
