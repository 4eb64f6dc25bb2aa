"""Programs and baselines as wholes, by hand arithmetic: three layers, four experts.

Unless stated otherwise a dense part takes 2 s, an expert 10 s on the CPU and 1 s on the
GPU, and its copy 4 s.
"""

import numpy as np
import pytest
from support.cache_driver import LayerStep, ListFuture
from support.handmade import HandCosts, plan_of, routed, run, shape, spans, steps
from support.learned_network import Artefacts

from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile
from moesim.policies.base import PolicyError
from moesim.policies.systems import SYSTEMS, compose
from moesim.traces.format.batch import RoutedLayer
from moesim.traces.format.schema import Phase

LAYERS = 3


def planner_of(name, costs=None, **memory):
    """A planner of a system on a model of three layers."""
    system = SYSTEMS[name] if isinstance(name, str) else name
    memory = {"scope": system.scope or "layer", "staging": 8, **memory}
    return plan_of(shape(layers=LAYERS, top_k=1), system, costs, **memory)


def end_s(planner, *passes, phase=Phase.DECODE):
    result, _ = run(planner, steps(*passes, phase=phase))
    return result.makespan_s


def one_token(*experts):
    """A forward pass of one token: its expert in each layer."""
    return [routed(layer, expert) for layer, expert in enumerate(experts)]


def prompt(tokens):
    """A forward pass of many tokens that uses all four experts of every layer."""
    routing = np.arange(tokens).reshape(-1, 1) % 4
    counts = np.bincount(routing[:, 0], minlength=4).astype(np.int32)
    return [
        RoutedLayer(
            layer=layer,
            experts=np.arange(4, dtype=np.int32),
            tokens=counts,
            routing=routing.astype(np.uint16),
            weights=None,
            scores=None,
            predicted={},
        )
        for layer in range(LAYERS)
    ]


# -- llama.cpp ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp-no-mmap", "ik_llama.cpp"])
def test_llama_cpp_decodes_layer_by_layer(name):
    """A third of the bytes is the last layer: 2 + 10 twice, then 2 + 1."""
    assert end_s(planner_of(name, ratio=1 / 3), one_token(0, 1, 2)) == 27.0


@pytest.mark.parametrize(("name", "tokens", "uploads"), [
    ("llama.cpp", 31, False),
    ("llama.cpp", 32, True),
    # 32 tokens for each of four experts, of which a token has one.
    ("ik_llama.cpp", 127, False),
    ("ik_llama.cpp", 128, True),
])  # fmt: skip
def test_llama_cpp_uploads_cpu_layers_for_large_batches(name, tokens, uploads):
    """On the CPU a layer takes 2 + 4 x 10. Uploaded, its four copies end at 18, and
    only then begin its products: 22. The last layer is on the GPU: 2 + 4.
    """
    planner = planner_of(name, ratio=1 / 3)
    result, timeline = run(planner, steps(prompt(tokens), phase=Phase.PREFILL))
    assert result.makespan_s == (22 + 22 + 6 if uploads else 42 + 42 + 6)
    copies = spans(timeline, "fetch")
    if uploads:
        on_gpu = [span for span in spans(timeline, "compute") if span[0] == "gpu0"]
        assert copies[3] == ("h2d0", 3, 14, 18)
        assert on_gpu[0] == ("gpu0", 0, 18, 19)
    else:
        assert copies == []
    # Nothing that was uploaded stays.
    assert planner.view.resident(0).sum() == 0


def test_copies_from_pageable_memory_take_longer():
    """Half the rate, where no probe of the machine tells."""
    profile = load_profile("rtx3090-epyc7532")
    model = shape(layers=LAYERS)
    locked = Costs(profile, model)
    pageable = Costs(profile, model, pageable=True)
    assert pageable.copy_s(0) == 2 * locked.copy_s(0)
    assert pageable.writeback_s(0) == locked.writeback_s(0)
    assert SYSTEMS["llama.cpp"].pageable
    assert not SYSTEMS["llama.cpp-no-mmap"].pageable


# -- layers that stream through the GPU -------------------------------------------------


