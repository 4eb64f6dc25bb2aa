"""Experts of one layer with sizes of their own: from a trace's header to every byte
that is copied.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_pairs import assert_equal, both
from support.handmade import (
    SizedCosts,
    plan_of,
    plan_step,
    routed,
    run,
    shape,
    steps,
)
from support.small_trace import SHAPE, write_small_trace

from moesim import replay
from moesim.base.errors import TraceError
from moesim.hwprofiles.costs import Costs, seconds_by_expert
from moesim.hwprofiles.profile import load_profile
from moesim.policies.sizes import CacheSize, fitting
from moesim.policies.systems import SYSTEMS, System, compose
from moesim.runs.bound import most_experts
from moesim.runtime.executor.trace_driven import shape_for
from moesim.traces.exporters.oracle_general import RECORD, export_requests
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import TraceHeader
from moesim.traces.format.writer import TraceWriter
from moesim.traces.shipped import resolve_trace
from moesim.traces.stats.statistics import info
from moesim.traces.synthetic.marks import WIDTHS
from moesim.traces.synthetic.widths import set_widths

LAYERS = 3
WIDE = 200
NARROW = 100


def alternating(layers=LAYERS, experts=4):
    """A model whose even experts are twice as large as the odd ones."""
    sizes = [[WIDE, NARROW] * (experts // 2)] * layers
    return shape(layers, experts).with_bytes_by_expert(sizes)


def one_token(*experts):
    return [routed(layer, expert) for layer, expert in enumerate(experts)]


# -- the header -------------------------------------------------------------------------


def test_a_shape_knows_every_size_and_their_mean():
    model = alternating()
    assert model.expert_bytes == (150,) * LAYERS
    assert model.bytes_of(0, 0) == WIDE
    assert model.bytes_of(0) == 150
    assert model.expert_sizes == (NARROW, WIDE)
    assert model.max_expert_bytes == WIDE
    assert model.routed_bytes == LAYERS * 2 * (WIDE + NARROW)


def test_a_header_keeps_sizes_and_is_as_before_where_there_are_none():
    plain = TraceHeader(shape(LAYERS, 4))
    assert "bytes_by_expert" not in plain.to_json()
    assert TraceHeader.from_json(plain.to_json(), where="t") == plain
    mixed = TraceHeader(alternating())
    assert TraceHeader.from_json(mixed.to_json(), where="t") == mixed
    alike = alternating().with_bytes_by_expert([[7] * 4] * LAYERS)
    assert alike.bytes_by_expert == ()
    assert alike.expert_bytes == (7,) * LAYERS


@pytest.mark.parametrize(("sizes", "message"), [
    ([[100, 100, 100, 50]] * 2, "expected 3 lists"),
    ([[100, 100, 50]] * 3, "of 4 sizes"),
    ([[100, 100, 100, 0]] * 3, "layer 0: expected 1.."),
])  # fmt: skip
def test_sizes_that_no_model_can_have(sizes, message):
    with pytest.raises(TraceError, match=message):
        shape(LAYERS, 4).with_bytes_by_expert(sizes)


def test_a_header_whose_mean_is_wrong_is_refused():
    fields = alternating().fields() | {"expert_bytes": (100,) * LAYERS}
    text = json.dumps({"schema_version": 1, "shape": fields})
    with pytest.raises(TraceError, match="expected the means of bytes_by_expert"):
        TraceHeader.from_json(text, where="t.parquet")


# -- memories ---------------------------------------------------------------------------


def test_equal_memory_whatever_the_widths():
    """A ratio is the bytes of all experts times it; slots count the largest."""
    model = alternating()
    half = CacheSize.for_model(model, ratio=0.5)
    assert half.pool_bytes.tolist() == [300] * LAYERS
    assert half.slots.tolist() == [1] * LAYERS
    shared = CacheSize.for_model(model, scope="global", ratio=0.5)
    assert shared.pool_bytes.tolist() == [900]
    assert shared.slots.tolist() == [4]
    two = CacheSize.for_model(model, slots_per_layer=2)
    assert two.total_bytes == half.total_bytes
    # 1000 bytes are two experts of mean size in each of three layers, and 100 more.
    assert CacheSize.for_model(model, total_bytes=1000).total_bytes == 900


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(1, 50), min_size=4, max_size=4), min_size=1, max_size=4
    ),
    st.sampled_from(["layer", "global"]),
    st.integers(0, 4),
)
def test_a_ratio_of_all_holds_all_and_no_pool_is_overfilled(sizes, scope, slots):
    model = shape(len(sizes), 4).with_bytes_by_expert(sizes)
    everything = CacheSize.for_model(model, scope=scope, ratio=1.0)
    assert everything.total_bytes == model.routed_bytes
    size = CacheSize.for_model(model, scope=scope, slots_per_layer=slots)
    rank = np.arange(model.layers * 4, dtype=np.float64).reshape(-1, 4)
    keys = fitting(rank, size.slots, scope, pool_bytes=size.pool_bytes, shape=model)
    held = np.zeros((model.layers, 4), np.bool_)
    held.reshape(-1)[keys] = True
    table = np.array(model.sizes_by_expert())
    used = (table * held).sum(axis=1)
    if scope == "global":
        used = used.sum(keepdims=True)
    assert (used <= size.pool_bytes).all()
    # What is not there would not fit either.
    free = np.broadcast_to(size.pool_bytes - used, model.layers)
    assert (table[~held] > np.repeat(free, (~held).sum(axis=1))).all()


# -- systems as wholes, by hand: three layers, dense part 2 s, product 1 s, 4 s of copy
#    for 100 bytes -----------------------------------------------------------------------


def end_s(model, system, *passes, **memory):
    planner = plan_of(model, system, SizedCosts(model=model), staging=8, **memory)
    result, timeline = run(planner, steps(*passes))
    return result.makespan_s, timeline.frame(), planner


def test_edgemoe_copies_and_keeps_experts_by_their_widths():
    """One pool of 300 bytes: a wide expert and a narrow one.

    First pass: (0, 0), wide: 0-2-10-11; (1, 1), narrow: 11-13-17-18. Layer 2 needs a
    narrow one: (0, 0) comes next and (1, 1) is one layer further off, so the latter
    leaves: 18-20-24-25.

    Second pass: layer 0 hits, 25-27-28, and foresees (1, 1): copied 27-31 in the place
    of (2, 3). Dense part 28-30, product 31-32. Meanwhile (2, 3) is foreseen: only (0, 0)
    may leave; copied 31-35, with 100 bytes to spare. Dense part 32-34, product 35-36.
    """
    passes = [one_token(0, 1, 3)] * 2
    memory = {"scope": "global", "ratio": 1 / 6}
    seconds, frame, planner = end_s(
        alternating(), SYSTEMS["edgemoe"], *passes, **memory
    )
    assert seconds == 36.0
    copied = frame[frame["bytes"] > 0]
    assert copied["bytes"].tolist() == [WIDE, NARROW, NARROW, NARROW, NARROW]
    assert copied["end_s"].tolist() == [10.0, 17.0, 24.0, 31.0, 35.0]
    assert planner.gpu[0].free_bytes[0] == 100

    # All of the mean width: 9, 18, 27; hit 30; copies 29-35 and 35-41; products 36, 42.
    equal = shape(LAYERS, 4, expert_bytes=150)
    assert end_s(equal, SYSTEMS["edgemoe"], *passes, **memory)[0] == 42.0


def test_two_narrow_experts_leave_for_a_wide_one_of_their_layer():
    """300 bytes for one layer. Experts 1, 3 and 5 fill them: 2 + 4 + 1 each. 0 is wide,
    so 1 and 3 leave: 2 + 8 + 1. 1 then takes the place of 5, 3 half of the place of 0,
    and 5 the other half, with nobody to leave: 2 + 4 + 1 each.
    """
    model = alternating(layers=1, experts=6)
    passes = [[routed(0, expert)] for expert in (1, 3, 5, 0, 1, 3, 5)]
    system = System("on-demand", cache="lru")
    seconds, _, planner = end_s(model, system, *passes, ratio=1 / 3)
    assert seconds == 3 * 7 + 11 + 3 * 7
    assert planner.view.resident(0).tolist() == [False, True] * 3


def test_a_swap_that_does_not_fit_is_not_carried_out():
    """DALI's window wants 0, wide, in the place of a narrow expert: it stays outside,
    and nothing waits for it.
    """
    model = alternating(layers=1)
    system = compose("greedy", cache="workload-window:window=1,swaps=1,fill=lowest")
    passes = [[routed(0, 0, tokens=[9])]] * 3
    for slots, resident in (
        (1, [False, True, False, False]),
        (2, [True, True, False, False]),
    ):
        _, frame, planner = end_s(model, system, *passes, slots=slots)
        assert planner.view.resident(0).tolist() == resident
        assert not (frame["kind"] == "replace").any()


def test_what_is_late_is_expected_by_its_own_size():
    """A wide expert takes 8 s on the link and 10 on the CPU, a narrow one 4: by mean
    size both would take 6 and go to the GPU together, for 12 s.
    """
    model = alternating(layers=1)
    planner = plan_of(model, System("greedy"), SizedCosts(model=model), slots=0)
    plan_step(planner, routed(0, 0, 1))
    assert planner.work.arrays().arrive_s.tolist() == [[8.0, 4.0]]
    assert planner.gpu[0].link.copy_s[1] == 4.0
    assert planner.view.copy_s[0] == 6.0


# -- the common case --------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["simpy", "fast"])
@pytest.mark.parametrize(
    "system", ["edgemoe", "dali", "hybrimoe", "fiddler", "llama.cpp"]
)
def test_widths_that_are_all_equal_change_no_bit(tmp_path, system, engine):
    """Sizes stated one by one go another way through every memory and table of costs."""
    plain = open_trace(resolve_trace("tiny"))
    stated = replace(plain.shape, bytes_by_expert=plain.shape.sizes_by_expert())
    columns = sorted(plain.columns)
    header = replace(plain.header, shape=stated)
    path = tmp_path / "stated.parquet"
    with TraceWriter(path, header, columns) as writer:
        for rows in plain.sequences(columns):
            place = rows.seq, rows.pos, rows.phase, rows.layer
            writer.write(*place, rows.experts, **rows.columns)
    assert open_trace(path).shape.bytes_by_expert
    options = {"cache_ratio": 0.3, "engine": engine, "steps": 20, "batch": 2}
    frames = [
        replay(trace, system, **options).timeline.frame()
        for trace in (plain, open_trace(path))
    ]
    assert frames[0].equals(frames[1])


# -- costs, bounds, other readers of a shape ----------------------------------------------


def test_costs_go_by_the_bytes_of_each_expert():
    profile = load_profile("rtx4060ti")
    sizes = [[1 << 20, 4 << 20, 1 << 20, 2 << 20]] * 2
    model = replace(SHAPE, layers=2, experts=4, expert_bytes=(1,) * 2)
    model = model.with_bytes_by_expert(sizes)
    costs = Costs(profile, model)
    tokens = np.array([1, 1, 3, 700])
    experts = np.array([0, 1, 2, 3])
    for size in (1 << 20, 2 << 20, 4 << 20):
        alike = Costs(
            profile, replace(model, expert_bytes=(size,) * 2, bytes_by_expert=())
        )
        those = np.array(sizes[0]) == size
        for lane in ("cpu_s", "gpu_s"):
            ours = getattr(costs, lane)(1, tokens, experts=experts)
            assert (ours == getattr(alike, lane)(1, tokens))[those].all()
        for expert in np.flatnonzero(those).tolist():
            assert costs.copy_s(1, expert=expert) == alike.copy_s(1)
            assert costs.read_s(1, expert) == alike.read_s(1)
            assert costs.writeback_s(1, expert=expert) == alike.writeback_s(1)
    table = seconds_by_expert(model, costs.copy_s)
    assert table[0, 1] > table[0, 3] > table[0, 0] == table[1, 2]


@pytest.mark.parametrize("sizes", [(), ((1 << 20, 4 << 20, 1 << 20, 2 << 20),)])
def test_a_layer_step_is_planned_by_the_costs_of_its_own_experts(sizes):
    """However many tokens come: 5000 are beyond the first tables."""
    model = replace(SHAPE, layers=1, experts=4, expert_bytes=(2 << 20,))
    if sizes:
        model = model.with_bytes_by_expert(sizes)
    costs = Costs(load_profile("rtx4060ti"), model)
    planner = plan_of(model, System("greedy"), costs, slots=1, gpus=2, split="experts")
    for tokens in (1, 5000, 1):
        plan_step(planner, routed(0, 0, 1, 3, tokens=[tokens, 1, 2]))
        work = planner.work.arrays()
        assert (work.cpu_s == costs.cpu_s(0, work.tokens, work.experts)).all()
        gpu_s = costs.gpu_s(0, work.tokens, experts=work.experts)
        assert (work.gpu_s == np.stack([gpu_s, gpu_s])).all()


def test_a_bound_takes_the_smallest_experts():
    model = alternating()
    size = CacheSize.for_model(model, ratio=0.5)
    sizes = model.expert_bytes, model.bytes_by_expert
    assert most_experts(size, *sizes).tolist() == [3] * LAYERS


@pytest.mark.parametrize(
    "cache", ["belady-cost", "belady-size", "prefill-swap", "s3-fifo", "arc", "mrs"]
)
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_kind_of_cache_policy_takes_unequal_experts(tmp_path, cache, scope):
    path = tmp_path / "w.parquet"
    source = write_small_trace(tmp_path / "t.parquet")
    set_widths(source, path, bits=[16, 4], by="popularity")
    options = {"cache": cache, "cache_scope": scope, "cache_ratio": 0.4}
    run_of = replay(path, "on-demand", engine="simpy", **options)
    assert run_of.metrics["hit_rate_active"] > 0
    if cache != "prefill-swap":
        assert_equal(*both(open_trace(path), "on-demand", **options))


def test_a_store_holds_records_of_one_size_per_layer():
    with pytest.raises(TraceError, match="experts of one layer differ in size"):
        shape_for(alternating(), None)


# -- moesim trace widths ------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    return write_small_trace(tmp_path / "source.parquet")


def test_shares_of_each_layer_get_their_widths(source, tmp_path):
    """3 x 64 x 32 weights: 8 bits are 6144 bytes, 4 bits 3072, 2 bits 1536."""
    widened = set_widths(
        source, tmp_path / "w.parquet", bits=[8, 4, 2], shares=[0.25, 0.5, 0.25]
    )
    for layer in widened.shape.bytes_by_expert:
        assert sorted(layer) == [1536] * 2 + [3072] * 4 + [6144] * 2
    again = set_widths(source, tmp_path / "a.parquet", bits=[8, 4, 2], seed=1)
    # Eight experts in thirds: remainders go to the first widths.
    assert (
        sorted(again.shape.bytes_by_expert[0]) == [1536] * 2 + [3072] * 3 + [6144] * 3
    )
    assert (again.bits != widened.bits).any()


def test_routing_and_columns_stay(source, tmp_path):
    before = open_trace(source)
    path = set_widths(before, tmp_path / "w.parquet", bits=[8, 2]).path
    after = open_trace(path)
    assert after.columns == before.columns
    columns = sorted(before.columns)
    for old, new in zip(
        before.sequences(columns), after.sequences(columns), strict=True
    ):
        np.testing.assert_array_equal(old.experts, new.experts)
        for name in columns:
            np.testing.assert_array_equal(old.columns[name], new.columns[name])


def test_popular_experts_come_first(source, tmp_path):
    uses = np.zeros((SHAPE.layers, SHAPE.experts))
    for rows in open_trace(source).sequences():
        np.add.at(uses, (rows.layer[:, None], rows.experts), 1)
    widened = set_widths(source, tmp_path / "w.parquet", bits=[8, 2], by="popularity")
    for layer in range(SHAPE.layers):
        wide = widened.bits[layer] == 8
        assert wide.sum() == 4
        assert uses[layer][wide].min() >= uses[layer][~wide].max()


def test_widths_from_a_table(source, tmp_path):
    wanted = np.random.default_rng(0).choice(
        [2.0, 4.5, 8.0], (SHAPE.layers, SHAPE.experts)
    )
    rows = [
        f"{layer},{expert},{bits}" for (layer, expert), bits in np.ndenumerate(wanted)
    ]
    table = tmp_path / "bits.csv"
    table.write_text("\n".join(["layer,expert,bits", *reversed(rows)]))
    widened = set_widths(source, tmp_path / "w.parquet", table=table)
    np.testing.assert_array_equal(widened.bits, wanted)


@pytest.mark.parametrize(("rows", "message"), [
    ("layer,expert\n0,0\n", "numbers in the columns layer,expert,bits"),
    ("layer,expert,bits\n0,0,4\n", "each of 3 x 8 experts once; layer and expert 0,1 is"),
    ("layer,expert,bits\n0,99,4\n", "expected each of 3 x 8 experts once"),
    ("layer,expert,bits\n0,0,4\n0,0,4\n", "layer and expert 0,0 is missing, unknown or"),
    ("layer,expert,bits\n0,0,four\n", "expected numbers in the columns"),
])  # fmt: skip
def test_a_damaged_table_is_refused(source, tmp_path, rows, message):
    table = tmp_path / "bits.csv"
    table.write_text(rows)
    with pytest.raises(TraceError, match=message):
        set_widths(source, tmp_path / "w.parquet", table=table)
    assert not (tmp_path / "w.parquet").exists()


@pytest.mark.parametrize(("options", "message"), [
    ({}, "either bits or a table"),
    ({"bits": [8, 4], "shares": [1.0]}, "one share for each of 2 widths, got 1"),
    ({"bits": [8, 4], "shares": [0.5, 0.4]}, "shares that add up to 1, got 0.5,0.4"),
    ({"bits": [8, 0]}, "expected 0 < bits <= 64"),
    ({"bits": [8, 4], "by": "luck"}, "expected random or popularity, got 'luck'"),
])  # fmt: skip
def test_widths_that_make_no_sense_are_refused(source, tmp_path, options, message):
    with pytest.raises(TraceError, match=message):
        set_widths(source, tmp_path / "w.parquet", **options)


def test_every_result_says_that_widths_were_given(source, tmp_path, command):
    path = tmp_path / "w.parquet"
    _, said, _ = command(
        "trace", "widths", source, path, "--bits", "8,2", "--by", "popularity"
    )
    assert "8, 2 bits for 50 %, 50 % of each layer's experts, by popularity" in said
    assert "5 bits in the mean" in said
    assert open_trace(path).header.provenance[WIDTHS]["by"] == "popularity"
    facts = " ".join(command("trace", "info", path)[1].split())
    assert "each layer's experts, by popularity" in facts
    run_of = replay(path, "edgemoe", cache_ratio=0.5)
    assert any(
        "stated widths of experts: 8, 2 bits" in line for line in run_of.warnings
    )
    assert run_of.config["expert_sizes"] == (1536, 6144)
    assert info(open_trace(path))["expert_bytes"] == [1536, 6144]


def test_an_exported_trace_has_the_size_of_every_request(source, tmp_path):
    path = set_widths(source, tmp_path / "w.parquet", bits=[8, 2]).path
    trace = open_trace(path)
    out = tmp_path / "requests.bin"
    export_requests(trace, out, lambda _: None)
    requests = np.fromfile(out, RECORD)
    sizes = np.array(trace.shape.sizes_by_expert()).reshape(-1)
    np.testing.assert_array_equal(requests["bytes"], sizes[requests["object"]])
