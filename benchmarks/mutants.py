"""``python -m benchmarks.mutants RESULTS [ROOM …] [--count N] [--seed N]``: change one
expression of the source at random; do the tests of its room notice?

Expressions are drawn, not files, so that long files have their share. One process
collects the tests of all rooms and forks a child for every trial, which exchanges the
code of one function and runs tests that reach the changed statement, the cheapest
first, until one fails. What reaches what is noted once. All of it is kept in RESULTS,
a JSON object a line, and what is there is not done again.

What has C types beside it can only be changed where it runs as Python, so the program
tries those files' mutants where ``MOESIM_PLAIN=1`` is set, and the others where it is
not. ``--again 30`` tries so many of RESULTS's mutants once more, on the sources that
there are now, whatever came of them before.

What survives is a hole in the tests, or a change that means the same.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import json
import os
import random
import re
import resource
import select
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from moesim.base.extensions import state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PLANNER = tuple(f"engine/{name}.py" for name in ("planner", "plan", "memory", "host"))
ENGINE = tuple(
    f"engine/{name}.py"
    for name in (
        *("at_once", "block", "durations", "gate_mass", "layer_step", "observers"),
        *("operations", "starting", "transfers"),
    )
)
ROOMS = {
    # room -> its sources, and the folders of its tests
    "engine": ((*ENGINE, "sim"), ("engine", "sim", "policies")),
    "policies": (("policies",), ("policies",)),
    "metrics": (("traces/timeline",), ("traces",)),
    "costs": (("hwprofiles",), ("hwprofiles", "evidence")),
    "statistics": (("traces/stats",), ("traces",)),
    "importers": (("traces/importers",), ("traces",)),
    "executor": (("runtime/executor",), ("runtime",)),
    "planner": (PLANNER, ("engine", "sim", "policies")),
    "runs": (("moesim/runs",), ("runs", "questions")),
    "questions": (("moesim/questions",), ("questions",)),
    "advice": (("moesim/advice",), ("advice",)),
    "evidence": (("moesim/evidence",), ("evidence",)),
}
TEST_S = 2.0
"""Processor seconds of a test; those that take longer are left out."""
LATE = 2
"""Tests that take longer one after another, after which the rest of a file is, too."""
SOON_S = 0.3
"""What takes longer comes behind the other tests of its file."""
SLOWER = 5
"""A test that takes so many times as long with a change has noticed it."""
TRIAL_S = 60.0
"""Processor seconds of a mutant's tests together; what survives them survives."""
WAIT_S = 180.0
"""By the clock: who says nothing for so long has lost its way."""
MORE_BYTES = 6 << 30

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


class Mutant(NamedTuple):
    """A change of one expression.

    Attributes:
        room, file: where; `function`: the outermost one around it.
        before, after: its line, changed and not; `nth`: of those that read the same.
    """

    room: str
    file: str
    function: str
    before: str
    after: str
    nth: int


class Place(NamedTuple):
    """Where a mutant lies in the sources that there are now.

    Attributes:
        line: number of the changed line; `changed`: what stands there then.
        begin: first line of the function, decorators included.
        first, last: lines of the changed statement.
    """

    line: int
    changed: str
    begin: int
    first: int
    last: int


# -- drawing --------------------------------------------------------------------------


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


def mutants_of(room: str, file: str) -> Iterator[tuple[Mutant, Place]]:
    """Every change of one file, by its path from the root."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    for function in _functions(ast.parse(text)):
        begin = min(each.lineno for each in (function, *function.decorator_list))
        for statement, node in _expressions(function):
            line = lines[node.lineno - 1]
            if not _stands(line, node):
                continue
            for other in variants(node):
                changed = _replaced(line, node, ast.unparse(other))
                named = (function.name, line.strip(), changed.strip())
                nth = counts[named]
                counts[named] += 1
                within = statement.lineno, statement.end_lineno
                place = Place(node.lineno, changed, begin, *within)
                yield Mutant(room, file, *named, nth), place


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions and methods; none inside another one."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef):
            yield child
        elif not isinstance(child, ast.expr):
            yield from _functions(child)


def _expressions(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """Expressions that run when a function does, with their statements."""
    own = list(tree.body) if isinstance(tree, ast.FunctionDef) else [tree]
    for statement in own:
        inner = [statement]
        while inner:
            node = inner.pop()
            if isinstance(node, ast.expr):
                yield statement, node
            for child in ast.iter_child_nodes(node):
                # Positions inside of f-strings are none of the file before Python 3.12.
                if isinstance(child, ast.JoinedStr):
                    continue
                if isinstance(child, ast.stmt):
                    yield from _expressions(child)
                else:
                    inner.append(child)


def _stands(line: str, node: ast.expr) -> bool:
    """Whether an expression that can be changed stands on its line alone, where its
    position says.
    """
    if node.lineno != node.end_lineno or next(variants(node), None) is None:
        return False
    segment = line.encode()[node.col_offset : node.end_col_offset].decode()
    try:
        found = ast.parse(segment, mode="eval").body
    except SyntaxError:
        return False
    # A name that is assigned to reads like one that is not.
    return ast.unparse(found) == ast.unparse(node)


def _replaced(line: str, node: ast.expr, replacement: str) -> str:
    encoded = line.encode()
    begin, end = node.col_offset, node.end_col_offset
    changed = encoded[:begin] + b"(" + replacement.encode() + b")" + encoded[end:]
    return changed.decode()


def sources_of(room: str) -> list[str]:
    """Files that a room's mutants are drawn from."""
    found = []
    for name in ROOMS[room][0]:
        place = ROOT / name
        found += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return [str(file.relative_to(ROOT)) for file in found]


