"""A real run, replayed with its own measured times, differs in structure alone: and
nothing of its structure differs.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support import real_machine
from support.real_machine import (
    COLUMNS,
    ONE_WORKER,
    READS_TOO,
    TWO_WORKERS,
    combinations,
    host_profile,
    real_run,
)
from support.small_trace import write_trace
from typer.testing import CliRunner

from benchmarks.structure import MeasuredDurations, compare_structure, of_folders
from moesim import cli
from moesim.base.errors import TraceError
from moesim.engine.operations import Machine, Operation, machine_of
from moesim.hwprofiles.profile import save_profile
from moesim.policies.systems import SYSTEMS
from moesim.runs.config import RunConfig
from moesim.runs.measured import columns_of
from moesim.runs.setup import Setup
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace
from moesim.traces.timeline.operations import LAUNCH, REQUEST, OperationTable, Part
from moesim.traces.timeline.spans import COMPUTE, DENSE

EXPERT = 3 * 64 * 32 * 4
WIDTHS = {"hidden": 64, "expert_intermediate": 32, "expert_bytes": (EXPERT,) * 4}
SHAPE = replace(real_machine.SHAPE, layers=4, **WIDTHS)
STAGED = 20 * EXPERT
"""Host memory for some experts, whatever a system stages."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    place = tmp_path_factory.mktemp("trace") / "t.parquet"
    sequences = ((5, 6), (3, 4), (7, 6), (4, 5))
    return open_trace(
        write_trace(place, SHAPE, sequences, columns=COLUMNS, ragged=True)
    )


def both(trace, store, artefacts, name, *, workers=TWO_WORKERS, batch=1, **memory):
    """Run for real; return the setup, its steps and the measured timeline."""
    policy, *parts = name.split("+")
    options = dict(zip(("cache", "prefetch"), parts, strict=False))
    options |= {"batch": batch, "artefacts": artefacts}
    options |= memory
    profile = host_profile(workers, cores=1 if workers is ONE_WORKER else 2)
    run = real_run(trace, policy, store, profile, **options)
    config = RunConfig.of(trace, policy, **options)
    setup = Setup.of(config, trace, profile=profile, shape=run.shape)
    columns = columns_of(trace, setup.policies())
    return setup, list(compose(trace, batch=batch, columns=columns)), run.timeline


# By hand.


def part(kind, picked_s, ended_s, *, lane=0, step=0, layer=0, expert=-1):
    return Part(lane, kind, step, layer, expert, picked_s, picked_s, ended_s, ended_s)


def table_of(*parts):
    table = OperationTable()
    for each in parts:
        table.add(each)
    return table


def lasting(durations, kind, *, lane=0, layer=0, expert=-1):
    operation = Operation()
    operation.lane, operation.kind = lane, kind
    operation.layer, operation.expert = layer, expert
    operation.work_s = 99.0
    durations.scatter(operation)
    return operation.work_s


def test_an_operation_lasts_from_instant_to_instant():
    """The first dense part begins with the run, an expert that comes twice in its
    order; what was never there lasts as predicted, and is counted.
    """
    table = table_of(
        part(DENSE, 1.0, 4.0, lane=2),
        part(COMPUTE, 7.0, 9.5, expert=3),
        part(COMPUTE, 5.0, 6.0, expert=3),
        part(LAUNCH, 4.0, 4.25),
        part(DENSE, 10.0, 11.0, lane=2, step=1),
    )
    durations = MeasuredDurations(table)
    assert lasting(durations, DENSE, lane=2) == 4.0
    assert lasting(durations, COMPUTE, expert=3) == 1.0
    assert lasting(durations, COMPUTE, expert=3) == 2.5
    assert lasting(durations, COMPUTE, expert=3) == 99.0
    assert durations.unmatched == Counter(compute=1)
    assert not durations.left()


def test_what_was_not_simulated_is_counted_but_in_the_last_pass():
    early, late = (part(COMPUTE, 5.0, 6.0, expert=1, step=step) for step in (0, 1))
    durations = MeasuredDurations(table_of(early, late, part(REQUEST, 1.0, 2.0)))
    assert durations.left() == Counter(compute=1)


# Real runs.


