"""Systems as wholes, by hand arithmetic: a few layers, few experts, round seconds."""

import numpy as np
import pytest
from support.cache_driver import ListFuture
from support.handmade import HandCosts, plan_of, routed, run, shape, spans, steps
from support.learned_network import Artefacts

from moesim.engine.memory import Placement
from moesim.engine.planner import Planner
from moesim.hwprofiles.profile import load_profile
from moesim.policies.names import ABSENT
from moesim.policies.sizes import CacheSize
from moesim.policies.systems import SYSTEMS, System, compose
from moesim.runs.config import MemoryOptions
from moesim.runs.memory import plan_memory
from moesim.traces.format.schema import Phase

PROFILE = load_profile("two-core-host")
UNEQUAL = {
    "equal": (100,) * 5,
    "growing": (60, 70, 100, 110, 130),
    "one large": (40, 40, 90, 40, 40),
}


def held_bytes(memory):
    """Bytes of everything in the cache."""
    there = np.asarray(memory.state) > 0
    return int(np.asarray(memory.bytes_of)[there].sum())


# -- equal memory -------------------------------------------------------------------


@pytest.mark.parametrize("sizes", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 1 / 3, 0.469, 0.5, 0.75, 0.97, 1.0])
def test_at_one_ratio_every_system_holds_the_same_bytes(ratio, sizes):
    """Both scopes, slots divided by use or not, and filled by a calibration: less than
    one expert below the ratio of all bytes, never above. `none` alone holds nothing.
    """
    experts = 6
    model = shape(layers=5, experts=experts, top_k=2, expert_bytes=sizes)
    wanted = round(ratio * experts * sum(sizes))
    by_use = {
        "single_share": np.full(5, 0.2),
        "prefetch_accuracy": np.linspace(0, 1, 5),
    }
    counts = np.arange(5.0 * experts).reshape(5, experts)
    for name, system in SYSTEMS.items():
        # Every layer has a slot where slots are divided by use: too few give none.
        can_divide = ratio * experts >= 2
        memory = plan_memory(
            MemoryOptions(cache_ratio=ratio),
            model,
            PROFILE,
            system,
            by_use if can_divide else None,
        )
        assert 0 <= wanted - memory.gpu.total_bytes < max(sizes), name
        planner = Planner(
            model,
            HandCosts(),
            system.build(gpus=1, host_cache=None),
            memory,
            calibration=counts,
            future=ListFuture([]),
            extras=Artefacts(5, experts),
        )
        held = held_bytes(planner.gpu[0])
        if system.cache == "none":
            assert held == 0
        else:
            assert 0 <= wanted - held < max(sizes), name


def test_a_ratio_that_does_not_divide_is_spread_over_the_layers():
    """120 of 256 slots are 46.875 %: 3.75 for each of 32 layers of 8, so every fourth
    layer has 3 of them and the others 4.
    """
    size = CacheSize.of((100,) * 32, 8, ratio=120 / 256)
    assert size.slots.tolist() == [3, 4, 4, 4] * 8
    # 0.3 of 10 are 3, though binary numbers say 2.9999….
    assert CacheSize.of((7,) * 3, 10, ratio=0.3).slots.tolist() == [3, 3, 3]


# -- SMoE ---------------------------------------------------------------------------


def smoe_layer(layer, *experts, coming=0):
    """One token; the next layer's gate foretells expert `coming`."""
    scores = np.full((1, 4), 0.1, np.float16)
    scores[0, list(experts)] = 0.3
    foretold = np.full((1, 4), 0.1, np.float16)
    foretold[0, coming] = 0.7
    return routed(layer, *experts, scores=scores, pred1_raw=foretold)


def test_smoe_prefill_preloads_the_next_layer():
    """Layer 0: dense part 0-2, copies of both experts 2-6-10, products to 11; behind
    them the whole of layer 1 is copied. It comes at 13: expert 0 is on its way until
    14, expert 1 goes next, to 18, the two that nobody wants are dropped; products to
    19. Layer 2 likewise: copies 18-22-26, products to 27. Without preloading: 33.
    """
    passes = steps([smoe_layer(n, 0, 1) for n in range(3)], phase=Phase.PREFILL)
    for prefetch, end_s in (("partial-hidden", 27.0), ("none", 33.0)):
        planner = plan_of(
            shape(layers=3, top_k=2),
            compose("smoe", prefetch=prefetch),
            slots=1,
            staging=4,
        )
        result, timeline = run(planner, passes)
        assert result.makespan_s == end_s
    assert spans(timeline, "prefetch") == []


