"""Calls of the public functions with values of wrong types: an answer, or an error of
ours that is raised on purpose, never one that comes out of the inside.
"""

import contextlib
import inspect
import io
import linecache
import os
import random
import tempfile
import traceback
import warnings
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import moesim

from .report import HungError, Report, last_lines, limited

LONGEST_S = 20
PACKAGE = str(Path(moesim.__file__).parents[1])

WRONG = [
    *(None, True, -1, 0, 3, 2**63, 2**64, -(2**63), 1.5, float("nan"), float("inf")),
    *("", "x", "x" * 5000, "-1", "\0", "\udcff", b"x", 1j, object()),
    *([], [1], [None], ["x", 1], (), {}, {"a": 1}, {1: 2}, {"x"}, range(3)),
    *(np.array(3), np.arange(3), np.array(["x"]), np.float32(2), np.datetime64("now")),
    *(Path("x"), Path(), datetime(2026, 1, 1, tzinfo=UTC), lambda *_: 1 / 0),
]
"""What is given in place of a value; some of it fits some arguments."""

CALLS = (
    "return function(*arguments, **named)",
    "getattr(moesim, name)(*arguments, **named)",
)
"""Lines that call what a user calls."""


CANNOT_SUCCEED = {"import_trace", "load_config", "register"}
"""Their files are not there."""


def subjects(folder):
    """A call of each public function that works, by name: positional and named."""
    trace = "tiny"
    moesim.synth(folder / "plain.parquet", like=trace, tokens=40)
    run = moesim.replay(trace, steps=2)
    frame = moesim.sweep(
        trace, ["greedy", "all-cpu"], steps=1, jobs=1, details=True,
        store=folder / "store",
    )  # fmt: skip
    rates = moesim.hit_rates(trace, ["lru"], [0.5], steps=1)
    short = {"steps": 1}
    known = {
        "replay": ((trace,), short),
        "replay_cache": ((trace,), short),
        "compare": ((trace, ["greedy", "all-cpu"]), short),
        "sweep": ((trace, ["greedy"]), short | {"jobs": 1}),
        "search": (
            (trace, ["greedy"]),
            {"jobs": 1, "trials": 2, "steps": 4, "over": {"cache_ratio": (0.1, 0.9)}},
        ),
        "sensitivity": ((trace,), short | {"policies": ["greedy"]}),
        "gap": ((trace,), short),
        "hit_rates": ((trace, ["lru"], [0.5]), short),
        "results": ((folder / "store",), {}),
        "query": ((folder / "store", "SELECT 1"), {}),
        "ranking": ((frame,), {}),
        "answer": ((run,), {}),
        "style": (("paper",), {}),
        "write_perfetto": ((folder / "p.json", {"a": run.timeline}), {}),
        "line_figure": ((rates, "title"), {}),
        "open_trace": ((trace,), {}),
        "export_trace": (
            (moesim.open_trace(trace), folder / "t.csv", "csv"),
            {},
        ),
        "import_trace": ((folder / "none.csv", folder / "t.parquet"), {}),
        "predict": (
            (folder / "plain.parquet", folder / "p.parquet"),
            {"recall": [0.8]},
        ),
        "synth": ((folder / "y.parquet",), {"like": trace, "tokens": 40}),
        "load_profile": (("rtx4060ti",), {}),
        "save_profile": ((moesim.load_profile("rtx4060ti"), folder / "h.toml"), {}),
        "load_config": ((folder / "none.toml",), {}),
        "list_policies": ((), {}),
        "list_profiles": ((), {}),
        "register": (("cache", "torture", int), {}),
        "advise": (("olmoe-1b-7b",), {"gpu": "RTX3090", "cpu": "Core i5-12400"}),
        "RunConfig": ((), {}),
        "MemoryOptions": ((), {}),
        "MeasuredConfig": ((), {}),
        "Job": ((), {}),
    }
    return {name: known[name] for name in moesim.__all__ if name in known}


def is_on_purpose(error):
    """Whether an error was raised by a statement of ours, for whoever calls."""
    if type(error).__module__.startswith("moesim."):
        return True
    # Files that are not there, or that cannot be, are named by the system.
    if isinstance(error, OSError) and (error.filename or error.errno):
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno).strip()
    is_ours = frame.filename.startswith(PACKAGE) and line.startswith("raise ")
    # Python names arguments that are missing, or that no function has.
    is_call = isinstance(error, TypeError) and frame.line in CALLS
    return is_ours or is_call


def draw(dice, name, call):
    """Replace one or two arguments of a call."""
    arguments, named = list(call[0]), dict(call[1])
    function = getattr(moesim, name)
    parameters = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    changed = []
    for parameter in dice.sample(
        parameters, min(len(parameters), dice.choice([1, 1, 2]))
    ):
        place = parameters.index(parameter)
        value = dice.choice(WRONG)
        changed.append(f"{parameter.name}={value!r:.40}")
        if place < len(arguments):
            arguments[place] = value
        else:
            named[parameter.name] = value
    return arguments, named, ", ".join(changed)


def run_suite(count, seed, only=None):
    report = Report("calls")
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _try(report, count, seed, only, Path(folder))
        finally:
            os.chdir(before)
    return report


def _try(report, count, seed, only, folder):
    calls = subjects(folder)
    for name in calls.keys() - CANNOT_SUCCEED:
        arguments, named = calls[name]
        getattr(moesim, name)(*arguments, **named)
    names = [name for name in calls if only is None or only in name]
    for number in range(count):
        if report.is_over:
            break
        dice = random.Random(f"{seed} {number}")
        name = dice.choice(names)
        arguments, named, changed = draw(dice, name, calls[name])
        try:
            with (
                limited(LONGEST_S),
                warnings.catch_warnings(),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                warnings.simplefilter("ignore")
                getattr(moesim, name)(*arguments, **named)
        except HungError:
            report.fail(f"{name}({changed}): no end after {LONGEST_S} s")
        except Exception as error:  # noqa: BLE001 - what it is is judged
            # What a function of the caller raises is the caller's.
            is_callers = isinstance(error, ZeroDivisionError) and "lambda" in changed
            if is_callers or is_on_purpose(error):
                report.count("refused")
            else:
                report.fail(f"{name}({changed}): {last_lines(error)}")
        else:
            report.count("answered")
