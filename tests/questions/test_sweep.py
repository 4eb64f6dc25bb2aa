"""Sweeps: every combination once, the same wherever it runs, and nothing that was found
is run again.
"""

import json
import os
import signal
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.processes import PATIENCE_S, ROOT, output_of, start
from support.small_trace import write_small_trace

import moesim
from moesim.base.files import sha256
from moesim.base.options import ConfigError
from moesim.policies import registry
from moesim.policies.base import PolicyError
from moesim.policies.faults import PolicyFault
from moesim.policies.registry import find
from moesim.runs.config import RunConfig
from moesim.runs.sweeps import execution, plan, rows
from moesim.runs.sweeps.execution import run_tasks
from moesim.runs.sweeps.sweep import configs_of

AXES = {"slots_per_layer": [1, 3], "batch": [1, 2], "hw": ["rtx4060ti", "rtx3080ti"]}
POLICIES = ["all-cpu", "on-demand", "greedy"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_small_trace(
        tmp_path_factory.mktemp("trace") / "small.parquet", sequences=6, new_tokens=8
    )


@pytest.fixture(scope="module")
def swept(trace):
    return moesim.sweep(trace, POLICIES, jobs=1, details=True, **AXES)


# Combinations.


def test_every_combination_is_one_run_with_the_figures_of_a_replay(trace, swept):
    assert len(swept) == 3 * 2 * 2 * 2
    assert swept.attrs["axes"] == ["policy", "hw", "slots_per_layer", "batch"]
    assert swept["policy"].tolist() == POLICIES * 8
    assert not swept["digest"].duplicated().any()
    for row in swept.iloc[::7].to_dict("records"):
        run = moesim.replay(
            trace,
            row["policy"],
            hw=row["hw"],
            slots_per_layer=row["slots_per_layer"],
            batch=row["batch"],
        )
        for name in ("tpot_s", "ttft_s", "makespan_s", "hits"):
            assert row[name] == run.metrics[name]
        assert json.loads(row["lanes"])["busy_s"] == run.metrics["busy_s"]


def test_a_list_in_a_file_is_an_axis(trace, tmp_path):
    """What a call says comes first."""
    file = tmp_path / "exp.toml"
    file.write_text(
        f'trace = "{trace}"\nslots_per_layer = [1, 3]\nsteps = 4\n'
        'cache = ["lfu:decay=0.5", "lfu:decay=0.9"]\n'
    )
    found = moesim.sweep(file, jobs=1)
    assert list(zip(found["slots_per_layer"], found["cache"], strict=True)) == [
        (1, "lfu:decay=0.5"),
        (1, "lfu:decay=0.9"),
        (3, "lfu:decay=0.5"),
        (3, "lfu:decay=0.9"),
    ]
    assert len(moesim.sweep(file, slots_per_layer=2, jobs=1)) == 2


def test_a_list_of_traces_and_of_seeds(trace, tmp_path):
    other = write_small_trace(tmp_path / "other.parquet", seed=1)
    found = moesim.sweep([trace, other], "greedy", seed=range(3), steps=2, jobs=1)
    assert found.attrs["axes"] == ["trace", "seed"]
    assert found["seed"].tolist() == [0, 1, 2] * 2


def test_what_cannot_be_is_left_out_and_said(trace):
    with pytest.warns(UserWarning, match="left out 1 of 2 runs: .*no room to stage"):
        found = moesim.sweep(trace, "greedy", gpu_memory_bytes=[1000, 1 << 30], jobs=1)
    assert found["gpu_memory_bytes"].tolist() == [1 << 30]
    with pytest.raises(PolicyError, match="no room to stage"):
        moesim.sweep(trace, "greedy", gpu_memory_bytes=[1000, 1001], jobs=1)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"policies": ["greedy", "gredy"]}, PolicyError, "did you mean 'greedy'"),
    ({"batch": [1, 0]}, ConfigError, "batch: expected a whole number >= 1"),
    ({"seed": []}, PolicyError, "seed: expected at least one value"),
    ({"batches": [1]}, TypeError, "did you mean 'batch'"),
])  # fmt: skip
def test_slips_are_refused_before_anything_runs(trace, tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        moesim.sweep(trace, results=tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


# Times, by hand.


def test_times_of_sequences_add_up_to_those_of_the_run(swept):
    for row in swept.to_dict("records"):
        count = 6 // row["batch"]
        assert len(row["batch_decode_s"]) == count
        steps = sum(row["batch_decode_tokens"])
        assert sum(row["batch_decode_s"]) / steps == pytest.approx(row["tpot_s"])
        assert sum(row["batch_makespan_s"]) == pytest.approx(row["makespan_s"])


# The store.


def counted(monkeypatch):
    """Digests of the runs that are carried out, in this process."""
    done = []

    def carry_out(point, progress):
        done.append(point.digest)
        return rows.carry_out(point, progress)

    monkeypatch.setattr("moesim.runs.sweeps.sweep.carry_out", carry_out)
    return done


def test_what_is_there_is_not_run_again(trace, swept, tmp_path, monkeypatch):
    done = counted(monkeypatch)
    options = {"results": tmp_path / "s", "jobs": 1, "details": True}
    moesim.sweep(trace, POLICIES[:2], **AXES, **options)
    assert len(done) == 16
    again = moesim.sweep(trace, POLICIES, **AXES, **options)
    assert len(done) == 24
    pd.testing.assert_frame_equal(again, swept)
    moesim.sweep(trace, POLICIES, **AXES, **options)
    assert len(done) == 24
    assert len(moesim.results(tmp_path / "s")) == 24


def digest_of(trace, **options):
    (point,) = plan.planned(configs_of(trace, options)).points
    return point.digest


# A value of each option other than its default, and options that it needs beside it.
OTHER_VALUES = {
    "policy": {"policy": "on-demand"},
    "cache": {"cache": "lfu:decay=0.5"},
    "prefetch": {"prefetch": "random"},
    "routing": {"routing": "cache-prior"},
    "hw": {"hw": "rtx4060ti"},
    "cache_ratio": {"cache_ratio": 0.5},
    "slots_per_layer": {"slots_per_layer": 3},
    "gpu_memory_bytes": {"gpu_memory_bytes": 1 << 30},
    "context_tokens": {"context_tokens": 100},
    "host_memory_bytes": {"host_memory_bytes": 1 << 30},
    "host_cache": {"host_cache": "lfu"},
    "cache_scope": {"cache_scope": "global"},
    "staging": {"staging": 5},
    "prefetch_budget_bytes": {"prefetch_budget_bytes": 100},
    "gpu_split": {"gpu_split": "experts"},
    "batch": {"batch": 2},
    "steps": {"steps": 3},
    "micro_batch": {"micro_batch": 2},
    "draft_tokens": {"draft_tokens": 2},
    "acceptance": {"acceptance": 0.5},
    "seed": {"seed": 1},
    "warm": {"warm": "tiny-calibration"},
    "artefacts": {"artefacts": "artefacts"},
    "engine": {"engine": "simpy"},
    "arrivals": {"arrivals": "poisson:3"},
    "slo": {"slo": "ttft=1"},
}
# Names of traces, and digests that only refuse other files.
DECIDE_NOTHING = {"trace", "trace_digest", "hw_digest"}


def test_a_digest_changes_with_every_option(trace, tmp_path, monkeypatch):
    """Each changed once gives another digest; a new option needs a line here."""
    monkeypatch.chdir(tmp_path)
    Path("artefacts").mkdir()
    declared = {field.name for field in fields(RunConfig)}
    assert declared == OTHER_VALUES.keys() | DECIDE_NOTHING
    found = {name: digest_of(trace, **change) for name, change in OTHER_VALUES.items()}
    found["nothing"] = digest_of(trace)
    assert len(set(found.values())) == len(found)


def write_inputs(folder, trace):
    """Files of each kind that a run may read, and the options that name them."""
    folder.mkdir()
    paths = {
        "trace": folder / "routing.parquet",
        "warm": folder / "calibration.parquet",
        "arrivals": folder / "arrivals.txt",
        "cache": folder / "mine.py",
        "hw": folder / "hw.toml",
    }
    for name in ("trace", "warm"):
        paths[name].write_bytes(trace.read_bytes())
    paths["arrivals"].write_text("0.5\n1.0\n")
    fifo = (ROOT / "policies" / "cache" / "fifo.py").read_text(encoding="utf-8")
    paths["cache"].write_text(fifo)
    profile = (ROOT / "hwprofiles/data/rtx4060ti.toml").read_text(encoding="utf-8")
    paths["hw"].write_text(profile)
    artefacts = folder / "artefacts"
    artefacts.mkdir()
    np.save(artefacts / "activation_counts.npy", np.ones(3))
    options = {name: str(path) for name, path in paths.items()}
    return options | {"artefacts": str(artefacts)}


@pytest.mark.parametrize(
    "changed", ["trace", "warm", "arrivals", "cache", "hw", "artefacts"]
)
def test_a_digest_changes_with_what_a_file_holds(trace, tmp_path, changed):
    """The same options, the same names: only a content differs."""
    options = write_inputs(tmp_path / "inputs", trace)
    before = digest_of(**options)
    place = Path(options[changed])
    if changed in ("trace", "warm"):
        write_small_trace(place, seed=1)
    elif changed == "artefacts":
        np.save(place / "activation_counts.npy", np.zeros(3))
    elif changed == "hw":
        text = place.read_text(encoding="utf-8")
        place.write_text(text.replace("value = 6\n", "value = 7\n", 1))
    else:
        place.write_text(place.read_text(encoding="utf-8") + "\n2.0\n")
    assert digest_of(**options) != before


def test_a_digest_changes_with_nothing_else(trace, tmp_path, monkeypatch):
    """Other folders, relative paths, files beside the artefacts, and digests that
    refuse other files.
    """
    options = write_inputs(tmp_path / "inputs", trace)
    expected = digest_of(**options)
    assert digest_of(**write_inputs(tmp_path / "elsewhere", trace)) == expected
    monkeypatch.chdir(tmp_path)
    relative = {name: os.path.relpath(path, tmp_path) for name, path in options.items()}
    assert digest_of(**relative) == expected
    (tmp_path / "inputs/artefacts/README.md").write_text("notes")
    assert digest_of(**options) == expected
    assert digest_of(**options, trace_digest=sha256(trace)) == expected


def test_a_digest_changes_with_the_code(trace, monkeypatch):
    before = digest_of(trace)
    monkeypatch.setattr(plan, "code_digest", lambda: "new")
    assert digest_of(trace) != before


LOADED = """
import sys, moesim
for engine in ("simpy", "fast"):
    moesim.replay(sys.argv[1], "greedy", steps=2, engine=engine)
print(*{name.split(".")[1] for name in sys.modules if name.startswith("moesim.")})
"""


def test_the_digest_of_the_code_holds_all_that_a_replay_loads(trace):
    """Machine code had come to stand in a room of its own, and was left out."""
    loaded = output_of("-c", LOADED, trace)
    # What extensions share is Cython's.
    assert set(loaded.split()) - {"_cyutility"} == set(plan.SIMULATING)


def test_an_edited_file_of_arrivals_is_run_again(trace, tmp_path):
    """A store gave the row of the file as it had been."""
    file = tmp_path / "arrivals.txt"
    rows = []
    for gap_s in (0.001, 1.0):
        file.write_text("".join(f"{place * gap_s}\n" for place in range(6)))
        options = {"arrivals": str(file), "results": tmp_path / "store", "jobs": 1}
        rows.append(moesim.sweep(trace, "greedy", **options).iloc[0])
    assert rows[0]["makespan_s"] < 1 < rows[1]["makespan_s"]
    ranked = moesim.ranking(moesim.results(tmp_path / "store", details=True))
    assert ranked.attrs["cells"] == ["files_digest"]


def test_two_sweeps_at_once_do_no_harm(trace, swept, tmp_path):
    """The same folder, the same runs: each row once in the end."""
    store = tmp_path / "s"
    code = (
        "import sys, moesim\n"
        "if __name__ == '__main__':\n"
        "    moesim.sweep(sys.argv[1], ['all-cpu', 'on-demand', 'greedy'],"
        " slots_per_layer=[1, 3], batch=[1, 2], hw=['rtx4060ti', 'rtx3080ti'],"
        " jobs=1, results=sys.argv[2])"
    )
    processes = [start("-c", code, trace, store) for _ in range(2)]
    assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0]
    found = moesim.sweep(trace, POLICIES, results=store, details=True, **AXES)
    pd.testing.assert_frame_equal(found, swept)
    assert rows.read_results(store).num_rows == 24
    assert {file.suffix for file in store.iterdir()} == {".parquet"}


@pytest.mark.parametrize(("columns", "found"), [
    ({"a": [1]}, 'Field "digest" does not exist'),
    ({"a": pa.array([b"x"]).dictionary_encode()}, 'Field "digest" does not exist'),
    ({"digest": ["x"], "trace_digest": ["x"]}, 'Field "hw_digest" does not exist'),
    ({"digest": [1], "trace_digest": ["x"], "hw_digest": ["x"]}, "digest has incompatible types: string vs int64"),
    ({"digest": ["x"], "trace_digest": ["x"], "hw_digest": ["x"], "tpot_s": ["y"]},
     "tpot_s has incompatible types: double vs string"),
])  # fmt: skip
def test_tables_of_others_are_no_results(tmp_path, columns, found):
    """They were rows of nothing, or ended in a traceback."""
    pq.write_table(pa.table(columns), tmp_path / "foreign.parquet")
    with pytest.raises(rows.ResultsError, match=f"foreign.parquet: .*{found}"):
        rows.read_results(tmp_path)
    with pytest.raises(rows.ResultsError, match="expected a folder of results"):
        rows.read_results(tmp_path / "nothing")


class Failing(find("lru", "cache")):
    """A mistake that shows in the middle of a run."""

    def accessed(self, work):
        raise KeyError("mine")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_policy_that_fails_costs_its_own_runs(trace, monkeypatch, jobs):
    """Without a store it lost all others of the sweep."""
    monkeypatch.setattr(registry, "_registered", {})
    moesim.register("cache", "failing", Failing)
    options = {"slots_per_layer": 2, "steps": [2, 3], "jobs": jobs}
    with pytest.warns(
        UserWarning, match="left out .* cache policy '[Ff]ailing' failed"
    ):
        found = moesim.sweep(trace, "on-demand", cache=["lru", "failing"], **options)
    assert found["cache"].tolist() == ["lru", "lru"]
    with pytest.raises(
        PolicyFault, match=r"failed, in .*test_sweep\.py, line"
    ) as raised:
        moesim.sweep(trace, "on-demand", cache="failing", **options)
    assert "KeyError: 'mine'" in raised.value.frames


def test_files_stay_few_and_complete(trace, tmp_path):
    """One write for runs that end within a second."""
    store = tmp_path / "s"
    moesim.sweep(trace, "greedy", seed=range(8), steps=1, results=store, jobs=1)
    assert sum(pq.read_metadata(file).num_rows for file in store.iterdir()) == 8
    assert len(list(store.iterdir())) < 8


# Processes.


def test_several_processes_find_what_one_finds(trace, swept):
    shares = []
    found = moesim.sweep(
        trace, POLICIES, jobs=2, details=True, progress=shares.append, **AXES
    )
    pd.testing.assert_frame_equal(found, swept)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_processes_know_what_a_notebook_registered(trace, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})

    class Backwards(find("fifo", "cache")):
        """As a cell of a notebook defines it: no module that could be imported."""

    Backwards.__module__ = "__main__"
    moesim.register("cache", "backwards", Backwards)
    options = {"policies": "on-demand", "cache": ["backwards", "fifo"], "steps": 4}
    alone, together = (moesim.sweep(trace, jobs=jobs, **options) for jobs in (1, 2))
    # No two plans take a policy that no file tells for the same one.
    same = ["digest", "files_digest"]
    pd.testing.assert_frame_equal(together.drop(columns=same), alone.drop(columns=same))


