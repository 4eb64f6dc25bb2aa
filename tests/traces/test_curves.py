"""Hit-rate curves at every size, against the caches that a replay drives one size at a
time.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handmade import hand_trace, shape
from support.small_trace import write_trace

from moesim.policies.cache_replay import replay
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.traces.format.batch import compose
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import layer_steps, of_sequences
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import Phase
from moesim.traces.stats import hit_rate_curves


def curves(trace, batch=1):
    """All curves of a trace."""
    return hit_rate_curves.curves(layer_steps(trace, batch=batch), trace.shape)


def replayed(trace, spec, slots, *, batch=1, scope="layer"):
    """Hits by layer of a replay with `slots` per pool."""
    counts = np.full(trace.shape.layers if scope == "layer" else 1, slots, np.int64)
    sizes = CacheSize(scope, counts, counts * trace.shape.expert_bytes[0])
    future = RecordedFuture.of(trace, batch=batch)
    blocks = layer_steps(trace, batch=batch)
    policy = resolve(spec, "cache")
    return replay(policy, spec, trace.shape, sizes, blocks, future=future).hits_by_layer


def test_by_hand(tmp_path):
    """0 1 2 0 1 2: a circle of three misses LRU below three slots; Belady keeps expert
    0 in one slot, 0 and 1 in two.

    One slot: 0 stays (2 is offered last and used sooner than 1 never), so the second 0
    hits, then 1, 2 come once more.
    """
    found = curves(
        hand_trace(
            tmp_path / "t.parquet",
            [[[0]], [[1]], [[2]], [[0]], [[1]], [[2]]],
            experts=4,
        )
    )
    assert found.hits("lru").tolist() == [[0, 0, 0, 3, 3]]
    assert found.hits("belady").tolist() == [[0, 1, 2, 3, 3]]
    assert found.accesses("lru").tolist() == [6]
    assert found.hits("lru_global").tolist() == [0, 0, 0, 3, 3]


def naive_belady(trace, slots, *, batch=1, scope="layer"):
    """Hits by pool, one set per pool: of misses and unheld residents the sooner-used
    stay.
    """
    width = trace.shape.experts
    visits = [
        [layer.layer * width + expert for expert in layer.experts.tolist()]
        for step in compose(trace, batch=batch)
        for layer in step.layers
    ]
    pools = trace.shape.layers if scope == "layer" else 1
    hits = [0] * pools
    residents = [set() for _ in range(pools)]
    for now, active in enumerate(visits):
        pool = now % pools
        resident = residents[pool]

        def due(key, now=now):
            return next(
                (
                    later
                    for later in range(now + 1, len(visits))
                    if key in visits[later]
                ),
                len(visits),
            )

        hits[pool] += len(resident.intersection(active))
        missing = sorted((key for key in active if key not in resident), key=due)
        room = min(slots - len(resident), len(missing))
        rivals = [(due(key), 0, key, key) for key in missing[room:]]
        rivals += [(due(key), 1, -key, key) for key in resident.difference(active)]
        held = resident.intersection(active) | set(missing[:room])
        residents[pool] = held | {
            rival[-1] for rival in sorted(rivals)[: len(resident) + room - len(held)]
        }
    return hits


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    experts=st.integers(2, 12),
    top_k=st.integers(1, 4),
    batch=st.integers(1, 4),
    lengths=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 25)), min_size=1, max_size=5
    ),
    ragged=st.booleans(),
)
def test_any_small_trace_equals_its_replays(
    tmp_path_factory, seed, experts, top_k, batch, lengths, ragged
):
    """LRU and Belady at every size, per layer and, for Belady, over all layers; Belady
    also against plain sets.
    """
    model = shape(2, experts, min(top_k, experts))
    path = tmp_path_factory.mktemp("any") / "t.parquet"
    trace = open_trace(
        write_trace(path, model, tuple(lengths), seed=seed, ragged=ragged)
    )
    found = curves(trace, batch=batch)
    for slots in range(experts + 1):
        assert (
            found.hits("lru")[:, slots].tolist()
            == replayed(trace, "lru", slots, batch=batch).tolist()
        ), slots
        hits = found.hits("belady")[:, slots].tolist()
        assert hits == naive_belady(trace, slots, batch=batch), slots
        assert hits == replayed(trace, "belady", slots, batch=batch).tolist(), slots
    for slots in range(2 * experts + 1):
        hits = found.hits("belady_global")[slots]
        assert [hits] == naive_belady(trace, slots, batch=batch, scope="global"), slots
        assert (
            hits == replayed(trace, "belady", slots, batch=batch, scope="global").sum()
        ), slots


def test_global_lru_equals_the_replay_from_the_largest_layer_step_on(make_trace):
    trace = open_trace(make_trace(sequences=((5, 200), (0, 125))))
    largest = max(int(np.diff(block.edges).max()) for block in layer_steps(trace))
    hits = curves(trace).hits("lru_global")
    for slots in range(largest, 25):
        assert hits[slots] == replayed(trace, "lru", slots, scope="global").sum()


def test_layer_steps_of_all_experts_find_room_in_the_row_of_uses(tmp_path):
    """Fifty uses a step: moved together they take fifty places, the next step fifty."""
    tokens = [[list(range(50))]] * 4
    found = curves(hand_trace(tmp_path / "t.parquet", tokens, experts=50))
    assert found.hits("lru_global")[50] == 3 * 50


def test_blocks_that_are_passed_over_change_nothing(tmp_path):
    """Forty experts in each of three layers, so that stacks have many blocks: every
    size against one set.
    """
    trace = open_trace(
        write_trace(tmp_path / "t.parquet", shape(3, 40, 2), ((3, 60), (0, 40)))
    )
    found = curves(trace)
    for slots in range(0, 121, 7):
        assert [found.hits("belady_global")[slots]] == naive_belady(
            trace, slots, scope="global"
        ), slots
    for slots in range(0, 41, 5):
        assert found.hits("belady")[:, slots].tolist() == naive_belady(trace, slots), (
            slots
        )


def test_a_short_horizon_only_costs_what_it_cannot_see(make_trace):
    """Two to three sequences in sight: hits stay within 2 % of all accesses, and each
    is still counted once.
    """
    trace = open_trace(make_trace(sequences=((0, 40),) * 8))
    exact = curves(trace)
    blocks = of_sequences(trace.sequences(), trace.shape)
    near = hit_rate_curves.curves(blocks, trace.shape, horizon=200)
    assert near.accesses("belady").tolist() == exact.accesses("belady").tolist()
    assert near.hits("lru").tolist() == exact.hits("lru").tolist()
    lost = exact.hits("belady") - near.hits("belady")
    assert np.abs(lost).max() <= 0.02 * exact.accesses("belady").max()


def test_phases_are_counted_apart_and_add_up(make_trace):
    trace = open_trace(make_trace(sequences=((4, 6), (3, 5))))
    found = curves(trace)
    assert found.accesses("lru", Phase.DECODE).tolist() == [11 * 2] * 3
    both = found.hits("belady", Phase.PREFILL) + found.hits("belady", Phase.DECODE)
    assert both.tolist() == found.hits("belady").tolist()