def test_deepspeed_waits_for_whole_layers():
    """Of layer 0 all four experts come at 18, its product ends at 19. Layer 1 has come
    at 34 and layer 2 at 50, so their products end at 35 and 51, and a second pass, which
    nothing precedes, takes as long.
    """
    planner = planner_of("deepspeed")
    assert end_s(planner, one_token(0, 1, 2), one_token(3, 3, 3)) == 102.0


def test_krasis_streams_the_prompt_and_decodes_on_the_cpu():
    """The prompt as DeepSpeed; decode computes where the weights are."""
    planner = planner_of("krasis")
    assert end_s(planner, one_token(0, 1, 2), phase=Phase.PREFILL) == 51.0
    planner = planner_of("krasis", slots=1)
    # Expert 0 is resident in every layer.
    assert end_s(planner, one_token(0, 1, 0)) == 3 + 12 + 3


# -- splits between CPU and GPU ---------------------------------------------------------


@pytest.mark.parametrize(("overlap", "fetched", "layer_s"), [
    # Alone, 10 / (10 + 4) of 4 are 2.86. With three copies the link is the longer
    # lane, 12 against 10 s: dense part 2, copies to 14, the last product to 15.
    ((1.0, 1.0), 3, 15.0),
    # Copies that take 8 s beside the CPU: 10 / 18 of 4 are 2.2, and two CPU experts
    # take 20 s. Here nothing slows down for real, so they end at 22.
    ((2.0, 1.0), 2, 22.0),
    # Experts that take 40 s beside copies: all but a tenth is fetched.
    ((1.0, 4.0), 4, 19.0),
])  # fmt: skip
def test_freetoken_splits_misses_by_speeds_beside_each_other(overlap, fetched, layer_s):
    planner = planner_of("freetoken", HandCosts(overlap=overlap))
    result, timeline = run(planner, steps(prompt(8)))
    assert len(spans(timeline, "fetch")) == LAYERS * fetched
    assert result.makespan_s == LAYERS * layer_s


def test_a_machines_table_says_how_many_misses_are_fetched():
    """Of four misses three, of one none; more than four are fetched beyond that."""
    for misses, fetched in ((1, 0), (2, 1), (3, 2), (4, 3)):
        system = compose("fetch-split:table=0/0/1/2/3+decayed-frequency")
        planner = planner_of(system)
        passes = steps([routed(layer, *range(misses)) for layer in range(LAYERS)])
        _, timeline = run(planner, passes)
        assert len(spans(timeline, "fetch")) == LAYERS * fetched
    for wrong in ("0/2", "0/x", "", "1"):
        with pytest.raises(PolicyError, match="table"):
            compose(f"fetch-split:table={wrong}").build(gpus=1, host_cache=None)


def test_fiddler_starts_the_cpu_when_loads_are_done():
    """Expert 0 is resident. Loads of 4 s beat the CPU's 10, so 1 is loaded, 2-6-7; at 3
    s the CPU wins, beside the resident: 2-5.
    """
    passes = [[routed(layer, 0, 1) for layer in range(LAYERS)]]
    assert end_s(planner_of("fiddler", ratio=1 / 4), *passes) == LAYERS * 7
    slow = planner_of("fiddler", HandCosts(cpu=3.0), ratio=1 / 4)
    assert end_s(slow, *passes) == LAYERS * 5


def test_ktransformers_computes_where_weights_are():
    """Expert 0 on the GPU beside expert 1 on the CPU: 2 + 10, and nothing is copied."""
    planner = planner_of("ktransformers", slots=1)
    passes = steps([routed(layer, 0, 1) for layer in range(LAYERS)])
    result, timeline = run(planner, passes)
    assert result.makespan_s == LAYERS * 12
    assert spans(timeline, "fetch") == []


@pytest.mark.parametrize(("prefetch", "seconds"), [
    # On demand: 2 + 4 + 1, 2 + 10, 2 + 4 + 1.
    ("none", 7 + 12 + 7),
    # All three of layer 1 follow the copy for layer 0, which ends at 6: 6-10, and
    # at 9 its gate speaks, so the other two are dropped; those for layer 2 are
    # copied 10-14, 14-18, 18-22, of which its expert 1 is the second. The CPU takes
    # 9-19, a dense part 19-21, and the product 21-22.
    ("moe-lightning", 22),
])  # fmt: skip
def test_moe_lightning_streams_a_fixed_share(prefetch, seconds):
    """Four experts, one of which a token has: n streamed ones take n x 4 / 4 s of the
    link and leave (4 - n) x 10 / 4 to the CPU. Least is the longer of both for three, so
    3 stays on the CPU.
    """
    planner = planner_of(compose("moe-lightning", prefetch=prefetch))
    assert end_s(planner, one_token(0, 3, 1)) == seconds


