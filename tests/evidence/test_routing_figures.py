"""Published figures that need only routing: the quotes are true, the functions compute
what they say, every experiment runs.
"""

import math

import numpy as np
import pytest
from support.handmade import hand_trace, routed, shape, steps
from support.small_trace import write_trace

from benchmarks import routing_figures as figures
from benchmarks.routing_figures import (
    CALLS,
    EXPERIMENTS,
    Excerpt,
    LacksError,
    RivalRecorder,
    mean_delay,
    opened,
    watch,
)
from moesim.engine.observers import observed_policy
from moesim.policies import cache_replay
from moesim.policies.registry import resolve
from moesim.policies.sizes import CacheSize
from moesim.questions.learned_cache import BOUND
from moesim.traces.format.future import RecordedFuture
from moesim.traces.format.layer_steps import of_steps
from moesim.traces.format.reader import open_trace
from moesim.traces.shipped import resolve_trace

PASSES = 28


def test_figures_are_quoted_under_their_setting():
    hits = EXPERIMENTS["hybrimoe-hit-rate"].published
    assert hits["HybriMoE: Mixtral"]["LRU, 25 % cached"] == 30.2
    assert hits["DALI: Mixtral-8x7B"] == {"HybriMoE whole, 25 % cached": 25.3}
    table = EXPERIMENTS["dali-prefetch-workload"].published
    assert table["DALI: Mixtral-8x7B"]["HybriMoE, top 2, batch 64"] == 56.4
    assert len(table["DALI: DeepSeek-V2-Lite"]) == 16


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_on_the_shipped_trace_or_says_what_it_lacks(name):
    excerpt = Excerpt(open_trace(resolve_trace("tiny")), PASSES)
    table = EXPERIMENTS[name].figures(excerpt)
    assert any(isinstance(figure, float) for figure in table.values())
    for row, figure in table.items():
        if isinstance(figure, str):
            assert figure.startswith("lacks ")
        else:
            # More than twice as many hits is possible.
            assert math.isfinite(figure)
            assert -100 <= figure <= (200 if "change" in row else 100)
    text = "\n".join(EXPERIMENTS[name].lines({"ours": table}))
    assert all(f"note: {caveat}" in text for caveat in EXPERIMENTS[name].caveats)


def test_the_largest_batch_stands_in_where_published_ones_lack_sequences(
    tmp_path, tiny_shape
):
    """Three sequences: batches of 8 and more are lacking, one of 3 has a row."""
    trace = write_trace(tmp_path / "few.parquet", tiny_shape, ((0, 12),) * 3)
    experiment = EXPERIMENTS["dali-prefetch-workload"]
    table = experiment.figures(Excerpt(open_trace(trace), PASSES))
    assert table["EdgeMoE, top 1, batch 8"].startswith("lacks sequences: batches of 8")
    assert isinstance(table["EdgeMoE, top 1, batch 3"], float)
    # What a trace lacks is said once, below the table.
    lines = experiment.lines({"few": table})
    assert sum("lacks column pred1_raw" in line for line in lines) == 1


def test_a_foreign_trace_at_hand_is_imported_on_the_way(shared_traces):
    with opened(shared_traces / "olmoe_1b_7b_decode299.parquet") as trace:
        assert trace.shape.name == "olmoe-1b-7b"
        assert 0 < figures.touched(Excerpt(trace, 40), 32) < 100


# What the functions compute.


def test_predictions_that_are_right_are_right_and_shifted_ones_are_not(tmp_path):
    """Layer 1 uses the expert after layer 0's. One column says so, the other says the
    one before.
    """
    rows = [[[t % 4], [(t + 1) % 4]] for t in range(8)]
    eye = np.eye(4)
    right = [[eye[(t + 1) % 4], eye[0]] for t in range(8)]
    wrong = [[eye[(t - 1) % 4], eye[0]] for t in range(8)]
    trace = hand_trace(
        tmp_path / "p.parquet", rows, experts=4, pred1_raw=right, pred1_res=wrong
    )
    load = Excerpt(trace)
    shares = dict.fromkeys(("chosen", "best", "active"))
    assert figures.foreseen(load, "HybriMoE") == dict.fromkeys(shares, 100.0)
    assert figures.foreseen(load, "DALI") == dict.fromkeys(shares, 0.0)
    assert figures.accuracy(load, "HybriMoE", 1)["1"] == 100.0
    assert figures.accuracy(load, "DALI", 1)["1"] == 0.0


