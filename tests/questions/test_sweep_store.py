"""A store gives a policy its own results only, and loses no more than what a disk lost."""

import os
import resource
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.processes import output_of, run_python
from support.small_trace import write_small_trace

import moesim
from moesim.policies import registry
from moesim.runs.sweeps import rows
from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.sweep import configs_of, run_sweep


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_small_trace(
        tmp_path_factory.mktemp("trace") / "small.parquet", sequences=2, new_tokens=4
    )


@pytest.fixture(autouse=True)
def _own_policies(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


# Policies.

POLICY = """
from moesim.policies.registry import find
class Mine(find("fifo", "cache")):
    def order(self, keys):
        from helper import choose
        return choose(keys)
"""
SWEEPS = """
import pathlib, sys
folder = pathlib.Path(sys.argv[2])
sys.path.insert(0, sys.argv[2])
from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.sweep import configs_of, run_sweep
options = {"policy": "on-demand", "cache": f"{folder}/mine.py", "steps": 2}
def stored(jobs, change=lambda: None):
    plan = planned(configs_of(sys.argv[1], options | {"seed": [0, 1]}))
    change()
    return run_sweep(plan, results=folder / "store", jobs=jobs).stored
"""


def write_helper(folder, choice):
    """A helper that is older than any process of the test."""
    file = folder / "helper.py"
    file.write_text(f"def choose(keys):\n    return {choice}\n")
    os.utime(file, (0, 0))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(POLICY)
    write_helper(tmp_path, "keys[0]")
    return tmp_path


def test_a_store_sees_an_edited_helper_of_a_policy_file(trace, folder):
    """The helper decided, and only the file that imports it was digested."""
    code = SWEEPS + "print(stored(1), stored(2))"
    for choice in ("keys[0]", "keys[-1]"):
        write_helper(folder, choice)
        assert output_of("-c", code, trace, folder) == "0 2\n"


EDIT = """
def edit(name):
    file = folder / name
    file.write_text(file.read_text() + "# edited\\n")
"""


def test_a_helper_that_was_edited_since_its_import_is_found_by_nobody(trace, folder):
    """What runs is no longer what the file holds."""
    code = (
        SWEEPS + EDIT + "import helper\nedit('helper.py')\nprint(stored(1), stored(1))"
    )
    assert output_of("-c", code, trace, folder) == "0 0\n"


def test_workers_refuse_other_code_than_the_sweep_was_planned_with(trace, folder):
    code = SWEEPS + EDIT + "stored(2, lambda: edit('mine.py'))"
    ended = run_python("-c", code, trace, folder)
    assert "found something else in a worker; start again" in ended.stderr


def test_what_files_do_not_tell_is_never_taken_from_a_store(trace, tmp_path):
    """A cell of a notebook may have changed since."""
    policy = type("Mine", (registry.find("fifo", "cache"),), {})
    moesim.register("cache", "mine", policy)
    options = {"policy": "on-demand", "cache": "mine", "steps": 1}
    for _ in range(2):
        plan = planned(configs_of(trace, options))
        assert run_sweep(plan, results=tmp_path / "store", jobs=1).stored == 0


# Disks.


def rows_of(count, placement_bytes=400):
    """Rows whose files are of several sizes."""
    draw = np.random.default_rng(count)
    return [
        {"digest": f"{place}", "trace_digest": "t", "hw_digest": "h",
         "lanes": "{}", "warnings": "[]", "placement": draw.bytes(placement_bytes)}
        for place in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("interrupt", [None, KeyboardInterrupt])
def test_no_size_of_a_full_disk_leaves_half_a_file(tmp_path, interrupt):
    """A failed close was swallowed while another exception was on its way, and what
    had been written got its final name.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = 0
    for size in range(4 << 10, 256 << 10, 6 << 10):
        store = rows.ResultStore(tmp_path / f"{size}")
        store._waiting = rows_of(200)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            if interrupt is None:
                store.flush()
            else:
                try:
                    raise interrupt
                finally:
                    store.flush()
        except (OSError, KeyboardInterrupt):
            pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        files = list(store.folder.iterdir())
        if files:
            written += 1
            assert rows.read_results(store.folder).num_rows == 200
    assert 0 < written < 42


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "a flipped bit": lambda path: path.write_bytes(
        bytes([byte ^ (place == 400) for place, byte in enumerate(path.read_bytes())])
    ),
    "empty": lambda path: path.write_bytes(b""),
    "a digest of null": lambda path: rewrite(path, "digest", None),
    "a trace's digest of null": lambda path: rewrite(path, "trace_digest", None),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def rewrite(path, name, value):
    table = pq.read_table(path)
    place = table.schema.get_field_index(name)
    column = pa.array([value] * table.num_rows, pa.string())
    table = table.set_column(place, name, column)
    pq.write_table(table.replace_schema_metadata(None), path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_costs_that_file(trace, tmp_path, damage, command):
    """It made the whole store useless; some damages ended in a traceback."""
    options = {"steps": 1, "results": tmp_path / "s", "jobs": 1, "details": True}
    expected = moesim.sweep(trace, ["greedy", "all-cpu"], steps=1, jobs=1)
    for policy in ("greedy", "all-cpu"):
        moesim.sweep(trace, policy, **options)
    file = min((tmp_path / "s").iterdir())
    DAMAGES[damage](file)
    with pytest.warns(UserWarning, match=file.name):
        found = moesim.results(tmp_path / "s")
    assert len(found) == 1
    code, out, err = command("results", tmp_path / "s")
    assert code == 0
    assert len(out.splitlines()) > 1
    assert err.startswith("note: ")
    assert file.name in err
    assert err.count("\n") == 1
    with pytest.warns(UserWarning, match=file.name):
        again = moesim.sweep(trace, ["greedy", "all-cpu"], **options)
    assert again["makespan_s"].tolist() == expected["makespan_s"].tolist()


def test_a_store_of_damaged_files_only_is_refused(trace, tmp_path):
    moesim.sweep(trace, "greedy", steps=1, results=tmp_path / "s", jobs=1)
    (file,) = (tmp_path / "s").iterdir()
    DAMAGES["cut"](file)
    with warnings.catch_warnings(), pytest.raises(rows.ResultsError, match=file.name):
        moesim.results(tmp_path / "s")
