"""No tuning to the answer: calibration cannot see what a prediction is compared with,
since modules do not name it.
"""

import ast

import pytest
from support.processes import ROOT

FITTING = (
    *sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "hwprofiles" / "calibration").glob("*.py")
    ),
    "moesim/evidence/validation/calibrate.py",
)
COMPARING = (
    "moesim/evidence/validation/grid.py",
    "moesim/evidence/validation/results.py",
    "moesim/evidence/validation/report.py",
    "moesim/questions/sensitivity.py",
)


def module_of(path):
    name = path.removesuffix(".py").replace("/", ".")
    return name if name.startswith("moesim.") else f"moesim.{name}"


def path_of(module):
    name = module.replace(".", "/") + ".py"
    return name if (ROOT / name).is_file() else name.removeprefix("moesim/")


def named(path):
    """Every module of ours that a file imports, in functions and under `TYPE_CHECKING`
    too.
    """
    modules = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {
                f"{node.module}.{alias.name}" for alias in node.names
            }
    return {name for name in modules if (ROOT / path_of(name)).is_file()}


def reached(path):
    """The same, through everything that is imported on the way."""
    seen = set()
    todo = [path]
    while todo:
        for name in named(todo.pop()) - seen:
            seen.add(name)
            todo.append(path_of(name))
    return seen


@pytest.mark.parametrize("path", FITTING)
def test_what_fits_reaches_nothing_that_compares(path):
    assert reached(path).isdisjoint(map(module_of, COMPARING))


@pytest.mark.parametrize("path", COMPARING)
def test_what_compares_names_nothing_that_fits(path):
    assert named(path).isdisjoint(map(module_of, FITTING))


def test_the_walk_would_see_it():
    """Else the two tests above could not fail."""
    assert "hwprofiles/calibration/fit_runs.py" in FITTING
    assert "moesim.evidence.validation.paired_runs" in reached(
        "moesim/evidence/validation/calibrate.py"
    ) & reached("moesim/evidence/validation/grid.py")
    assert "moesim.evidence.validation.results" in reached(
        "moesim/evidence/validation/grid.py"
    )