def test_the_table_learns_who_follows_whom_in_the_first_half(tmp_path):
    """Expert 0 is always followed by 2, and 1 by 3; by the second half the table has
    seen both.
    """
    rows = [[[t % 2], [2 + t % 2]] for t in range(8)]
    load = Excerpt(hand_trace(tmp_path / "t.parquet", rows, experts=4))
    assert figures.accuracy(load, "EdgeMoE", 1)["1"] == 100.0


def test_section_2_5_similarity_of_prefill_and_decode(tmp_path):
    """Layer 0: shares (1/2, 1/4, 1/4) and (1/2, 1/2, 0), cosine .866025 (DAOP,
    equation 1).

    Layer 1 is alike in both: cosine 1.
    """
    prefill = [0, 0, 1, 2]
    decode = [0, 1, 0, 1]
    rows = [[[e], [n % 2]] for n, e in enumerate(prefill)] + [
        [[e], [n % 2]] for n, e in enumerate(decode)
    ]
    trace = hand_trace(tmp_path / "s.parquet", rows, experts=3, prompt=4)
    similarity = figures.similarity(Excerpt(trace))
    assert similarity == pytest.approx(100 * (0.866025 + 1) / 2, abs=1e-3)


def test_experts_touched_by_the_first_tokens(tmp_path):
    """32 tokens go round 4 of 8 experts in layer 0 and stay with one in layer 1: (4/8 +
    1/8) / 2.
    """
    rows = [[[t % 4], [5]] for t in range(40)]
    load = Excerpt(hand_trace(tmp_path / "f.parquet", rows, experts=8))
    assert figures.touched(load, 32) == pytest.approx(100 * (4 / 8 + 1 / 8) / 2)
    with pytest.raises(LacksError, match="lacks sequences of 64 tokens"):
        figures.touched(load, 64)


def test_delays_of_evictions_by_hand():
    """LRU, 2 slots, 0 1 2 0 1: it evicts 0 and 1, which are used next step, and 2,
    which is never used again. Belady evicts 1 at step 2 and lets 0 stay until step 4.
    """
    forward = steps(*[[routed(0, expert)] for expert in (0, 1, 2, 0, 1)])
    lru, belady = (watch(spec, forward, shape(), 2) for spec in ("lru", BOUND))
    assert (lru[1], lru[0].evictions, lru[0].soon) == (0.0, 3, 2)
    # 1 leaves at step 3, Belady let it go at step 2; 0 and 2 never overstay.
    assert mean_delay(lru[0].stays, belady[0].stays) == 1.0
    assert mean_delay(belady[0].stays, belady[0].stays) is None


def test_section_5_5_evictions_and_their_re_use():
    """The step-atomic example of the reference, section 5.5: C = 3,
    {0,1}{2,3}{0,2}{1,4}{0,2}{3,4}.

    Hits, and how many victims are used again; a rival that is asked in the same cache
    and agrees is never worse.
    """
    model = shape(experts=5, top_k=2)
    chosen = ((0, 1), (2, 3), (0, 2), (1, 4), (0, 2), (3, 4))
    forward = steps(*[[routed(0, *pair)] for pair in chosen])
    future = RecordedFuture(forward)
    size = CacheSize.of(model.expert_bytes, model.experts, slots_per_layer=3)
    for spec, hits, evictions, again in (("lru", 3, 6, 4), (BOUND, 4, 5, 3)):
        policy = resolve(spec, "cache")
        watched = RivalRecorder(resolve("lru", "cache"), future, model.experts)
        policy = observed_policy(policy, watched, CALLS)
        blocks = of_steps(forward)
        counts = cache_replay.replay(policy, spec, model, size, blocks, future=future)
        assert counts.hits == hits
        assert (watched.evictions, watched.soon) == (evictions, again)
        # LRU never differs from LRU, and nobody names a better victim than Belady.
        assert watched.better == watched.decided
        assert (watched.decided > 0) is (spec == BOUND)


def test_the_anchored_machine_gives_the_times_it_was_anchored_on(tmp_path):
    """DALI's table 4, Mixtral at batch 16, least time: 22.6 s, fitted within 6 %."""
    modelled_s = figures.modelled_decode_s("mixtral-8x7b", 16, "exact", tmp_path)
    assert modelled_s == pytest.approx(22.6, rel=0.06)