# -- everything on the GPU --------------------------------------------------------------


def test_moe_on_demand_forgets_what_it_copied():
    """2 + 4 + 1 for every layer, in the second pass too."""
    passes = [one_token(0, 1, 2)] * 2
    assert end_s(planner_of("moe-on-demand"), *passes) == 2 * LAYERS * 7


def test_flashmoe_hits_what_it_fetched():
    """A first pass of misses, 2 + 4 + 1 each, and a second of hits, 2 + 1 each."""
    planner = planner_of("flashmoe", slots=1, extras=Artefacts(LAYERS, 4))
    assert end_s(planner, *[one_token(0, 1, 2)] * 2) == LAYERS * (7 + 3)


def test_pre_gated_copies_the_next_layer_while_one_is_computed():
    """Layer 0 on demand, to 7. Layer 1 comes 6-10 and ends at 11, layer 2 10-14 and
    ends at 15. On demand: 21.
    """
    forward_pass = one_token(0, 1, 2)
    future = ListFuture([LayerStep(0, layer, [layer]) for layer in range(LAYERS)])
    assert end_s(planner_of("pre-gated", future=future), forward_pass) == 15.0


def test_edgemoe_predicts_by_two_layers():
    """Expert 1 of layer 1 was followed by 2 where 0 had preceded it, and by 0 where 3
    had. The second time 0 precedes, so 2 is prefetched, and nothing else; by one layer
    both are as likely, and 0 is there already.
    """
    passes = [one_token(0, 1, 2), one_token(3, 1, 0), one_token(0, 1, 2)]
    for prefetch, expected in (
        ("statistical:preceding=2", [2]),
        ("statistical:preceding=1,size=1", []),
    ):
        planner = planner_of(compose("edgemoe", prefetch=prefetch), slots=1)
        _, timeline = run(planner, steps(*passes))
        frame = timeline.frame()
        last = frame[(frame["kind"] == "prefetch") & (frame["step"] == 2)]
        assert last["expert"].tolist() == expected
        assert set(last["layer"]) <= {2}


def test_edgemoe_keeps_what_comes_next():
    """Two slots for all layers. Layer 2's fetch finds (0, 0), which comes next, and (1,
    1), one layer further off: as often used, the latter leaves. So layer 0 hits, 2 + 1;
    layer 1's fetch finds (0, 0) used twice, two layers off, and (2, 2) used once, one
    layer off: the lower leaves, and layer 2 hits. By frequency alone (0, 0) leaves
    first and layer 0 misses, 2 + 4 + 1.
    """
    passes = [one_token(0, 1, 2), one_token(0, 1, 2)]
    for cache, seconds in (("edgemoe", 21 + 3 + 7 + 3), ("lfu", 21 + 7 + 7 + 3)):
        system = compose("edgemoe", cache=cache, prefetch="none")
        planner = planner_of(system, scope="global", ratio=2 / 12)
        assert end_s(planner, *passes) == seconds


@pytest.mark.parametrize(("prefetch", "seconds"), [
    # Layer 0 hits: dense part 21-23, product 23-24. On demand: 24-26-30-31-33-37-38.
    ("none", 38),
    # The sequence before used (1, 1) and (2, 2) next. (1, 1) is copied 23-27 in the
    # place of (2, 2), as (0, 0) is in use; dense part 24-26, product 27-28. (2, 2)
    # follows 27-31; dense part 28-30, product 31-32.
    ("activation-matrix", 32),
])  # fmt: skip
def test_moe_infinity_learns_from_the_sequence_before(prefetch, seconds):
    """Two sequences of one prompt token, two slots for all layers. The first one misses
    three times, 2 + 4 + 1 each. For (2, 2) leaves (1, 1), whose layer counts less than
    that of (0, 0).
    """
    system = compose("moe-infinity", prefetch=prefetch)
    planner = planner_of(system, ratio=2 / 12)
    passes = steps(*[one_token(0, 1, 2)] * 2, phase=Phase.PREFILL)
    passes[1].batch = 1
    result, _ = run(planner, passes)
    assert result.makespan_s == seconds


