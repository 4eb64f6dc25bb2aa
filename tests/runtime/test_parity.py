"""Two worlds, one planner: what a real run saw and decided, and what the simulator
makes of it.
"""

import re

import pytest
from support.processes import ROOT
from support.real_machine import (
    COLUMNS,
    ONE_WORKER,
    SHAPE,
    combinations,
    host_profile,
    real_run,
    usable,
)
from support.small_trace import write_trace

from moesim.engine.observers import observed_policy, repeat
from moesim.runs import replay as api
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.reader import open_trace

EXPERT = 8192  # 3 x 32 x 16 weights of 4 bytes, in whole blocks


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    place = tmp_path_factory.mktemp("trace") / "t.parquet"
    return open_trace(
        write_trace(
            place, SHAPE, ((5, 8), (3, 6), (7, 8)), columns=COLUMNS, ragged=True
        )
    )


def simulated_like(trace, assignment, cache, batch, artefacts=None, **memory):
    """A measured run without prefetching, simulated."""
    return api.replay(
        trace,
        assignment,
        cache=cache,
        prefetch="none",
        hw=host_profile(),
        batch=batch,
        artefacts=artefacts,
        **memory,
    )


def equal_accesses(run, other, *columns):
    frames = [each.timeline.access_frame() for each in (run, other)]
    return all((frames[0][name] == frames[1][name]).all() for name in columns)


def measured(
    trace,
    store,
    combination,
    *,
    batch=1,
    routing=None,
    workers=None,
    numbers=None,
    out=None,
    artefacts=None,
    **memory,
):
    policy, cache, prefetch = (*combination.split("+"), None, None)[:3]
    stated = dict(numbers or {})
    if workers is ONE_WORKER:
        stated["cores"] = 1
    others = {"cache": cache, "prefetch": prefetch, "routing": routing}
    options = {"batch": batch, "out": out, "artefacts": artefacts, **others}
    profile = host_profile(workers, **stated)
    return real_run(trace, policy, store, profile, memory=memory, **options)


def repeated(run, trace, combination, *, entries=None, batch=1, **options):
    """Plans of a fresh planner that is told what a real run's was."""
    planner = fresh_planner(trace, combination, batch=batch, **options)
    steps = compose(trace, batch=batch, columns=COLUMNS)
    return repeat(entries or run.decision_log.entries, planner, steps)


def fresh_planner(
    trace, combination, *, batch=1, artefacts=None, numbers=None, **memory
):
    from moesim.runs.config import RunConfig
    from moesim.runs.setup import Setup
    from moesim.runtime.executor.trace_driven import shape_for

    config = RunConfig.of(policy=combination, artefacts=artefacts, **memory)
    setup = Setup(
        config,
        shape_for(trace.shape, None),
        host_profile(**(numbers or {})),
        config.system,
        future=RecordedFuture.of(trace, batch=batch),
    )
    return setup.planner()


class Seen:
    """What an assignment is shown of each layer step: copies of the arrays."""

    def __init__(self):
        self.costs = []

    def reported(self, call, arguments, answer):
        shown = arguments[0].arrays()
        self.costs.append(type(shown)(*(part.copy() for part in shown)))


def test_views_of_a_run_give_the_same_plans_for_every_policy(trace, store, artefacts):
    """Oracles, work ahead and learning included; each combination at another cache
    size, batch and host memory.
    """
    for one, combination in enumerate(combinations(oracles=True, approximate=True)):
        batch = 1 + one % 3
        memory = {
            "slots_per_layer": one % 9,
            "host_memory_bytes": (7 + one % 9) * EXPERT if one % 2 else None,
        }
        # Some stage whole layers, which need room.
        if one % 2 and "moe-lightning" in combination:
            memory["host_memory_bytes"] += 2 * SHAPE.experts * EXPERT
        options = {"batch": batch, "artefacts": artefacts, **memory}
        run = measured(trace, store, combination, **options)
        plans = repeated(run, trace, combination, **options)
        assert len(plans) == run.metrics["layer_steps"] == 3 * run.metrics["steps"], (
            combination
        )


LAUNCH_S = 1e-5
"""Fixed seconds of an expert on either lane of `host_profile`."""
READ_S = EXPERT / 1e10
"""What reading its weights there takes, longer than these few tokens' operations."""
PLAIN_S = LAUNCH_S + READ_S


@pytest.mark.parametrize(("policy", "numbers", "cpu_s", "gpu_s", "chosen"), [
    ("exact+none+none", {}, PLAIN_S, PLAIN_S, {"cpu", "gpu0"}),
    # A second for each expert on the CPU, or for the first of a layer step, which
    # an expert's own time lacks: nothing is worth that.
    ("exact+none+none", {"costs.cpu.overhead_s": 1.0}, 1.0 + READ_S, PLAIN_S, {"gpu0"}),
    ("hybrimoe-schedule+none+none", {"costs.cpu.first_s": 1.0}, PLAIN_S, PLAIN_S,
     {"gpu0"}),
    # A second for each launch on the GPU; or for the one of a group, whose experts
    # are compared by their shares.
    ("exact+none+none", {"costs.gpu.overhead_s": 1.0}, PLAIN_S, 1.0 + READ_S, {"cpu"}),
    ("exact+none+none", {"costs.gpu.overhead_s": 1.0, "costs.gpu.further_s": 2e-5},
     PLAIN_S, 2e-5 + READ_S, {"cpu", "gpu0"}),
    # An expert slows down beside copies, or copies beside it, beyond all use.
    ("fetch-split+none+none", {"contention.cpu.h2d": 1e6}, PLAIN_S, PLAIN_S, {"gpu0"}),
    ("fetch-split+none+none", {"contention.h2d.cpu": 1e6}, PLAIN_S, PLAIN_S, {"cpu"}),
    # A system's own kernels: its work on the CPU, and not what a launch takes.
    ("dali-ktransformers", {}, LAUNCH_S + READ_S / 1.25, PLAIN_S, {"cpu"}),
])  # fmt: skip
def test_the_runtime_plans_with_each_cost_that_the_simulator_charges(
    trace, store, policy, numbers, cpu_s, gpu_s, chosen
):
    """By hand on three layers: what an expert takes on either lane in the views of a
    real run, where its plans send it, and the same plans from the simulator's planner.
    """
    options = {"numbers": numbers, "slots_per_layer": 0}
    run = measured(trace, store, policy, **options)
    planner = fresh_planner(trace, policy, **options)
    seen = Seen()
    planner.assignment = observed_policy(planner.assignment, seen, ("assign",))
    steps = compose(trace, columns=COLUMNS)
    plans = repeat(run.decision_log.entries, planner, steps)
    assert len(seen.costs) == len(plans)
    for costs in seen.costs:
        assert costs.cpu_s == pytest.approx(cpu_s)
        assert costs.gpu_s[0] == pytest.approx(gpu_s)
    assert {plan.layer for plan in plans} == {0, 1, 2}
    assert set(run.timeline.access_frame()["lane"]) == chosen


