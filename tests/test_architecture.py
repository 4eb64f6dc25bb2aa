"""The import diagram of the architecture, held by parsing every module.

`docs/architecture.md` shows the same diagram to readers. A line that would break it fails here, with file and line.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from small_trace import write_small_trace

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "traces": set(),
    "hwprofiles": {"traces"},
    "policies": {"traces", "hwprofiles"},
    "sim": {"traces", "hwprofiles", "policies"},
    "runtime": {"traces", "hwprofiles", "policies"},
    "moesim": {"traces", "hwprofiles", "policies", "sim", "runtime"},
}
"""Which of our packages may name which others; itself always."""

ONLY_IN = {
    "simpy": {"sim"},
    "torch": {"runtime"},
    "transformers": {"runtime"},
    "safetensors": {"runtime"},
    "numba": {"policies", "traces", "runtime"},
    "pulp": {"policies"},
    "highspy": {"policies"},
    "matplotlib": {"moesim"},
    "rich": {"moesim"},
    "typer": {"moesim"},
}
"""Libraries with one home."""

POLICIES_USE = {"numpy", "scipy", "pulp", "highspy", "numba"}
"""Everything outside the standard library that a decision may need."""

CLOCKS_AND_IO = {
    "asyncio", "datetime", "io", "logging", "os", "shutil", "socket", "subprocess", "tempfile", "threading", "time",
}  # fmt: skip
"""What no policy may touch: time is given to it, and files and processes are none of its business."""

MOST_LINES = 500


class Import(NamedTuple):
    """One imported module, as written."""

    where: str
    package: str
    module: str
    top: str
    level: int


def modules(*packages):
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path):
    """Every import of a file, in functions and under `TYPE_CHECKING` too."""
    name = path.relative_to(ROOT)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(name))):
        if isinstance(node, ast.Import):
            found, level = [alias.name for alias in node.names], 0
        elif isinstance(node, ast.ImportFrom):
            found, level = [node.module or ""], node.level
        else:
            continue
        for module in found:
            yield Import(f"{name}:{node.lineno}", name.parts[0], module, module.partition(".")[0], level)


ALL = [line for path in modules(*MAY_IMPORT) for line in imports(path)]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_the_diagram_allows(package):
    lines = [line for line in ALL if line.package == package]
    assert lines
    allowed = MAY_IMPORT[package] | {package}
    assert [line.where for line in lines if line.top in MAY_IMPORT and line.top not in allowed] == []


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_stays_at_home(library):
    assert [line.where for line in ALL if line.top == library and line.package not in ONLY_IN[library]] == []


def test_simulator_and_runtime_never_import_each_other():
    """The seam is real only when neither side can lean on the other."""
    pairs = {(line.package, line.top) for line in ALL}
    assert ("sim", "runtime") not in pairs
    assert ("runtime", "sim") not in pairs
    assert ("sim", "policies") in pairs, "the walk over the modules found nothing"


def test_policies_have_no_clock_and_no_io():
    lines = [line for line in ALL if line.package == "policies"]
    assert [line.where for line in lines if line.top in CLOCKS_AND_IO] == []
    third_party = {line.top for line in lines} - set(sys.stdlib_module_names) - set(MAY_IMPORT)
    assert third_party <= POLICIES_USE


def test_imports_are_absolute():
    assert [line.where for line in ALL if line.level] == []


def test_nothing_edits_the_import_path():
    """The package names are generic, so whoever else owns a `sim` or `traces` must not meet ours by accident."""
    for path in modules(*MAY_IMPORT):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            edits = isinstance(node, ast.Attribute) and node.attr == "path" and getattr(node.value, "id", "") == "sys"
            assert not edits, f"{path.relative_to(ROOT)}:{node.lineno}: sys.path"


def test_no_room_is_two_rooms():
    everywhere = modules(*MAY_IMPORT, "benchmarks", "tests")
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in everywhere}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in modules(*MAY_IMPORT)
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def modules_loaded_by(code, *arguments, cwd):
    """Top-level names in `sys.modules` after running `code` in a fresh interpreter, outside the checkout."""
    report = "\nimport sys; print('LOADED', *sorted({name.partition('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", code + report, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd, env=environment, timeout=300)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_import_moesim_is_light(tmp_path):
    """Asking for the package costs nothing: its functions import what they need when first touched."""
    loaded = modules_loaded_by("import moesim", cwd=tmp_path)
    assert "moesim" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "pandas", "pyarrow", "simpy", "numba", "matplotlib", "typer"})


def test_a_replay_never_imports_torch(tmp_path):
    """Nor pandas or matplotlib, which cost half a second each."""
    trace = write_small_trace(tmp_path / "small.parquet")
    code = "import sys, moesim; assert moesim.replay(sys.argv[1], 'greedy').metrics['accesses']"
    loaded = modules_loaded_by(code, trace, cwd=tmp_path)
    assert "simpy" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "matplotlib", "pandas"})