def test_smoe_prefill_keeps_the_next_layers_residents():
    """All of layer 1 is preloaded but its resident, which does not leave for the
    others: they wait in staging.
    """
    planner = plan_of(
        shape(layers=2),
        compose("smoe"),
        HandCosts(dense=40.0),
        slots=1,
        staging=5,
        calibration=np.array([[1.0, 0, 0, 0], [0, 0, 1.0, 0]]),
    )
    passes = steps([smoe_layer(0, 0), smoe_layer(1, 2)], phase=Phase.PREFILL)
    _, timeline = run(planner, passes)
    assert [span[1] for span in spans(timeline, "prefetch")] == [0, 1, 3]
    assert planner.view.resident(1).tolist() == [False, False, True, False]
    assert timeline.access_frame()["state"].tolist() == ["hit", "hit"]


def test_smoe_decode_pays_for_its_prediction():
    """Layer 0: dense part 0-2, its resident 2-3, the next dense part once more on what
    there is, 3-5. The copy that it asks for follows, 5-9, and (1, 0) leaves for it.
    Layer 1: dense part 5-7, product 9-10.
    """
    planner = plan_of(
        shape(layers=2),
        compose("smoe"),
        slots=1,
        calibration=np.array([[1.0, 0, 0, 0]] * 2),
    )
    left = []

    class Places(Placement):
        def take(self, key):
            pass

        def release(self, key):
            left.append(key)

    planner.gpu[0].slots = Places()
    result, timeline = run(
        planner, steps([smoe_layer(0, 0, coming=1), smoe_layer(1, 1)])
    )
    assert spans(timeline, "prefetch") == [("h2d0", 1, 5, 9)]
    assert left == [4]
    assert [span[2:] for span in spans(timeline, "dense")] == [(0, 2), (3, 5), (5, 7)]
    assert result.makespan_s == 10.0


def test_smoe_routes_by_cache_in_decode_only():
    """beta is 0.2, the band 0.14 to 0.26: expert 1 of 0.25 is low-score and absent,
    expert 2 of 0.2 is resident. A prompt keeps its gate's choice.
    """
    scores = np.array([[0.35, 0.25, 0.2, 0.2]], np.float16)
    layer = routed(0, 0, 1, scores=scores)
    used = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        planner = plan_of(
            shape(top_k=2),
            compose("smoe"),
            slots=2,
            calibration=np.array([[1.0, 0, 1.0, 0]]),
        )
        _, timeline = run(planner, steps([layer], phase=phase))
        used[phase] = sorted(span[1] for span in spans(timeline, "compute"))
    assert used == {Phase.PREFILL: [0, 1], Phase.DECODE: [0, 2]}


# -- what predictions cost ----------------------------------------------------------


def test_gates_of_coming_layers_are_part_of_the_dense_part():
    """Dense part 2 s, gate 1 s. HybriMoE asks three gates ahead, of four layers: 3, 2,
    1 and 0 of them; DALI one, but behind the last layer; a table costs nothing.
    """
    experts = np.full((1, 4), 0.25, np.float16)
    columns = dict.fromkeys(
        ("pred1_raw", "pred2_raw", "pred3_raw", "pred1_res"), experts
    )
    weights = np.ones((1, 1), np.float16)
    layers = [
        routed(n, 0, scores=experts, weights=weights, **columns) for n in range(4)
    ]
    passes = steps(layers)
    for system, gates in (
        ("hybrimoe", [3, 2, 1, 0]),
        ("dali", [1, 1, 1, 0]),
        ("adapmoe", [1, 1, 1, 0]),
        ("edgemoe", [0, 0, 0, 0]),
        ("hybrimoe-released", [0, 0, 0, 0]),
    ):
        planner = plan_of(
            shape(layers=4), SYSTEMS[system], HandCosts(gate=1.0), slots=4
        )
        _, timeline = run(planner, passes)
        lengths = [end - start for *_, start, end in spans(timeline, "dense")]
        assert lengths == [2 + count for count in gates], system


# -- DALI ---------------------------------------------------------------------------

WINDOW_OF_ONE = "workload-window:window=1,swaps=1,fill=lowest"


