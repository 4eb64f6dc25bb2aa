"""``python -m benchmarks.mutants [ROOM …] [--count N] [--seed N] [--minutes M]``:
change one expression of the source at random; do the tests of its room notice?

Each mutant runs in a copy of the checkout, test files that name its module first, and
ends with the first failure. Expressions are drawn, not files, so that long files have
their share. What survives is a hole in the tests, or a change that means the same.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
ROOMS = {
    # room -> its sources, and the folders of its tests
    "engine": (("engine", "sim"), ("engine", "sim")),
    "policies": (
        ("policies/assignment", "policies/cache", "policies/prefetch"),
        ("policies",),
    ),
    "metrics": (("traces/timeline",), ("traces",)),
    "costs": (("hwprofiles",), ("hwprofiles", "evidence")),
    "statistics": (("traces/stats",), ("traces",)),
    "importers": (("traces/importers",), ("traces",)),
    "executor": (("runtime/executor",), ("runtime",)),
    "runs": (("moesim/runs",), ("runs", "questions")),
    "questions": (("moesim/questions",), ("questions",)),
    "advice": (("moesim/advice",), ("advice",)),
    "evidence": (("moesim/evidence",), ("evidence",)),
}
LONGEST_S = 1800
"""Of a mutant's tests; who runs longer has lost its way, and counts as killed."""

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def variants(node: ast.AST) -> Iterator[ast.expr]:
    """What an expression is changed into."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]()
        yield ast.Compare(node.left, [other, *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield ast.Name(NAMES[node.id])
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)


def mutants_of(file: Path) -> Iterator[tuple[ast.expr, str, str]]:
    """Every change of one file: the place, what replaces it, and its function."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                is_short = isinstance(node, ast.expr) and node.lineno == node.end_lineno
                for other in variants(node) if is_short else ():
                    yield node, ast.unparse(other), function.name


def changed(file: Path, node: ast.expr, replacement: str) -> str:
    """The text of a file with one expression replaced."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    begin, end = node.col_offset, node.end_col_offset
    line = line[:begin] + b"(" + replacement.encode() + b")" + line[end:]
    lines[node.lineno - 1] = line.decode()
    return "".join(lines)


def sources_of(room: str) -> list[Path]:
    """Files that a room's mutants are drawn from."""
    return [
        file
        for folder in ROOMS[room][0]
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]


def tests_of(room: str, file: Path) -> list[list[str]]:
    """Test files of a room: those that name the module, then the others."""
    name = re.compile(rf"\b{file.stem}\b")
    naming: list[str] = []
    others: list[str] = []
    for folder in ROOMS[room][1]:
        for each in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            named = name.search(each.read_text(encoding="utf-8"))
            (naming if named else others).append(str(each.relative_to(ROOT)))
    return [naming, others]


def survives(copy: Path, room: str, file: Path, text: str) -> bool:
    """Whether the tests of a room hold although a file is changed."""
    place = copy / file.relative_to(ROOT)
    # What is compiled stands beside the file and below the build's folder.
    kept = [place, *copy.rglob(f"{place.stem}.*.so"), *copy.rglob(f"{place.stem}.[co]")]
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(kept):
            shutil.copy2(each, Path(folder) / str(number))
        place.write_text(text, encoding="utf-8")
        try:
            if place.with_suffix(".pxd").is_file():
                # Else everything would run uncompiled.
                build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
                subprocess.run(build, cwd=copy, capture_output=True, check=False)
            return all(_hold(copy, tests) for tests in tests_of(room, file) if tests)
        finally:
            for number, each in enumerate(kept):
                shutil.copy2(Path(folder) / str(number), each)


def _hold(copy: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> None:
    """Try mutants until the time is up."""
    parser = argparse.ArgumentParser(prog="benchmarks.mutants", description=__doc__)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", default="", help="part of a file's path")
    chosen = parser.parse_args()

    end_s = time.monotonic() + 60 * chosen.minutes
    counts = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        hidden = shutil.ignore_patterns(".git", ".venv", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=hidden, symlinks=True)
        for number in range(chosen.first, chosen.count):
            if time.monotonic() > end_s:
                break
            dice = random.Random(f"{chosen.seed} {number}")
            room = dice.choice(chosen.rooms or list(ROOMS))
            found = [
                (file, *mutant)
                for file in sources_of(room)
                if chosen.only in str(file)
                for mutant in mutants_of(file)
            ]
            file, node, replacement, function = dice.choice(found)
            text = changed(file, node, replacement)
            outcome = "survived" if survives(copy, room, file, text) else "killed"
            counts[outcome] += 1
            before, after = (
                lines.splitlines()[node.lineno - 1].strip()
                for lines in (file.read_text(encoding="utf-8"), text)
            )
            place = f"{file.relative_to(ROOT)}:{node.lineno} {function}"
            change = f"{before}  ->  {after}"
            print(f"{number}: {outcome}: {place}: {change}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


main()
