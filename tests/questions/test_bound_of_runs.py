"""No run of moesim's own runtime, and no simulated run of any system, beats its bound.

The runtime's experts lie in host memory behind the processor's caches, so these count
as a cache in the bound, and its rate is the best that any of several kernels reads at
on this machine, before and after the runs.
"""

import time
from dataclasses import replace

import pytest
import torch
from support.learned_network import write as write_network
from support.real_machine import host_profile, real_run
from support.small_trace import write_trace

from moesim.hwprofiles import paths
from moesim.hwprofiles.schema import Quantity
from moesim.policies.systems import SYSTEMS
from moesim.runs.bound import highest_read_rate, memory_bound, replay_bound
from moesim.runs.config import RunConfig
from moesim.runs.measured import run_bound
from moesim.runs.replay import replay
from moesim.runs.setup import Setup, profile_of
from moesim.runtime.accelerators import all_caches_bytes
from moesim.traces.format.batch import compose
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import ModelShape

LAYERS = 4
EXPERTS = 6
HIDDEN = 1024
WIDTH = 512
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 4
PROBED_BYTES = 128 << 20


def best_read_rate():
    """Highest rate of three kernels: integers, floats, and a matrix times a vector as
    experts are computed.
    """
    integers = torch.ones(PROBED_BYTES // 8, dtype=torch.int64)
    floats = torch.ones(PROBED_BYTES // 4)
    matrix = floats.view(-1, HIDDEN)
    vector = torch.ones(HIDDEN)
    kernels = (integers.sum, floats.sum, lambda: torch.mv(matrix, vector))

    rates = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for kernel in kernels:
            for _ in range(3):
                begin_s = time.perf_counter()
                kernel()
                rates.append(PROBED_BYTES / (time.perf_counter() - begin_s))
    torch.set_num_threads(before)
    return max(rates)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store") / "s"


@pytest.fixture(scope="module")
def routing(tmp_path_factory):
    """150 MB of experts, more than the caches of most processors."""
    shape = ModelShape(
        "wide", LAYERS, EXPERTS, 3, HIDDEN, WIDTH, (EXPERT_BYTES,) * LAYERS, 1
    )
    folder = tmp_path_factory.mktemp("routing")
    return open_trace(write_trace(folder / "t.parquet", shape, ((2, 8),)))


@pytest.fixture(scope="module")
def before():
    return best_read_rate()


@pytest.mark.parametrize("policy", ["greedy", "all-cpu", "on-demand", "ktransformers"])
def test_no_real_run_beats_what_memory_can_deliver(routing, store, before, policy):
    rate = max(before, best_read_rate())
    probe = Quantity(rate, "assumed", "the best of several kernels")
    profile = host_profile()
    profile.numbers[paths.host_read(2)] = probe

    run = real_run(routing, policy, store, profile, memory={"cache_ratio": 0.5})
    # A machine that does not tell its caches has no bound.
    if all_caches_bytes() is None:
        assert run.bound is None
        return
    assert run.bound.bytes_per_s == rate
    # Others may have kept the memory busy while it was probed.
    rate = max(rate, best_read_rate())
    least_s = run.bound.seconds * run.bound.bytes_per_s / rate
    assert least_s <= run.metrics["makespan_s"]
    if all_caches_bytes() < LAYERS * EXPERTS * EXPERT_BYTES // 2:
        # Not by being void: each expert is read at least once.
        assert least_s >= LAYERS * EXPERTS * EXPERT_BYTES / (2 * rate)
    assert run.to_json()["bound"]["reads"] == run.bound.reads


@pytest.mark.parametrize(("split", "caches"), [("layers", 1), ("experts", 2)])
def test_what_two_cards_hold_counts_once_where_they_share_the_layers(
    routing, monkeypatch, split, caches
):
    """Slots of a layer are those of the one card that computes it."""
    monkeypatch.setattr(
        "moesim.runtime.accelerators.all_caches_bytes", lambda: EXPERT_BYTES
    )
    config = RunConfig(
        trace=routing, hw="dali-2x-rtx3090", slots_per_layer=2, gpu_split=split
    )
    profile = profile_of(config.hw)
    probe = {paths.host_read(2): Quantity(1e10, "assumed", "a guess")}
    profile = replace(profile, numbers=profile.numbers | probe)
    setup = Setup.of(config, routing, profile=profile)
    bound = run_bound(setup, list(compose(routing)), 0)
    assert bound.cache_bytes == EXPERT_BYTES * (1 + 2 * LAYERS * caches)


def test_caches_of_the_processor_count_as_a_cache(tmp_path):
    """Four experts in turn; with room for two, Belady keeps two of them."""
    chosen = ModelShape("m", 1, 4, 1, 8, 8, (100,), 1)
    trace = open_trace(write_trace(tmp_path / "t.parquet", chosen, ((1, 30),)))
    passes = list(compose(trace))

    def reads(cache_bytes):
        bound = memory_bound(passes, (100,), 50.0, cache_bytes=cache_bytes, warm=False)
        assert bound.seconds == pytest.approx(2 * bound.reads)
        return bound.reads

    used = {int(step.layers[0].experts[0]) for step in passes}
    assert reads(0) == len(passes)
    # A part of an expert may stay: a cache of one byte counts as one of an expert.
    assert reads(1) == reads(100) < reads(0)
    assert reads(400) == len(used)


def test_other_weights_are_read_in_every_step(tmp_path):
    """250 bytes in one layer are two whole records of 100, and three with the expert."""
    shape = ModelShape("m", 1, 4, 1, 8, 8, (100,), 1)
    trace = open_trace(write_trace(tmp_path / "t.parquet", shape, ((1, 9),)))
    passes = list(compose(trace))
    bound = memory_bound(
        passes, (100,), 1.0, cache_bytes=0, dense_bytes=250, warm=False
    )
    assert bound.reads == bound.accesses == 3 * len(passes)
    assert bound.words(2 * bound.seconds).startswith("at 50 % of what reading host")


def test_the_quartile_above_the_median_is_the_rate_of_a_probe():
    numbers = {
        "probes.host_read.1.bytes_per_s": Quantity(8.0, "measured", "a test", 3, 1.0),
        "probes.host_read.2.bytes_per_s": Quantity(10.0, "measured", "a test", 3, 2.0),
        "probes.device.read_bytes_per_s": Quantity(99.0, "measured", "a test", 3, 1.0),
    }
    assert highest_read_rate(numbers) == 12.0
    assert highest_read_rate({}) is None


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """What the learned cache needs."""
    shape = open_trace("tiny").shape
    folder = tmp_path_factory.mktemp("learned") / "network"
    return write_network(folder, shape.layers, shape.experts)


@pytest.mark.parametrize("hw", ["two-core-host", "rtx4060ti"])
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_no_system_beats_the_bound_on_the_shipped_trace(system, hw, network):
    trace = open_trace("tiny")
    needs = {"artefacts": network} if system == "flashmoe" else {}
    config = RunConfig.of(
        trace,
        policy=system,
        hw=profile_of(hw),
        steps=12,
        cache_ratio=0.4,
        **needs,
    )
    bound = replay_bound(Setup.of(config, trace), trace)
    # Systems that choose other experts than the trace have no bound.
    if bound is None:
        assert Setup.of(config, trace).policies().routing.alters
        return
    done = replay(config, keep=False)
    assert 0 < bound.seconds <= done.metrics["makespan_s"] * (1 + 1e-9)