def dali_run(cache, second_visit):
    """Two layers, two steps. In the first, single tokens go to the CPU (1 s; a copy
    takes 20) and ask for swaps. Layer 0: dense part 0-2, CPU 2-3, swap 3-23. Layer 1:
    dense part 3-5, CPU 5-6, its swap for expert 2 waits behind. Layer 0 again: 6-9.
    Layer 1 again is planned at 11.
    """
    planner = plan_of(
        shape(layers=2),
        compose("dali", cache=cache, prefetch="none"),
        HandCosts(cpu=1.0, gpu=0.01, copy=20.0, per_token=1.0),
        slots=1,
    )
    first = [routed(0, 1), routed(1, 2)]
    _, timeline = run(planner, steps(first, [routed(0, 1), second_visit]))
    frame = timeline.frame()
    copies = frame[frame["lane"] == "h2d0"]
    columns = ("kind", "layer", "expert", "start_s", "end_s")
    return [tuple(row) for row in copies[list(columns)].to_numpy().tolist()]


def test_dalis_swaps_land_before_what_their_layer_needs_next():
    """At 11 layer 1 wants expert 3 for 100 tokens: a fetch. The swap goes first, as it
    should have been there already; with no deadline it stays behind the fetch.
    """
    wanted = routed(1, 3, tokens=[100])
    swap, fetch = ("replace", 1, 2), ("fetch", 1, 3)
    for deadline, order in (("visit", [swap, fetch]), ("none", [fetch, swap])):
        copies = dali_run(f"{WINDOW_OF_ONE},deadline={deadline}", wanted)
        assert copies[0] == ("replace", 0, 1, 3.0, 23.0)
        assert copies[1] == (*order[0], 23.0, 43.0)
        # A run ends with its last product, so what is behind it is not copied.
        behind = [(*fetch, 43.0, 63.0)] if order[0] == swap else []
        assert copies[2:] == behind


def test_dalis_buffer_holds_all_that_it_prefetches():
    """Layer 1 is prefetched while its dense part runs for 40 s: its four experts are
    there when it comes, though the cache admits none of them.
    """
    model = shape(layers=2, experts=6, top_k=4)
    memory = MemoryOptions(slots_per_layer=1)
    assert plan_memory(memory, model, PROFILE, SYSTEMS["dali"]).staging == 8
    small = compose("dali", prefetch="residual:size=1")
    assert plan_memory(memory, model, PROFILE, small).staging == 5

    scores = np.array([[0.1, 0.2, 0.2, 0.2, 0.2, 0.1]], np.float16)
    layers = [routed(0, 0, 1, 2, 3, pred1_res=scores), routed(1, 1, 2, 3, 4)]
    system = compose("greedy", cache=WINDOW_OF_ONE, prefetch="residual")
    slots = plan_memory(memory, model, PROFILE, system).staging
    assert slots == PROFILE.memory.staging_experts + 4
    costs = HandCosts(dense=40.0, cpu=50.0)
    planner = plan_of(model, system, costs, slots=1, staging=slots)
    _, timeline = run(planner, steps(layers))
    assert timeline.access_frame()["state"].tolist()[4:] == ["hit"] * 4


def test_dalis_readings_of_others():
    """KTransformers keeps the last of two layers on the GPU, whole; HybriMoE compares
    each expert by itself: 12 tokens take 12 s on the CPU, more than a copy of 10, and
    two tokens 2 s.
    """
    costs = HandCosts(cpu=1.0, gpu=0.1, copy=10.0, per_token=1.0)
    layers = [routed(0, 1, 2, tokens=[12, 2]), routed(1, 1, 2, tokens=[12, 2])]
    planner = plan_of(
        shape(layers=2), SYSTEMS["dali-ktransformers"], costs, slots=2, scope="global"
    )
    _, timeline = run(planner, steps(layers))
    lanes = [span[:2] for span in spans(timeline, "compute")]
    assert lanes == [("cpu", 1), ("cpu", 2), ("gpu0", 1), ("gpu0", 2)]

    system = compose("dali-hybrimoe", cache="lru", prefetch="none")
    planner = plan_of(shape(layers=2), system, costs, slots=2)
    _, timeline = run(planner, steps(layers))
    lanes = {span[:2] for span in spans(timeline, "compute")}
    assert lanes == {("gpu0", 1), ("cpu", 2)}


