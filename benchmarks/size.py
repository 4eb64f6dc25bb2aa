"""What a person must hold to know the project: files and tokens of each package.

``python -m benchmarks.size`` prints the table; `tests/project/test_architecture.py`
holds its totals, so that growth is a decision. Seconds of the tests of each package
come from a report of pytest: ``pytest --junitxml=out/tests.xml``, then ``python -m
benchmarks.size out/tests.xml``.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moesim", "policies", "engine", "sim", "runtime", "traces", "hwprofiles")
SMALL_LINES = 50

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Size:
    """Counts of files.

    Attributes:
        files: how many.
        tokens: of code, without comments and docstrings; no formatter changes it.
        code_lines: without blank lines, comments and docstrings.
        import_lines: of these, lines that import.
        small: files of fewer than `SMALL_LINES` lines of code.
        longest_function: its lines, docstring included.
    """

    files: int = 0
    tokens: int = 0
    code_lines: int = 0
    import_lines: int = 0
    small: int = 0
    longest_function: int = 0

    def __add__(self, other: Size) -> Size:
        """Count both."""
        return Size(
            self.files + other.files,
            self.tokens + other.tokens,
            self.code_lines + other.code_lines,
            self.import_lines + other.import_lines,
            self.small + other.small,
            max(self.longest_function, other.longest_function),
        )


def size_of_file(path: Path) -> Size:
    """Count one file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    imports = 0
    longest = 0
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            text = node.body[0]
            tokens -= 1
            lines.difference_update(range(text.lineno, (text.end_lineno or 0) + 1))
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += (node.end_lineno or 0) - node.lineno + 1
        if isinstance(node, _FUNCTIONS):
            longest = max(longest, (node.end_lineno or 0) - node.lineno + 1)
    small = int(len(lines) < SMALL_LINES)
    return Size(1, tokens, len(lines), imports, small, longest)


def size_of(folder: Path) -> Size:
    """Count all files of a folder; links to other packages are not followed."""
    return sum(map(size_of_file, sorted(folder.rglob("*.py"))), Size())


def test_seconds(report: Path) -> Counter[str]:
    """Seconds of tests by folder, from a JUnit report of pytest."""
    seconds: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        folder = parts[1] if len(parts) > 1 else ""
        seconds[folder] += float(case.get("time", 0))
    return seconds


def report() -> None:
    """Print the table."""
    seconds = test_seconds(Path(sys.argv[1])) if sys.argv[1:2] else Counter()
    rows = {name: size_of(ROOT / name) for name in PACKAGES}
    inner = sorted(path for path in (ROOT / "moesim").iterdir() if path.is_dir())
    rows |= {
        f"  moesim/{path.name}": size_of(path)
        for path in inner
        if not path.is_symlink() and any(path.glob("*.py"))
    }
    print(f"{'package':22} files  tokens   code imports  small longest  tests test s")
    rows["all"] = sum((rows[name] for name in PACKAGES), Size())
    for name, size in rows.items():
        folder = name.strip().rpartition("/")[2]
        tests = size_of(ROOT / "tests" / ("" if name == "all" else folder))
        spent_s = seconds.total() if name == "all" else seconds[folder]
        print(
            f"{name:22} {size.files:5} {size.tokens:7} {size.code_lines:6}"
            f" {size.import_lines:7} {size.small:6} {size.longest_function:7}"
            f" {tests.code_lines:6}"
            f" {spent_s:6.0f}"
        )


if __name__ == "__main__":
    report()