def finemoe_end_s(*passes, **parts):
    """Three slots for all layers, LRU unless stated; maps foretell one layer ahead."""
    parts = {"prefetch": "finemoe:distance=1", "cache": "lru", **parts}
    planner = planner_of(compose("finemoe", **parts), ratio=3 / 12)
    return end_s(planner, *[[scored(n, e) for n, e in enumerate(p)] for p in passes])


@pytest.mark.parametrize(
    ("prefetch", "seconds"),
    # On demand: 38-40-41; 41-43-47-48; 48-50-54-55.
    [("none", 55), ("finemoe:distance=1", 49)],
)
def test_finemoe_prefetches_what_a_similar_pass_used(prefetch, seconds):
    """The first pass misses three times, 2 + 4 + 1 each. The second hits in layer 0, 2
    + 1, and its misses drive (1, 1) and (2, 2) out, until 38. The third looks like both
    at first, and the older counts: (1, 1) is copied 40-44, product 44-45. Then it is
    the first again: (2, 2) is copied 44-48, product 48-49.
    """
    passes = (0, 1, 2), (0, 3, 3), (0, 1, 2)
    assert finemoe_end_s(*passes, prefetch=prefetch) == seconds


@pytest.mark.parametrize(("cache", "seconds"), [("finemoe", 55), ("lfu", 57)])
def test_finemoe_keeps_what_the_searched_map_expects(cache, seconds):
    """After the first pass all have been used once. The second misses three times, and
    resembles the first enough to expect (1, 1) and (2, 2): they stay, (0, 0) alone is
    fetched again, 42-44-48-49, and two layers hit, 3 each. By uses alone (1, 1) and
    later (2, 2) leave; prefetched 48-52 and 52-56, they are awaited.
    """
    assert finemoe_end_s((0, 1, 2), (3, 3, 3), (0, 1, 2), cache=cache) == seconds


@pytest.mark.parametrize(("prefetch", "seconds"), [("none", 15), ("fate", 12)])
def test_fate_copies_what_fits_into_a_layer(prefetch, seconds):
    """Each layer holds experts 0 and 1. Layer 0 hits, 2 + 1. Layer 1 misses: dense part
    3-5, copy 5-8, product 8-9. A dense part and a product last as long as a copy, so
    one expert is prefetched for layer 2, 8-11: dense part 9-11, product 11-12.
    """
    passes = [
        routed(layer, expert, pred1_raw=np.eye(5, 4, dtype=np.float16)[[expert + 1]])
        for layer, expert in enumerate((0, 2, 3))
    ]
    planner = planner_of(
        compose("fate", prefetch=prefetch), HandCosts(copy=3.0), slots=2
    )
    assert end_s(planner, passes) == seconds


# -- HybriMoE as released ---------------------------------------------------------------


def scored(layer, *experts):
    """One token whose experts have the highest scores."""
    scores = np.full((1, 4), 0.05, np.float16)
    scores[0, list(experts)] = 0.3
    return routed(layer, *experts, scores=scores)


@pytest.mark.parametrize(("prefetch", "seconds"), [
    # The CPU's 3 s are less than 4 + 1: twice 2 + 1, 2 + 3, 2 + 3.
    ("none", 26),
    # In the second pass layer 0 asks at 15 for what layer 1 used before: copied
    # 15-19, dense part 16-18, product 19-20. So does layer 1 at 18: 19-23, dense
    # part 20-22, product 23-24.
    ("hybrimoe-released:size=1", 24),
])  # fmt: skip
def test_hybrimoe_released_prefetches_what_scored_before(prefetch, seconds):
    """Expert 0 is resident; layers use 0, 1 and 2, twice."""
    system = compose("hybrimoe-released", prefetch=prefetch)
    planner = planner_of(system, HandCosts(cpu=3.0), slots=1)
    forward_pass = [scored(layer, layer) for layer in range(LAYERS)]
    assert end_s(planner, forward_pass, forward_pass) == seconds