# -- DAOP ---------------------------------------------------------------------------


def test_daops_swaps_serve_the_prompt_that_caused_them():
    """Expert 1 has 10 tokens of a prompt, the resident 0 has 2. Copies both ways 2-6;
    10 tokens take 10 s on the GPU, 6-16, and 2 take 20 s on the CPU, 2-22. Swapped
    behind its layer step, expert 1 would take 100 s on the CPU.
    """
    planner = plan_of(
        shape(top_k=1),
        compose("daop", routing="as-recorded"),
        HandCosts(per_token=1.0),
        slots=1,
        scope="global",
    )
    passes = steps([routed(0, 0, 1, tokens=[2, 10])], phase=Phase.PREFILL)
    result, timeline = run(planner, passes)
    assert spans(timeline, "fetch") == [("h2d0", 1, 2, 6)]
    assert spans(timeline, "replace") == [("d2h0", 0, 2, 6)]
    assert set(spans(timeline, "compute")) == {("gpu0", 1, 6, 16), ("cpu", 0, 2, 22)}
    assert result.makespan_s == 22.0
    assert planner.view.resident(0).tolist() == [False, True, False, False]


def test_daop_starts_ahead_only_what_degradation_keeps():
    """Layer 1 is foretold 1, 2 and 3, all on the CPU; its resident is 0. Degradation
    keeps 1 and takes 0, and for the third there is nobody, so 2 stays too. Only these
    start ahead: dense part 0-2, 10 s each on the CPU; 3 would be 10 s in vain.
    """
    foretold = np.array([[0.05, 0.4, 0.3, 0.25]], np.float16)
    scores = np.full((1, 4), 0.25, np.float16)
    layers = [
        routed(0, 0, 1, 2, scores=scores, pred1_raw=foretold),
        routed(1, 1, 2, 3, scores=scores),
    ]
    system = compose(
        "daop:first_layer=1",
        cache="prefill-swap",
        routing="graceful-degradation:first-layer=1",
    )
    calibration = np.array([[3.0, 2, 1, 0], [1.0, 0, 0, 0]])
    planner = plan_of(
        shape(layers=2, top_k=3),
        system,
        slots=2,
        scope="global",
        calibration=calibration,
    )
    # Two of four slots for each layer: 0 and 1 of both.
    planner.gpu[0].state[4 + 1] = ABSENT
    planner.gpu[0].cache.evicted(4 + 1)
    result, timeline = run(planner, steps(layers))
    on_cpu = [span[1:] for span in spans(timeline, "compute") if span[0] == "cpu"]
    # Layer 0's expert 2, then what is foretold for layer 1.
    assert on_cpu == [(2, 2, 12), (1, 12, 22), (2, 22, 32)]
    assert result.makespan_s == 32.0


# -- caches that fill late, or never --------------------------------------------------


def test_a_miss_enters_when_it_was_used_clearly_more_of_late():
    """Half-life of one step, margin 1. Expert 1 has score 1 after its first use, not
    more than the resident's 0 and 1; after the second 1.5. CPU 2-12 and 14-24, the copy
    24-28, and from then on hits.
    """
    system = compose("dfa-cache", cache="decayed-frequency:half-life=1,fill=lowest")
    planner = plan_of(shape(), system, slots=1)
    _, timeline = run(planner, steps(*[[routed(0, 1)] for _ in range(4)]))
    assert spans(timeline, "replace") == [("h2d0", 1, 24, 28)]
    assert timeline.access_frame()["state"].tolist() == [
        "miss",
        "miss",
        "delayed",
        "hit",
    ]


def test_mrs_copies_a_missed_expert_behind_the_work_when_the_gate_rates_it_higher():
    """Expert 0 is resident with S = 0; expert 1 is missed with S = 0.4, so it enters:
    CPU 2-12, the copy 12-16, and the second step computes it on the GPU.
    """
    scores = np.array([[0.2, 0.8]], np.float16)
    system = System("fixed-mapping", cache="mrs:fill=lowest,copies=missed,p=1")
    planner = plan_of(shape(experts=2), system, slots=1)
    passes = [[routed(0, 1, scores=scores)] for _ in range(3)]
    _, timeline = run(planner, steps(*passes))
    assert spans(timeline, "replace") == [("h2d0", 1, 12, 16)]
    assert timeline.access_frame()["state"].tolist() == ["miss", "delayed", "hit"]
