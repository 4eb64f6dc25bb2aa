"""How the code reads: the field's words, few tokens per line, reasons beside them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "hwprofiles", "moesim", "policies", "runtime", "sim", "traces")
SOURCES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]

FORMER_MODULES = {
    "alike", "bounds", "clerk", "closed", "computes", "designs", "filling", "folds",
    "frontier", "halves", "jobs", "journal", "look", "overrule", "picked", "places",
    "planned", "pointers", "presence", "prices", "recency", "reference", "requests",
    "scored", "stacks", "survey", "swaps", "tallies", "terms", "tier", "trials",
    "verdict", "views",
}  # fmt: skip
"""Names of modules that only their authors understood; see the glossary."""

METAPHORS = (
    "bell", "cloakroom", "clerk", "house of cards", "kitchen", "overrule", "pantry",
    "relay", "shelf", "shelves", "stove", "warehouse",
)  # fmt: skip
"""Pictures that stood for what has a name in the field."""

EMPTY_NAMES = {
    "bad", "found", "one", "own", "said", "say", "stuff", "thing", "things",
    "told", "what", "whole",
}  # fmt: skip
"""Names of variables that do not say what the variable holds."""

NOT_TOKENS = {
    tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
DIRECTIVES = ("noqa", "type:", "fmt:")


class Measures(NamedTuple):
    """Counts of one file, docstrings aside."""

    lines: int
    tokens: int
    comments: int
    tuple_assignments: int


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def docstring_lines(tree):
    """Lines of strings that stand alone: docstrings, of attributes too."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def measured(path):
    tree = parsed(path)
    documented = docstring_lines(tree)
    source = io.StringIO(path.read_text(encoding="utf-8"))
    lines = set()
    tokens = 0
    comments = 0
    for token in tokenize.generate_tokens(source.readline):
        if token.type == tokenize.COMMENT:
            comments += not token.string.lstrip("# ").startswith(DIRECTIVES)
        if token.type in NOT_TOKENS or token.start[0] in documented:
            continue
        tokens += 1
        lines.add(token.start[0])

    tuple_assignments = sum(
        isinstance(node, ast.Assign)
        and any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
        for node in ast.walk(tree)
    )
    return Measures(len(lines), tokens, comments, tuple_assignments)


def total():
    files = [measured(path) for path in SOURCES]
    return Measures(*map(sum, zip(*files, strict=True)))


def name_of(path):
    return str(path.relative_to(ROOT))


def test_a_line_holds_one_thought():
    """Assignments to several names at once are the exception."""
    counts = total()
    assert 1000 * counts.tuple_assignments / counts.lines < 8.0


def test_reasons_stand_beside_the_code():
    """At least 4 comments per 100 code lines; cachetools has 7.7."""
    counts = total()
    assert 100 * counts.comments / counts.lines >= 4.0


def test_modules_have_the_names_of_the_glossary():
    former = [
        name_of(path) for path in SOURCES if path.stem.lstrip("_") in FORMER_MODULES
    ]
    assert not former


@pytest.mark.parametrize("word", METAPHORS)
def test_no_picture_stands_for_a_term(word):
    pattern = re.compile(rf"\b{word}", re.IGNORECASE)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    speaking = [
        name_of(path)
        for path in (*SOURCES, *pages)
        if pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert not speaking


def test_variables_say_what_they_hold():
    silent = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            name = node.id if isinstance(node, ast.Name) else None
            if isinstance(node, ast.arg):
                name = node.arg
            stored = not isinstance(getattr(node, "ctx", None), ast.Load)
            if stored and name in EMPTY_NAMES:
                silent.append(f"{name_of(path)}:{node.lineno}: {name}")
    assert not silent


COMPILED = {
    "KernelView", "Work", "_best", "_fill_makespans", "_largest_gain", "_on_gpu",
    "rebuild_stacks", "count_decode", "fill_ordered", "greedy", "list_schedule",
    "look_up", "machine.operation", "missing", "name_absent",
    "operation", "pack_span", "pair_missed", "Planner", "_rebuild_block",
    "self.machine.operation", "sum_by_lane",
}  # fmt: skip
"""Compiled functions: a keyword costs a call of theirs a microsecond, or is refused."""


def test_no_call_passes_more_than_six_arguments_by_position():
    """Signatures of compiled functions are types, not calls."""
    long = [
        f"{name_of(path)}:{node.lineno}: {ast.unparse(node.func)}"
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and len(node.args) > 6
        and not ast.unparse(node.func).startswith("nb.")
        and ast.unparse(node.func) not in COMPILED
    ]
    assert not long
