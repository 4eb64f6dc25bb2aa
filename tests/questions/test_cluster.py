"""Sweeps on a Dask cluster: the same bytes as in one process, whoever is killed."""

import os
import re
import shlex
import socket
import subprocess
import sys

import psutil
import pytest
from support.doc_examples import examples
from support.processes import (
    PATIENCE_S,
    ROOT,
    run_python,
    start,
)
from support.small_trace import write_small_trace

import moesim
from moesim.base.errors import TraceError
from moesim.base.files import sha256
from moesim.base.options import ConfigError
from moesim.runs.sweeps import execution

Client = pytest.importorskip(
    "distributed", reason="Dask is not installed: moesim[cluster]"
).Client

PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
"""Workers find what tests find."""
AXES = {"policies": ["greedy", "on-demand"], "slots_per_layer": [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_small_trace(
        tmp_path_factory.mktemp("trace") / "small.parquet", sequences=8, new_tokens=60
    )


@pytest.fixture(scope="module")
def alone(trace):
    return moesim.sweep(trace, jobs=1, details=True, **AXES)


def commands():
    """The lines that the page tells readers to type."""
    page = (ROOT / "docs" / "how-to" / "sweeps.md").read_text(encoding="utf-8")
    lines = [line for each in examples(page) for line in each.text.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("dask ")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A scheduler and two workers on this machine, started as the page says."""
    folder = tmp_path_factory.mktemp("cluster")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    environment = PATHS | {"DASK_DISTRIBUTED__WORKER__DAEMON": "true"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = []
    for command in commands():
        words = [re.sub(r"^tcp://.*", address, word) for word in command]
        words = [str(port) if word == "8786" else word for word in words]
        process = start("-m", *words, cwd=folder, environment=environment, **quiet)
        processes.append(process)
    assert len(processes) == 2
    yield address
    for process in processes:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def workers_of(address):
    with Client(address) as client:
        client.wait_for_workers(2, timeout=PATIENCE_S)
        return list(client.run(os.getpid).values())


def as_bytes(frame, path):
    frame.to_parquet(path)
    return path.read_bytes()


def test_two_workers_give_the_bytes_of_one_process(trace, alone, cluster, tmp_path):
    assert len(workers_of(cluster)) == 2
    found = moesim.sweep(trace, cluster=cluster, details=True, **AXES)
    assert as_bytes(found, tmp_path / "a") == as_bytes(alone, tmp_path / "b")


def test_a_killed_worker_costs_nothing_but_its_runs(trace, alone, cluster, tmp_path):
    """Killed after the first result; all others arrive nevertheless."""
    pids = workers_of(cluster)

    def kill(_share):
        if pids:
            psutil.Process(pids.pop(0)).kill()
            pids.clear()

    store = tmp_path / "s"
    found = moesim.sweep(
        trace, cluster=cluster, details=True, results=store, progress=kill, **AXES
    )
    assert pids == []
    assert as_bytes(found, tmp_path / "a") == as_bytes(alone, tmp_path / "b")


def test_a_machine_without_the_trace_says_so(trace):
    """On another machine its path leads nowhere, or to another file."""
    for place, digest in (("/nowhere.parquet", sha256(trace)), (trace, "0" * 64)):
        with pytest.raises(TraceError, match="put it there, under the same path"):
            execution.open_shared(str(place), digest)


@pytest.mark.parametrize("address", ["192.168.0.5", "local:2"])
def test_what_is_no_cluster_is_said(trace, address):
    with pytest.raises(ConfigError, match=r"expected the address.*--jobs"):
        moesim.sweep(trace, cluster=address)


def test_nobody_answers(trace, monkeypatch):
    monkeypatch.setattr("moesim.runs.sweeps.execution.WAIT_FOR_SCHEDULER_S", 1)
    with pytest.raises(ConfigError, match="no Dask scheduler answers"):
        moesim.sweep(trace, cluster="tcp://127.0.0.1:1")


def test_without_dask_the_extra_is_named(trace, tmp_path):
    code = (
        "import sys; sys.modules['distributed'] = None\n"
        "from moesim import cli; cli.main(sys.argv[1:])"
    )
    words = ("sweep", trace, "--cluster", "tcp://127.0.0.1:1")
    done = run_python("-c", code, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'moesim[cluster]'" in done.stderr
