"""Terms that turn orders of systems round when they are missing: fixed time of an
expert, grouped launches, a system's own kernels, memory that all lanes read.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.engine_pairs import assert_equal, both
from support.handmade import hand_trace
from test_profile import number, profile

from moesim.evidence.validation.paired_runs import Trial, drawn_steps, simulate
from moesim.hwprofiles import paths
from moesim.hwprofiles.costs import Costs, Kernels
from moesim.hwprofiles.profile import list_profiles, load_profile
from moesim.hwprofiles.schema import Quantity
from moesim.runs.config import MemoryOptions
from moesim.traces.format.schema import ModelShape
from moesim.traces.models import model_shape

PACKAGED = [name for name in list_profiles() if load_profile(name).kind != "measured"]
MODELS = ("qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b", "deepseek-v2-lite")
BYTES = 1_000_000
MS = 1e-3
LAUNCH_S = paths.roofline("gpu").overhead_s


def machine(**gpu):
    """CPU: 1 ms each, 4 ms more for the first. GPU: 5 ms to launch, 1 ms to read; the
    rest costs nothing.
    """
    nothing = {"base_s": number(0.0), "per_expert_s": number(0.0)}
    link = {"latency_s": number(0.0), "bytes_per_s": number(1e12)}
    dispatch = ("per_op_s", "first_op_s", "join_s")
    costs = {
        "cpu": roof(overhead_s=1 * MS, rate=1e15) | {"first_s": number(4 * MS)},
        "gpu": roof(overhead_s=5 * MS, rate=1e9) | gpu,
        "dense": roof(overhead_s=0.0, rate=1e15),
        **dict.fromkeys(("activation", "h2d", "d2h"), link),
        "dispatch": dict.fromkeys(dispatch, number(0.0)),
        "planning": {"default": nothing},
    }
    workers = {name: [name] for name in raw_lanes()}
    kind = {"name": "hand", "accelerator": "cuda", "cores": number(4)}
    return profile(**kind, workers=workers, costs=costs)


def raw_lanes():
    return ("control", "cpu", "gpu0", "h2d0", "d2h0", "ssd")


def roof(*, overhead_s, rate):
    return {
        "overhead_s": number(overhead_s),
        "bytes_per_s": number(rate),
        "flops_per_s": number(1e18),
    }


@pytest.fixture
def three_layers(tmp_path):
    """Four experts of a megabyte; one token that takes three of them, in 3 layers."""
    routing = [[[0, 1, 2]] * 3]
    return hand_trace(tmp_path / "t.parquet", routing, experts=4, expert_bytes=BYTES)


@pytest.mark.parametrize(("gpu", "policy", "ratio", "layer_ms"), [
    # The processor: the first of a layer step 4 ms more, each of three 1 ms.
    ({}, "all-cpu+none", 0.0, 4 + 3 * 1),
    # Each expert launched by itself: 5 ms and 1 ms of reading, three times.
    ({}, "on-demand+static", 1.0, 3 * (5 + 1)),
    # One launch for the layer step: 5 ms once, then 0.5 ms and 1 ms for each,
    # of which the first has its 0.5 ms in the 5 ms.
    ({"further_s": number(0.5 * MS)}, "on-demand+static", 1.0, 4.5 + 3 * (0.5 + 1)),
])  # fmt: skip
def test_fixed_times_by_hand_on_three_layers(
    three_layers, gpu, policy, ratio, layer_ms
):
    first, second = both(three_layers, policy, hw=machine(**gpu), cache_ratio=ratio)
    assert_equal(first, second)
    assert first.result.makespan_s == pytest.approx(3 * layer_ms * MS)


def test_a_rate_of_few_tokens_is_not_carried_to_many_on_three_layers(tmp_path):
    """Three tokens at each of two experts: 4 ms for the first and 1 ms fixed, then 1 ms
    for one token, the most that was measured, or 0.5 ms for each of many.
    """
    routing = [[[0, 1]] * 3] * 3
    prompt = hand_trace(
        tmp_path / "t.parquet", routing, experts=4, prompt=3, expert_bytes=BYTES
    )
    one_token_flops = prompt.shape.expert_flops_per_token
    few = {
        "costs.cpu.flops_per_s": one_token_flops / MS,
        "costs.cpu.few_tokens": 1,
        "costs.cpu.many_flops_per_s": one_token_flops / (0.5 * MS),
    }
    known = machine()
    stated = {name: Quantity(value, "assumed", "a test") for name, value in few.items()}
    known = replace(known, numbers=dict(known.numbers) | stated)
    first, second = both(prompt, "all-cpu+none", hw=known, cache_ratio=0.0)
    assert_equal(first, second)
    layer_ms = 4 + 2 * (1 + 3 * 0.5)
    assert first.result.makespan_s == pytest.approx(3 * layer_ms * MS)


def test_a_systems_own_kernels_change_its_work_and_not_the_machine():
    """Twice the work on the GPU, half of it on the CPU, 3 ms for each expert there."""
    one = np.array([1])
    shape = ModelShape("hand", 1, 4, 1, 4, 4, (BYTES,), 1)
    known = machine(further_s=number(0.5 * MS))
    own = Costs(known, shape, kernels=Kernels(cpu=0.5, gpu=2.0, cpu_expert_s=3 * MS))
    assert own.cpu_s(0, one)[0] == pytest.approx(3 * MS, rel=1e-3)
    assert own.gpu_s(0, one)[0] == pytest.approx((0.5 + 2 * 1) * MS)
    assert own.gpu_first_s == pytest.approx(4.5 * MS)
    alone = Costs(known, shape, kernels=Kernels(grouped=False))
    assert alone.gpu_s(0, one)[0] == pytest.approx((5 + 1) * MS)
    assert alone.gpu_first_s == 0.0
    usual = Costs(known, shape)
    assert usual.cpu_s(0, one)[0] == pytest.approx(1 * MS, rel=1e-3)


@pytest.mark.parametrize("name", PACKAGED)
def test_every_packaged_machine_states_what_an_expert_costs_at_least(name):
    """Fixed times of an expert on both, the first one of a layer step, and whether the
    GPU launches groups, each published or of a datasheet, none assumed.
    """
    numbers = load_profile(name).numbers
    for path in (
        paths.roofline("cpu").overhead_s,
        paths.first_s("cpu"),
        paths.roofline("gpu").overhead_s,
        paths.FURTHER_S,
    ):
        assert numbers[path].kind in {"published", "datasheet"}, path
        assert len(numbers[path].source) > 40, path


FITTED = {"dali-rtx3090", "dali-2x-rtx3090"}
"""Fitted to times that were measured while processor and link worked side by side."""


@pytest.mark.parametrize("name", sorted(FITTED))
def test_what_a_fit_contains_is_not_charged_again(name):
    hw = load_profile(name)
    for one, other in (("cpu", "h2d"), ("h2d", "cpu"), ("cpu", "d2h"), ("d2h", "cpu")):
        slower = hw.numbers[paths.contention(one, other)]
        assert slower.value == 1.0
        assert "fitted" in slower.source


@pytest.mark.parametrize("name", [name for name in PACKAGED if name not in FITTED])
def test_processor_and_links_cannot_read_more_than_their_memory_gives(name):
    """Both at once: at most 1.04 of what the larger gets alone, as others measured."""
    hw = load_profile(name)
    cpu = hw.number("costs.cpu.bytes_per_s")
    alone = max(cpu, hw.number("costs.h2d.bytes_per_s"))
    whole = load_profile(_base_of(name)).number("costs.cpu.bytes_per_s")
    for link in ("h2d", "d2h", "ssd"):
        beside = hw.numbers[paths.contention(link, "cpu")]
        reading = cpu / hw.contention.slowdown("cpu", link)
        copying = hw.number(f"costs.{link}.bytes_per_s") / beside.value
        assert reading + copying <= 1.05 * max(alone, whole)
        low, high = beside.interval
        assert low <= beside.value <= high
        assert "moe-speed-of-light" in beside.source


def _base_of(name):
    return {"daop-a6000": "a6000-i9-10980xe", "smoe-a6000": "a6000-xeon5220r-10c"}.get(
        name, name
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PACKAGED)
def test_all_resident_is_never_slower_than_mixed(name, model):
    """All else equal: the same policy, model, routing; only the cache differs."""
    whole = model_shape(model, "q4_k_m")
    counts = {"layers": 6, "experts": 32, "top_k": 4, "dense_layers": ()}
    shape = replace(whole, expert_bytes=whole.expert_bytes[:6], **counts)
    hw = load_profile(name)
    for batch in (1, 4):
        routing = drawn_steps(batch=batch, prompt=0, decode=8, seed=3)

        def seconds(ratio, policy="greedy+static", routing=routing):
            memory = MemoryOptions(cache_ratio=ratio)
            timeline = simulate(Trial(policy, memory, routing), shape, hw)
            return max(float(c["end_s"].max()) for c in timeline.step_chunks())

        resident = seconds(1.0)
        for ratio in (0.25, 0.5, 0.75, 0.9):
            assert resident <= seconds(ratio) * (1 + 1e-9), (batch, ratio)
        # Nor is the card by itself slower than a mixed run, where it launches groups
        # (DAOP's software launches each expert), one token at a time.
        further_s, launch_s = map(hw.number, (paths.FURTHER_S, LAUNCH_S))
        if batch == 1 and further_s < launch_s:
            assert seconds(1.0, "on-demand+static") <= seconds(0.5)


@pytest.mark.parametrize(("per", "policy", "ratio", "charged"), [
    # Three products in each layer, one after the other.
    (paths.OPERATION, "all-cpu+none", 0.0, 3 * 3),
    (paths.FIRST_OPERATION.base_s, "all-cpu+none", 0.0, 3),
    (paths.JOIN.base_s, "all-cpu+none", 0.0, 3),
    # The first copy of each layer waits; the others pass beside products.
    ("h2d", "on-demand+none", 0.0, 3 * BYTES),
])  # fmt: skip
def test_a_new_cost_is_one_row_of_the_table(
    three_layers, monkeypatch, per, policy, ratio, charged
):
    """Both engines charge it where its row says, and profiles without it nothing."""
    seconds = 1 * MS if per != "h2d" else 1 * MS / BYTES
    row = paths.Charge("costs.dispatch.new_s", per)
    monkeypatch.setattr(paths, "CHARGES", (*paths.CHARGES, row))
    known = machine()
    added = {row.path: Quantity(seconds, "assumed", "a test")}
    stated = replace(known, numbers={**known.numbers, **added})
    spans = []
    for hw in (known, stated):
        first, second = both(three_layers, policy, hw=hw, cache_ratio=ratio)
        assert_equal(first, second)
        spans.append(first.result.makespan_s)
    assert spans[1] - spans[0] == pytest.approx(charged * seconds, rel=1e-6)
