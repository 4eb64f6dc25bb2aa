"""No tuning to the answer: calibration cannot see what a prediction is compared with.

Held twice: by what modules may name, and by what flows while they work.
"""

import ast
from dataclasses import replace

import pytest
from support.calibrating import sized
from support.processes import ROOT
from support.real_machine import host_profile

from moesim.evidence.validation.calibrate import learn
from moesim.evidence.validation.grid import validate
from moesim.evidence.validation.paired_runs import Trial, designs, drawn_steps, simulate
from moesim.evidence.validation.results import Validation
from moesim.hwprofiles.profile import load_profile
from moesim.runs.config import MemoryOptions
from moesim.traces.format import reader
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace

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
    "moesim/evidence/validation/agreement.py",
)
TRACES = [
    ROOT / "traces" / "data" / f"tiny_{split}.parquet"
    for split in ("calibration", "evaluation")
]


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
    assert "moesim.evidence.validation.agreement" in reached(
        "moesim/evidence/validation/grid.py"
    )
    assert "moesim.evidence.validation.drift" in reached(
        "moesim/evidence/validation/calibrate.py"
    ) & reached("moesim/evidence/validation/grid.py")


def test_the_designed_set_is_drawn_without_opening_a_file(monkeypatch):
    """Routing, runs and fit of a calibration, while every door to traces is shut."""
    shape = sized("olmoe-1b-7b/4")
    machine = load_profile("two-core-host")

    def shut(*_arguments, **_named):
        raise AssertionError("calibration opened a trace")

    monkeypatch.setattr(reader, "open_trace", shut)
    monkeypatch.setattr(reader.Trace, "__init__", shut)
    runs = [
        (shape, design.trial, simulate(design.trial, shape, machine))
        for design in designs(shape, quick=True)[:6]
    ]
    assert learn(runs, machine, date="2026-01-01", name="x").numbers


def test_drawn_routing_is_no_shipped_trace():
    """Token by token, the designed routing has nothing of the traces that ship."""
    drawn = {
        layer.routing.tobytes()
        for step in drawn_steps(batch=1, prompt=0, decode=60, seed=0)
        for layer in step.layers
    }
    for path in TRACES:
        steps = compose(open_trace(path), steps=60)
        shipped = [layer.routing.tobytes() for step in steps for layer in step.layers]
        same = sum(routing in drawn for routing in shipped)
        assert same <= 0.02 * len(shipped)


def test_a_validation_leaves_the_profile_as_it_was(tmp_path):
    profile = host_profile()
    before = profile.digest
    validation = validate(
        [TRACES[1]],
        policies=["all-cpu+none"],
        cache_ratios=[0.2],
        batches=[1],
        hw=profile,
        steps=3,
        replications=1,
        repetitions=1,
        stores=tmp_path,
    )
    assert isinstance(validation, Validation)
    assert profile.digest == before == validation.config["hw_digest"]


def test_the_same_runs_give_the_same_profile_whatever_was_compared_before():
    """The fit is a function of the runs it is given: no state survives from a
    comparison.
    """
    shape = sized("olmoe-1b-7b/4")
    machine = load_profile("two-core-host")
    runs = [
        (shape, design.trial, simulate(design.trial, shape, machine))
        for design in designs(shape, quick=True)[:4]
    ]
    first = learn(runs, machine, date="2026-01-01", name="x").digest
    other = Trial(
        "greedy+lru",
        MemoryOptions(cache_ratio=0.5),
        list(compose(open_trace(TRACES[1]), steps=4)),
    )
    simulate(other, replace(open_trace(TRACES[1]).shape), machine)
    assert learn(runs, machine, date="2026-01-01", name="x").digest == first
