"""The import diagram of the architecture, held by parsing every module.

`docs/explanation/architecture.md` shows the same diagram to readers. A line that would break it
fails here, with file and line.
"""

import ast
import graphlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes import output_of

from benchmarks.size import PACKAGES, Size, size_of

ROOT = Path(__file__).parents[2]

WORLDS = ("base", "traces", "hwprofiles", "policies", "engine")
BOTH = (*WORLDS, "sim", "runtime")
MAY_IMPORT = {
    "base": (),
    "traces": ("base",),
    "hwprofiles": ("base", "traces"),
    "policies": ("base", "traces", "hwprofiles"),
    "engine": WORLDS[:-1],
    "sim": WORLDS,
    "runtime": WORLDS,
    "reporting": ("base", "traces"),
    "runs": (*BOTH, "reporting"),
    "questions": (*BOTH, "reporting", "runs"),
    "advice": (*BOTH, "reporting", "runs"),
    "evidence": (*BOTH, "reporting", "runs", "questions", "advice"),
    "cli": (*BOTH, "reporting", "runs", "questions", "advice", "evidence"),
    "moesim": (*BOTH, "reporting", "runs", "questions", "advice", "evidence", "cli"),
}
"""Which of our packages may name which others; itself always. Those that are not at the
top of the repository lie in ``moesim``, whose own modules are its face.
"""

TOP = ("traces", "hwprofiles", "policies", "engine", "sim", "runtime", "moesim")

MOST_TOKENS = 437_000
MOST_TEST_TOKENS = 310_000
"""What a person must hold; `benchmarks/size.py` counts it, in tokens of code, which no
formatter changes. A change that needs more raises the number, and says why.
"""

ONLY_IN = {
    "simpy": {"sim"},
    "duckdb": {"traces", "runs"},
    "torch": {"runtime"},
    "transformers": {"runtime"},
    "safetensors": {"runtime"},
    "pulp": {"policies"},
    "highspy": {"policies"},
    "joblib": {"runs", "evidence"},
    "distributed": {"runs"},
    "optuna": {"questions"},
    "matplotlib": {"reporting", "questions"},
    "altair": {"reporting"},
    "vl_convert": {"reporting"},
    "rich": {"reporting", "cli"},
    "jinja2": {"reporting"},
    "typer": {"cli"},
}
"""Libraries with one home."""

POLICIES_USE = {"numpy", "scipy", "pulp", "highspy"}
"""Everything outside the standard library that a decision may need."""

CLOCKS_AND_IO = {
    "asyncio", "datetime", "io", "logging", "os", "shutil", "socket", "subprocess",
    "tempfile", "threading", "time",
}  # fmt: skip
"""What no policy may touch: time is given to it, and files and processes are none of
its business.
"""


class Import(NamedTuple):
    """One imported module, as written: where, from which room, into which room or
    library.
    """

    where: str
    room: str
    module: str
    target: str
    level: int


def room_of(path):
    """The package of a file; what lies in ``moesim`` itself is its face."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "moesim" and len(parts) > 2 else parts[0]


def modules(*rooms):
    files = [path for name in TOP for path in sorted((ROOT / name).rglob("*.py"))]
    return [path for path in files if not rooms or room_of(path) in rooms]


def module_name(path):
    """``policies/base.py`` is installed as ``moesim.policies.base``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "moesim" else ("moesim", *parts)
    return ".".join(parts).removesuffix(".__init__")


NAMES = {module_name(path): path for path in modules()}


def target_of(module):
    """The room of a module of ours, or the library that it belongs to."""
    top, _, rest = module.partition(".")
    inner = rest.partition(".")[0]
    return inner if top == "moesim" and inner in MAY_IMPORT else top


def imported(path):
    """Line, module and level of every import of a file, in functions and under
    `TYPE_CHECKING` too.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (
                    node.lineno,
                    inner if inner in NAMES else node.module or "",
                    node.level,
                )


def imports(path):
    name = path.relative_to(ROOT)
    for line, module, level in imported(path):
        yield Import(f"{name}:{line}", room_of(path), module, target_of(module), level)


ALL = [line for path in modules() for line in imports(path)]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_the_diagram_allows(room):
    lines = [line for line in ALL if line.room == room]
    assert lines
    allowed = {*MAY_IMPORT[room], room}
    assert [
        line.where
        for line in lines
        if line.target in MAY_IMPORT and line.target not in allowed
    ] == []


def test_no_module_imports_itself_on_a_detour():
    """Imports under `TYPE_CHECKING` count: whoever needs another's types to be
    understood depends on it.
    """
    imports_of = {
        name: {module for _, module, _ in imported(path)} & NAMES.keys()
        for name, path in NAMES.items()
    }
    order = graphlib.TopologicalSorter(
        {name: found - {name} for name, found in imports_of.items()}
    )
    order.prepare()


def test_everything_is_installed_in_one_namespace():
    """A folder called `policies` or `traces` of somebody else must not be met by
    accident.
    """
    assert [
        line.where
        for line in ALL
        if line.module.partition(".")[0] in MAY_IMPORT.keys() - {"moesim"}
    ] == []


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_stays_at_home(library):
    assert [
        line.where
        for line in ALL
        if line.target == library and line.room not in ONLY_IN[library]
    ] == []


def test_policies_have_no_clock_and_no_io():
    lines = [line for line in ALL if line.room == "policies"]
    assert [line.where for line in lines if line.target in CLOCKS_AND_IO] == []
    third_party = (
        {line.target for line in lines} - set(sys.stdlib_module_names) - set(MAY_IMPORT)
    )
    assert third_party <= POLICIES_USE


def test_nothing_edits_the_import_path():
    """The package names are generic, so whoever else owns a `sim` or `traces` must not
    meet ours by accident.
    """
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            edits = (
                isinstance(node, ast.Attribute)
                and node.attr == "path"
                and getattr(node.value, "id", "") == "sys"
            )
            assert not edits, f"{path.relative_to(ROOT)}:{node.lineno}: sys.path"


def test_the_whole_grows_on_purpose_only():
    """No ratio: what is split or moved counts as before."""
    package = sum((size_of(ROOT / name) for name in PACKAGES), Size())
    tests = size_of(ROOT / "tests")
    assert package.tokens <= MOST_TOKENS
    assert tests.tokens <= MOST_TEST_TOKENS


def test_no_test_asserts_elapsed_time():
    """Seconds say who else is busy; what was imported, counted or asked does not."""
    clock = re.compile(
        r"^ *assert\b.*\b(perf_counter|monotonic|\w+_time)\(\)", re.MULTILINE
    )
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        found = clock.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)}: {found}"


SILENT = {
    "bad", "found", "one", "own", "said", "say", "stuff", "thing", "things",
    "told", "what", "whole",
}  # fmt: skip
"""Names of variables that do not say what the variable holds."""


def test_variables_say_what_they_hold():
    silent = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "id", getattr(node, "arg", None))
            is_read = isinstance(getattr(node, "ctx", None), ast.Load)
            if name in SILENT and not is_read and not isinstance(node, ast.keyword):
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not silent


REPORT = """
import sys
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_import_moesim_is_light(tmp_path):
    """Asking for the package costs nothing: its functions import what they need when
    first touched.
    """
    loaded = output_of("-c", "import moesim" + REPORT, cwd=tmp_path).split()
    assert "moesim" in loaded
    assert {
        *("torch", "numpy", "pandas", "pyarrow", "simpy", "vl_convert", "typer")
    }.isdisjoint(loaded)
