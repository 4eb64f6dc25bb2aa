"""A store gives a policy its own results only, and loses no more than what a disk lost."""

import resource
import warnings

import nbclient
import nbformat
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.processes import output_of, run_python
from support.small_trace import write_small_trace

import moesim
from moesim.policies import registry
from moesim.runs.config import RunConfig
from moesim.runs.sweeps import rows
from moesim.runs.sweeps.plan import planned, policies_of
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

CELLS = {
    "start": """
import importlib, pathlib, sys, warnings
import moesim
from moesim.policies.registry import find
sys.path.insert(0, ".")
helper = pathlib.Path("helper.py")
helper.write_text("def place(key):\\n    return key\\n")
import helper as helpers

def stored(**options):
    plan = planned(configs_of("TRACE", {"policy": "on-demand", "cache": "mine",
        "slots_per_layer": 2, "steps": 2, **options}))
    row = run_sweep(plan, results="store", jobs=1)
    return row.stored

from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.sweep import configs_of, run_sweep
""",
    "policy": """
class Mine(find("fifo", "cache")):
    def order(self, keys):
        return sorted(keys, key=lambda key: rule(helpers.place(key)))

def rule(key):
    return key

moesim.register("cache", "mine", Mine)
""",
    "the same policy once more, a helper of a cell": "def rule(key):\n    return -hash(key)",
    "a helper module, edited and reloaded": """
helper.write_text("def place(key):\\n    return tuple(reversed(key))\\n")
importlib.reload(helpers)
""",
    "a constant in a module": "helpers.place.__defaults__ = (3,)",
    "a class that exec makes": """
exec('''
class Mine(find("fifo", "cache")):
    def order(self, keys):
        return max(keys)
''')
moesim.register("cache", "mine", Mine)
""",
}


def test_a_store_sees_what_a_notebook_redefines(trace, tmp_path):
    """The class of fault: a changed policy got the results of what it was."""
    cells = [nbformat.v4.new_code_cell(CELLS["start"].replace("TRACE", str(trace)))]
    changes = list(CELLS.values())[1:]
    for change in changes:
        cells.append(nbformat.v4.new_code_cell(change))
        cells.append(nbformat.v4.new_code_cell("print(stored(), stored())"))
    # What is back as it was is found again.
    cells.append(nbformat.v4.new_code_cell(CELLS["policy"]))
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = ["".join(out["text"] for out in cell["outputs"]) for cell in cells[2::2]]
    assert printed == ["0 1\n"] * len(changes)


EDITED = """
import sys
sys.path.insert(0, sys.argv[2])
from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.sweep import configs_of, run_sweep
options = {"policy": "on-demand", "cache": sys.argv[2] + "/mine.py", "steps": 2}
for jobs in (1, 2):
    plan = planned(configs_of(sys.argv[1], options | {"seed": [0, 1]}))
    print(run_sweep(plan, results=sys.argv[2] + "/store", jobs=jobs).stored)
"""


def test_a_store_sees_an_edited_helper_of_a_policy_file(trace, tmp_path):
    """The helper decided, and only the file that imports it was digested."""
    (tmp_path / "mine.py").write_text(
        "from moesim.policies.registry import find\n"
        "class Mine(find('fifo', 'cache')):\n"
        "    def order(self, keys):\n"
        "        from helper import choose\n"
        "        return choose(keys)\n"
    )
    for text in ("return keys[0]", "return keys[-1]"):
        (tmp_path / "helper.py").write_text(f"def choose(keys):\n    {text}\n")
        assert output_of("-c", EDITED, trace, tmp_path) == "0\n2\n"


def test_processes_find_the_code_that_a_sweep_was_planned_with(trace, tmp_path):
    """A worker imports a module anew: it may have been edited since."""
    (tmp_path / "helper.py").write_text(
        "import moesim\n"
        "class Mine(moesim.policies.registry.find('fifo', 'cache')):\n    TAG = 1\n"
    )
    code = EDITED.replace(
        "options =",
        "import helper, pathlib, moesim\n"
        "moesim.register('cache', 'mine', helper.Mine)\n"
        "file = pathlib.Path(helper.__file__)\n"
        "file.write_text(file.read_text().replace('1', '2'))\n"
        "options =",
    ).replace('sys.argv[2] + "/mine.py"', '"mine"')
    ended = run_python("-c", code, trace, tmp_path)
    assert ended.stdout == "0\n2\n"
    code = code.replace("(1, 2)", "(2,)").replace("'1', '2'", "'2', '3'")
    ended = run_python("-c", code, trace, tmp_path)
    assert "found other code in a worker; reload" in ended.stderr


def test_what_cannot_be_digested_is_never_taken_from_a_store(trace, tmp_path):
    class Reads(registry.find("fifo", "cache")):
        """Decides by a file that nobody knows of."""

        def start(self, context):
            super().start(context)
            self.order = open(__file__).read()  # noqa: PTH123, SIM115

    moesim.register("cache", "reads", Reads)
    options = {"policy": "on-demand", "cache": "reads", "steps": 1}
    for _ in range(2):
        plan = planned(configs_of(trace, options))
        assert run_sweep(plan, results=tmp_path / "store", jobs=1).stored == 0


def test_what_a_run_leaves_in_a_policy_is_no_other_policy(trace, tmp_path):
    """Digests of what decides nothing: addresses, order of sets, caches of kernels."""
    for kind in ("assignment", "cache", "prefetch", "routing"):
        for name, cls in list(registry.classes(kind).items()):
            alias = type(
                cls.__name__, (cls,), {"MARKS": {"a", "b", "c"}, "at": np.ones(2)}
            )
            moesim.register(kind, f"my-{name}", alias)
    config = RunConfig(policy="my-greedy", cache="my-lru", prefetch="my-random")
    before = policies_of(config)
    assert None not in before.values()
    moesim.replay(trace, config.policy, cache=config.cache, prefetch=config.prefetch)
    assert policies_of(config) == before


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
    "broken JSON": lambda path: rewrite(path, "lanes", "{"),
    "JSON of another kind": lambda path: rewrite(path, "warnings", "3"),
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
