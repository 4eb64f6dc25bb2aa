"""What holds for every command: tables fit a narrow terminal, and nothing is imported
that a command does not use.
"""

import re
import shlex

import pytest
from support.processes import output_of

from moesim.base.host import Finding
from moesim.evidence.doctor import Checked, Diagnosis

COLUMNS = 80
# Two gaps between words: cells of a table, not a sentence.
TABLE_LINE = re.compile(r"\S {2,}\S")


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


TABLES = [
    "list",
    "list assignment",
    "list cache",
    "list prefetch",
    "list routing",
    "list systems",
    "list machines",
    "list models",
    "replay TRACE --policy greedy+workload-window --steps 3",
    "compare TRACE --policy all-cpu,greedy,greedy+workload-window --steps 3 --jobs 1",
    (
        "compare TRACE --policy all-cpu,greedy --steps 3 --jobs 1 --cache-ratio 0.25,0.5"
        " --hw rtx4060ti,a6000-xeon5220r-10c"
    ),
    "sweep TRACE --policy all-cpu,greedy --steps 3 --jobs 1 --seed 0,1,2",
    "hits TRACE --cache-ratio 0.1,0.15,0.2,0.25,0.3,0.35,0.4,0.45,0.5,0.6,0.7,0.8,0.9",
    "gap TRACE --policy on-demand --steps 2",
    "trace stats TRACE",
    "model qwen3-30b-a3b",
    "sensitivity TRACE --policy greedy,on-demand --steps 3",
    (
        "advise qwen3-30b-a3b --cpu 'Ryzen 7 5700X' --ram '2x16GB DDR4-3600'"
        " --gpu 'RTX 4060 Ti 16GB'"
    ),
]


@pytest.mark.parametrize("words", TABLES)
def test_tables_fit_eighty_columns(command, trace, words):
    code, out, err = command(*shlex.split(words.replace("TRACE", str(trace))))
    assert code == 0, err
    rows = [line for line in out.splitlines() if TABLE_LINE.search(line)]
    assert rows
    assert [line for line in rows if len(line) > COLUMNS] == []


def test_findings_of_the_doctor_wrap_in_their_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    finding = Finding("limited", "a core of a processor " * 9, way_out="close it " * 20)
    first, *others, _verdict = Diagnosis({}, [Checked("cores", finding, 0.1)]).lines()
    assert first.startswith("cores  limited  a core of a processor")
    assert len(others) > 3
    assert all(line.startswith(" " * len("cores  limited  ")) for line in others)
    assert max(map(len, [first, *others])) <= COLUMNS


HEAVY = {
    "torch", "transformers", "vl_convert", "jinja2", "duckdb", "pulp", "highspy",
    "joblib", "distributed", "optuna", "psutil", "matplotlib", "altair",
}  # fmt: skip
"""What takes long to import, or belongs to an extra, or to some commands only."""

USES = {
    # command -> what else it does without
    "list cache": {"pandas", "pyarrow", "simpy"},
    "replay TRACE --policy greedy --steps 3": {"pandas"},
    "compare TRACE --policy greedy,on-demand --steps 3 --jobs 1": set(),
    "trace check TRACE": {"pandas", "simpy", "rich"},
    "model qwen3-30b-a3b": {"pandas", "simpy", "pyarrow"},
    "trace synth s.parquet --shape layers=2,experts=4,top_k=1,expert_bytes=1KiB"
    " --tokens 20": {"pandas", "simpy"},
}
CODE = """
import sys
from moesim import cli
try:
    cli.main(sys.argv[1:])
finally:
    print("IMPORTED", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("words", USES)
def test_nothing_is_imported_that_a_command_does_not_use(trace, tmp_path, words):
    arguments = shlex.split(words.replace("TRACE", str(trace)))
    out = output_of("-c", CODE, *arguments, cwd=tmp_path)
    imported = set(out.splitlines()[-1].split()[1:])
    assert "moesim" in imported
    assert imported & (HEAVY | USES[words]) == set()