def drawn(rooms: list[str], count: int, seed: int) -> Iterator[Mutant]:
    """Draw mutants, a room at a time in turn."""
    every = {
        room: [
            mutant for file in sources_of(room) for mutant, _ in mutants_of(room, file)
        ]
        for room in rooms
    }
    dice = random.Random(seed)
    for number in range(count):
        yield dice.choice(every[rooms[number % len(rooms)]])


def placed(mutants: dict[int, Mutant]) -> dict[int, Place]:
    """Where mutants are in the sources; those whose lines have gone are left out."""
    files = {(mutant.room, mutant.file) for mutant in mutants.values()}
    found: dict[Mutant, Place] = {}
    wanted = set(mutants.values())
    for room, file in files:
        if (ROOT / file).is_file():
            found |= {
                mutant: place
                for mutant, place in mutants_of(room, file)
                if mutant in wanted
            }
    return {
        number: found[mutant] for number, mutant in mutants.items() if mutant in found
    }


# -- code -----------------------------------------------------------------------------


def imported(mutants: Iterable[Mutant]) -> dict[tuple[str, int], list[FunctionType]]:
    """Functions of the files with mutants, by file and first line."""
    files = {str(ROOT / mutant.file) for mutant in mutants}
    for file in files:
        inside = Path(file).relative_to(ROOT).with_suffix("").parts
        importlib.import_module(".".join(("moesim", *inside)))
    found: dict[tuple[str, int], list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType):
            code = thing.__code__
            file = os.path.realpath(code.co_filename)
            if file in files:
                found[file, code.co_firstlineno].append(thing)
    return found


def code_within(code: CodeType) -> Iterator[CodeType]:
    """Some code, and that of functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_within(constant)


def exchange(functions: list[FunctionType], place: Place) -> None:
    """Give functions the code that a changed file has for them."""
    for function in functions:
        old = function.__code__
        text = Path(old.co_filename).read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        lines[place.line - 1] = place.changed
        module = compile("".join(lines), old.co_filename, "exec", dont_inherit=True)
        (function.__code__,) = (
            code
            for code in code_within(module)
            if code.co_firstlineno == old.co_firstlineno
            and code.co_qualname == old.co_qualname
        )


class Watch:
    """Notes which changed statements are reached, as a tracer of Python's."""

    def __init__(
        self,
        places: dict[int, tuple[Place, list[FunctionType]]],
    ) -> None:
        self.reached: set[int] = set()
        self._lines: dict[int, dict[int, list[int]]] = {}
        for number, (place, functions) in places.items():
            for function in functions:
                for code in code_within(function.__code__):
                    lines = self._lines.setdefault(id(code), {})
                    for line in range(place.first, place.last + 1):
                        lines.setdefault(line, []).append(number)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        """Look at lines of watched functions only."""
        lines = self._lines.get(id(frame.f_code))
        if lines is None:
            return None
        if event in {"line", "call"}:
            self.reached.update(lines.get(frame.f_lineno, ()))
        return self


# -- trials ---------------------------------------------------------------------------


