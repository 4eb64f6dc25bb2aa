"""Drawn runs, simulated and real, pass an audit that knows nothing of the engine; the
same seed gives the same bytes in any process.
"""

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.real_machine import host_profile
from support.small_trace import write_small_trace

import moesim
from moesim.cli.errors import message_for_users
from moesim.hwprofiles.profile import list_profiles
from moesim.policies.registry import names
from moesim.policies.systems import SYSTEMS
from moesim.runs.measured import run_trace
from moesim.traces.format.reader import open_trace
from torture import attacks
from torture.audit import Record, audit

ROOT = Path(__file__).parents[2]
COLUMNS = ("weights", "scores", "pred1_raw")
BLOCK_BYTES = 4096
SEEDS = st.integers(0, 1 << 32)


def drawn(dice):
    """The options of one replay."""
    options = {
        "hw": dice.choice(list_profiles()),
        "steps": dice.randint(1, 12),
        "batch": dice.choice((1, 1, 2, 3)),
        "seed": dice.randrange(1000),
        "cache_ratio": dice.choice((0.0, 0.1, 0.25, 0.5, 0.9, 1.0)),
        "policy": dice.choice(sorted(SYSTEMS)),
    }
    if dice.random() < 0.5:
        for part in ("assignment", "cache", "prefetch"):
            options["policy" if part == "assignment" else part] = dice.choice(
                names(part)
            )
    often = {
        "cache_scope": ("layer", "global"),
        "host_memory_bytes": (1 << 18, 1 << 20, 1 << 22),
        "prefetch_budget_bytes": (0, 1 << 16, 1 << 20),
    }
    chosen = [name for name in often if dice.random() < 0.25]
    return options | {name: dice.choice(often[name]) for name in chosen}


def replayed(options, folder):
    """A digest of a replay's bytes, or of the line that refuses it."""
    try:
        run = moesim.replay(**options, out=folder)
    except Exception as error:
        message = message_for_users(error)
        if message is None or "\n" in message:
            raise
        return message
    trace = open_trace(options["trace"])
    assert audit(Record(folder, trace, run.config, run.metrics["makespan_s"])) == []
    digest = hashlib.sha256()
    for name in ("timeline", "accesses", "steps"):
        digest.update((folder / f"{name}.parquet").read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return [
        str(
            write_small_trace(
                folder / f"t{seed}.parquet", sequences=4, seed=seed, columns=COLUMNS
            )
        )
        for seed in range(2)
    ]


@attacks
@given(seed=SEEDS)
def test_a_drawn_replay_passes_the_audit_and_is_repeated(
    traces, tmp_path_factory, seed
):
    dice = random.Random(seed)
    options = drawn(dice) | {"trace": dice.choice(traces)}
    first, second = (tmp_path_factory.mktemp("out") for _ in "ab")
    assert replayed(options, first) == replayed(options, second)


WORKER = """
import json, sys, tempfile
from pathlib import Path
from torture.test_audited_runs import replayed
for options in json.load(sys.stdin):
    with tempfile.TemporaryDirectory() as folder:
        print(replayed(options, Path(folder)))
"""


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed(traces):
    dice = random.Random(7)
    asked = json.dumps([drawn(dice) | {"trace": traces[0]} for _ in range(3)])
    answers = [
        subprocess.run(
            [sys.executable, "-c", WORKER],
            input=asked,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ
            | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}/tests:{ROOT}"},
        ).stdout
        for seed in ("1", "271828")
    ]
    assert answers[0] == answers[1]
    assert answers[0].count("\n") == 3


@pytest.mark.parametrize("policy", ["greedy", "on-demand", "beam"])
def test_a_real_run_passes_the_same_audit(traces, tmp_path, policy):
    dice = random.Random(policy)
    options = {
        "cache": dice.choice(("lru", "lfu", "arc", "fifo")),
        "slots_per_layer": dice.randint(1, 8),
        "steps": dice.randint(1, 20),
        "batch": dice.choice((1, 2)),
        "seed": dice.randrange(100),
    }
    hw = dataclasses.replace(host_profile(), kind="measured")
    store = str(tmp_path / "store")
    run = run_trace(
        traces[0], policy, hw=hw, out=tmp_path / "run", store=store, **options
    )
    trace = open_trace(traces[0])
    record = Record(tmp_path / "run", trace, run.config, run.metrics["makespan_s"])
    # Real experts are what the machine computes with, in full blocks of the store.
    weights = 3 * trace.shape.hidden * trace.shape.expert_intermediate
    size = -(-weights * 4 // BLOCK_BYTES) * BLOCK_BYTES
    record.sizes = [size] * trace.shape.layers
    assert audit(record) == []


# -- the audit sees what it should -----------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trace = write_small_trace(folder / "t.parquet", sequences=3)
    options = {"policy": "on-demand", "steps": 20, "cache_ratio": 0.25, "batch": 2}
    replayed = moesim.replay(str(trace), **options, out=folder)
    return folder, open_trace(trace), replayed


def overlap(record):
    place = record.spans.index[record.spans.lane == "gpu0"][3]
    record.spans.loc[place, "start_s"] -= 1e-6


def early(record):
    spans = record.spans
    missed = record.accesses[
        (record.accesses.state == "miss") & (record.accesses.lane == "gpu0")
    ].iloc[0]
    is_copy = spans.kind == "fetch"
    for name in ("step", "layer", "expert"):
        is_copy &= spans[name] == missed[name]
    record.spans = spans.drop(spans.index[is_copy][0])


def fewer_bytes(record):
    record.spans.loc[record.spans.index[record.spans.kind == "fetch"][0], "bytes"] -= 1


def never_computed(record):
    place = record.spans.index[record.spans.kind == "compute"][5]
    record.spans = record.spans.drop(place)


def too_many_resident(record):
    record.accesses.loc[record.accesses.lane == "gpu0", "state"] = "hit"
    copies = record.spans.index[record.spans.kind == "fetch"]
    record.spans = record.spans.drop(copies)


def late_end(record):
    record.makespan_s *= 1.01


def other_expert(record):
    record.accesses.loc[record.accesses.index[0], "tokens"] += 1


@pytest.mark.parametrize(("fault", "named"), [
    (overlap, "overlap"),
    (early, "arrival"),
    (fewer_bytes, "bytes"),
    (never_computed, "compute"),
    (too_many_resident, "memory"),
    (late_end, "makespan"),
    (other_expert, "accesses"),
])  # fmt: skip
def test_the_audit_sees_a_fault_put_in_on_purpose(run, fault, named):
    folder, trace, replayed = run
    record = Record(folder, trace, replayed.config, replayed.metrics["makespan_s"])
    assert audit(record) == []
    fault(record)
    assert any(text.startswith(f"{named}:") for text in audit(record))
