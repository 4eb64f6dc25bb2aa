"""``python -m benchmarks.mutants [ROOM …] [--count N] [--seed N] [--minutes M]``:
change one expression of the source at random; do the tests of its room notice?

Each mutant runs in a copy of the checkout, test files that name its module first, and
ends with the first failure. What survives is printed as a line to look at: a hole in
the tests, or a change that means the same.
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
    # source -> folders of its tests
    "engine": ("engine", "sim"),
    "sim": ("engine", "sim"),
    "policies": ("policies",),
    "traces": ("traces",),
    "hwprofiles": ("hwprofiles", "evidence"),
    "runtime/executor": ("runtime",),
    "moesim/runs": ("runs", "questions"),
    "moesim/questions": ("questions",),
    "moesim/advice": ("advice",),
    "moesim/evidence": ("evidence",),
}
LONGEST_S = 240

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


def tests_of(room: str, file: Path) -> list[str]:
    """Test files of a room, those that name the module first."""
    files = []
    for folder in ROOMS[room]:
        files += sorted((ROOT / "tests" / folder).rglob("test_*.py"))
    name = re.compile(rf"\b{file.stem}\b")
    known = [name.search(each.read_text(encoding="utf-8")) is None for each in files]
    order = sorted(range(len(files)), key=lambda place: (known[place], place))
    return [str(files[place].relative_to(ROOT)) for place in order]


def survives(copy: Path, room: str, file: Path, text: str) -> bool | None:
    """Whether the tests of a room hold although a file is changed; None if they took
    too long.
    """
    place = copy / file.relative_to(ROOT)
    original = place.read_text(encoding="utf-8")
    place.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests_of(room, file)],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True, timeout=LONGEST_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    finally:
        place.write_text(original, encoding="utf-8")
    return done.returncode == 0


def main() -> None:
    """Try mutants until the time is up."""
    parser = argparse.ArgumentParser(prog="benchmarks.mutants", description=__doc__)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", default="", help="part of a file's path")
    chosen = parser.parse_args()

    end_s = time.monotonic() + 60 * chosen.minutes
    counts = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        hidden = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build")
        shutil.copytree(ROOT, copy, ignore=hidden, symlinks=True)
        for number in range(chosen.count):
            if time.monotonic() > end_s:
                break
            dice = random.Random(f"{chosen.seed} {number}")
            room = dice.choice(chosen.rooms or list(ROOMS))
            files = sorted((ROOT / room).rglob("*.py"))
            file = dice.choice([each for each in files if chosen.only in str(each)])
            found = list(mutants_of(file))
            if not found:
                continue
            node, replacement, function = dice.choice(found)
            text = changed(file, node, replacement)
            outcome = {True: "survived", False: "killed", None: "too long"}[
                survives(copy, room, file, text)
            ]
            counts[outcome] += 1
            if outcome != "killed":
                before = file.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
                place = f"{file.relative_to(ROOT)}:{node.lineno} {function}"
                print(f"{outcome}: {place}: {before.strip()}  ->  {replacement}")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


main()