class Results:
    """What is known, a JSON object a line.

    Attributes:
        mutants: by number.
        tests: by their names: file's digest, seconds (None: left out), what it reaches.
        trials: what came of mutants, by number.
    """

    def __init__(self, path: Path) -> None:
        self.mutants: dict[int, Mutant] = {}
        self.tests: dict[str, dict[str, Any]] = {}
        self.trials: dict[int, dict[str, Any]] = {}
        self._path = path
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._take(json.loads(line))

    def add(self, **line: Any) -> None:
        """Keep one more line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "mutant" in line:
            fields = {name: line[name] for name in Mutant._fields}
            self.mutants[line["mutant"]] = Mutant(**fields)
        elif "test" in line:
            self.tests[line["test"]] = line
        else:
            self.trials[line["trial"]] = line


class Trials:
    """A plugin of pytest: collects tests, and runs them in children.

    Args:
        results: what is known, and takes what is found.
        rooms: whose mutants to try.
        again: how many mutants to try once more; 0: those that were not tried.
        retry: try survivors once more, too.
    """

    def __init__(
        self, results: Results, rooms: list[str], again: int, *, retry: bool
    ) -> None:
        self._results = results
        self._rooms = rooms
        self._again = again
        self._retry = retry
        self._mode = state()[0]
        is_plain = self._mode == "plain"
        # Those of other rooms are watched, too: what a test reaches is noted once.
        self.mutants = {
            number: mutant
            for number, mutant in results.mutants.items()
            if (ROOT / mutant.file).with_suffix(".pxd").is_file() == is_plain
        }
        self._items: dict[Path, list[pytest.Item]] = defaultdict(list)
        self._places: dict[int, tuple[Place, list[FunctionType]]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try mutants instead of running every test."""
        for item in session.items:
            self._items[item.path].append(item)
        functions = imported(self.mutants.values())
        for number, place in placed(self.mutants).items():
            file = str(ROOT / self.mutants[number].file)
            self._places[number] = place, functions[file, place.begin]
        for number in self._chosen():
            self._try(number)
        return True

    def _chosen(self) -> list[int]:
        """Numbers of the mutants that are to be tried."""
        trials = self._results.trials
        asked = {
            number
            for number in self._places
            if self.mutants[number].room in self._rooms
        }
        if self._again:
            dice = random.Random(self._again)
            count = min(self._again, len(asked))
            return sorted(dice.sample(sorted(asked), count))
        tried = {
            number
            for number, trial in trials.items()
            if not (self._retry and trial["outcome"] != "killed")
        }
        return sorted(asked - tried)

    def _try(self, number: int) -> None:
        """Change a function in children, and run tests until one fails."""
        mutant = self.mutants[number]
        place, functions = self._places[number]
        killer = ""
        tests = 0
        left_s = TRIAL_S
        for path in self._files_for(number):
            found = self._reaching(path, number)
            if not found:
                continue
            taken = []
            for item, seconds in sorted(found, key=lambda each: each[1] > SOON_S):
                if seconds < left_s:
                    taken.append(item)
                    left_s -= seconds
            tests += len(taken)
            killer = self._killer(place, functions, taken)
            if killer:
                break
        outcome = "killed" if killer else "survived" if tests else "unreached"
        self._results.add(trial=number, outcome=outcome, by=killer, tests=tests)
        where = f"{mutant.file}:{place.line} {mutant.function}"
        change = f"{mutant.before}  ->  {mutant.after}"
        print(f"{number}: {outcome}: {where}: {change}", flush=True)

    def _killer(
        self, place: Place, functions: list[FunctionType], items: list[pytest.Item]
    ) -> str:
        """The first of some tests that does not hold with a change; or none."""

        def run(say: Any) -> None:
            exchange(functions, place)
            say("")
            for n, item in enumerate(items):
                say(item.nodeid)
                _limit_cpu(SLOWER * TEST_S)
                if not _passes(item, items[n + 1 : n + 2]):
                    return
            say("")

        names = list(_in_child(run))
        assert functions, f"nobody has the function of line {place.line}"
        assert names, f"line {place.line} cannot be exchanged"
        return names[-1]

    def _files_for(self, number: int) -> list[Path]:
        """Test files of a mutant's room: who killed it before, those that name its
        module, then small ones.
        """
        mutant = self.mutants[number]
        name = re.compile(rf"\b{Path(mutant.file).stem}\b")
        killer = self._results.trials.get(number, {}).get("by", "")

        def rank(path: Path) -> tuple[Any, ...]:
            text = path.read_text(encoding="utf-8")
            own = str(path.relative_to(ROOT)) == killer.partition("::")[0]
            folder = ROOMS[mutant.room][1].index(_folder_of(path))
            return not own, not name.search(text), folder, len(text)

        folders = ROOMS[mutant.room][1]
        return sorted(
            (path for path in self._items if _folder_of(path) in folders), key=rank
        )

    # -- which test reaches what ------------------------------------------------------

    def _reaching(self, path: Path, number: int) -> list[tuple[pytest.Item, float]]:
        """Tests of a file that reach a mutant, and their seconds."""
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        items = self._items[path]
        left = [item for item in items if not self._is_known(item, digest)]
        late = 0
        while left and not self._again:
            if late == LATE:
                # The others of this file, which share its fixtures, take long as well.
                for item in left:
                    self._note_test(item, digest, None, [])
                break
            before = len(left)
            left = self._watch(left, digest)
            late = late + 1 if before - len(left) == 1 else 0
        found = []
        for item in items:
            known = self._results.tests.get(self._name(item))
            if known and known["cpu_s"] is not None and number in known["reaches"]:
                found.append((item, known["cpu_s"]))
        return found

    def _name(self, item: pytest.Item) -> str:
        return f"{item.nodeid} {self._mode}"

    def _is_known(self, item: pytest.Item, digest: str) -> bool:
        known = self._results.tests.get(self._name(item))
        return known is not None and known["digest"] == digest

    def _watch(self, items: list[pytest.Item], digest: str) -> list[pytest.Item]:
        """Run tests until one takes too long; who is left."""

        def run(say: Any) -> None:
            watch = Watch(self._places)
            for n, item in enumerate(items):
                used_s = _limit_cpu(TEST_S)
                watch.reached.clear()
                threading.settrace(watch)
                sys.settrace(watch)
                passes = _passes(item, items[n + 1 : n + 2])
                sys.settrace(None)
                threading.settrace(None)  # type: ignore[arg-type]
                took_s = _cpu_s() - used_s if passes else None
                say(json.dumps([took_s, sorted(watch.reached)]))

        done = 0
        for line in _in_child(run):
            took_s, reached = json.loads(line)
            self._note_test(items[done], digest, took_s, reached)
            done += 1
        if done < len(items):
            self._note_test(items[done], digest, None, [])
        return items[done + 1 :]

    def _note_test(
        self, item: pytest.Item, digest: str, took_s: float | None, reached: list[int]
    ) -> None:
        self._results.add(
            test=self._name(item), digest=digest, cpu_s=took_s, reaches=reached
        )


