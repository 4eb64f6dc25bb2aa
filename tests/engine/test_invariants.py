"""What must hold in every replay, whatever the policies do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handmade import (
    HandProfile,
    SizedCosts,
    plan_of,
    registered,
    routed,
    run,
    shape,
    steps,
)
from support.wild_policies import WildAssignment, WildCache, WildPrefetch

from moesim.policies.systems import System
from moesim.traces.timeline.spans import Timeline

LAYERS = 3
EXPERTS = 6


@pytest.fixture(autouse=True, scope="module")
def wild_policies():
    with registered(
        assignment_wild=WildAssignment, prefetch_wild=WildPrefetch, cache_wild=WildCache
    ):
        yield


layer_steps = st.lists(
    st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS),
    min_size=LAYERS,
    max_size=LAYERS,
)
traces = st.lists(layer_steps, min_size=1, max_size=6)
setups = st.fixed_dictionaries(
    {
        "slots": st.integers(0, EXPERTS),
        "scope": st.sampled_from(["layer", "global"]),
        "staging": st.integers(1, 3),
        "host_slots": st.one_of(st.none(), st.integers(1, LAYERS * EXPERTS)),
        "seed": st.integers(0, 1000),
        "gpus": st.sampled_from([1, 2]),
        "split": st.sampled_from(["layers", "experts"]),
        "unequal": st.sampled_from(["nothing", "layers", "experts"]),
    }
)
systems = st.builds(
    System,
    assignment=st.sampled_from(["wild", "greedy", "on-demand", "all-cpu"]),
    cache=st.sampled_from(["wild", "lru", "lfu", "none", "static"]),
    prefetch=st.sampled_from(["wild", "none"]),
)
contention = st.sampled_from(
    [
        {},
        {
            ("cpu", "h2d"): 1.3,
            ("h2d", "cpu"): 1.2,
            ("gpu", "cpu"): 1.1,
            ("ssd", "h2d"): 2.0,
        },
    ]
)


def replayed(trace, setup, system, slow):
    setup = dict(setup)
    unequal = setup.pop("unequal")
    sizes = [100, 150, 100] if unequal == "layers" else 100
    if (
        setup["gpus"] == 2
        and setup["split"] == "experts"
        and "wild" in {system.cache, system.prefetch}
    ):
        setup["gpus"] = 1  # the wild policies speak about GPU 0 only
    if setup["gpus"] == 2 and system.cache == "wild":
        setup["gpus"] = 1
    model = shape(LAYERS, EXPERTS, expert_bytes=sizes)
    if unequal == "experts":
        widths = np.random.default_rng(setup["seed"]).choice([50, 75, 140], (3, 6))
        model = model.with_bytes_by_expert(widths.tolist())
    costs = SizedCosts(
        model=model,
        cpu=3.1,
        gpu=0.9,
        copy=2.3,
        read=3.7,
        dense=1.7,
        plan=0.1,
        dispatch_s=0.01,
        join=0.03,
    )
    planner = plan_of(model, system, costs, **setup)
    profile = HandProfile(gpus=planner.gpus, slow=slow)
    passes = steps(
        *[
            [routed(layer, *sorted(chosen)) for layer, chosen in enumerate(layers)]
            for layers in trace
        ]
    )
    result, timeline = run(planner, passes, profile)
    return planner, result, timeline


@settings(max_examples=120, deadline=None)
@given(traces, setups, systems, contention)
def test_every_replay_keeps_the_books(trace, setup, system, slow):
    planner, result, timeline = replayed(trace, setup, system, slow)
    frame = timeline.frame()
    accesses = timeline.access_frame()

    # every active expert is computed exactly once per layer step, on the lane that the
    # access names
    computed = frame[frame["kind"] == "compute"]
    rows = ["step", "layer", "expert", "lane"]
    assert sorted(map(tuple, computed[rows].astype(str).to_numpy())) == sorted(
        map(tuple, accesses[rows].astype(str).to_numpy())
    )
    # no lane does two things at once, none is busy longer than the run
    for _, lane in frame.groupby("lane", observed=True):
        ordered = lane.sort_values(["start_s", "end_s"])
        assert (
            ordered["start_s"].to_numpy()[1:] >= ordered["end_s"].to_numpy()[:-1] - 1e-9
        ).all()
        assert (lane["end_s"] - lane["start_s"]).sum() <= result.makespan_s + 1e-9
    # bytes are whole experts
    copies = frame[frame["kind"].isin(["fetch", "prefetch", "replace", "read"])]
    sizes = np.array(planner.shape.sizes_by_expert())
    assert (copies["bytes"] == sizes[copies["layer"], copies["expert"]]).all()
    # layer steps follow one another
    dense = frame[frame["kind"] == "dense"]["start_s"].to_numpy()
    assert (np.diff(dense) > 0).all()
    # a GPU computes only what was copied there before and ended before it starts
    filled = {key for key, _ in _initial(planner, system)}
    landed: set = set(filled)
    for row in frame.sort_values(["end_s", "start_s"]).itertuples():
        if row.kind in {"fetch", "prefetch", "replace"}:
            landed.add((row.lane.replace("h2d", "gpu"), row.layer, row.expert))
        elif row.kind == "compute" and row.lane != "cpu":
            assert (row.lane, row.layer, row.expert) in landed
    # nothing stays held or staged that nobody waits for; bytes are conserved
    for memory in planner.gpu:
        staged = np.asarray(memory.staged)
        unstaged = (np.asarray(memory.state) != 0) & (staged == 0)
        used = int(sizes.reshape(-1)[unstaged].sum())
        assert used + sum(memory.free_bytes) == memory.size.total_bytes
        assert (np.asarray(memory.holds) == staged).all()
        # What is still staged is a guess about a layer that has not come again.
        by_layer = staged.reshape(LAYERS, EXPERTS).sum(axis=1)
        assert by_layer.tolist() == list(memory.staged_of)
    if (
        planner.host is not None
        and not planner.policies.prefetch.prefetches
        and system.cache != "wild"
    ):
        memory = planner.host.memory
        assert not any(memory.staged)
        assert not any(memory.holds)


def _initial(planner, system):
    if system.cache != "static":
        return []
    return [
        ((f"gpu{gpu}", layer, int(expert)), None)
        for gpu in range(planner.gpus)
        for layer in range(LAYERS)
        for expert in np.flatnonzero(planner.view.resident(layer, gpu))
    ]


@settings(max_examples=60, deadline=None)
@given(traces, setups, systems, contention)
def test_the_same_reports_give_the_same_plans(trace, setup, system, slow):
    """Parity by construction: a planner fed with another's log repeats every
    plan.
    """
    from moesim.engine.observers import DecisionLog, observed, repeat

    setup = {**setup, "unequal": False, "gpus": 1}
    model = shape(LAYERS, EXPERTS)
    passes = steps(
        *[
            [routed(layer, *sorted(chosen)) for layer, chosen in enumerate(layers)]
            for layers in trace
        ]
    )
    given = {key: value for key, value in setup.items() if key != "unequal"}
    first = plan_of(model, system, **given)
    log = DecisionLog()
    run(observed(first, log), passes, HandProfile(slow=slow))
    plans = repeat(log.entries, plan_of(model, system, **given), passes)
    assert len(plans) == LAYERS * len(trace)


def test_a_timeline_does_not_depend_on_where_it_is_written(tmp_path):
    """Two runs with out folders give byte-identical Parquet files."""
    from moesim.sim.replay import Replay

    def written(folder):
        planner = plan_of(shape(), System("greedy", cache="lru"), slots=2)
        profile = HandProfile()
        with Timeline(profile.lanes, folder) as timeline:
            Replay(profile, planner, timeline).run(
                steps([routed(0, 0, 1)], [routed(0, 2)])
            )
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    one = written(tmp_path / "a")
    two = written(tmp_path / "b")
    assert one == two
    assert set(one) == {"timeline.parquet", "accesses.parquet", "steps.parquet"}