def drawn_cells(count, seed=11):
    """Systems and combinations of policies, each with other memories and batches."""
    names = [*SYSTEMS, *combinations(oracles=True, approximate=True)]
    draws = np.random.default_rng(seed)
    chosen = draws.choice(names, size=count, replace=False).tolist()
    for number, name in enumerate(chosen):
        host = STAGED if number % 2 else None
        yield name, 1 + 3 * (number // 2 % 2), int(draws.integers(0, 6)), host


@pytest.mark.parametrize(("name", "batch", "slots", "host"), list(drawn_cells(20)))
def test_no_structure_differs(trace, store, artefacts, name, batch, slots, host):
    memory = {"slots_per_layer": slots, "host_memory_bytes": host}
    cell = both(trace, store, artefacts, name, batch=batch, **memory)
    structure = compare_structure(name, *cell)
    assert not structure.findings()
    assert structure.worst <= 0.02
    assert structure.median <= 0.005
    assert structure.accesses > 100


@pytest.mark.parametrize("workers", [ONE_WORKER, READS_TOO], ids=["one", "reads"])
@pytest.mark.parametrize("name", ["dali", "daop"])
def test_nor_with_other_workers(trace, store, artefacts, name, workers):
    memory = {"slots_per_layer": 3, "host_memory_bytes": STAGED}
    cell = both(trace, store, artefacts, name, workers=workers, **memory)
    structure = compare_structure(name, *cell)
    assert not structure.findings()
    assert structure.worst <= 0.02


def test_another_policy_is_found(trace, store, artefacts):
    """States, lanes and orders differ from those of a run under another policy."""
    memory = {"slots_per_layer": 3}
    _, _, timeline = both(trace, store, artefacts, "greedy+lru+none", **memory)
    name = "on-demand+lfu+next-gate"
    other, steps, _ = both(trace, store, artefacts, name, **memory)
    structure = compare_structure("mixed", other, steps, timeline)
    assert not structure.is_equal
    assert structure.other_states
    assert structure.other_lanes
    assert "gpu0" in structure.orders
    assert structure.simulated_only["prefetch"]
    assert "accesses" in structure.findings()[0]


def test_a_worker_that_chooses_too_early_is_found(trace, store, artefacts, monkeypatch):
    """The simulator once let a worker take a prefetch before the product that its own
    copy had made ready was queued.
    """
    memory = {"slots_per_layer": 0, "host_memory_bytes": STAGED}
    cell = both(trace, store, artefacts, "smoe", workers=ONE_WORKER, batch=4, **memory)
    assert compare_structure("smoe", *cell).is_equal

    class Hasty(Machine):
        """Lets a worker choose before the consequences of what ended have queued."""

        def ended(self, operation):
            worker = self.lanes[operation.lane].worker
            worker.busy = operation.kind == DENSE
            if not worker.busy:
                self.offer()
                # What it took so early it keeps.
                worker.kept = worker.busy
            super().ended(operation)

    def hasty(names, served):
        made = machine_of(names, served)
        return Hasty(made.lanes, made.workers)

    # The compiled replay finds its machine's maker as a name of its module.
    monkeypatch.setattr("moesim.sim.replay.machine_of", hasty)
    assert not compare_structure("smoe", *cell).is_equal


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trace, store):
    place = tmp_path_factory.mktemp("run")
    profile = save_profile(host_profile(), place / "machine.toml")
    arguments = [trace.path, "--hw", profile, "--out", place / "run"]
    arguments += ["--policy", "dali", "--cache-ratio", 0.3, "--dtype", "float32"]
    result = CliRunner().invoke(cli.app, ["run", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    profile.unlink()
    return place / "run"


def test_a_folder_of_a_real_run_tells_its_structure(folder, capsys):
    """Its profile lies beside it: that of the machine may have changed since."""
    assert of_folders([folder]) == 0
    text = capsys.readouterr().out
    assert "1 of 1 runs have the simulator's structure" in text
    assert "workers' time: " in text


def test_folders_that_are_no_real_runs_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"operations\.parquet: no such file"):
        of_folders([tmp_path])
    (tmp_path / "operations.parquet").write_bytes(b"not a table")
    with pytest.raises(TraceError, match=r"not a readable table of operations"):
        OperationTable.load(tmp_path)