def pids(task, _progress):
    if task == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_a_task_that_kills_every_process_is_given_up(monkeypatch):
    monkeypatch.setattr(execution, "MOST_RESTARTS", 0)
    results = []
    with pytest.raises(ChildProcessError, match="killed again and again"):
        run_tasks(
            pids, ["kill", "kill"], lambda *result: results.append(result), jobs=2
        )
    assert results == []


def once(task, _progress):
    """Kills its process the first time, as a machine short of memory does."""
    if task.exists():
        return task.name
    task.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_killed_process_costs_its_tasks_only(tmp_path):
    tasks = [tmp_path / str(number) for number in range(4)]
    for task in tasks[1:]:
        task.touch()
    results = {}
    run_tasks(once, tasks, results.__setitem__, jobs=2)
    assert results == {number: str(number) for number in range(4)}


def test_times_of_batches_by_hand():
    """A pause belongs to the step after it, but not one between batches; the second
    batch has no prompt, and one step verifies a draft.
    """
    columns = {"batch": [0, 0, 0, 1], "phase": [0, 1, 1, 1], "tokens": [4, 2, 4, 2],
               "sequences": [2, 2, 2, 2], "start_s": [0.0, 3.0, 4.0, 9.0],
               "end_s": [2.0, 4.0, 6.0, 10.0]}  # fmt: skip
    chunk = {name: np.array(each) for name, each in columns.items()}
    found = rows.times_of_batches([chunk])
    assert found["batch_decode_s"] == [4.0, 1.0]
    assert found["batch_decode_tokens"] == [3, 1]
    assert found["batch_makespan_s"] == [6.0, 1.0]