def _folder_of(path: Path) -> str:
    return path.relative_to(ROOT / "tests").parts[0]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _limit_cpu(more_s: float) -> float:
    """Let the process be killed after so many more seconds; seconds used so far."""
    used_s = _cpu_s()
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used_s + more_s) + 1
    if most != resource.RLIM_INFINITY:
        soft = min(soft, most)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, most))
    return used_s


def _passes(item: pytest.Item, following: list[pytest.Item]) -> bool:
    """Whether a test holds; one that is skipped does."""
    nextitem = following[0] if following else None
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    return not any(report.failed for report in reports)


def _in_child(run: Any) -> Iterator[str]:
    """Lines that a child says, until it has ended or is silent for too long."""
    reads, writes = os.pipe()
    folder = tempfile.mkdtemp(prefix="mutant-")
    child = os.fork()
    if not child:
        os.setsid()
        os.close(reads)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            run(lambda text: os.write(writes, f"{text}\n".encode()))
        finally:
            os._exit(0)
    os.close(writes)
    held = b""
    while select.select([reads], [], [], WAIT_S)[0]:
        more = os.read(reads, 1 << 16)
        if not more:
            break
        *lines, held = (held + more).split(b"\n")
        yield from (line.decode() for line in lines)
    os.close(reads)
    # What it has started is in its session.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, 9)
    os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Draw what is missing, and try what was not tried."""
    parser = argparse.ArgumentParser(prog="benchmarks.mutants", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=int, default=0, metavar="N")
    parser.add_argument("--retry", action="store_true", help="survivors, too")
    given = parser.parse_args()

    rooms = given.rooms or list(ROOMS)
    results = Results(given.results)
    if not results.mutants:
        for number, mutant in enumerate(drawn(rooms, given.count, given.seed)):
            results.add(mutant=number, **mutant._asdict())
    trials = Trials(results, rooms, given.again, retry=given.retry)
    tried = {mutant.room for mutant in trials.mutants.values()} & set(rooms)
    folders = {folder for room in tried for folder in ROOMS[room][1]}
    tests = [str(ROOT / "tests" / folder) for folder in sorted(folders)]
    options = ["-q", "-s", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    pytest.main([*options, *tests], plugins=[trials])
    outcomes = [trial["outcome"] for trial in results.trials.values()]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    print(f"{len(results.mutants)} drawn, {counts}")


if __name__ == "__main__":
    main()
