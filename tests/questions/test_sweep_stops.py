"""Sweeps and comparisons that are stopped or killed: quickly, leaving nothing but what
was finished, and going on from there.
"""

import signal
import sys

import pandas as pd
import psutil
import pytest
from support.processes import (
    PATIENCE_S,
    end_by_two_interrupts,
    run_python,
    start,
    wait_for,
)
from support.small_trace import write_small_trace

import moesim
from moesim.runs.sweeps.rows import read_results

POLICIES = ["all-cpu", "on-demand", "greedy", "fiddler"]
RUNS = 4 * 10


def command(request, folder, *words):
    """A command of ours under way, in a process group of its own."""
    process = start("-m", "moesim", *words, cwd=folder, start_new_session=True)
    request.addfinalizer(process.kill)
    return process


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_small_trace(
        tmp_path_factory.mktemp("trace") / "small.parquet", sequences=4, new_tokens=12
    )


def test_a_killed_sweep_goes_on_where_it_was(trace, tmp_path, request):
    store = tmp_path / "store"
    seeds = ",".join(map(str, range(10)))
    words = ("sweep", trace, "--policy", ",".join(POLICIES), "--seed", seeds)
    process = command(request, tmp_path, *words, "--jobs", 2, "--results", store)
    wait_for(lambda: len(list(store.glob("*.parquet"))) >= 1)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    # Workers see that nobody waits for them any more.
    assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == []

    there = set(read_results(store)["digest"].to_pylist())
    # A machine may have ended them all before it was killed.
    assert 0 < len(there) <= RUNS
    options = {"seed": range(10), "jobs": 1, "details": True}
    found = moesim.sweep(trace, POLICIES, results=store, **options)
    pd.testing.assert_frame_equal(found, moesim.sweep(trace, POLICIES, **options))
    # Each run is there once: what was finished was not run again.
    rows = sum(
        pd.read_parquet(file, columns=["digest"])["digest"].count()
        for file in store.glob("*.parquet")
    )
    assert rows == RUNS


def test_an_interrupted_sweep_keeps_what_was_finished(trace, tmp_path, request):
    store = tmp_path / "store"
    seeds = ",".join(map(str, range(4000)))
    words = ("sweep", trace, "--seed", seeds, "--jobs", 1, "--results", store)
    process = command(request, tmp_path, *words)
    wait_for(lambda: list(store.glob("*.parquet")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err == "interrupted\n"
    assert read_results(store).num_rows > 0
    assert {file.suffix for file in store.iterdir()} == {".parquet"}


def test_two_interrupts_end_a_comparison_at_once(tmp_path, request):
    """As a terminal sends them, to all processes of the group; 20 ms apart the second
    meets the clearing up of the first.
    """
    trace = write_small_trace(tmp_path / "long.parquet", sequences=2, new_tokens=2000)
    # Two that take minutes, so that both are writing for long.
    policies = "ilp,ilp:solver=highs"
    words = ("compare", trace, "--policy", policies, "--jobs", 2, "--out", "run")
    process = command(request, tmp_path, *words)
    parent = psutil.Process(process.pid)
    wait_for(lambda: len(list(tmp_path.glob("run/**/*.part"))) == 6)
    children = parent.children(recursive=True)

    end_by_two_interrupts(process, 0.02)
    assert [path for path in tmp_path.glob("run/**/*") if path.is_file()] == []
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []


BORN = """
import signal, sys, time
from moesim.runs.sweeps.execution import run_tasks

def mask(_task, _report):
    # The other worker must not do both tasks.
    time.sleep(0.5)
    return sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))

masks = []
run_tasks(mask, [1, 2], lambda _index, found: masks.append(found), jobs=2)
print(masks)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal masks")
def test_workers_are_born_with_stops_masked(tmp_path):
    """In a fresh process, where no library has started a process of its own yet."""
    done = run_python("-c", BORN, cwd=tmp_path)
    stops = [int(signal.SIGINT), int(signal.SIGTERM)]
    assert done.stdout == f"{[stops, stops]}\n"
