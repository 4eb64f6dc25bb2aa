"""Two worlds, one planner: what a real run saw and decided, and what the simulator makes of it."""

import pytest
from conftest import write_trace
from real_machine import ONE_WORKER, combinations, host_profile, usable

from moesim import api
from moesim.runs import run_trace
from policies.journal import repeat
from runtime.views import FILE_NAME, load_views
from traces.batch import compose
from traces.future import RecordedFuture
from traces.reader import open_trace
from traces.schema import PREDICTION_COLUMNS, ModelShape

SHAPE = ModelShape(
    name="small", layers=3, experts=8, top_k=2, hidden=32, expert_intermediate=16,
    expert_bytes=(3 * 32 * 16 * 4,) * 3, other_bytes=1 << 12, dtype="f32", vocab=50,
)  # fmt: skip
EXPERT = 8192  # 3 x 32 x 16 weights of 4 bytes, in whole blocks
COLUMNS = ("weights", "scores", *PREDICTION_COLUMNS)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    place = tmp_path_factory.mktemp("trace") / "t.parquet"
    return open_trace(write_trace(place, SHAPE, ((5, 8), (3, 6), (7, 8)), columns=COLUMNS, ragged=True))


@pytest.fixture(scope="module")
def store(tmp_path_factory, trace):
    from moesim.runs import open_random_store
    from runtime.tracedriven import shape_for

    with open_random_store(shape_for(trace.shape, None), tmp_path_factory.mktemp("store"), "float32") as opened:
        yield opened


def measured(trace, store, combination, *, batch=1, routing=None, workers=None, out=None, **memory):
    policy, cache, prefetch = combination.split("+")
    cores = {"cores": 1} if workers is ONE_WORKER else {}
    return run_trace(
        trace, policy, cache=cache, prefetch=prefetch, routing=routing, store=store, dtype="float32", batch=batch,
        hw=host_profile(workers, **cores), memory=api.MemoryOptions(**memory), out=out,
    )  # fmt: skip


def fresh_planner(trace, combination, *, batch=1, **memory):
    from moesim.runs import Setup
    from policies.systems import compose as system_of
    from runtime.tracedriven import shape_for

    policy, cache, prefetch = combination.split("+")
    setup = Setup(
        shape_for(trace.shape, None), host_profile(), system_of(policy, cache=cache, prefetch=prefetch),
        api.MemoryOptions(**memory), "lru", 0, future=RecordedFuture.of(trace, batch=batch),
    )  # fmt: skip
    return setup.planner()


def test_views_of_a_run_give_the_same_plans_for_every_policy(trace, store):
    """Oracles and work ahead included; each combination at another cache size, batch and host memory."""
    for one, combination in enumerate(combinations(oracles=True, approximate=True)):
        batch = 1 + one % 3
        memory = {"slots_per_layer": one % 9, "host_memory_bytes": (3 + one % 9) * EXPERT if one % 2 else None}
        run = measured(trace, store, combination, batch=batch, **memory)
        planner = fresh_planner(trace, combination, batch=batch, **memory)
        plans = repeat(run.journal.entries, planner, compose(trace, batch=batch, columns=COLUMNS))
        assert len(plans) == run.metrics["layer_steps"] == 3 * run.metrics["steps"], combination


def test_hits_equal_the_simulators_for_every_cache_policy(trace, store):
    """Without prefetch nothing depends on time: hits, delayed hits and misses are equal, not similar."""
    caches = usable("cache", oracles=True)
    for one, cache in enumerate(caches):
        memory = {"slots_per_layer": 1 + one % 5, "scope": "global" if one % 4 == 3 else "layer"}
        run = measured(trace, store, f"on-demand+{cache}+none", batch=1 + one % 2, **memory)
        simulated = api.replay(
            trace, "on-demand", cache=cache, prefetch="none", hw=host_profile(), batch=1 + one % 2,
            memory=api.MemoryOptions(**memory),
        )  # fmt: skip
        for figure in ("accesses", "hits", "delayed_hits", "misses"):
            assert run.metrics[figure] == simulated.metrics[figure], (cache, figure)
        assert (run.timeline.access_frame()["state"] == simulated.timeline.access_frame()["state"]).all(), cache


def test_saved_views_are_checked_in_another_process_without_torch(trace, store, tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    measured(trace, store, "greedy+lru+next-gate", out=tmp_path, slots_per_layer=3)
    entries, steps = load_views(tmp_path / FILE_NAME)
    assert steps is None, "routing is in the trace"
    assert [e.call for e in entries].count("plan") > 0
    code = (
        "import sys; from pathlib import Path; from runtime.views import load_views\n"
        f"entries, _ = load_views(Path({str(tmp_path / FILE_NAME)!r}))\n"
        "assert 'torch' not in sys.modules; print(len(entries))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert int(done.stdout) == len(entries)


@pytest.mark.parametrize("workers", [None, ONE_WORKER], ids=["two cores", "one core"])
def test_spans_and_accesses_tell_the_whole_run(trace, store, workers):
    """One compute span per access, on the lane that the access names; one plan, join and dense span per layer step."""
    run = measured(
        trace, store, "greedy+lru+next-gate", workers=workers, slots_per_layer=3, host_memory_bytes=9 * EXPERT
    )
    spans, accesses = run.timeline.frame(), run.timeline.access_frame()
    key = ["step", "layer", "expert", "lane"]
    compute = spans[spans["kind"] == "compute"]
    assert sorted(map(tuple, compute[key].to_numpy())) == sorted(map(tuple, accesses[key].to_numpy()))
    layer_steps = run.metrics["layer_steps"]
    for kind in ("plan", "join"):
        assert (spans["kind"] == kind).sum() == layer_steps
    assert (spans["kind"] == "dense").sum() == layer_steps + run.metrics["steps"]  # and the head of every step
    assert (spans["end_s"] >= spans["start_s"]).all()
    copies = spans[spans["kind"].isin(["fetch", "prefetch", "read"])]
    assert set(copies["bytes"]) == {EXPERT}
    for lanes in host_profile(workers, **({"cores": 1} if workers else {})).workers.values():
        mine = spans[spans["lane"].isin(lanes)].sort_values("start_s")
        assert (mine["start_s"].to_numpy()[1:] >= mine["end_s"].to_numpy()[:-1] - 1e-9).all(), "a worker does one thing"
