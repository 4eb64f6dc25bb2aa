"""Slots divided among layers by the hits that they bring (``--cache-scope by-curve``)."""

import numpy as np
import pytest
from support.engine_pairs import assert_equal, both, machine
from support.handmade import hand_trace

import moesim
from moesim.policies.base import PolicyError
from moesim.policies.cache._slot_shares import by_curves
from moesim.runs.config import RunConfig
from moesim.runs.setup import Setup

BY_CURVE = {"cache_scope": "by-curve"}
HITS = np.array([[0, 6, 8, 8, 8], [0, 4, 8, 11, 12], [0, 0, 0, 0, 0]])
"""Of three layers with four experts, by slots."""


def test_by_hand_three_layers():
    """Half-way to the mean (0, 10/3, 16/3, 19/3, 20/3) the slots of the first layer
    bring 14/3, 2, 1/2 and 1/6, those of the second 11/3, 3, 2 and 2/3, and those of the
    third 5/3, 1, 1/2 and 1/6.
    """
    sizes = np.array([100, 100, 100])
    division = [by_curves(HITS, sizes, 100 * n).tolist() for n in (1, 2, 3, 5, 6, 7)]
    assert division == [
        [1, 0, 0],
        [1, 1, 0],
        [1, 2, 0],
        [2, 3, 0],
        [2, 3, 1],
        [2, 3, 2],
    ]


def test_by_hand_an_expert_of_twice_the_size_must_bring_twice_the_hits():
    sizes = np.array([100, 200, 100])
    assert by_curves(HITS, sizes, 300).tolist() == [2, 0, 1]


def test_a_step_in_a_curve_is_worth_what_all_of_it_brings():
    """Two slots bring 8 hits together and nothing alone: 4 each, before 3 and 1."""
    hits = np.array([[0.0, 0.0, 8.0], [0.0, 3.0, 4.0]])
    assert by_curves(hits - hits.mean(0) + hits, np.array([1, 1]), 2).tolist() == [2, 0]


ROUTING = [[[0], [t % 2], [t % 3]] for t in range(16)]
"""One expert of the first layer is used, two of the second, three of the third."""


def slots(tmp_path, *, gpus=1, **options):
    trace = hand_trace(tmp_path / "t.parquet", ROUTING, experts=4)
    config = RunConfig.of(trace, "greedy", cache="lru", warm=trace, **options)
    return Setup.of(config, trace, profile=machine(gpus=gpus)).memory.gpu.slots.tolist()


def test_all_layers_together_have_the_memory_of_equal_slots(tmp_path):
    assert slots(tmp_path, slots_per_layer=2) == [2, 2, 2]
    # One slot and two bring all hits of the first layers.
    assert slots(tmp_path, slots_per_layer=2, **BY_CURVE) == [1, 2, 3]
    assert slots(tmp_path, cache_ratio=1.0, **BY_CURVE) == [4, 4, 4]


def test_what_the_other_half_does_not_confirm_divides_nothing(tmp_path):
    """In one half of the calibration the first layer uses one expert and the last three,
    in the other half it is the other way round.
    """
    turned = [step[::-1] for step in ROUTING]
    for routing, expected in (
        (ROUTING + ROUTING, [1, 2, 3]),
        (ROUTING + turned, [2, 2, 2]),
    ):
        trace = hand_trace(tmp_path / "t.parquet", routing, experts=4)
        for cache in ("lru", "static"):
            config = RunConfig.of(
                trace, "greedy", cache=cache, warm=trace, slots_per_layer=2, **BY_CURVE
            )
            setup = Setup.of(config, trace, profile=machine())
            assert setup.memory.gpu.slots.tolist() == expected


def test_each_card_divides_its_own_memory(tmp_path):
    """Of two cards the first has two layers, so four slots, one of which brings none;
    cards that share every layer have slots for all of them.
    """
    options = {"slots_per_layer": 2, "gpus": 2, **BY_CURVE}
    assert slots(tmp_path, **options) == [2, 2, 2]
    assert slots(tmp_path, gpu_split="experts", **options) == [1, 2, 3]


@pytest.mark.parametrize("policy", ["greedy+lru", "llama.cpp-moe-cache", "dfa-cache"])
def test_both_engines_give_the_same_run(tmp_path, policy):
    trace = hand_trace(tmp_path / "t.parquet", ROUTING, experts=4)
    assert_equal(*both(trace, policy, warm=trace, cache_ratio=0.5, **BY_CURVE))


def test_compare_and_sweep_tell_the_divisions_apart(tmp_path):
    trace = hand_trace(tmp_path / "t.parquet", ROUTING, experts=4).path
    options = {"warm": trace, "cache_ratio": 0.5}
    compared = moesim.compare(trace, ["greedy", "on-demand"], **options, **BY_CURVE)
    assert set(compared.table["cache_scope"]) == {"by-curve"}
    scopes = ["layer", "by-curve"]
    rows = moesim.sweep(trace, "greedy", cache_scope=scopes, **options)
    assert set(rows["cache_scope"]) == {"layer", "by-curve"}


def test_without_a_calibration_it_is_refused(tmp_path):
    trace = hand_trace(tmp_path / "t.parquet", ROUTING, experts=4)
    for ask in (moesim.replay, lambda t, **o: moesim.compare(t, ["greedy"], **o)):
        with pytest.raises(PolicyError, match="add --warm TRACE"):
            ask(trace, cache_ratio=0.5, **BY_CURVE)