def test_hits_equal_the_simulators_for_every_cache_policy(trace, store, artefacts):
    """Nothing depends on time without prefetch, where a replacement lands before its
    layer comes again: hits, delayed hits and misses are equal, not similar.
    """
    one_at_a_time = {"workload-window": "workload-window:swaps=1"}
    caches = usable("cache", oracles=True)
    for one, name in enumerate(caches):
        cache = one_at_a_time.get(name, name)
        memory = {
            "slots_per_layer": 1 + one % 5,
            "cache_scope": "global" if one % 4 == 3 else "layer",
        }
        batch = 1 + one % 2
        memory["artefacts"] = artefacts
        combination = f"on-demand+{cache}+none"
        run = measured(trace, store, combination, batch=batch, **memory)
        simulated = simulated_like(trace, "on-demand", cache, batch, **memory)
        for figure in ("accesses", "hits", "delayed_hits", "misses"):
            assert run.metrics[figure] == simulated.metrics[figure], (cache, figure)
        assert equal_accesses(run, simulated, "state"), cache


@pytest.mark.parametrize("cache", ["static", "lru"])
@pytest.mark.parametrize("host_experts", [None, 9])
def test_deferred_results_change_neither_hits_nor_plans(
    trace, store, cache, host_experts
):
    """Nothing is copied but what host memory lacks, so residency depends on no time;
    what is deferred follows from the routing and, where host memory is limited, from
    what it holds: the log of the real run repeats it.
    """
    memory = {
        "slots_per_layer": 2,
        "host_memory_bytes": host_experts and host_experts * EXPERT,
    }
    combination = f"fixed-mapping:defer=1+{cache}+none"
    run = measured(trace, store, combination, batch=2, **memory)
    assert run.metrics["approximate"] is True
    simulated = simulated_like(trace, "fixed-mapping:defer=1", cache, 2, **memory)
    assert equal_accesses(run, simulated, "state", "lane")
    plans = repeated(run, trace, combination, batch=2, **memory)
    assert any(any(plan.deferred) for plan in plans)


def test_the_page_of_files_names_every_file_of_a_run(trace, store, tmp_path):
    """And says which a replay has as well."""
    measured(
        trace, store, "greedy+lru+next-gate", out=tmp_path / "a", slots_per_layer=3
    )
    api.replay(trace, "greedy", out=tmp_path / "b")
    page = (ROOT / "docs/reference/files.md").read_text(encoding="utf-8")
    section = page.partition("## Run")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", section, re.MULTILINE))
    simulated = {name for name, words in listed.items() if " runs only" not in words}
    written = {file.name for file in (tmp_path / "a").iterdir()}
    assert written == listed.keys() - {"routing.npz"}, "of live runs alone"
    assert {file.name for file in (tmp_path / "b").iterdir()} == simulated


@pytest.mark.parametrize("workers", [None, ONE_WORKER], ids=["two cores", "one core"])
def test_spans_and_accesses_tell_the_whole_run(trace, store, workers):
    """One compute span per access, on the lane that the access names; one plan, join
    and dense span per layer step.
    """
    run = measured(
        trace,
        store,
        "greedy+lru+next-gate",
        workers=workers,
        slots_per_layer=3,
        host_memory_bytes=9 * EXPERT,
    )
    spans = run.timeline.frame()
    accesses = run.timeline.access_frame()
    key = ["step", "layer", "expert", "lane"]
    compute = spans[spans["kind"] == "compute"]
    assert sorted(map(tuple, compute[key].to_numpy())) == sorted(
        map(tuple, accesses[key].to_numpy())
    )
    layer_steps = run.metrics["layer_steps"]
    for kind in ("plan", "join"):
        assert (spans["kind"] == kind).sum() == layer_steps
    # And the head of every step.
    assert (spans["kind"] == "dense").sum() == layer_steps + run.metrics["steps"]
    assert (spans["end_s"] >= spans["start_s"]).all()
    copies = spans[spans["kind"].isin(["fetch", "prefetch", "read"])]
    assert set(copies["bytes"]) == {EXPERT}
    for lanes in host_profile(
        workers, **({"cores": 1} if workers else {})
    ).workers.values():
        mine = spans[spans["lane"].isin(lanes)].sort_values("start_s")
        assert (
            mine["start_s"].to_numpy()[1:] >= mine["end_s"].to_numpy()[:-1] - 1e-9
        ).all(), "a worker does one thing"
